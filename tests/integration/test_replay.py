"""`roost replay` over real sockets: every dialect, what it counts, how many clients, who waits for whom, its end."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.domain.turn import Dialect
from simulations import workload
from simulations.measure import Figures
from simulations.prompt_dialects import DIALECTS
from simulations.replay import RECORDED, Load, Replay, Wording
from simulations.replay_client import Client, Unreachable
from simulations.trace import Kind, Ref, Run, Session, Tree, Turn
from tests.integration.replicas import PATIENCE_S, Gate, Script, Visit, events, replicas
from tests.integration.roosts import running, settings_for

BLOCK_TOKENS = 10
CHILD = "from simulations.replay_cli import app; app(prog_name='roost replay')"


def turn(sid: str, index: int, tokens: int, *after: Ref, new: int | None = None, at_s: float | None = None) -> Turn:
    """A turn that extends the one before; `new` blocks of the tree's ids from there on."""
    keep = (tokens - (new or 0)) // BLOCK_TOKENS if index else 0
    first = 1 + keep + 1000 * sum(map(ord, sid))
    add = (Run(first, tokens // BLOCK_TOKENS - keep),)
    base = Ref(sid, index - 1) if index else None
    waits = after or ((base,) if base else ())
    return Turn(index, Kind.TOOL if index else Kind.START, tokens, 4, base, keep, add, waits, 0.0, at_s)


def chat(sid: str, turns: int = 3) -> Session:
    """A session whose prompts grow from 100 tokens by 50 a turn."""
    return Session(sid, tuple(turn(sid, n, 100 + 50 * n, new=50) for n in range(turns)))


def lone(sid: str, turns: int = 3) -> Tree:
    return Tree((chat(sid, turns),))


def family() -> Tree:
    """A root whose second turn waits for two subagents of two turns each."""
    agents = tuple(
        Session(name, (turn(name, 0, 50, Ref("a", 0)), turn(name, 1, 80, new=30)), Ref("a", 0)) for name in ("b", "c")
    )
    root = Session("a", (turn("a", 0, 100), turn("a", 1, 150, Ref("a", 0), Ref("b", 1), Ref("c", 1), new=50)))
    return Tree((root, *agents))


@dataclass
class Memory:
    """A script of a replica that remembers every prompt: it reports the longest common start as cached."""

    prompts: list[str] = field(default_factory=list)

    async def __call__(self, visit: Visit) -> None:
        text = words(json.loads(visit.seen.body), visit.seen.dialect)
        cached = max((common(text, old) for old in self.prompts), default=0)
        self.prompts.append(text)
        await visit.begin()
        for event in events(visit.seen.dialect, visit.response_id, len(text) // 4):
            await visit.chunk(told_cached(event, visit.seen.dialect, cached // 4))
        await visit.end()


def serving(script: Script) -> Script:
    """The script of a server that also says what it serves."""
    models = {"data": [{"id": "m", "max_model_len": 262_144}]}

    async def serve(visit: Visit) -> None:
        if visit.seen.path == "/v1/models":
            await visit.answer(body=json.dumps(models).encode())
        else:
            await script(visit)

    return serve


def common(one: str, other: str) -> int:
    """Characters two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def words(asked: dict[str, Any], dialect: Dialect) -> str:
    """The prompt's words, without anything that marks its messages."""
    if dialect in (Dialect.COMPLETIONS, Dialect.GENERATE):
        return str(asked.get("prompt") or asked["text"])
    found: list[str] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(value[key] for key in ("text", "content", "output") if isinstance(value.get(key), str))
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                look(each)

    look([asked.get("system"), asked.get("instructions"), asked.get("messages"), asked.get("input")])
    return "".join(found)


def told_cached(event: bytes, dialect: Dialect, cached: int) -> bytes:
    """The event with its usage, if it has one, telling that so many tokens were cached."""
    lines = event.split(b"\n")
    place = next(n for n, line in enumerate(lines) if line.startswith(b"data: "))
    if lines[place] == b"data: [DONE]":
        return event
    told = json.loads(lines[place][6:])
    match dialect:
        case Dialect.CHAT | Dialect.COMPLETIONS:
            if told["usage"]:
                told["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        case Dialect.MESSAGES:
            if told["type"] == "message_start":
                told["message"]["usage"]["input_tokens"] -= cached
                if cached:  # SGLang leaves a zero out
                    told["message"]["usage"]["cache_read_input_tokens"] = cached
        case Dialect.RESPONSES:
            if told["type"] == "response.completed":
                told["response"]["usage"]["input_tokens_details"]["cached_tokens"] = cached
        case _:
            told["meta_info"]["cached_tokens"] = cached
    lines[place] = b"data: " + json.dumps(told).encode()
    return b"\n".join(lines)


@asynccontextmanager
async def playing(url: str, load: Load | None = None, **wording: Any) -> AsyncIterator[Replay]:
    async with Client.session() as http:
        said = Wording(block_tokens=BLOCK_TOKENS, global_blocks=False, **wording)
        client = Client(http, url, said.dialect)
        yield Replay(client, load or Load(), said)


async def played(url: str, trees: list[Tree], load: Load | None = None, **wording: Any) -> Figures:
    async with playing(url, load, **wording) as replay, asyncio.timeout(PATIENCE_S):
        await replay.run(trees)
        assert (replay.in_flight, replay.open_trees) == (0, 0)
        return replay.measured.figures()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_is_played_and_counted(dialect: Dialect) -> None:
    """Three growing turns of two sessions: a cache that forgets nothing reports what the blocks say."""
    async with replicas(1, script=Memory()) as [replica]:
        figures = await played(replica.url, [lone("a"), lone("b")], dialect=dialect)
        assert (figures["turns"], figures["errors"]) == (6, 0)
        assert [seen.dialect for seen in replica.turns] == [dialect] * 6
    assert figures["prompt_tokens"] == pytest.approx(2 * (100 + 150 + 200), abs=6)
    assert figures["hit_rate_infinite"] == 500 / 900
    assert figures["hit_rate"] == pytest.approx(500 / 900, abs=0.01)
    assert figures["output_tokens"] == 12
    assert figures["ttft_s"] is not None
    assert figures["ttft_s"]["count"] == 6


async def test_time_between_tokens_is_shared_by_the_tokens_of_an_event() -> None:
    """Two events that the usage says were eight tokens: each gap is a quarter of what lies between the events."""
    held = asyncio.Event()

    async def speculative(visit: Visit) -> None:
        told = events(Dialect.CHAT, "r", 10)
        await visit.begin()
        await visit.chunk(told[0])
        with suppress(TimeoutError):
            await asyncio.wait_for(held.wait(), 0.2)
        await visit.chunk(told[1])
        await visit.chunk(told[2].replace(b'"completion_tokens": 2', b'"completion_tokens": 8'))
        await visit.chunk(told[3])
        await visit.end()

    async with replicas(1, script=speculative) as [replica], Client.session() as http:
        answer = await Client(http, replica.url, Dialect.CHAT).ask(b'{"stream": true}', {})
    assert answer.error is None
    assert answer.usage.output_tokens == 8
    assert answer.ttft_s is not None
    assert 0 < answer.gaps_s[0] <= 1.001 * (answer.duration_s - answer.ttft_s) / 4


async def test_fewer_tokens_have_the_same_shape() -> None:
    """`token_scale` shrinks prompts and not their rates."""
    async with replicas(1, script=Memory()) as [replica]:
        figures = await played(replica.url, [lone("a"), lone("b")], token_scale=0.2)
    assert figures["prompt_tokens"] == pytest.approx(2 * (20 + 30 + 40), abs=6)
    assert figures["hit_rate_infinite"] == 500 / 900


async def test_sessions_are_named_if_asked_and_only_then() -> None:
    """One name per tree, subagents included; without the option no header at all."""
    async with replicas(1) as [replica]:
        await played(replica.url, [family(), lone("z")], session_header="x-session-id")
        names = [seen.header(b"x-session-id") for seen in replica.turns]
        assert sorted(names) == [[b"a-0"]] * 6 + [[b"z-0"]] * 3
        replica.seen.clear()
        await played(replica.url, [lone("y")])
        assert all(seen.header(b"x-session-id") == [] for seen in replica.turns)


async def test_a_closed_population_keeps_its_size() -> None:
    """Three clients and seven sessions: never more than three at once, and when one ends the next begins."""
    gate = Gate()
    async with replicas(1, script=gate) as [replica], playing(replica.url, Load(sessions=3)) as replay:
        task = asyncio.create_task(replay.run([lone(f"s{n}", 1) for n in range(7)]))
        await gate.waiting(3)
        assert (replay.open_trees, replay.in_flight, gate.arrived) == (3, 3, 3)
        gate.open()
        async with asyncio.timeout(PATIENCE_S):
            await task
        assert replay.measured.figures()["turns"] == 7


async def test_an_open_loop_begins_sessions_whoever_is_still_busy() -> None:
    """Sessions of a recorded clock begin at their times although none of them ever ends."""
    gate = Gate()
    trees = [Tree((Session(f"s{n}", (turn(f"s{n}", 0, 100, at_s=1000.0 + n),)),)) for n in range(5)]
    load = Load(sessions=1, open_loop=RECORDED, time_scale=1000.0)
    async with replicas(1, script=gate) as [replica], playing(replica.url, load) as replay:
        task = asyncio.create_task(replay.run(trees))
        await gate.waiting(5)
        assert replay.in_flight == 5
        gate.open()
        async with asyncio.timeout(PATIENCE_S):
            await task
        assert replay.measured.figures()["turns"] == 5


async def test_a_rate_draws_arrivals() -> None:
    async with replicas(1) as [replica]:
        load = Load(open_loop=2.0, time_scale=1000.0)
        assert (await played(replica.url, [lone(f"s{n}", 2) for n in range(8)], load))["turns"] == 16


async def test_subagents_go_after_their_parent_and_their_parent_after_them() -> None:
    """The order in which requests arrive is the trace's: spawn, both subagents at once, and the parent last."""
    async with replicas(1) as [replica]:
        figures = await played(replica.url, [family()], Load(sessions=1))
        sizes = [len(words(json.loads(seen.body), Dialect.CHAT)) // 4 for seen in replica.turns]
    assert figures["turns"] == 6
    assert (sizes[0], sizes[-1]) == (100, 150)
    assert sorted(sizes[1:5]) == [50, 50, 80, 80]


async def test_a_number_of_turns_or_a_duration_ends_it() -> None:
    """No turn is sent beyond them, however long the clients would still think."""
    thinking = [Tree((Session(n, (turn(n, 0, 100), _slow(turn(n, 1, 150, new=50)))),)) for n in ("a", "b", "c")]
    async with replicas(1) as [replica]:
        assert (await played(replica.url, thinking, Load(sessions=3, turns_max=2)))["turns"] == 2
        assert (await played(replica.url, thinking, Load(sessions=3, duration_s=0.3, seed=1)))["turns"] == 3
        assert len(replica.turns) == 5


def _slow(after: Turn) -> Turn:
    return Turn(after.index, after.kind, after.prompt_tokens, 4, after.base, after.keep, after.add, after.after, 500.0)


async def test_what_fails_is_named_and_the_session_goes_on() -> None:
    """A refused turn, a broken stream and an error event are errors of their own; a later turn still comes."""
    async with replicas(1) as [replica]:

        async def ill(visit: Visit) -> None:
            match visit.number:
                case 0:
                    await visit.answer(503, b"{}")
                case 1:
                    await visit.begin()
                    await visit.chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
                    visit.reset()
                case 2:
                    await visit.begin()
                    await visit.chunk(b'data: {"error": {"message": "no", "code": 500}}\n\n')
                    await visit.end()
                case 3:
                    await visit.begin()
                    await visit.end()
                case _:
                    await visit.reply()

        replica.script = ill
        figures = await played(replica.url, [lone("a", 5)])
    assert (figures["turns"], figures["errors"]) == (1, 4)
    assert figures["errors_by"] == {"status_503": 1, "broken": 1, "internal": 1, "incomplete": 1}


async def test_nobody_there_is_said_at_once() -> None:
    async with replicas(1) as [replica]:
        url = replica.url
    async with Client.session() as http:
        with pytest.raises(Unreachable, match="nobody answers"):
            await Client(http, url, Dialect.CHAT).served()
    assert (await played(url, [lone("a", 1)]))["errors_by"] == {"unreachable": 1}


async def test_through_roost_every_session_stays_where_it_began() -> None:
    """Two replicas behind Roost: the replies name them, no session moves, and together they forget nothing."""
    async with replicas(2) as given:
        for each in given:
            each.script = Memory()
        async with running(settings_for(given), given) as roost:
            trees = [lone(f"s{n}", 4) for n in range(6)]
            figures = await played(f"http://127.0.0.1:{roost.port}", trees, Load(sessions=6), model="m")
    assert (figures["turns"], figures["errors"], figures["moves"]) == (24, 0, 0)
    assert set(figures["per_replica"]) == {each.id for each in given}
    assert sum(share["turns"] for share in figures["per_replica"].values()) == 24
    assert figures["hit_rate"] == pytest.approx(figures["hit_rate_infinite"], abs=0.01)


# --- the command -----------------------------------------------------------------------------------------------------


async def command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def trace_file(path: Path, sessions: int = 2) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "format": "satrace/1",
            "block_size": 64,
            "clock": "session",
            "hash_scope": "tree",
            "source": "x",
            "licence": "x",
        }
    ]
    for number in range(sessions):
        sid = f"s{number}"
        rows.append({"sid": sid, "turn": 0, "in": 640, "out": 5, "kind": "start", "add": [[1, 10]]})
        rows.append(
            {"sid": sid, "turn": 1, "in": 704, "out": 5, "kind": "tool", "base": 0, "keep": 10, "add": [[11, 1]]}
        )
    rows.append({"sid": "long", "turn": 0, "in": 300_000, "out": 5, "kind": "start"})
    path.write_text("\n".join(json.dumps(each) for each in rows))
    return path


SCHEMA: dict[str, type | tuple[type, ...]] = {
    "turns": int,
    "errors": int,
    "errors_by": dict,
    "prompt_tokens": int,
    "cached_tokens": (int, type(None)),
    "output_tokens": int,
    "hit_rate": (float, type(None)),
    "hit_rate_infinite": (float, type(None)),
    "ttft_s": (dict, type(None)),
    "itl_s": (dict, type(None)),
    "per_replica": dict,
    "moves": int,
    "setting": dict,
    "wall_s": float,
    "interrupted": bool,
}


def figures_in(path: Path) -> dict[str, Any]:
    told = json.loads(path.read_text())
    assert set(told) == set(SCHEMA)
    assert all(isinstance(told[name], kind) for name, kind in SCHEMA.items())
    for name in ("ttft_s", "itl_s"):
        assert told[name] is None or set(told[name]) == {"p50", "p95", "p99", "mean", "count"}
    found: dict[str, Any] = told
    return found


async def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    """Model and context are the server's own; what does not fit is said; the exit code is 0."""
    trace, figures = trace_file(tmp_path / "t.jsonl"), tmp_path / "f.json"
    async with replicas(1, script=serving(Memory())) as [replica]:
        arguments = ("--url", replica.url, "--ramp", "0", "--json", str(figures), "--seed", "3")
        code, out, err = await ended(await command(str(trace), *arguments))
    assert code == 0, err
    assert "1 sessions left out" in err
    assert "hit rate" in out
    told = figures_in(figures)
    assert (told["turns"], told["errors"], told["interrupted"]) == (4, 0, False)
    assert (told["setting"]["model"], told["setting"]["context_tokens"], told["setting"]["seed"]) == ("m", 262_144, 3)
    assert told["hit_rate_infinite"] == 1280 / 2688


async def test_the_built_in_workload_needs_no_file(tmp_path: Path) -> None:
    figures = tmp_path / "f.json"
    async with replicas(1) as [replica]:
        arguments = ("--url", replica.url, "--sessions", "4", "--turns", "12", "--think-max", "0", "--ramp", "0")
        code, _, err = await ended(
            await command(
                "synthetic", *arguments, "--token-scale", "0.05", "--json", str(figures), "--dialect", "messages"
            )
        )
        assert code == 0, err
        assert len(replica.turns) == 12
    assert figures_in(figures)["turns"] == 12


async def test_ctrl_c_ends_with_what_was_measured(tmp_path: Path) -> None:
    """Turns in flight are given up, the table and the JSON come, and nothing hangs."""
    trace, figures = trace_file(tmp_path / "t.jsonl"), tmp_path / "f.json"
    gate = Gate()

    async def first_only(visit: Visit) -> None:
        await (visit.reply() if visit.number == 1 else gate(visit))

    async with replicas(1, script=serving(first_only)) as [replica]:
        process = await command(
            str(trace), "--url", replica.url, "--ramp", "0", "--sessions", "1", "--json", str(figures)
        )
        await gate.waiting(1)
        process.send_signal(signal.SIGINT)
        code, out, err = await ended(process)
    assert code == 0, err
    assert "interrupted" in out
    assert (figures_in(figures)["turns"], figures_in(figures)["interrupted"]) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("{trace}", "--url", "{dead}"), 1, "nobody answers"),
        (("{trace}", "--url", "{live}", "--context", "10"), 1, "no session fits"),
        (("{trace}", "--url", "{live}", "--open-loop", "trace"), 1, "no common clock"),
        (("nothing.jsonl", "--url", "{live}"), 1, "cannot read"),
        (("synthetic", "--url", "{live}", "--json", "no/such/x.json"), 2, "no folder"),
        (("{trace}", "--url", "{live}", "--open-loop", "-1"), 2, "neither a positive rate"),
        (("{trace}", "--url", "{live}", "--dialect", "other"), 2, "chat"),
        (("{trace}", "--url", "{live}", "--plot", "p.gif"), 2, ".png or .svg"),
        (("{trace}", "--url", "{live}", "--token-scale", "0"), 2, "more than 0"),
        (("{trace}", "--url", "{live}", "--over-context", "x"), 2, "drop or cut"),
        (("{trace}",), 2, "--url"),
    ],
)
async def test_a_wrong_command_is_explained(tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    trace = trace_file(tmp_path / "t.jsonl")
    async with replicas(2) as [live, dead]:
        await dead.stop()
        given = [each.format(trace=trace, live=live.url, dead=dead.url) for each in arguments]
        found, out, err = await ended(await command(*given))
    assert found == code, out + err
    assert says in err
    assert "Traceback" not in err


async def test_turns_that_fail_make_exit_code_one(tmp_path: Path) -> None:
    async def refuse(visit: Visit) -> None:
        await visit.answer(503, b"{}")

    trace = trace_file(tmp_path / "t.jsonl")
    async with replicas(1, script=serving(refuse)) as [replica]:
        code, out, _ = await ended(await command(str(trace), "--url", replica.url, "--ramp", "0"))
    assert code == 1
    assert "status_503 4" in out


async def test_a_picture_is_drawn_in_both_formats(tmp_path: Path) -> None:
    """With matplotlib installed; without it the command says how to get it before it sends a turn."""
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    trace = trace_file(tmp_path / "t.jsonl")
    for suffix, begins in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        plot = tmp_path / f"p{suffix}"
        async with replicas(1, script=serving(Memory())) as [replica]:
            arguments = ("--url", replica.url, "--ramp", "0", "--plot", str(plot))
            code, _, err = await ended(await command(str(trace), *arguments))
        assert code == 0, err
        assert plot.read_bytes().startswith(begins)


async def test_the_workload_and_the_replay_agree() -> None:
    """A synthetic tree with subagents is played to its end: as many requests as it has turns."""
    shape = workload.Shape(context_tokens=60_000, fan_out_share=0.3)
    trees = [tree for tree in workload.trace(4, 40, shape).trees if len(tree.sessions) > 1 and tree.turn_count < 60][:2]
    assert trees
    async with replicas(1) as [replica], Client.session() as http:
        wording = Wording(block_tokens=64, global_blocks=True, token_scale=0.05)
        replay = Replay(Client(http, replica.url, Dialect.CHAT), Load(sessions=2, think_max_s=0.0), wording)
        async with asyncio.timeout(PATIENCE_S):
            await replay.run(trees)
        assert len(replica.turns) == sum(tree.turn_count for tree in trees)
        assert replay.measured.figures()["errors"] == 0
