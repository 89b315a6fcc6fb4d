"""Tenants' limits: counted once for all routers, never below zero, and free again whoever dies.

The worlds are those of the store's contract: a clock that stands still until it is moved.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from router.domain.tenant import Denied, TenantLimits
from router.ports import Permits
from router.store.permits import MemoryPermits, RedisPermits
from router.store.redis import RedisStore
from tests.contracts.worlds import World, memory_world, redis_world

TTL_S = 10.0
THREE = TenantLimits(concurrent=3)
SIX_A_MINUTE = TenantLimits(rate_per_minute=6)


def permits_of(world: World) -> Permits:
    """Permits as one more router would count them: all see the same."""
    return RedisPermits(world.store, "p") if isinstance(world.store, RedisStore) else MemoryPermits(world.clock)


@pytest.fixture
def permits(world: World) -> Permits:
    return permits_of(world)


async def take(permits: Permits, permit: str, limits: TenantLimits = THREE, tenant: str = "acme") -> Denied | None:
    return await permits.take(tenant, permit, limits, TTL_S)


async def test_so_many_at_once_and_no_more(permits: Permits) -> None:
    for number in range(3):
        assert await take(permits, f"p{number}") is None
    assert await take(permits, "p3") == Denied("concurrent", 0.0)
    await permits.give("acme", "p1")
    assert await take(permits, "p3") is None
    assert await take(permits, "p4") == Denied("concurrent", 0.0)


async def test_tenants_do_not_share(permits: Permits) -> None:
    one = TenantLimits(concurrent=1, rate_per_minute=1)
    assert await take(permits, "p", one, "acme") is None
    assert await take(permits, "p", one, "other") is None
    assert await take(permits, "q", one, "other") == Denied("concurrent", 0.0)


async def test_giving_back_twice_or_what_was_never_taken_makes_no_room(permits: Permits) -> None:
    """The count is a set's size: it cannot go below zero."""
    await permits.give("acme", "never")
    assert await take(permits, "p0") is None
    for _ in range(5):
        await permits.give("acme", "p0")
    assert [await take(permits, f"q{number}") for number in range(4)] == [None] * 3 + [Denied("concurrent", 0.0)]


async def test_a_permit_taken_again_counts_once_and_costs_no_rate(permits: Permits) -> None:
    """A call that was cut short may be repeated."""
    limits = TenantLimits(concurrent=1, rate_per_minute=1)
    assert await take(permits, "p", limits) is None
    assert await take(permits, "p", limits) is None
    assert await take(permits, "q", limits) == Denied("concurrent", 0.0)


async def test_the_permits_of_a_router_that_died_expire(world: World, permits: Permits) -> None:
    """Nothing is given back and nothing renewed: as after kill -9."""
    for number in range(3):
        assert await take(permits, f"dead{number}") is None
    await world.advance(TTL_S - 0.5)
    assert await take(permits, "p") == Denied("concurrent", 0.0)
    await world.advance(0.5)
    assert [await take(permits, f"p{number}") for number in range(4)] == [None] * 3 + [Denied("concurrent", 0.0)]


async def test_renewed_permits_stay_and_those_of_the_dead_do_not(world: World, permits: Permits) -> None:
    for permit in ("mine", "dead"):
        assert await take(permits, permit, TenantLimits(concurrent=2)) is None
    for _ in range(4):
        await world.advance(6.0)
        await permits.renew("acme", ["mine"], TTL_S)
    assert await take(permits, "p", TenantLimits(concurrent=2)) is None
    assert await take(permits, "q", TenantLimits(concurrent=2)) == Denied("concurrent", 0.0)


async def test_what_the_store_has_forgotten_counts_again_once_it_is_renewed(world: World, permits: Permits) -> None:
    """A store that came back empty, or a router that could not reach it for longer than the TTL."""
    for number in range(3):
        assert await take(permits, f"p{number}") is None
    await world.advance(TTL_S)
    await permits.renew("acme", ["p0", "p1", "p2"], TTL_S)
    assert await take(permits, "q") == Denied("concurrent", 0.0)


async def test_a_minutes_turns_may_come_at_once_and_then_one_by_one(world: World, permits: Permits) -> None:
    for number in range(6):
        assert await take(permits, f"p{number}", SIX_A_MINUTE) is None
    assert await take(permits, "p6", SIX_A_MINUTE) == Denied("rate", 10.0)
    await world.advance(4.0)
    assert await take(permits, "p6", SIX_A_MINUTE) == Denied("rate", 6.0)
    await world.advance(6.0)
    assert await take(permits, "p6", SIX_A_MINUTE) is None
    assert await take(permits, "p7", SIX_A_MINUTE) == Denied("rate", 10.0)
    await world.advance(600.0)
    assert [await take(permits, f"q{number}", SIX_A_MINUTE) for number in range(7)].count(None) == 6


@pytest.mark.parametrize("rate", [1, 7, 13, 60, 999])
async def test_the_whole_of_an_uneven_rate_may_come_at_once(permits: Permits, rate: int) -> None:
    limits = TenantLimits(rate_per_minute=rate)
    assert [await take(permits, f"p{number}", limits) for number in range(rate)] == [None] * rate
    assert await take(permits, "more", limits) is not None


async def test_what_was_denied_has_used_nothing_up(world: World, permits: Permits) -> None:
    """A tenant that knocks all the time is not kept out by that."""
    limits = TenantLimits(concurrent=1, rate_per_minute=2)
    assert await take(permits, "p", limits) is None
    for number in range(20):
        assert await take(permits, f"q{number}", limits) == Denied("concurrent", 0.0)
    await permits.give("acme", "p")
    assert await take(permits, "q", limits) is None
    await permits.give("acme", "q")
    denied = await take(permits, "r", limits)
    assert denied is not None
    assert denied.limit == "rate"
    await world.advance(denied.retry_after_s)
    assert await take(permits, "r", limits) is None


async def test_a_race_for_the_last_one_has_one_winner(permits: Permits) -> None:
    taken = await asyncio.gather(*(take(permits, f"p{number}", TenantLimits(concurrent=1)) for number in range(20)))
    assert taken.count(None) == 1


@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_server_answers_as_memory_does(request: pytest.FixtureRequest, kind: str, seed: int) -> None:
    """Over random histories, call by call."""
    dice = random.Random(seed)
    url = request.getfixturevalue(f"{kind}_url")
    seen = set()
    async with memory_world() as reference, redis_world(url) as world:
        one, other = permits_of(reference), permits_of(world)
        for step in range(400):
            if dice.random() < 0.2:
                passed_s = dice.choice([0.0625, 3.0, 10.0, 100.0])
                await reference.advance(passed_s)
                await world.advance(passed_s)
            tenant, permit = dice.choice(["a", "b"]), f"p{dice.randrange(6)}"
            limits = TenantLimits(dice.choice([None, 1, 7, 60]), dice.choice([None, 1, 2, 4]))
            match dice.randrange(5):
                case 0:
                    await one.give(tenant, permit)
                    await other.give(tenant, permit)
                case 1:
                    await one.renew(tenant, [permit], TTL_S)
                    await other.renew(tenant, [permit], TTL_S)
                case _:
                    expected = await one.take(tenant, permit, limits, TTL_S)
                    got = await other.take(tenant, permit, limits, TTL_S)
                    seen.add(None if expected is None else expected.limit)
                    assert got == expected, f"step {step}"
    assert seen == {None, "concurrent", "rate"}, "a history that denies nothing tests nothing"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_all_keys_of_a_tenant_share_one_hash_tag_and_expire(request: pytest.FixtureRequest, kind: str) -> None:
    """So that Redis Cluster takes the script, and tenants that were taken out leave nothing behind."""
    async with redis_world(request.getfixturevalue(f"{kind}_url")) as world:
        await take(permits_of(world), "p", TenantLimits(60, 3))
        keys = [key async for key in world.raw.scan_iter(match="p:*")]
        assert sorted(keys) == [b"p:{tenant:acme}:v2:permits", b"p:{tenant:acme}:v2:rate"]
        assert all([0 < await world.raw.pttl(key) <= 60_000 for key in keys])
