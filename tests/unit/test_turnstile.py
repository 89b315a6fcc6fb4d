"""Tenants at the door: what is taken is given back, and what holds while the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from router.domain.errors import OverLimit, StoreUnavailable
from router.domain.tenant import Denied, Tenant, TenantLimits
from router.lifecycle.turnstile import Turnstile
from router.store.permits import MemoryPermits
from tests.contracts.worlds import FakeClock

TTL_S = 10.0


def tenant(concurrent: int | None = None, rate: int | None = None, name: str = "acme") -> Tenant:
    return Tenant(name, f"scope of {name}", TenantLimits(rate, concurrent))


class Shared(MemoryPermits):
    """The store's permits, which can be away or slow, and tell what they were asked."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.away = False
        self.too_late = False
        """The call is carried out and its answer never comes."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0

    async def take(self, tenant: str, permit: str, limits: TenantLimits, ttl_s: float) -> Denied | None:
        await self._asked()
        denied = await super().take(tenant, permit, limits, ttl_s)
        if self.too_late:
            raise StoreUnavailable("too late")
        await self.gate.wait()
        return denied

    async def renew(self, tenant: str, permits: Sequence[str], ttl_s: float) -> None:
        await self._asked()
        await super().renew(tenant, permits, ttl_s)

    async def give(self, tenant: str, permit: str) -> None:
        await self._asked()
        await super().give(tenant, permit)

    async def _asked(self) -> None:
        self.calls += 1
        if self.away:
            raise StoreUnavailable("away")


class World:
    """Several routers before one store."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.shared = Shared(self.clock)
        self._number = 0

    def router(self) -> Turnstile:
        return Turnstile(self.shared, self.clock, self._id, ttl_s=TTL_S, renew_s=3.0)

    def _id(self) -> str:
        self._number += 1
        return f"p{self._number}"


async def held(turnstile: Turnstile, who: Tenant | None, stack: AsyncExitStack, count: int = 1) -> int:
    """Begins turns that go on until the stack closes; returns how many were let through."""
    passed = 0
    for _ in range(count):
        try:
            await stack.enter_async_context(turnstile.turn(who))
        except OverLimit:
            continue
        passed += 1
    return passed


async def test_who_has_no_limits_costs_nothing() -> None:
    world = World()
    async with AsyncExitStack() as stack:
        assert await held(world.router(), None, stack, 50) == 50
        assert await held(world.router(), tenant(), stack, 50) == 50
    assert world.shared.calls == 0


async def test_two_routers_share_a_limit_and_it_is_free_again_at_the_end() -> None:
    world = World()
    one, other = world.router(), world.router()
    for _ in range(3):
        async with AsyncExitStack() as stack:
            assert await held(one, tenant(3), stack, 2) == 2
            assert await held(other, tenant(3), stack, 2) == 1
            assert (one.under_way("acme"), other.under_way("acme")) == (2, 1)
        await one.drained()
        await other.drained()


@pytest.mark.parametrize("limits", [(1, None), (None, 1)])
async def test_over_the_limit_says_when_to_come_again(limits: tuple[int | None, int | None]) -> None:
    world = World()
    router = world.router()
    async with router.turn(tenant(*limits)):
        with pytest.raises(OverLimit) as caught:
            async with router.turn(tenant(*limits)):
                pytest.fail("let through")
    assert caught.value.retry_after_s == (60.0 if limits[0] is None else 2.0)


async def test_a_turn_that_fails_or_is_cancelled_gives_back() -> None:
    world = World()
    router = world.router()
    with pytest.raises(RuntimeError):
        async with router.turn(tenant(1)):
            raise RuntimeError
    begun = asyncio.Event()

    async def served() -> None:
        async with router.turn(tenant(1)):
            begun.set()
            await asyncio.Event().wait()

    await router.drained()
    task = asyncio.create_task(served())
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    await router.drained()
    async with router.turn(tenant(1)):
        pass


async def test_a_client_that_leaves_while_it_is_being_counted_leaves_nothing_counted() -> None:
    """The store had carried the call out, and nobody waited for the answer."""
    world = World()
    router = world.router()
    world.shared.gate.clear()
    task = asyncio.create_task(held(router, tenant(1), AsyncExitStack()))
    while not world.shared.calls:  # noqa: ASYNC110 (one turn of the loop)
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    world.shared.gate.set()
    await router.drained()
    async with router.turn(tenant(1)):
        pass


async def test_without_the_store_each_process_holds_the_limit_by_itself() -> None:
    """What was let through before counts."""
    world = World()
    one, other = world.router(), world.router()
    async with AsyncExitStack() as stack:
        assert await held(one, tenant(3), stack, 2) == 2
        world.shared.away = True
        assert await held(one, tenant(3), stack, 5) == 1
        assert await held(other, tenant(3), stack, 5) == 3
    await one.drained()
    async with AsyncExitStack() as stack:
        assert await held(one, tenant(3), stack, 5) == 3


async def test_without_the_store_the_rate_is_held_by_each_process_too() -> None:
    world = World()
    router = world.router()
    async with AsyncExitStack() as stack:
        assert await held(router, tenant(rate=6), stack, 4) == 4
        world.shared.away = True
        assert await held(router, tenant(rate=6), stack, 4) == 2
        world.clock.time_s += 10.0
        assert await held(router, tenant(rate=6), stack, 4) == 1


async def test_a_call_that_was_too_late_is_taken_back() -> None:
    """It may have been carried out: else its permit would count beside the turn's own."""
    world = World()
    one, other = world.router(), world.router()
    async with AsyncExitStack() as stack:
        world.shared.too_late = True
        assert await held(one, tenant(2), stack) == 1
        world.shared.too_late = False
        await one.drained()
        await one.renew()
        assert await held(other, tenant(2), stack, 2) == 1


async def test_the_store_learns_on_its_return_what_went_on() -> None:
    world = World()
    one, other = world.router(), world.router()
    async with AsyncExitStack() as stack:
        world.shared.away = True
        assert await held(one, tenant(3), stack, 3) == 3
        await one.renew()
        world.shared.away = False
        await one.renew()
        assert await held(other, tenant(3), stack) == 0


async def test_the_turns_of_a_router_that_was_killed_are_free_within_the_ttl() -> None:
    """It gives nothing back and renews no more; the living one's turns stay counted."""
    world = World()
    dead, living = world.router(), world.router()
    async with AsyncExitStack() as stack:
        await held(dead, tenant(3), stack, 2)
        await held(living, tenant(3), stack, 1)
        for _ in range(3):
            world.clock.time_s += 3.0
            await living.renew()
        assert await held(living, tenant(3), stack) == 0
        world.clock.time_s += 1.0
        assert await held(living, tenant(3), stack, 3) == 2


async def test_what_was_given_back_while_others_are_renewed_is_not_there_again() -> None:
    world = World()
    router = world.router()
    async with AsyncExitStack() as stack:
        await held(router, tenant(1, name="a"), stack)
        await held(router, tenant(1, name="b"), stack)
        renewing = asyncio.create_task(router.renew())
        await asyncio.sleep(0)
    await renewing
    await router.drained()
    async with router.turn(tenant(1, name="a")), router.turn(tenant(1, name="b")):
        pass


async def test_a_store_that_is_known_to_be_away_is_not_asked() -> None:
    """Nobody waits for its timeout; once it is back it is asked again, and told of what goes on."""
    world = World()
    one, other = world.router(), world.router()
    one.store_changed(up=False)
    async with AsyncExitStack() as stack:
        assert await held(one, tenant(2), stack, 5) == 2
        await one.renew()
        assert world.shared.calls == 0
        one.store_changed(up=True)
        await one.renew()
        assert await held(other, tenant(2), stack) == 0
    await one.drained()
    assert await held(other, tenant(2), AsyncExitStack()) == 1
