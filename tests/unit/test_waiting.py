"""The waiting room: bounded, fair by tenant, left at once by who goes, and nobody known ever waits in it.

The loop's time is virtual: it jumps to the next timer, so nothing here sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

import pytest

from router.domain.errors import FleetFull
from router.domain.replica import Profile
from router.domain.turn import Facts
from router.lifecycle.placing import Limits
from router.lifecycle.waiting import LOOK_S, Seat, WaitingRoom
from router.lifecycle.watch import FOREIGN_WINDOW
from router.placement.admission import Occupancy
from router.telemetry.events import TurnWaited, TurnWaiting
from simulations.clock import run
from tests.fakes import LoopClock, Stage, prompt, stage, stage_with, tokens

FULL = Occupancy(live_tokens=1_000.0, room_tokens=1_000)
HALF_FULL = Occupancy(live_tokens=500.0, room_tokens=1_000)


_P = ParamSpec("_P")


def virtual(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """A test in virtual time."""

    @wraps(test)
    def ran(*args: _P.args, **kwargs: _P.kwargs) -> None:
        run(test(*args, **kwargs))

    return ran


# --- the room itself --------------------------------------------------------------------------------------------------


class Guests:
    """Seats by name, and who has been called."""

    def __init__(self, queue_max: int = 100, queue_s: float = 30.0) -> None:
        self.room = WaitingRoom(limit=1.0, queue_max=queue_max, queue_s=queue_s)
        self.seats: dict[str, Seat] = {}

    def come(self, name: str, tenant: str, priority: int = 0, need: int = 10, who: str | None = None) -> None:
        self.seats[name] = self.room.take(name, tenant, who, priority, need)

    def called(self) -> list[str]:
        return [name for name, seat in self.seats.items() if seat.call.done() and seat.call.result() == "come"]

    async def wait_in_vain(self, name: str) -> None:
        """Whenever it is called there is no room."""
        while True:
            await self.room.called(self.seats[name])
            self.room.found_none(self.seats[name], FULL)

    def admit_one(self) -> str:
        """Whoever is called gets in."""
        (name,) = self.called()
        self.room.leave(self.seats.pop(name), admitted=True)
        return name

    def admit_all(self) -> list[str]:
        self.room.look()
        return [self.admit_one() for _ in range(len(self.seats))]


@virtual
async def test_tenants_take_turns_however_many_one_brings() -> None:
    guests = Guests()
    for name in ("a1", "a2", "a3", "a4"):
        guests.come(name, "a")
    guests.come("b1", "b")
    guests.come("b2", "b")
    guests.come("c1", "c")
    assert guests.admit_all() == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


@virtual
async def test_within_a_tenant_the_higher_priority_goes_first_then_who_came_first() -> None:
    """And no priority carries anybody past another tenant."""
    guests = Guests()
    guests.come("a1", "a")
    guests.come("b1", "b", priority=99)
    guests.come("a2", "a", priority=5)
    guests.come("a3", "a", priority=5)
    guests.come("a4", "a", priority=-1)
    assert guests.admit_all() == ["a2", "b1", "a3", "a1", "a4"]


@virtual
async def test_who_does_not_fit_keeps_its_seat_and_others_that_fit_go_on() -> None:
    """Of other tenants: nobody overtakes within one. One after another, so that each sees those before it."""
    guests = Guests()
    guests.come("big", "a", need=900)
    guests.come("small", "a", need=1)
    guests.come("other", "b", need=400)
    guests.come("large", "c", need=501)
    guests.room.look()
    assert guests.called() == ["big"]
    guests.room.found_none(guests.seats["big"], replace(HALF_FULL, live_tokens=501.0))
    assert guests.called() == ["other"]
    guests.room.leave(guests.seats.pop("other"), admitted=True)
    assert guests.called() == []
    assert len(guests.room) == 3


@virtual
async def test_a_full_fleet_is_asked_once_a_look_however_many_wait() -> None:
    guests = Guests()
    for number in range(20):
        guests.come(f"g{number}", f"tenant {number}")
    guests.room.look()
    (first,) = guests.called()
    guests.room.found_none(guests.seats[first], FULL)
    assert guests.called() == []


@virtual
async def test_a_look_comes_once_a_second_while_somebody_waits_and_not_otherwise() -> None:
    guests = Guests()
    loop = asyncio.get_running_loop()
    guests.come("a1", "a")
    looks: list[float] = []
    for _ in range(3):
        await guests.room.called(guests.seats["a1"])
        looks.append(loop.time())
        guests.room.found_none(guests.seats["a1"], FULL)
    assert looks == pytest.approx([LOOK_S, 2 * LOOK_S, 3 * LOOK_S])
    guests.room.leave(guests.seats["a1"], admitted=False)
    await asyncio.sleep(10 * LOOK_S)
    assert guests.room._timer is None


@virtual
async def test_who_waits_in_vain_is_told_when_to_come_back() -> None:
    guests = Guests(queue_s=30.0)
    guests.come("a1", "a")
    loop = asyncio.get_running_loop()

    with pytest.raises(FleetFull, match="within 30 s") as refused:
        await guests.wait_in_vain("a1")
    assert loop.time() == pytest.approx(30.0)
    assert (refused.value.status, refused.value.code) == (503, "fleet_full")
    assert 1 <= refused.value.retry_after_s <= 60


@virtual
async def test_a_full_room_refuses_and_one_tenant_cannot_fill_it() -> None:
    """The tenant with most seats gives up its last, as long as it keeps as many as the newcomer's has."""
    guests = Guests(queue_max=4)
    for name in ("a1", "a2", "a3", "a4"):
        guests.come(name, "a")
    with pytest.raises(FleetFull, match="4 new sessions wait already"):
        guests.come("a5", "a")
    guests.come("b1", "b")
    with pytest.raises(FleetFull, match="others go before it"):
        await guests.room.called(guests.seats["a4"])
    guests.come("b2", "b")
    with pytest.raises(FleetFull):
        guests.come("b3", "b")
    assert len(guests.room) == 4
    del guests.seats["a3"], guests.seats["a4"]
    assert guests.admit_all() == ["a1", "b1", "a2", "b2"]


@virtual
async def test_who_was_sent_away_and_comes_back_has_its_old_place() -> None:
    """Else whoever is refused often enough would never get in, however long it has been asking."""
    guests = Guests(queue_max=2, queue_s=5.0)
    guests.come("early", "a", who="s1")
    await asyncio.sleep(4.0)
    guests.come("late", "a", who="s2")
    with pytest.raises(FleetFull):
        guests.come("latest", "a", who="s3")
    with pytest.raises(FleetFull, match="within 5 s"):
        await guests.wait_in_vain("early")
    guests.room.leave(guests.seats.pop("early"), admitted=False)
    guests.room.found_none(guests.seats["late"], FULL)
    guests.come("new", "a", who="s4")
    guests.come("early again", "a", who="s1")
    with pytest.raises(FleetFull, match="others go before it"):
        await guests.room.called(guests.seats["new"])
    del guests.seats["new"]
    assert guests.admit_all() == ["early again", "late"]


@virtual
async def test_into_a_full_room_a_higher_priority_gets_before_the_last_of_its_own_tenant() -> None:
    guests = Guests(queue_max=2)
    guests.come("a1", "a")
    guests.come("b1", "b")
    guests.come("a2", "a", priority=1)
    with pytest.raises(FleetFull):
        await guests.room.called(guests.seats.pop("a1"))
    with pytest.raises(FleetFull):
        guests.come("a3", "a", priority=1)
    assert guests.admit_all() == ["b1", "a2"]


@virtual
async def test_without_seats_everybody_is_refused() -> None:
    with pytest.raises(FleetFull):
        Guests(queue_max=0).come("a1", "a")


@virtual
async def test_who_leaves_frees_its_seat_and_whoever_was_to_follow_is_called() -> None:
    guests = Guests()
    guests.come("a1", "a")
    guests.come("a2", "a")
    guests.room.look()
    assert guests.called() == ["a1"]
    guests.room.leave(guests.seats.pop("a1"), admitted=False)
    assert guests.called() == ["a2"]
    guests.room.leave(guests.seats.pop("a2"), admitted=False)
    assert len(guests.room) == 0


@virtual
async def test_others_of_a_session_that_got_in_need_not_wait_any_more() -> None:
    guests = Guests()
    guests.come("main", "a", who="s1")
    guests.come("stranger", "a", who="s2")
    guests.come("title", "a", who="s1")
    guests.come("elsewhere", "b", who="s1")
    guests.room.look()
    guests.room.leave(guests.seats.pop("main"), admitted=True)
    assert guests.called() == ["title", "elsewhere"]


@virtual
async def test_a_room_that_closes_sends_everybody_away_and_whoever_comes() -> None:
    guests = Guests()
    guests.come("a1", "a")
    guests.come("a2", "a")
    guests.room.look()
    guests.room.close()
    with pytest.raises(FleetFull, match="stopping"):
        await guests.room.called(guests.seats["a2"])
    await guests.room.called(guests.seats["a1"])
    guests.room.found_none(guests.seats["a1"], FULL)
    with pytest.raises(FleetFull, match="stopping"):
        await guests.room.called(guests.seats["a1"])
    with pytest.raises(FleetFull, match="stopping"):
        guests.come("a3", "a")


# --- turns in it ------------------------------------------------------------------------------------------------------


def long_prompt(session: str | None, *more: str, priority: int | None = None, tenant: str | None = None) -> Facts:
    """About 1,000 tokens, and what came after."""
    facts = prompt(f"{session or more[0]} " + "word " * 800, *more, session=session)
    return replace(facts, priority=priority, tenant=tenant or facts.tenant)


async def small(limits: Limits | None = None, device_tokens: int = 2_900) -> Stage:
    """One replica with room for two sessions, where somebody else's turn runs all the while."""
    world = await stage(
        1, admission=1.0, profile=Profile(device_tokens=device_tokens), limits=limits, clock=LoopClock()
    )
    world.upstream.otherwise = tokens(prompt=1_000, cached=0)
    world.fleet.watch.of("r0:1").foreign = ((1, 0),) * FOREIGN_WINDOW
    return world


@asynccontextmanager
async def waiting(world: Stage, facts: Facts, times: int = 1) -> AsyncIterator[asyncio.Task[object]]:
    """A turn that sits in the waiting room."""
    before = sum(isinstance(event, TurnWaiting) for event in world.events.all)
    task: asyncio.Task[object] = asyncio.create_task(world.serve(facts))
    while sum(isinstance(event, TurnWaiting) for event in world.events.all) < before + times:
        assert not task.done(), "it did not wait"
        await asyncio.sleep(0)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fill(world: Stage, sessions: int = 2) -> None:
    for number in range(sessions):
        await world.serve(long_prompt(f"s{number}"))


@virtual
async def test_a_new_session_waits_until_live_tokens_have_decayed_and_its_wait_is_told() -> None:
    world = await small()
    await fill(world)
    async with waiting(world, long_prompt("new")) as task:
        await task
    (waited,) = [event for event in world.events.all if isinstance(event, TurnWaited)]
    assert waited.admitted
    assert 1 <= waited.waited_s <= 30
    record = world.recent.newest(1)[0]
    assert record.waited_s == pytest.approx(waited.waited_s)
    assert record.attempt == 1
    assert record.place_s < 1, "waiting is no placing"
    await world.settled()


@virtual
async def test_known_sessions_their_forks_and_subagents_never_wait() -> None:
    """Not behind a queue, and not with nothing in common but the session's id, or its name in a subagent's own."""
    world = await small(Limits(queue_s=3_000.0))
    await fill(world)
    async with waiting(world, long_prompt("new")):
        await world.serve(long_prompt("s0", "ok", "next"))
        await world.serve(long_prompt("s0", "ok", "another way"))
        subagent = replace(prompt("find " * 800, session="s0"), head=0)
        await world.serve(replace(subagent, chain=subagent.chain[1:]))
        own_session = long_prompt("child")
        await world.serve(replace(own_session, parent=long_prompt("s1").session))
        assert sum(isinstance(event, TurnWaiting) for event in world.events.all) == 1
    await world.settled()


@virtual
async def test_a_parent_that_nobody_knows_opens_no_door() -> None:
    world = await small()
    await fill(world)
    async with waiting(world, replace(long_prompt("child"), parent="unheard of")):
        pass


@virtual
async def test_a_keyless_conversation_goes_on_and_a_new_one_waits() -> None:
    """Tools and system prompt alone are common to all conversations of a harness, and make none known."""
    world = await small()
    await world.serve(long_prompt(None, "first"))
    await world.serve(long_prompt(None, "second"))
    await world.serve(long_prompt(None, "first", "and", "on"))
    await world.serve(long_prompt(None, "second", "and", "on"))
    async with waiting(world, long_prompt(None, "third")):
        pass
    await world.settled()


@virtual
async def test_a_client_that_leaves_while_it_waits_frees_its_seat_at_once() -> None:
    world = await small(Limits(queue_max=1))
    await fill(world)
    async with waiting(world, long_prompt("new")):
        with pytest.raises(FleetFull):
            await world.serve(long_prompt("other"))
    async with waiting(world, long_prompt("other")):
        pass
    (first, second) = [event for event in world.events.all if isinstance(event, TurnWaited)]
    assert not first.admitted
    assert not second.admitted
    await world.settled()


@pytest.mark.parametrize("step", range(1, 8))
@virtual
async def test_cancelled_at_any_step_while_it_is_let_in_a_turn_holds_up_nobody(step: int) -> None:
    world = await small(Limits(queue_s=3_000.0))
    await fill(world)
    await world.settled()
    async with waiting(world, long_prompt("first")) as first, waiting(world, long_prompt("second")) as second:
        world.gate.victim = first  # type: ignore[assignment]
        world.gate.cancel_at = [len(world.gate.steps) + step]
        await asyncio.gather(first, return_exceptions=True)
        await second
    await world.settled()
    assert sum(event.admitted for event in world.events.all if isinstance(event, TurnWaited)) >= 1


@virtual
async def test_many_new_sessions_at_once_do_not_all_see_the_same_room() -> None:
    """Claims under way count, though no view of the store shows them yet."""
    world = await small(device_tokens=10_000)
    tasks = [asyncio.create_task(world.serve(long_prompt(f"s{number}"))) for number in range(40)]
    await asyncio.sleep(LOOK_S / 2)
    assert len(world.events.started) + sum(isinstance(e, TurnWaiting) for e in world.events.all) == 40
    assert len(world.events.started) <= 10
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.settled()


@virtual
async def test_a_store_that_goes_away_lets_the_waiting_in() -> None:
    """Without it nobody knows what lives: turns are placed blind, as all others."""
    world = await small()
    await fill(world)
    async with waiting(world, long_prompt("new")) as task:
        world.store.away = True
        await task
    assert world.events.finished[-1].blind
    world.store.away = False


@virtual
async def test_a_stopping_router_sends_the_waiting_away() -> None:
    world = await small()
    await fill(world)
    async with waiting(world, long_prompt("new")) as task:
        world.turns.stopping()
        with pytest.raises(FleetFull, match="stopping"):
            await task
    with pytest.raises(FleetFull, match="stopping"):
        await world.serve(long_prompt("late"))


@virtual
async def test_a_stopping_router_lets_nobody_wait_for_a_fleet_that_it_never_served() -> None:
    world = await small()
    await fill(world)
    other = stage_with(world.clock, world.gate, world.store, world.upstream, world.fleet, Limits(), "other")
    other.turns.stopping()
    with pytest.raises(FleetFull, match="stopping"):
        await other.serve(long_prompt("new"))


@virtual
async def test_a_replica_that_joins_makes_room() -> None:
    world = await small(Limits(queue_s=3_000.0))
    await fill(world)
    async with waiting(world, long_prompt("new")) as task:
        await world.join(1)
        await task
    (waited,) = [event for event in world.events.all if isinstance(event, TurnWaited)]
    assert waited.waited_s <= 2 * LOOK_S


@virtual
async def test_without_a_limit_nobody_waits() -> None:
    world = await stage(1, admission=0.0, profile=Profile(device_tokens=100))
    for number in range(5):
        await world.serve(long_prompt(f"s{number}"))
    assert not any(isinstance(event, TurnWaiting) for event in world.events.all)


@virtual
async def test_the_first_session_gets_in_however_long_its_prompt() -> None:
    world = await small(device_tokens=64)
    await world.serve(long_prompt("huge"))
    assert not any(isinstance(event, TurnWaiting) for event in world.events.all)
