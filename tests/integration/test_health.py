"""Busy is not dead, over real sockets: replicas that answer no probe, stand still, vanish, or fail their turns.

Times are as in earnest where they are fixed (two seconds for a probe), and scaled where they are settings.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from router.domain.turn import Dialect
from router.settings import Fleet, Settings
from router.settings.model import Ejection, Timeouts
from tests.integration.conversations import Conversation
from tests.integration.replicas import PATHS, PATIENCE_S, Gate, Replica, Visit, events, replicas, speak
from tests.integration.roosts import PROBE_INTERVAL_S, Roost, running, settings_for

QUICK = Ejection(failures=3, base_s=0.5, max_s=4.0, silent_s=1.0)
SILENT_WITHIN_S = 8.0
"""Two probes of 2 s, with room for a busy machine."""


def given(fleet: list[Replica], ejection: Ejection = QUICK) -> Settings:
    """Settings under which only other replicas' answers end a stream's silence."""
    return settings_for(fleet, ejection=ejection)


async def state(roost: Roost, replica: str) -> str:
    told: str = (await roost.replicas())[replica]["health"]["state"]
    return told


async def until_state(roost: Roost, replica: str, *wanted: str) -> float:
    """Until the replica is in one of these states; returns the seconds it took."""
    began = time.monotonic()

    async def so() -> bool:
        return await state(roost, replica) in wanted

    await roost.until(so)
    return time.monotonic() - began


async def until(true: Callable[[], bool]) -> None:
    """Look until it is so: replicas tell nobody what they have received."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 (see above)
            await asyncio.sleep(0.005)


async def settled_at(roost: Roost, asked: Conversation, fleet: list[Replica]) -> tuple[Replica, Replica]:
    """The conversation's home after a first turn, and another replica."""
    answer = await roost.turn(asked)
    asked.grow()
    home = next(each for each in fleet if each.id == answer.replica)
    return home, next(each for each in fleet if each is not home)


async def broken(visit: Visit) -> None:
    """Dies mid-stream."""
    await visit.begin()
    await visit.chunk(events(visit.seen.dialect, "r", 1)[0])
    visit.reset()


class Streaming:
    """A script that streams until told to finish, and says when a stream has begun."""

    def __init__(self, pause_s: float = 0.05) -> None:
        self.began = asyncio.Event()
        self.finish = asyncio.Event()
        self._pause_s = pause_s

    async def __call__(self, visit: Visit) -> None:
        await visit.begin()
        first, *rest = events(visit.seen.dialect, "r", 1)
        self.began.set()
        while not self.finish.is_set():
            await visit.chunk(first)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self.finish.wait()
        for event in rest:
            await visit.chunk(event)
        await visit.end()


async def test_a_replica_that_streams_keeps_its_sessions_though_no_probe_is_answered() -> None:
    """A long prefill starves its probes: three of them in a row hang, and its branches still go home."""
    async with replicas(2) as fleet, running(given(fleet), fleet) as roost:
        long, other = Conversation("long"), Conversation("other")
        home, _ = await settled_at(roost, long, fleet)
        while (await roost.turn(other)).replica != home.id:
            other = Conversation(f"{other.name}+")
        other.grow()
        streaming = Streaming()
        home.script, home.mute = streaming, True
        turn = asyncio.create_task(roost.turn(long))
        await streaming.began.wait()
        home.script = speak
        probes = home.probes
        await until(lambda: home.probes >= probes + 4)
        assert await state(roost, home.id) == "well"
        answer = await roost.turn(other)
        assert (answer.replica, answer.reason) == (home.id, "home")
        streaming.finish.set()
        assert (await turn).body.endswith(b"data: [DONE]\n\n")
        home.mute = False


async def test_one_that_answers_nothing_while_nothing_flows_is_dead_within_seconds_and_back_on_probation() -> None:
    async with replicas(2) as fleet, running(given(fleet), fleet) as roost:
        quiet, other = fleet
        quiet.mute = True
        assert await until_state(roost, quiet.id, "dead") < SILENT_WITHIN_S
        new = {(await roost.turn(Conversation(f"new {number}"))).replica for number in range(4)}
        assert new == {other.id}
        quiet.mute = False
        await until_state(roost, quiet.id, "probation")
        back = [(await roost.turn(Conversation(f"back {number}"))).replica for number in range(4)]
        assert quiet.id in back
        assert await state(roost, quiet.id) == "well"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_that_waits_at_a_replica_that_falls_silent_is_served_elsewhere(stream: bool) -> None:
    """Nothing closes its connection. No head has come, so the client sees one answer, from another replica."""
    async with replicas(2) as fleet, running(given(fleet), fleet) as roost:
        asked = Conversation("waiting", stream=stream)
        home, other = await settled_at(roost, asked, fleet)
        arrived = asyncio.Event()

        async def hang(visit: Visit) -> None:
            home.mute = True
            arrived.set()
            await visit.until_closed()

        home.script = hang
        turn = asyncio.create_task(roost.turn(asked))
        await arrived.wait()
        answer = await turn
        assert (answer.replica, answer.reason) == (other.id, "home_gone")
        assert len([seen for seen in home.turns if seen.body == asked.body()]) == 1


async def test_a_stream_whose_head_waits_is_served_elsewhere_when_its_replica_is_lost() -> None:
    """SGLang sends its head before the prefill; while it is held back the client has seen nothing."""
    async with replicas(2) as fleet:
        settings = settings_for(fleet, ejection=QUICK, timeouts=Timeouts(ready_lag_s=0.0, refusal_s=30.0))
        async with running(settings, fleet) as roost:
            asked = Conversation("head first")
            home, other = await settled_at(roost, asked, fleet)

            async def head_only(visit: Visit) -> None:
                home.mute = True
                await visit.begin()
                await visit.until_closed()

            home.script = head_only
            answer = await roost.turn(asked)
            assert (answer.replica, answer.reason) == (other.id, "home_gone")


async def test_a_stream_that_stands_still_at_a_lost_replica_is_broken_in_its_dialect() -> None:
    """Bytes have gone out: what is left is to say so, long before any timeout of the stream itself."""
    async with replicas(2) as fleet:
        settings = given(fleet, QUICK)
        async with running(settings, fleet) as roost:
            asked = Conversation("stuck", Dialect.MESSAGES)
            home, _ = await settled_at(roost, asked, fleet)

            async def stuck(visit: Visit) -> None:
                home.mute = True
                await visit.begin()
                await visit.chunk(events(visit.seen.dialect, "r", 1)[0])
                await visit.until_closed()

            home.script = stuck
            began = time.monotonic()
            answer = await roost.watch(asked)
            assert (answer.status, answer.complete) == (200, False)
            assert b"event: error\n" in answer.body
            assert time.monotonic() - began < SILENT_WITHIN_S


async def test_of_what_is_no_turn_only_what_acts_on_an_engine_waits_at_a_lost_replica() -> None:
    """An engine that loads weights may answer no probe; a client that asked for an embedding has waited long enough."""
    gate = Gate()

    async def mute(visit: Visit) -> None:
        visit.replica.mute = True
        await gate(visit)

    async with replicas(3) as fleet, running(given(fleet), fleet) as roost:
        for replica in fleet:
            replica.script = mute
        loading = asyncio.create_task(roost.request("POST", "/update_weights_from_disk", b"{}"))
        await gate.waiting(1)
        asked = asyncio.create_task(roost.request("POST", "/v1/embeddings", b"{}"))
        async with asyncio.timeout(PATIENCE_S):
            assert (await asked).status == 502
        for replica in fleet:
            if replica.mute:
                await until_state(roost, replica.id, "dead")
        assert not loading.done()
        gate.open()
        assert (await loading).status == 200


async def test_one_that_passes_probes_and_fails_turns_is_out_comes_back_on_probation_and_is_well_again() -> None:
    async with replicas(3) as fleet, running(given(fleet), fleet) as roost:
        asked = Conversation("doomed")
        home, _ = await settled_at(roost, asked, fleet)
        home.script = broken
        for _ in range(3):
            assert not (await roost.watch(asked)).complete
        told = (await roost.replicas())[home.id]
        assert told["health"]["state"] == "ejected"
        assert 0 < told["health"]["for_s"] <= 0.5
        assert "its turns fail" in told["health"]["why"]
        assert told["healthy"] is False
        assert (await roost.turn(asked)).reason == "home_gone"
        # Back on probation, the first turn there fails: out for longer.
        await until_state(roost, home.id, "probation")
        await tried(roost, home)
        assert await state(roost, home.id) == "ejected"
        assert await until_state(roost, home.id, "probation") > 0.5
        home.script = speak
        await tried(roost, home)
        assert await state(roost, home.id) == "well"
        assert f'roost_ejections_total{{fleet="default",replica="{home.id}",why="turns"}} 2.0' in await roost.metrics()


async def tried(roost: Roost, replica: Replica) -> None:
    """New conversations until one has gone there."""
    before = len(replica.turns)
    for number in range(20):
        asked = Conversation(f"try {before} {number}")
        await roost.watch(asked)
        if len(replica.turns) > before:
            await roost.idle()
            return
    raise AssertionError("nobody went there")


async def test_where_every_replica_fails_half_of_the_fleet_stays() -> None:
    async with replicas(2, script=broken) as fleet, running(given(fleet), fleet) as roost:
        for number in range(10):
            assert (await roost.watch(Conversation(f"doomed {number}"))).status == 200
        states = sorted([await state(roost, each.id) for each in fleet])
        assert states in (["ejected", "well"], ["probation", "well"])


async def test_of_a_crowd_one_turn_goes_to_a_replica_on_probation() -> None:
    """Sixteen new sessions at once, and its engine may still be broken: one finds out."""
    async with replicas(3) as fleet, running(given(fleet), fleet) as roost:
        quiet = fleet[0]
        await quiet.stop()
        await until_state(roost, quiet.id, "dead")
        streaming = Streaming()
        quiet.script = streaming
        await quiet.restart()
        await until_state(roost, quiet.id, "probation")
        turns = [asyncio.create_task(roost.turn(Conversation(f"crowd {number}"))) for number in range(16)]
        await streaming.began.wait()
        await until(lambda: sum(turn.done() for turn in turns) == 15)
        assert len(quiet.turns) == 1
        streaming.finish.set()
        await asyncio.gather(*turns)
        assert await state(roost, quiet.id) == "well"


async def test_a_drained_replica_finishes_its_streams_and_each_of_its_branches_moves_once() -> None:
    async with replicas(3) as fleet, running(given(fleet), fleet) as roost:
        asked = [Conversation(f"branch {number}", header=("x-session-id", str(number))) for number in range(12)]
        homes = {each.name: (await roost.turn(each)).replica for each in asked}
        leaving = fleet[0]
        live = [each for each in asked if homes[each.name] == leaving.id]
        assert len(live) >= 2
        streaming = Streaming()
        leaving.script = streaming
        for each in asked:
            each.grow()
        under_way = [asyncio.create_task(roost.turn(each)) for each in live]
        await until(lambda: len(leaving.turns) >= 2 * len(live))
        assert (await roost.admin("POST", f"/admin/replicas/{leaving.id}/drain"))[0] == 200
        seen = len(leaving.seen)
        assert leaving.id not in {(await roost.turn(Conversation(f"new {number}"))).replica for number in range(4)}
        streaming.finish.set()
        for answer in await asyncio.gather(*under_way):
            assert answer.replica == leaving.id
            assert answer.body.endswith(b"data: [DONE]\n\n")
        moved = {}
        for each in live:
            each.grow()
            answer = await roost.turn(each)
            assert answer.reason == "home_gone"
            moved[each.name] = answer.replica
        for _ in range(2):
            for each in live:
                each.grow()
                answer = await roost.turn(each)
                assert (answer.replica, answer.reason) == (moved[each.name], "home")
        assert len(leaving.seen) == seen


async def test_the_connections_of_a_removed_replica_are_closed() -> None:
    """At once those that are idle, and not when their keep-alive runs out, which is an hour here."""
    connections: dict[str, list[asyncio.StreamWriter]] = {}

    async def noting(visit: Visit) -> None:
        connections.setdefault(visit.replica.id, []).append(visit.writer)
        await visit.reply()

    async with replicas(2, script=noting) as fleet:
        settings = settings_for(fleet, ejection=QUICK, timeouts=Timeouts(ready_lag_s=0.0, keepalive_s=3600.0))
        async with running(settings, fleet) as roost:
            gone, kept = [await home_apart(roost, number) for number in range(2)]
            assert not any(writer.is_closing() for writer in connections[gone])
            await roost.admin("DELETE", f"/admin/replicas/{gone}")
            await until(lambda: all(writer.is_closing() for writer in connections[gone]))
            assert not any(writer.is_closing() for writer in connections[kept])


async def home_apart(roost: Roost, number: int) -> str:
    """Where a new conversation begins: each at another replica, since both are idle and the first has the other."""
    return (await roost.turn(Conversation(f"apart {number}"))).replica


# --- engines that are processes ---------------------------------------------------------------------------------------


@dataclass
class EngineProcess:
    """A simulated engine in a process of its own, which can be stopped as a whole."""

    url: str
    process: Process

    @property
    def id(self) -> str:
        return self.url.removeprefix("http://")

    def stand_still(self) -> None:
        """The kernel still accepts connections; nobody answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def engine_process() -> AsyncIterator[EngineProcess]:
    code = "from router.cli import app; app(prog_name='roost')"
    args = ("engine", "--port", "0", "--profile", "cpu-tiny", "--count", "1", "--time-scale", "20")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *args, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(2 * PATIENCE_S):
            line = (await process.stdout.readline()).decode()
        yield EngineProcess(line.split()[-1], process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_an_engine_that_stands_still_is_left_within_seconds_and_found_again() -> None:
    """SIGSTOP: its port accepts, nothing closes, nothing comes. A turn that waits there is served elsewhere."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine_process()) for _ in range(2)]
        urls = tuple(each.url for each in engines)
        fleets = (Fleet(name="default", replicas=urls, probe_interval_s=PROBE_INTERVAL_S),)
        roost = await stack.enter_async_context(running(settings_for(fleets, ejection=QUICK)))

        async def both_ready() -> bool:
            told = await roost.replicas()
            return all(each.id in told and told[each.id]["healthy"] for each in engines)

        await roost.until(both_ready)
        asked = Conversation("still", stream=False, model=None)
        answer = await roost.request("POST", PATHS[asked.dialect], asked.body(), asked.headers)
        assert answer.status == 200
        home = next(each for each in engines if each.id == answer.replica)
        asked.grow()
        home.stand_still()
        began = time.monotonic()
        answer = await roost.request("POST", PATHS[asked.dialect], asked.body(), asked.headers)
        took_s = time.monotonic() - began
        assert answer.status == 200
        assert answer.replica != home.id
        assert await state(roost, home.id) == "dead"
        home.go_on()
        back_s = await until_state(roost, home.id, "probation", "well")
        sys.stderr.write(f"a stopped engine: turn served elsewhere after {took_s:.1f} s, back after {back_s:.1f} s\n")


async def test_a_host_that_takes_no_connection_is_a_silent_one() -> None:
    """A full backlog drops the handshake, as a host that is gone does: no reset, no refusal, only time."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        async with replicas(1) as (well,):
            hole = f"http://127.0.0.1:{port}"
            fleets = (Fleet(name="default", replicas=(well.url, hole), probe_interval_s=PROBE_INTERVAL_S),)
            for each in fillers:
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", port))
            async with running(settings_for(fleets, ejection=QUICK), [well]) as roost:
                await until_state(roost, f"127.0.0.1:{port}", "dead")
                assert (await roost.turn(Conversation("new"))).replica == well.id
        for each in fillers:
            each.close()
