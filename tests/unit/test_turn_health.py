"""What turns tell of their replicas, and what becomes of turns where a replica is out, on probation, or lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import pytest

from router.domain.decision import Reason
from router.domain.errors import NotPlaced, UpstreamBroken, UpstreamUnreachable
from router.domain.outcome import End
from router.domain.replica import Standing
from router.domain.shared import Ask, Member
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.health import State
from router.lifecycle.watch import Outside
from tests.fakes import DOWN, FLEET, SILENT, UP, Answer, FakeClock, FakeProber, FakeStore, Gate, Stage, prompt, stage
from tests.fakes import tokens as words

MIDSTREAM = Answer(chunks=words(done=False).chunks, breaks=UpstreamBroken("reset"))
EARLY = Answer(error=UpstreamBroken("reset", answered=False))
FULL = Answer(status=503, headers=((b"Content-Type", b"application/json"),), chunks=(b"{}",))


def at(world: Stage, replica: str, *answers: Answer) -> None:
    world.upstream.answers[f"http://{replica}"] = list(answers)


def state(world: Stage, replica: str) -> State:
    return world.fleet.watch.state(replica)


async def home_of(world: Stage, session: str = "s") -> str:
    """Begin a conversation, and say where it lives."""
    await world.serve(prompt("word " * 2_000, session=session))
    return world.replica_of()


async def fails(world: Stage, count: int, session: str = "s") -> None:
    """Further turns of the conversation that break midway."""
    for number in range(count):
        with pytest.raises(UpstreamBroken):
            await world.serve(prompt("word " * 2_000, f"again {number}", "go on", session=session))


async def ejected(world: Stage) -> str:
    """A replica that has just been ejected, the home of session `s`."""
    home = await home_of(world)
    at(world, home, MIDSTREAM)
    await fails(world, 3)
    assert state(world, home) is State.EJECTED
    return home


async def test_a_replica_that_passes_probes_and_fails_turns_is_left_once_by_each_branch() -> None:
    world = await stage(3)
    home = await home_of(world)
    at(world, home, MIDSTREAM)
    await fails(world, 2)
    assert state(world, home) is State.WELL
    await fails(world, 1)
    world.fleet.observed(home, UP)
    assert state(world, home) is State.EJECTED
    at(world, home, words())
    for number in range(3):
        await world.serve(prompt("word " * 2_000, f"now {number}", "go on"))
    served = world.events.finished[-3:]
    assert [turn.reason for turn in served] == [Reason.HOME_GONE, Reason.HOME, Reason.HOME]
    assert home not in {turn.replica for turn in served}
    await world.settled()


async def test_a_turn_that_was_served_elsewhere_still_tells_of_where_it_failed() -> None:
    """Its client has seen nothing of it; the replica that breaks before its head is out all the same."""
    world = await stage(2)
    at(world, "r0:1", EARLY)
    at(world, "r1:1", words())
    for number in range(8):
        await world.serve(prompt("word " * 2_000, session=f"s{number}"))
    assert state(world, "r0:1") is State.EJECTED
    failed = Counter(turn.replica for turn in world.events.finished if turn.outcome.end is End.UNREACHED)
    assert failed == {"r0:1": 3}


@pytest.mark.parametrize("answer", [FULL, Answer(status=429, chunks=(b"{}",)), Answer(status=400, chunks=(b"{}",))])
async def test_what_a_replica_refuses_is_no_failure(answer: Answer) -> None:
    world = await stage(1)
    at(world, "r0:1", answer)
    for number in range(6):
        await world.serve(prompt("word", session=f"s{number}"))
    assert state(world, "r0:1") is State.WELL


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_servers_errors_are_failures(status: int) -> None:
    world = await stage(2)
    at(world, "r0:1", Answer(status=status, headers=FULL.headers, chunks=(b"{}",)))
    at(world, "r1:1", words())
    for number in range(8):
        await world.serve(prompt("word", session=f"s{number}"))
    assert state(world, "r0:1") is State.EJECTED


@pytest.mark.parametrize(("replicas", "out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
async def test_at_most_half_of_the_fleet_is_ejected_and_the_rest_serves_on(replicas: int, out: int) -> None:
    """Where all fail it is the network, the clients or this router."""
    world = await stage(replicas)
    world.upstream.otherwise = MIDSTREAM
    for number in range(12 * replicas):
        with pytest.raises(UpstreamBroken):
            await world.serve(prompt("word", session=f"s{number}"))
    states = Counter(state(world, each.id) for each in world.fleet.members)
    assert states[State.EJECTED] == out
    assert world.fleet.ready()


async def test_half_is_of_those_that_answer_and_of_those_that_are_not_draining() -> None:
    world = await stage(4)
    for number in (1, 2):
        world.fleet.observed(f"r{number}:1", DOWN)
    (member,) = [each for each in world.fleet.members if each.id == "r3:1"]
    await world.store.put_member(FLEET, replace(member, standing=Standing.DRAINING))
    await world.fleet.refresh()
    at(world, "r0:1", MIDSTREAM)
    for number in range(5):
        with pytest.raises(UpstreamBroken):
            await world.serve(prompt("word", session=f"s{number}"))
    assert state(world, "r0:1") is State.WELL


async def test_where_only_ejected_ones_are_left_they_are_used() -> None:
    """And what succeeds there readmits them."""
    world = await stage(2)
    home = await ejected(world)
    (other,) = {each.id for each in world.fleet.members} - {home}
    world.fleet.observed(other, DOWN)
    at(world, home, words())
    await world.serve(prompt("word", session="new"))
    assert world.replica_of() == home
    assert state(world, home) is State.WELL


async def test_without_the_store_an_ejected_home_is_left_too_and_once() -> None:
    world = await stage(3)
    home = await ejected(world)
    world.store.away = True
    at(world, home, words())
    for number in range(3):
        await world.serve(prompt("word " * 2_000, f"blind {number}", "go on"))
    served = world.events.finished[-3:]
    assert all(turn.blind for turn in served)
    assert home not in {turn.replica for turn in served}
    assert len({turn.replica for turn in served}) == 1


async def test_what_is_no_turn_is_asked_of_an_ejected_replica_only_where_all_are() -> None:
    world = await stage(2)
    home = await ejected(world)
    assert home not in {member.id for member in world.fleet.usable()}
    (other,) = {each.id for each in world.fleet.members} - {home}
    world.fleet.observed(other, DOWN)
    assert [member.id for member in world.fleet.usable()] == [home]


async def test_on_probation_one_turn_at_a_time_until_one_has_succeeded() -> None:
    """New and home turns alike; a branch whose home is at its one turn spills, and keeps its home."""
    world = await stage(2)
    home = await home_of(world)
    (other,) = {each.id for each in world.fleet.members} - {home}
    world.fleet.observed(home, DOWN)
    world.fleet.observed(home, UP)
    assert state(world, home) is State.PROBATION
    hold = asyncio.Event()

    async def held_back(url: str) -> None:
        if url == f"http://{home}":
            await hold.wait()

    world.upstream.before = held_back
    trial = asyncio.create_task(world.serve(prompt("word " * 2_000, "ok", "go on")))
    await world.gate.passed("sent", times=2)
    assert world.events.started[-1].replica == home
    for number in range(6):
        await world.serve(prompt("word", session=f"new {number}"))
        assert world.replica_of() == other
    await world.serve(prompt("word " * 2_000, "ok", "go on", "ok", "further"))
    spilt = world.events.finished[-1]
    assert (spilt.replica, spilt.reason) == (other, Reason.SPILL)
    assert world.store.claims[-1].home.replica == home
    hold.set()
    await trial
    assert state(world, home) is State.WELL
    await world.settled()


async def test_a_crowd_of_turns_at_once_is_one_turn_for_a_replica_on_probation() -> None:
    world = await stage(3)
    world.fleet.observed("r0:1", DOWN)
    world.fleet.observed("r0:1", UP)
    hold = asyncio.Event()

    async def held_back(_: str) -> None:
        await hold.wait()

    world.upstream.before = held_back
    turns = [asyncio.create_task(world.serve(prompt("word", session=f"s{number}"))) for number in range(16)]
    await world.gate.passed("sent", times=16)
    placed = Counter(event.replica for event in world.events.started)
    assert placed["r0:1"] == 1
    assert abs(placed["r1:1"] - placed["r2:1"]) <= 2
    hold.set()
    await asyncio.gather(*turns)
    assert state(world, "r0:1") is State.WELL
    await world.settled()


async def test_however_often_it_loses_the_race_a_turn_is_no_second_one_on_probation() -> None:
    """A claim that has been stale grows tolerant of rivals, but not at a replica on probation."""
    world = await stage(1)
    world.fleet.observed("r0:1", DOWN)
    world.fleet.observed("r0:1", UP)
    world.store.stale = "load"
    with pytest.raises(NotPlaced):
        await world.serve(prompt("word"))
    *claims, _ = world.store.claims
    assert len(claims) > 3
    assert {(claim.observed_in_flight, claim.slack) for claim in claims} == {(0, 0)}


async def test_where_all_are_on_probation_nobody_is_refused() -> None:
    world = await stage(2)
    for each in ("r0:1", "r1:1"):
        world.fleet.observed(each, DOWN)
        world.fleet.observed(each, UP)
    await asyncio.gather(*(world.serve(prompt("word", session=f"s{number}")) for number in range(8)))
    await world.settled()


async def test_a_failure_on_probation_is_out_for_longer_and_a_success_is_a_newcomer() -> None:
    world = await stage(2)
    home = await ejected(world)
    at(world, home, MIDSTREAM, MIDSTREAM, words())
    for out_s in (5.0, 10.0):
        assert world.fleet.watch.described(home)["for_s"] == out_s
        world.clock.at_s += out_s
        assert state(world, home) is State.PROBATION
        if out_s == 10.0:
            at(world, home, words())
        await _until_tried(world, home)
    assert state(world, home) is State.WELL
    view = await world.store.fetch(FLEET, Ask(session=None))
    joined = {each.id: each.joined_at_s for each in world.fleet.snapshot(view).replicas}
    assert joined[home] == world.clock.now_s()
    assert all(since_s < joined[home] for name, since_s in joined.items() if name != home)


async def _until_tried(world: Stage, replica: str) -> None:
    """New sessions until one has gone there."""
    for number in range(20):
        try:
            await world.serve(prompt("word", session=f"try {world.clock.at_s} {number}"))
        except UpstreamBroken:
            assert world.replica_of() == replica
            return
        if world.replica_of() == replica:
            return
    raise AssertionError("nobody went there")


# --- lost replicas ----------------------------------------------------------------------------------------------------


async def test_a_turn_that_waits_at_a_lost_replica_is_placed_elsewhere() -> None:
    """Its connection notices nothing; a lost host sends no reset. The client has seen nothing yet."""
    world = await stage(2)
    home = await home_of(world)
    never = asyncio.Event()

    async def hang(url: str) -> None:
        if url == f"http://{home}":
            await never.wait()

    world.upstream.before = hang
    turn = asyncio.create_task(world.serve(prompt("word " * 2_000, "ok", "go on")))
    await world.gate.passed("sent", times=2)
    world.clock.at_s += 11  # the bytes of its first turn are long ago
    for look in (UP, SILENT, SILENT):
        world.fleet.observed(home, look)
    assert state(world, home) is State.DEAD
    await asyncio.sleep(0)
    assert not turn.done()  # dead to new turns, but it may merely be busy
    world.clock.at_s += 10
    world.fleet.observed(home, SILENT)
    await turn
    assert [event.outcome.end for event in world.events.finished[-2:]] == [End.UNREACHED, End.COMPLETE]
    assert world.events.finished[-1].reason is Reason.HOME_GONE
    await world.settled()


async def test_where_nobody_is_well_turns_wait_on() -> None:
    """Then it is more likely this router that is cut off, and waiting is all there is."""
    world = await stage(1)
    come = asyncio.Event()

    async def hang(_: str) -> None:
        await come.wait()

    world.upstream.before = hang
    turn = asyncio.create_task(world.serve(prompt("word")))
    await world.gate.passed("sent")
    world.clock.at_s += 20
    for _ in range(3):
        world.fleet.observed("r0:1", SILENT)
    assert state(world, "r0:1") is State.DEAD
    with pytest.raises(NotPlaced):
        await world.serve(prompt("word", session="new"))
    come.set()
    await turn
    await world.settled()


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_each_change_of_state_is_one_log_line_and_each_ejection_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "roost.fleet")
    counted: list[tuple[str, str, str]] = []
    clock = FakeClock()
    spec = FleetSpec(FLEET, replicas=("http://r0:1", "http://r1:1"))
    outside = Outside(ejected=lambda *told: counted.append(told))
    fleet = FleetRuntime(spec, FakeStore(clock, Gate()), FakeProber(), clock, outside)
    for each in ("r0:1", "r1:1"):
        fleet.observed(each, UP)
    caplog.clear()

    def turn(error: UpstreamBroken | None) -> None:
        seen = fleet.watch.turn_began("r0:1")
        end = End.COMPLETE if error is None else End.UPSTREAM_BROKEN
        fleet.watch.turn_ended("r0:1", seen, end, 200, error, clock.at_s)

    for _ in range(3):
        turn(UpstreamBroken("connection lost"))
    clock.at_s += 5
    fleet.observed("r0:1", UP)
    turn(None)
    fleet.watch.unreachable("r0:1", UpstreamUnreachable("nobody listens"))
    fleet.watch.unreachable("r0:1", UpstreamUnreachable("nobody listens"))
    fleet.observed("r0:1", DOWN)
    fleet.observed("r0:1", UP)
    assert [record.getMessage().removeprefix(f"replica r0:1 of fleet {FLEET} ") for record in caplog.records] == [
        "is out for 5 s: its turns fail, the last one so: connection lost",
        "is back on probation: one turn at a time until one has said something",
        "is ready",
        "is not ready: nobody listens",
        "is back on probation: one turn at a time until one has said something",
    ]
    assert counted == [(FLEET, "r0:1", "turns"), (FLEET, "r0:1", "dead")]


async def test_a_url_is_told_as_left_once_no_member_is_there() -> None:
    left: list[str] = []
    clock = FakeClock()
    store = FakeStore(clock, Gate())
    fleet = FleetRuntime(FleetSpec(FLEET, replicas=("http://r0:1",)), store, FakeProber(), clock, Outside(left.append))
    await fleet.enrol()
    await store.put_member(FLEET, Member("r1:1", "http://r1:1", "admin"))
    await fleet.refresh()
    assert left == []
    await store.put_member(FLEET, Member("r1:1", "http://elsewhere:1", "admin"))
    await fleet.refresh()
    assert left == ["http://r1:1"]
    await store.remove_member(FLEET, "r1:1")
    await fleet.refresh()
    assert left == ["http://r1:1", "http://elsewhere:1"]
