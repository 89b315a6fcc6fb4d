"""A store and the time it lives in, the same for every kind of store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from router.domain.session import Binding, Boundary
from router.ports import Acquired, Ask, Claim, Lease, Settlement, Stale, Store, View
from router.store.memory import MemoryStore
from router.store.redis import RedisStore, Script, load_scripts

START_S = 1_700_000_000.25
FLEET = "m"

_CLOCK_KEY = "roost:clock"


@dataclass(frozen=True)
class Place:
    """Where a store is: for the store, and for a client that may write what it likes."""

    url: str
    raw_url: str
    tags: tuple[str, ...] = ()
    """Of a cluster: the hash tags that the tests use. A script sees one slot, so the clock must be in each."""


class FakeClock:
    def __init__(self) -> None:
        self.time_s = START_S

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s


class World:
    """A store whose clock stands still until `advance`."""

    def __init__(
        self, store: Store, clock: FakeClock, raw: redis.asyncio.Redis | None, clock_keys: Iterable[str] = ()
    ) -> None:
        self.store = store
        self.clock = clock
        self._raw = raw
        self._clock_keys = clock_keys

    @property
    def has_server(self) -> bool:
        """Whether there is a server, and so a `raw` client."""
        return self._raw is not None

    @property
    def raw(self) -> redis.asyncio.Redis:
        """A client that writes what it likes; only where there is a server."""
        assert self._raw is not None
        return self._raw

    async def advance(self, seconds: float) -> None:
        """Let time pass: for the scripts' clock and for the keys' time to live."""
        self.clock.time_s += seconds
        if self._raw is None:
            return
        await self.set_clock()
        left_ms = round(seconds * 1000)
        async for key in self._raw.scan_iter():
            ttl_ms = await self._raw.pttl(key)
            if 0 <= ttl_ms <= left_ms:
                await self._raw.delete(key)
            elif ttl_ms > 0:
                await self._raw.pexpire(key, ttl_ms - left_ms)

    async def set_clock(self) -> None:
        whole = int(self.clock.time_s)
        micros = round((self.clock.time_s - whole) * 1_000_000)
        for key in self._clock_keys:
            await self.raw.hset(key, mapping={"s": whole, "us": micros})


@asynccontextmanager
async def memory_world() -> AsyncIterator[World]:
    clock = FakeClock()
    yield World(MemoryStore(clock), clock, None)


@asynccontextmanager
async def redis_world(place: Place | str) -> AsyncIterator[World]:
    """The real scripts, but for the one line that asks the server for the time."""
    if isinstance(place, str):
        place = Place(place, place)
    tag = " .. string.match(KEYS[1], '{.-}')" if place.tags else ""
    timed = {
        name: Script(script.text.replace("redis.call('TIME')", f"redis.call('HMGET', '{_CLOCK_KEY}'{tag}, 's', 'us')"))
        for name, script in load_scripts().items()
    }
    clients: Any = RedisCluster if place.tags else redis.asyncio.Redis
    raw: redis.asyncio.Redis = clients.from_url(place.raw_url)
    store = RedisStore(place.url, timeout_s=30.0, scripts=timed)
    world = World(store, FakeClock(), raw, [f"{_CLOCK_KEY}{{{tag}}}" for tag in place.tags] or [_CLOCK_KEY])
    try:
        await raw.flushall()
        await world.set_clock()
        await store.open()
        yield world
    finally:
        await store.close()
        await raw.aclose()


def boundary(number: int, text_bytes: int = 100) -> Boundary:
    return Boundary(f"{number:032x}", text_bytes)


def claim(lease: str = "l1", branch: str = "b1", *tips: Boundary, **changes: object) -> Claim:
    """A claim of a new branch at replica r1; `tips` newest first."""
    given = Claim(
        lease=lease,
        replica="r1",
        incarnation="i1",
        prefill_tokens=100,
        locked_tokens=120,
        branch=branch,
        session="s1",
        version=None,
        home=Binding("r1", "i1"),
        tip=tips[0] if tips else None,
        tips=tips,
        weight=2.0,
        text_bytes=400,
        crowd_half_life_s=60.0,
        live_half_life_s=30.0,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def settlement(lease: str = "l1", branch: str = "b1", **changes: object) -> Settlement:
    return replace(Settlement(lease, "r1", "i1", branch), **changes)  # type: ignore[arg-type]


def lease(name: str = "l1", branch: str = "b1", **changes: object) -> Lease:
    """What the turn of `claim(name, branch)` holds until its first byte comes."""
    return replace(Lease(name, "r1", "i1", 100, 120, branch), **changes)  # type: ignore[arg-type]


@dataclass
class Fleet:
    """The calls of one fleet, short."""

    world: World

    async def acquire(self, asked: Claim) -> Acquired | Stale:
        return await self.world.store.acquire(FLEET, asked)

    async def win(self, asked: Claim) -> Acquired:
        got = await self.acquire(asked)
        assert isinstance(got, Acquired), got
        return got

    async def settle(self, done: Settlement) -> None:
        await self.world.store.settle(FLEET, done)

    async def renew(self, *leases: Lease, ttl_s: float = 10.0) -> list[str]:
        """The ids of those that were taken again."""
        return list(await self.world.store.renew(FLEET, leases, ttl_s))

    async def look(self, *boundaries: Boundary, session: str | None = None, **more: str) -> View:
        asked = Ask(session=session, boundaries=tuple(each.hash for each in boundaries), **more)
        return await self.world.store.fetch(FLEET, asked)
