"""A store that was away, or has forgotten, learns what it missed; and no router's word undoes a newer one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from router.domain.decision import Reason
from router.domain.errors import StoreForeign
from router.domain.outcome import End
from router.domain.replica import Standing
from router.domain.shared import Acquired, Ask, Claim, Lease, Member, Settlement, Stale
from router.domain.turn import Dialect, Facts
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.returning import BATCH
from router.placement.lineage import ask_for
from router.store.memory import MemoryStore
from tests.fakes import (
    DOWN,
    FLEET,
    LIFE,
    REQUEST,
    UP,
    Answer,
    FakeClock,
    FakeDown,
    FakeProber,
    FakeStore,
    Gate,
    Stage,
    prompt,
    stage,
    tokens,
    url_of,
)

LONG = "word " * 4_000
NOTHING = Ask(session=None)


class Flushable(FakeStore):
    """Forgets all when it is told; counts how many claims are under way at once."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(self.clock, Gate())
        self.claiming = 0
        self.claiming_max = 0
        self.spoilt: str | None = None
        """A fleet that has something else where its leases are kept."""

    def flush(self) -> None:
        self._fleets.clear()

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        self.claiming += 1
        self.claiming_max = max(self.claiming_max, self.claiming)
        try:
            return await super().acquire(fleet, claim)
        finally:
            self.claiming -= 1

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        if fleet == self.spoilt:
            raise StoreForeign("a key is not Roost's")
        await super().settle(fleet, settlement)

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        if fleet == self.spoilt:
            raise StoreForeign("a key is not Roost's")
        return await super().renew(fleet, leases, lease_ttl_s)


@pytest.fixture
def store() -> Flushable:
    return Flushable()


async def two(store: Flushable, replicas: int = 5, policy: str = "roost") -> tuple[Stage, Stage]:
    """Two routers of one fleet over one store."""
    one, other = [await stage(replicas, store=store, ids=ids, policy=policy) for ids in "ab"]
    for world in (one, other):
        world.upstream.otherwise = tokens(prompt=5_000, cached=0)
    return one, other


@asynccontextmanager
async def returning(*worlds: Stage) -> AsyncIterator[None]:
    """Their write-back going."""
    tasks = [asyncio.create_task(world.turns.run([world.fleet])) for world in worlds]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)


async def caught_up(world: Stage) -> None:
    """Until this router owes the store nothing."""
    async with asyncio.timeout(10):
        while world.turns.owes:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0)
    await world.turns.drained()


async def served(world: Stage, facts: Facts) -> str:
    """Where a turn was served."""
    await world.serve(facts)
    await world.turns.drained()
    assert world.events.finished[-1].outcome.end is End.COMPLETE
    return world.replica_of()


@asynccontextmanager
async def running(world: Stage, facts: Facts) -> AsyncIterator[None]:
    """A turn that has reached its replica and waits for its first byte."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_: str) -> None:
        arrived.set()
        await go_on.wait()

    world.upstream.before = hold
    task = asyncio.create_task(world.serve(facts))
    await arrived.wait()
    world.upstream.before = None
    yield
    go_on.set()
    await task
    await world.turns.drained()


def in_flight(store: FakeStore) -> int:
    return sum(load.in_flight for load in store.loads().values())


# --- the store was away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["s", None])
async def test_what_one_router_bound_without_the_store_the_other_continues(
    store: Flushable, session: str | None
) -> None:
    one, other = await two(store)
    store.away = True
    home = await served(one, prompt(LONG, session=session))
    assert one.events.finished[-1].blind
    store.away = False
    async with returning(one):
        await caught_up(one)
    assert await served(other, prompt(LONG, "ok", "next", session=session)) == home
    assert other.events.finished[-1].reason is Reason.HOME
    assert other.events.finished[-1].predicted_cached_tokens > 4_000, "what the turn left was not written"
    await one.settled()


async def test_a_branch_that_moved_without_the_store_has_moved_for_all(store: Flushable) -> None:
    """Its old home died meanwhile; the record that the store had is moved on, not doubled."""
    one, other = await two(store)
    old = await served(one, prompt(LONG))
    before = store.branches()
    store.away = True
    one.fleet.observed(old, DOWN)
    home = await served(one, prompt(LONG, "ok", "next"))
    assert home != old
    store.away = False
    async with returning(one):
        await caught_up(one)
    assert store.branches().keys() == before.keys()
    assert await served(other, prompt(LONG, "ok", "next", "ok", "more")) == home
    assert other.events.finished[-1].reason is Reason.HOME


async def test_what_the_router_did_not_know_but_the_store_did_is_one_branch_again(store: Flushable) -> None:
    """The other router placed it; this one, without the store, by hash; by its chain the store finds them one."""
    one, other = await two(store)
    await served(other, prompt(LONG))
    store.away = True
    home = await served(one, prompt(LONG, "ok", "next"))
    store.away = False
    async with returning(one):
        await caught_up(one)
    assert len(store.branches()) == 1
    assert await served(other, prompt(LONG, "ok", "next", "ok", "more")) == home


@pytest.mark.parametrize("session", ["s", "t", "u"])
async def test_a_subagent_placed_without_the_store_does_not_move_its_session(store: Flushable, session: str) -> None:
    """Where sessions are bound as a whole: the binding that the store knows stands, while its replica lives."""
    one, other = await two(store, policy="session_sticky")
    home = await served(other, prompt(LONG, session=session))
    store.away = True
    assert await served(one, prompt("a subagent", session=session)) != home
    store.away = False
    async with returning(one):
        await caught_up(one)
    assert len(store.branches()) == 2
    assert await served(other, prompt(LONG, "ok", "next", session=session)) == home


async def test_after_a_flush_a_session_that_is_bound_as_a_whole_is_bound_again(store: Flushable) -> None:
    one, other = await two(store, policy="session_sticky")
    home = await served(one, prompt(LONG))
    store.flush()
    for world in (one, other):
        await world.fleet.refresh()
    one.turns.store_changed(up=True)
    async with returning(one):
        await caught_up(one)
    assert await served(other, prompt("a subagent")) == home


async def test_what_a_turn_left_is_remembered_although_its_branch_was_given_its_old_name_meanwhile(
    store: Flushable,
) -> None:
    """The store knew the branch by another name than the router that bound it blindly; then it is flushed."""
    one, other = await two(store)
    await served(other, prompt(LONG))
    store.away = True
    async with running(one, prompt(LONG, "ok", "next")):
        store.away = False
        async with returning(one):
            await caught_up(one)
    store.flush()
    await one.fleet.refresh()
    one.turns.store_changed(up=True)
    async with returning(one):
        await caught_up(one)
    (branch,) = store.branches().values()
    assert branch.tokens == 5_000
    assert branch.residues[0].tokens == 5_003


async def test_a_turn_that_runs_on_counts_from_the_return_and_is_settled_once(store: Flushable) -> None:
    one, other = await two(store)
    store.away = True
    async with running(one, prompt(LONG)):
        store.away = False
        async with returning(one):
            await caught_up(one)
            assert in_flight(store) == 1
            (load,) = (load for load in store.loads().values() if load.in_flight)
            assert load.prefill_tokens > 4_000
            assert load.locked_tokens > load.prefill_tokens
    await one.settled()
    (branch,) = store.branches().values()
    assert branch.tokens == 5_000
    assert branch.residues[0].tokens == 5_003
    assert store.loads()[one.replica_of()].admitted_tokens == 5_003
    assert await served(other, prompt(LONG, "ok", "next")) == one.replica_of()


async def test_a_settlement_that_the_store_did_not_take_is_repeated(store: Flushable) -> None:
    one, _ = await two(store)
    async with running(one, prompt(LONG)):
        store.away = True
    assert in_flight(store) == 1
    store.away = False
    async with returning(one):
        await caught_up(one)
    await one.settled()
    (branch,) = store.branches().values()
    assert (branch.tokens, branch.residues[0].tokens) == (5_000, 5_003)
    load = store.loads()[one.replica_of()]
    assert (load.admitted_tokens, load.in_flight) == (5_003, 0)
    view = await store.fetch(FLEET, NOTHING)
    assert view.beliefs[one.replica_of()].bytes_weight > 0


async def test_one_fleet_whose_keys_are_spoilt_keeps_no_other_from_being_told(store: Flushable) -> None:
    """Neither its leases, nor its settlements, nor its branches stand before those of the others."""
    world = await stage(store=store)
    spoilt = FleetRuntime(FleetSpec("spoilt", replicas=(url_of(0),)), store, FakeProber(), store.clock)
    await spoilt.enrol()
    spoilt.observed("r0:1", UP)
    store.spoilt = spoilt.name
    await world.turns.serve(spoilt, prompt("a"), REQUEST, FakeDown(), lambda *_: (), lambda _: None)
    store.away = True
    home = await served(world, prompt("hi"))
    store.away = False
    task = asyncio.create_task(world.turns.run([spoilt, world.fleet]))
    async with asyncio.timeout(10):
        await store.gate.passed("acquire done", 2)  # the spoilt fleet's own, and the branch that is written
    task.cancel()
    await asyncio.wait([task])
    branch = (await store.fetch(FLEET, ask_for(prompt("hi")))).branch
    assert branch is not None
    assert branch.home is not None
    assert branch.home.replica == home


async def test_a_lease_that_expired_meanwhile_is_taken_again_without_its_prefill(store: Flushable) -> None:
    """The first byte came while the store was away: those tokens wait no more."""
    one, _ = await two(store)
    async with running(one, prompt(LONG)):
        store.away = True
        store.clock.at_s += 11.0
        one.turns.store_changed(up=False)
        store.away = False
        await store.fetch(FLEET, NOTHING)
        assert in_flight(store) == 0
        one.turns.store_changed(up=True)
        async with returning(one):
            await caught_up(one)
        assert in_flight(store) == 1
    await one.settled()


async def test_of_two_routers_that_bound_one_branch_the_first_to_write_stands(store: Flushable) -> None:
    """They saw different replicas alive, so they placed it apart; nothing is counted twice, and both go there now."""
    one, other = await two(store)
    store.away = True
    first = await served(one, prompt(LONG))
    other.fleet.observed(first, DOWN)
    second = await served(other, prompt(LONG))
    assert first != second
    store.away = False
    async with returning(other):
        await caught_up(other)
    async with returning(one):
        await caught_up(one)
    assert len(store.branches()) == 1
    for world in (one, other):
        assert await served(world, prompt(LONG, "ok", "next")) == second
        await world.settled()


async def test_a_turn_does_not_wait_for_the_write_back_to_come_to_its_branch(store: Flushable) -> None:
    """It is written at once, with the turn; also where the store has an older end of the branch."""
    one, _ = await two(store)
    old = await served(one, prompt(LONG))
    store.away = True
    one.fleet.observed(old, DOWN)
    home = await served(one, prompt(LONG, "ok", "next"))
    fresh = await served(one, prompt("another", session="t"))
    store.away = False
    assert await served(one, prompt(LONG, "ok", "next", "ok", "more")) == home
    assert await served(one, prompt("another", "ok", "next", session="t")) == fresh
    assert {event.reason for event in one.events.finished[-2:]} == {Reason.HOME}
    await one.settled()


async def test_a_returning_store_is_told_a_few_at_a_time(store: Flushable) -> None:
    one, _ = await two(store)
    store.away = True
    for number in range(5 * BATCH):
        await served(one, prompt("a", session=f"s{number}"))
    store.away = False
    async with returning(one):
        await caught_up(one)
    assert store.claiming_max == BATCH
    assert len(store.branches()) == 5 * BATCH
    await one.settled()


async def test_a_branch_whose_home_has_restarted_is_not_written(store: Flushable) -> None:
    """A claim for the old life would begin it anew, at zero, over the counts of the new one."""
    one, _ = await two(store)
    store.away = True
    home = await served(one, prompt(LONG))
    store.away = False
    member = one.fleet.member(home)
    assert member is not None
    await store.put_member(FLEET, replace(member, incarnation="life-1"))
    await one.fleet.refresh()
    async with returning(one):
        await caught_up(one)
    assert store.branches() == {}
    assert home not in store.loads()


async def test_a_store_that_goes_away_again_midway_loses_nothing(store: Flushable) -> None:
    one, other = await two(store)
    store.away = True
    homes = {n: await served(one, prompt(f"{n} {LONG}", session=f"s{n}")) for n in range(2 * BATCH)}
    store.away = False
    calls = 0

    async def fall_away(_: Claim) -> None:
        nonlocal calls
        calls += 1
        store.away = store.away or calls == BATCH // 2

    store.rival = fall_away
    async with returning(one):
        while calls < BATCH // 2:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0)
        store.rival, store.away = None, False
        await caught_up(one)
    for number, home in homes.items():
        assert await served(other, prompt(f"{number} {LONG}", "ok", "next", session=f"s{number}")) == home
    for world in (one, other):
        await world.settled()


# --- the store has forgotten ------------------------------------------------------------------------------------------


async def flushed(store: Flushable, *worlds: Stage) -> None:
    """Empty, but for the members that each router has enrolled again."""
    store.flush()
    for world in worlds:
        await world.fleet.refresh()


async def test_after_a_flush_known_branches_stay_at_home_on_every_router(store: Flushable) -> None:
    """At once where this router placed them; elsewhere once it has told the store."""
    one, other = await two(store)
    homes = {n: await served(one, prompt(f"{n} {LONG}", session=f"s{n}")) for n in range(10)}
    assert len(set(homes.values())) > 1
    await flushed(store, one, other)
    for number in range(5):
        assert await served(one, prompt(f"{number} {LONG}", "ok", "next", session=f"s{number}")) == homes[number]
        assert one.events.finished[-1].reason is Reason.HOME
        assert not one.events.finished[-1].blind
    async with returning(one):
        await caught_up(one)
    for number in range(5, 10):
        assert await served(other, prompt(f"{number} {LONG}", "ok", "next", session=f"s{number}")) == homes[number]
        assert other.events.finished[-1].predicted_cached_tokens > 4_000
    for world in (one, other):
        await world.settled()


async def test_after_a_flush_running_turns_count_again(store: Flushable) -> None:
    one, other = await two(store)
    await served(one, prompt(LONG, session="idle"))
    async with running(one, prompt(LONG)):
        await flushed(store, one, other)
        assert in_flight(store) == 0
        async with returning(one):
            one.turns.store_changed(up=True)
            await caught_up(one)
        assert in_flight(store) == 1
        assert {branch.in_flight for branch in store.branches().values()} == {0, 1}
    await one.settled()


async def test_a_newer_binding_of_another_router_stands(store: Flushable) -> None:
    """What this router remembers is used only where the store knows nothing of the prompt."""
    one, other = await two(store)
    old = await served(one, prompt(LONG))
    other.fleet.observed(old, DOWN)
    new = await served(other, prompt(LONG, "ok", "next"))
    assert new != old
    assert await served(one, prompt(LONG, "ok", "next", "ok", "more")) == new


async def test_a_shorter_memory_does_not_move_a_branch_back_after_a_flush(store: Flushable) -> None:
    """The other router served it last, elsewhere: whoever writes first, the longer prompt's home is its home."""
    for first in (0, 1):
        store.flush()
        worlds = await two(store)
        one, other = worlds
        old = await served(one, prompt(LONG))
        other.fleet.observed(old, DOWN)
        new = await served(other, prompt(LONG, "ok", "next"))
        await flushed(store, one, other)
        for world in (worlds[first], worlds[1 - first]):
            async with returning(world):
                world.turns.store_changed(up=True)
                await caught_up(world)
        assert await served(one, prompt(LONG, "ok", "next", "ok", "more")) == new


async def test_a_remembered_home_that_has_restarted_is_no_home(store: Flushable) -> None:
    one, other = await two(store)
    home = await served(one, prompt(LONG))
    await flushed(store, one, other)
    await store.put_member(FLEET, Member(home, f"http://{home}", "config", incarnation="life-1"))
    await one.fleet.refresh()
    await served(one, prompt(LONG, "ok", "next"))
    assert one.events.finished[-1].reason is Reason.NEW


async def test_a_rewound_prompt_whose_end_was_forgotten_is_still_placed(store: Flushable) -> None:
    """The branch lives on under other ends: the claim of what is remembered fails, and it decides by the store."""
    one, _ = await two(store)
    await served(one, prompt("a"))
    (known,) = store.branches().values()

    async def move_on(claim: Claim) -> None:
        store.rival = None
        far = replace(claim, lease="far", version=known.version, branch=known.id, tip=None, tips=())
        assert isinstance(await store.acquire(FLEET, far), Acquired)

    await move_on(store.claims[-1])
    await served(one, prompt("a", "ok", "next"))
    assert len(store.branches()) == 2


async def test_a_restarted_router_moves_nobody(store: Flushable) -> None:
    one, other = await two(store)
    homes = {n: await served(one, prompt(f"{n} {LONG}", session=f"s{n}")) for n in range(8)}
    restarted = await stage(5, store=store, ids="c")
    for number, home in homes.items():
        assert await served(restarted, prompt(f"{number} {LONG}", "ok", "next", session=f"s{number}")) == home
        assert restarted.events.finished[-1].reason is Reason.HOME
    await other.settled()


async def test_without_the_store_a_stored_response_is_continued_at_its_holder(store: Flushable) -> None:
    one, _ = await two(store)
    made, text, done = (
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_text.delta", "delta": "word"},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}},
    )
    one.upstream.otherwise = Answer(
        chunks=tuple(f"data: {json.dumps(each)}\n\n".encode() for each in (made, text, done))
    )
    facts = replace(prompt(LONG), dialect=Dialect.RESPONSES, stores_response=True)
    home = await served(one, facts)
    store.away = True
    for number in range(6):
        turn = replace(prompt("other", session=f"s{number}"), dialect=Dialect.RESPONSES, refers_to="resp_1")
        assert await served(one, turn) == home
        assert one.events.finished[-1].reason is Reason.STORED


async def test_an_operators_word_and_a_lifes_age_survive_a_flush_and_a_router_that_knew_neither(
    store: Flushable,
) -> None:
    """The one that starts on the empty store writes first; those that remember mend what it could not know."""
    one, other = await two(store)
    for name, changes in (
        ("r0:1", {"standing": Standing.CORDONED}),
        ("r1:1", {"standing": Standing.DRAINING, "joined_at_s": 5.0}),
        ("r2:1", {"joined_at_s": 7.0, "source": "admin"}),
    ):
        member = one.fleet.member(name)
        assert member is not None
        assert await store.put_member(FLEET, replace(member, **changes))
    for world in (one, other):
        await world.fleet.refresh()
    known = one.fleet.members
    store.flush()
    fresh = FleetRuntime(one.fleet.spec, store, FakeProber(), store.clock)
    await fresh.enrol()
    await store.put_member(FLEET, Member("r1:1", "http://r1:1", "config", incarnation=LIFE, joined_at_s=99.0))
    await one.fleet.refresh()
    found = {member.id: member for member in (await store.members(FLEET)).members}
    assert {name: member.standing for name, member in found.items()} == {each.id: each.standing for each in known}
    assert {name: member.incarnation for name, member in found.items()} == {each.id: LIFE for each in known}
    assert (found["r1:1"].joined_at_s, found["r2:1"].joined_at_s) == (5.0, 7.0)


async def test_without_the_store_a_restart_is_seen_by_the_router_that_looks(store: Flushable) -> None:
    """What it binds then is bound to the life that it saw, and is at home when the store is back."""
    one, _ = await two(store, replicas=1)
    prober = FakeProber()
    prober.shows[url_of(0)] = replace(UP, incarnation="life-9")
    fleet = FleetRuntime(replace(one.fleet.spec, probe_interval_s=0.001), store, prober, store.clock)
    await fleet.enrol()
    store.away = True
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(10):
        while (member := fleet.member("r0:1")) is None or member.incarnation != "life-9":  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0)
        (recorded,) = (await MemoryStore.members(store, FLEET)).members
        assert recorded.incarnation == LIFE
        store.away = False
        while (await store.members(FLEET)).members[0].incarnation != "life-9":  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
