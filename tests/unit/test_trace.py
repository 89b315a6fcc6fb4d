"""Traces: the three formats become one form, bad lines are named, and what does not fit a context goes."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from simulations.trace import Fit, Kind, Ref, Run, TraceError, Tree, fit
from simulations.trace_files import load
from simulations.trace_formats import compact, read

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "traces"

HEADER = {"format": "satrace/1", "source": "made up", "licence": "none", "block_size": 10, "clock": "session"}


def row(sid: str, turn: int, tokens: int, **given: Any) -> dict[str, Any]:
    return {"sid": sid, "turn": turn, "in": tokens, "out": 5, "kind": "tool", **given}


def lines(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(each) for each in rows]


FAMILY = (
    {**HEADER, "hash_scope": "tree"},
    row("a", 0, 35, kind="start", add=[[1, 3]], t=0.0, think=0.0, shr="h", shr_tok=20),
    row("a", 1, 52, base=0, keep=3, add=[[4, 2]], t=9.0, think=2.5, after=[["a", 0], ["a/1", 1]]),
    row("a/1", 0, 20, kind="spawn", psid="a", ptn=0, add=[[10, 2]], t=3.0, think=0.0),
    row("a/1", 1, 31, base=0, keep=2, add=[[12, 1]], t=5.0, think=1.0),
    row("b", 0, 10, kind="start", add=[[1, 1]]),
)


def test_satrace_becomes_trees_with_links() -> None:
    """Subagents go with their root; `after` left out is the turn before, for a first turn the one that spawned it."""
    trace = read(lines(*FAMILY))
    assert (trace.block_tokens, trace.global_blocks, trace.shared_clock) == (10, False, False)
    assert [[session.id for session in tree.sessions] for tree in trace.trees] == [["a", "a/1"], ["b"]]
    root, agent = trace.trees[0].sessions
    assert (root.head, root.head_tokens, root.parent, agent.parent) == ("h", 20, None, Ref("a", 0))
    assert root.turns[1].after == (Ref("a", 0), Ref("a/1", 1))
    assert root.turns[1].base == Ref("a", 0)
    assert (root.turns[1].keep, root.turns[1].add, root.turns[1].think_s) == (3, (Run(4, 2),), 2.5)
    assert (agent.turns[0].after, agent.turns[0].kind, agent.turns[0].base) == ((Ref("a", 0),), Kind.SPAWN, None)
    assert agent.turns[1].after == (Ref("a/1", 0),)
    assert trace.turn_count == 5


def test_a_think_time_that_is_missing_is_the_time_between_sends() -> None:
    """A trace that knows only send times is still played at its pace."""
    given = lines(HEADER, row("a", 0, 9, t=4.0), row("a", 1, 9, t=11.0), row("a", 2, 9))
    assert [turn.think_s for turn in read(given).trees[0].sessions[0].turns] == [None, 7.0, None]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 3"),
        (json.dumps({"sid": "a", "turn": 1, "out": 1}), "line 3: Object missing required field `in`"),
        (json.dumps(row("a", 2, 5)), "line 3: turn 2 of a follows 1 turns"),
        (json.dumps(row("a", 1, 0)), "line 3: a count of a turn 1"),
        (json.dumps(row("a", 1, 5, base=1)), "line 3: base 1 of a turn 1"),
        (json.dumps(row("z", 0, 5, psid="y", ptn=0)), "line 3: parent y of z"),
    ],
)
def test_a_bad_line_is_named(bad: str, says: str) -> None:
    """The error tells the line and what is wrong with it."""
    with pytest.raises(TraceError) as caught:
        read([*lines(HEADER, row("a", 0, 5)), bad])
    assert says in str(caught.value)
    assert caught.value.line == 3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "empty"),
        ([""], "empty"),
        (["[1]"], "line 1"),
        (['{"a": 1}'], "neither a satrace/1 header nor a Mooncake row"),
        (['{"format": "other/2"}'], "unknown format 'other/2'"),
        (['{"format": "satrace/1", "block_size": 0}'], "block_size"),
        (['{"input_length": 5000, "output_length": 1, "hash_ids": [1]}'], "line 1: 1 hash_ids do not cover 5000"),
    ],
)
def test_what_is_no_trace_is_refused(given: list[str], says: str) -> None:
    with pytest.raises(TraceError, match=says.replace("(", r"\(")):
        read(given)


def test_mooncake_rows_that_extend_a_prompt_are_its_sessions_next_turn() -> None:
    """Prompts are told apart by their blocks; a last block that is not full does not count."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [8, 9]},
        {"timestamp": 2000, "input_length": 1600, "output_length": 7, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 6]},
    ]
    trace = read(lines(*rows))
    assert (trace.block_tokens, trace.global_blocks, trace.shared_clock) == (512, True, True)
    first, second, third = (tree.sessions[0] for tree in trace.trees)
    assert [turn.prompt_tokens for turn in first.turns] == [1100, 1600]
    assert (first.turns[1].base, first.turns[1].keep, first.turns[1].add) == (Ref(first.id, 0), 2, (Run(4, 1),))
    assert first.turns[1].think_s == 2.0
    assert len(second.turns) == len(third.turns) == 1


def test_multi_turn_rows_append_to_what_was_said_before() -> None:
    """A later row brings what it appends; the server's words before it take blocks of their own."""
    rows = [
        {"session_id": "s", "timestamp": 0, "input_length": 1024, "output_length": 512, "hash_ids": [1, 2]},
        {"session_id": "s", "delay": 1500, "input_length": 512, "output_length": 10, "hash_ids": [3]},
        {"session_id": "t", "timestamp": 900, "input_length": 512, "output_length": 10, "hash_ids": [1]},
    ]
    trace = read(lines(*rows))
    session = trace.trees[0].sessions[0]
    later = session.turns[1]
    assert (later.prompt_tokens, later.think_s, later.keep, later.base) == (2048, 1.5, 2, Ref("s", 0))
    assert [run.size for run in later.add] == [1, 1]
    assert later.add[0].first not in (1, 2, 3)
    assert later.add[1] == Run(3, 1)
    assert trace.trees[1].sessions[0].turns[0].at_s == 0.9


def test_runs_join_where_ids_are_consecutive() -> None:
    assert compact([(1, 2), (3, 1), (7, 1), (9, 0), (8, 2)]) == (Run(1, 3), Run(7, 3))


def tree() -> Tree:
    return read(lines(*FAMILY)).trees[0]


def test_what_does_not_fit_is_left_out_or_cut() -> None:
    """Dropping takes whole trees; cutting ends sessions early, and nobody waits for a turn that is gone."""
    both = read(lines(*FAMILY)).trees
    assert fit(both, 60, cut=False) == Fit(both)
    dropped = fit(both, 50, cut=False)
    assert ([each.id for each in dropped.trees], dropped.dropped, dropped.turns_lost) == (["b"], 1, 4)
    cut = fit(both, 50, cut=True)
    assert ([len(each.turns) for each in cut.trees[0].sessions], cut.cut, cut.turns_lost) == ([1, 2], 1, 1)
    assert fit(both, 30, cut=True).dropped == 1
    shorter = fit([tree()], 40, cut=True).trees[0]
    assert [len(each.turns) for each in shorter.sessions] == [1, 2]


def test_cutting_a_parent_takes_its_subagents() -> None:
    given = (
        HEADER,
        row("a", 0, 10),
        row("a", 1, 90, base=0, keep=1),
        row("a/1", 0, 10, psid="a", ptn=1),
        row("a/2", 0, 95, psid="a", ptn=0),
    )
    cut = fit(read(lines(*given)).trees, 50, cut=True)
    assert [session.id for session in cut.trees[0].sessions] == ["a"]


def test_files_may_be_compressed_and_errors_name_them(tmp_path: Path) -> None:
    text = "\n".join(lines(*FAMILY))
    plain, packed, broken = tmp_path / "t.jsonl", tmp_path / "t.jsonl.xz", tmp_path / "b.jsonl.xz"
    plain.write_text(text)
    packed.write_bytes(lzma.compress(text.encode()))
    broken.write_bytes(packed.read_bytes()[:-30])
    assert load(plain) == load(packed)
    with pytest.raises(TraceError, match="cannot read"):
        load(broken)
    with pytest.raises(TraceError, match="cannot read"):
        load(tmp_path / "nothing")
    plain.write_text("{}")
    with pytest.raises(TraceError, match=r"t\.jsonl: line 1"):
        load(plain)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="recorded traces are not here")
def test_recorded_traces_are_read_whole() -> None:
    """The recorded coding agents: 430 roots, 27 subagents, 30,854 requests; 353 roots fit a Kimi's context."""
    trace = load(RECORDED / "weka_dev.satrace.jsonl.xz")
    assert (len(trace.trees), trace.turn_count, trace.block_tokens) == (430, 30_854, 64)
    assert sum(len(each.sessions) - 1 for each in trace.trees) == 27
    assert len(fit(trace.trees, 262_144, cut=False).trees) == 353
    assert load(RECORDED / "moon_conv.satrace.jsonl.xz").turn_count == 12_031
    assert load(RECORDED / "azure_code.satrace.jsonl.xz").shared_clock
