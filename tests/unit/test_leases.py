"""Held leases are renewed together until they are settled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from router.domain.errors import StoreUnavailable
from router.lifecycle.leases import BATCH, Leases
from router.ports import Lease
from router.store.memory import MemoryStore
from tests.fakes import FakeClock

BEAT_S = 0.001


class Renewals(MemoryStore):
    """Keeps what was renewed; the store may be away."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.told: list[Lease] = []
        self.fails = 0
        self.renewing = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        assert lease_ttl_s == 10.0
        self.asked.append((fleet, tuple(lease.id for lease in leases)))
        self.told += leases
        self.renewing.set()
        await self.may_answer.wait()
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("away")
        return []

    async def renewed(self) -> None:
        """Wait for the next renewal."""
        self.renewing.clear()
        await self.renewing.wait()


@pytest.fixture
def store() -> Renewals:
    return Renewals()


@pytest.fixture
def leases(store: Renewals) -> Leases:
    return Leases(store, ttl_s=10.0, renew_s=BEAT_S)


async def test_what_is_held_is_renewed_and_what_is_settled_is_not(store: Renewals, leases: Leases) -> None:
    leases.add("f", lease("a"))
    leases.add("f", lease("b"))
    leases.discard("f", "a")
    leases.discard("f", "never held")
    leases.discard("never seen", "x")
    assert leases.count == 1
    async with running(leases):
        await store.renewed()
    assert store.asked[0] == ("f", ("b",))


async def test_many_are_renewed_in_batches(store: Renewals, leases: Leases) -> None:
    names = {f"l{number}" for number in range(BATCH + 1)}
    for name in names:
        leases.add("f", lease(name))
    async with running(leases):
        await store.renewed()
        await store.renewed()
    (_, first), (_, second) = store.asked[:2]
    assert (len(first), len(second)) == (BATCH, 1)
    assert {*first, *second} == names


async def test_a_fleets_first_turn_may_come_while_another_fleets_are_renewed(store: Renewals, leases: Leases) -> None:
    leases.add("f", lease("a"))
    store.may_answer.clear()
    async with running(leases):
        await store.renewed()
        leases.add("g", lease("b"))
        store.may_answer.set()
        while ("g", ("b",)) not in store.asked:
            await store.renewed()


async def test_a_store_that_is_away_is_asked_again(store: Renewals, leases: Leases) -> None:
    leases.add("f", lease("a"))
    store.fails = 2
    async with running(leases):
        for _ in range(4):
            await store.renewed()
    assert len(store.asked) >= 4


async def test_one_fleet_whose_leases_cannot_be_renewed_costs_no_other_fleet_its_own(
    store: Renewals, leases: Leases
) -> None:
    leases.add("f", lease("a"))
    leases.add("g", lease("b"))
    store.fails = 1
    with pytest.raises(StoreUnavailable):
        await leases.renew()
    assert store.asked == [("f", ("a",)), ("g", ("b",))]


async def test_what_is_settled_while_others_are_renewed_is_not_taken_again(store: Renewals, leases: Leases) -> None:
    """A store that has lost them takes what it is told: a later batch must not tell it what is settled by then."""
    for number in range(BATCH + 2):
        leases.add("f", lease(f"l{number:04}"))
    store.may_answer.clear()
    async with running(leases):
        await store.renewed()
        leases.discard("f", f"l{BATCH:04}")
        store.may_answer.set()
        await store.renewed()
    assert store.asked[1] == ("f", (f"l{BATCH + 1:04}",))


async def test_prefill_that_is_over_is_not_told_again(store: Renewals, leases: Leases) -> None:
    leases.add("f", lease("a"))
    leases.progressed("f", "a")
    leases.progressed("f", "unknown")
    leases.progressed("g", "a")
    await leases.renew()
    assert [(held.id, held.prefill_tokens, held.locked_tokens) for held in store.told] == [("a", 0, 7)]


async def test_the_branches_of_running_turns_are_known(leases: Leases) -> None:
    leases.add("f", lease("a"))
    leases.add("f", lease("b"))
    leases.discard("f", "a")
    assert leases.branches("f") == {"branch of b"}
    assert leases.branches("g") == frozenset()


def lease(name: str) -> Lease:
    return Lease(name, "r", "life", 5, 7, f"branch of {name}")


class running:  # noqa: N801 (reads as a word)
    """The loop, for as long as the block."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._leases.run())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled()
