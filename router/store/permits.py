"""What tenants have under way and how fast they begin turns, counted for all routers together.

| key               | type   | holds                                               | TTL                      |
|-------------------|--------|-----------------------------------------------------|--------------------------|
| `<tenant>permits` | zset   | permit, scored with the Unix ms at which it expires | the permits'             |
| `<tenant>rate`    | string | microseconds: `next_arrival` of the tenant          | until it is of no use    |

`<tenant>` is `{prefix}:{tenant:<name>}:v2:`: each tenant has a hash tag, and so a slot of Redis Cluster, of its own. A
permit is a set's member, so a count cannot go below zero, giving one back twice does nothing, and a router that dies
takes its permits with it within their TTL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from router.domain.tenant import Denied, TenantLimits, next_arrival
from router.ports import Clock

__all__ = ["MemoryPermits", "RedisPermits", "Scripts"]


class Scripts(Protocol):
    """Runs the scripts of `router/store/scripts`."""

    async def run_script(self, name: str, keys: list[bytes], *args: bytes | str | int) -> Any:
        """One round trip. Raises StoreError."""
        ...


class RedisPermits:
    """`router.ports.Permits` in Redis or Valkey."""

    def __init__(self, scripts: Scripts, prefix: str) -> None:
        self._scripts = scripts
        self._prefix = prefix

    async def take(self, tenant: str, permit: str, limits: TenantLimits, ttl_s: float) -> Denied | None:
        """See `router.ports.Permits.take`."""
        at_once = -1 if limits.concurrent is None else limits.concurrent
        rate = -1 if limits.rate_per_minute is None else limits.rate_per_minute
        keys = [self._permits(tenant), self._key(tenant, "rate")]
        denied = await self._scripts.run_script("take_permit", keys, permit, at_once, rate, _ms(ttl_s))
        return Denied(denied[0].decode(), int(denied[1]) / 1e6) if denied else None

    async def renew(self, tenant: str, permits: Sequence[str], ttl_s: float) -> None:
        """See `router.ports.Permits.renew`."""
        await self._scripts.run_script("renew_permits", [self._permits(tenant)], _ms(ttl_s), *permits)

    async def give(self, tenant: str, permit: str) -> None:
        """See `router.ports.Permits.give`."""
        await self._scripts.run_script("give_permit", [self._permits(tenant)], permit)

    def _permits(self, tenant: str) -> bytes:
        return self._key(tenant, "permits")

    def _key(self, tenant: str, what: str) -> bytes:
        return f"{self._prefix}:{{tenant:{tenant}}}:v2:{what}".encode()


class MemoryPermits:
    """`router.ports.Permits` of one process: the reference."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._permits: dict[str, dict[str, float]] = {}
        self._arrivals: dict[str, int] = {}

    async def take(self, tenant: str, permit: str, limits: TenantLimits, ttl_s: float) -> Denied | None:
        """See `router.ports.Permits.take`."""
        now_s = self._clock.now_s()
        held = self._held(tenant, now_s)
        again = limits.concurrent is not None and permit in held
        if limits.concurrent is not None and not again and len(held) >= limits.concurrent:
            return Denied("concurrent", 0.0)
        if limits.rate_per_minute is not None and not again:
            now_us = round(now_s * 1e6)
            moved_us, wait_s = next_arrival(self._arrivals.get(tenant, 0), now_us, limits.rate_per_minute)
            if wait_s > 0:
                return Denied("rate", wait_s)
            self._arrivals[tenant] = moved_us
        if limits.concurrent is not None:
            held[permit] = now_s + ttl_s
        return None

    async def renew(self, tenant: str, permits: Sequence[str], ttl_s: float) -> None:
        """See `router.ports.Permits.renew`."""
        now_s = self._clock.now_s()
        self._held(tenant, now_s).update(dict.fromkeys(permits, now_s + ttl_s))

    async def give(self, tenant: str, permit: str) -> None:
        """See `router.ports.Permits.give`."""
        self._permits.get(tenant, {}).pop(permit, None)

    def _held(self, tenant: str, now_s: float) -> dict[str, float]:
        held = self._permits.setdefault(tenant, {})
        for permit in [permit for permit, until_s in held.items() if until_s <= now_s]:
            del held[permit]
        return held


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
