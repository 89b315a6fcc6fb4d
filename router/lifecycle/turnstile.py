"""Tenants' limits at the door: a turn begins when its tenant has one left, and gives it back however it ends.

- *Only tenants with limits are asked for*: for all others this costs nothing.
- *All routers count together*, in the store, before anything is placed: one round trip.
- *What was taken is given back on every path*, out of cancellation's reach; a router that dies gives its own back by
  renewing them no more.
- *The store away*: each process holds a tenant to its limits by itself, so several routers let through several times as
  much for that while. It counts what it had let through before, and tells the store of it again on its return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from router.domain.errors import OverLimit, StoreError
from router.domain.tenant import Denied, Tenant, next_arrival
from router.ports import Clock, Permits

__all__ = ["Turnstile"]

log = logging.getLogger("roost.tenants")

BUSY_RETRY_S: Final = 2.0
"""When to come again where too many turns are under way: nobody knows when one of them ends."""
BATCH: Final = 500


class Turnstile:
    """Holds tenants to their limits."""

    def __init__(
        self, permits: Permits, clock: Clock, new_id: Callable[[], str], *, ttl_s: float, renew_s: float
    ) -> None:
        self._permits = permits
        self._clock = clock
        self._new_id = new_id
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._under_way: dict[str, set[str]] = {}
        """By tenant, of this process: permits of turns that are under way."""
        self._arrivals: dict[str, int] = {}
        self._store_up = True
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def turn(self, tenant: Tenant | None) -> AsyncIterator[None]:
        """Around one turn. Raises OverLimit."""
        if tenant is None or not tenant.limits.any:
            yield
            return
        permit = self._new_id()
        denied = await self._take(tenant, permit)
        if denied is not None:
            raise _over(tenant, denied)
        if tenant.limits.concurrent is None:
            yield
            return
        self._under_way.setdefault(tenant.name, set()).add(permit)
        try:
            yield
        finally:
            self._under_way[tenant.name].discard(permit)
            self._give(tenant, permit)

    def under_way(self, tenant: str) -> int:
        """Turns in this process of a tenant that may have only so many."""
        return len(self._under_way.get(tenant, ()))

    def store_changed(self, up: bool) -> None:
        """The store has gone or come back: while it is away nobody waits for it."""
        self._store_up = up

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(self._renew_s)
            await self.renew()

    async def renew(self) -> None:
        """Tell the store of all turns under way."""
        if not self._store_up:
            return
        for tenant, permits in list(self._under_way.items()):
            held = list(permits)
            try:
                for start in range(0, len(held), BATCH):
                    # Without those given back meanwhile: they must not be there again.
                    if batch := [each for each in held[start : start + BATCH] if each in permits]:
                        await self._permits.renew(tenant, batch, self._ttl_s)
            except StoreError as error:
                log.debug("permits of tenant %s not renewed: %s", tenant, error)

    async def drained(self) -> None:
        """Wait until everything taken is given back."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _take(self, tenant: Tenant, permit: str) -> Denied | None:
        if not self._store_up:
            return self._take_alone(tenant)
        try:
            denied = await self._permits.take(tenant.name, permit, tenant.limits, self._ttl_s)
        except asyncio.CancelledError:
            self._give(tenant, permit)
            raise
        except StoreError:
            self._give(tenant, permit)  # it may have been carried out, too late
            return self._take_alone(tenant)
        if denied is None and tenant.limits.rate_per_minute is not None:
            self._arrived(tenant, tenant.limits.rate_per_minute)
        return denied

    def _take_alone(self, tenant: Tenant) -> Denied | None:
        """By what this process has let through."""
        limits = tenant.limits
        if limits.concurrent is not None and self.under_way(tenant.name) >= limits.concurrent:
            return Denied("concurrent", 0.0)
        if limits.rate_per_minute is not None:
            wait_s = self._arrived(tenant, limits.rate_per_minute)
            if wait_s > 0:
                return Denied("rate", wait_s)
        return None

    def _arrived(self, tenant: Tenant, rate_per_minute: int) -> float:
        now_us = round(self._clock.monotonic_s() * 1e6)
        known = self._arrivals.get(tenant.name, 0)
        self._arrivals[tenant.name], wait_s = next_arrival(known, now_us, rate_per_minute)
        return wait_s

    def _give(self, tenant: Tenant, permit: str) -> None:
        if tenant.limits.concurrent is None or not self._store_up:
            return
        task = asyncio.get_running_loop().create_task(_quietly(self._permits.give(tenant.name, permit)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    """A store call whose failure costs nothing: the permit expires."""
    try:
        await call
    except StoreError as error:
        log.debug("a permit was not given back, it will expire: %s", error)


def _over(tenant: Tenant, denied: Denied) -> OverLimit:
    if denied.limit == "rate":
        told = f"this key's tenant may begin {tenant.limits.rate_per_minute} turns a minute"
        return OverLimit(told, denied.retry_after_s)
    told = f"this key's tenant may have {tenant.limits.concurrent} turns under way at once"
    return OverLimit(told, BUSY_RETRY_S)
