"""What live sessions take in Redis or Valkey, and whether all of it expires.

    python -m tests.bench.state [--sessions N] [--server redis|valkey] [--json FILE]

A session is what dozens of turns leave behind: a main branch with all the boundaries it keeps and residues on two
replicas; every fourth session has two subagents' branches of three boundaries besides. Bytes are the server's own
`used_memory`, so they hold keys, expiry and allocator overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import uvloop
from redis.asyncio import Redis
from rich.progress import track

from router.domain.session import Binding, Boundary
from router.domain.shared import Acquired, Claim, Settlement
from router.settings import Settings
from router.store.redis import RedisStore
from tests.contracts.servers import serving

FLEET = "default"
AT_ONCE = 64
REPLICAS = 50


def _hex(rng: random.Random, size: int) -> str:
    return rng.randbytes(size).hex()


async def remember(store: RedisStore, rng: random.Random, session: str, boundaries: int) -> None:
    """One branch as the lifecycle leaves it: served by two replicas, the newest at home."""
    branch = _hex(rng, 12)
    tips = tuple(Boundary(_hex(rng, 16), 400_000 - 8_000 * n) for n in range(boundaries))
    version: int | None = None
    for turn in range(2):
        home = Binding(f"10.0.0.{rng.randrange(REPLICAS)}:30000", "b2c07d5e9f314a68")
        lease = _hex(rng, 12)
        claim = Claim(
            lease=lease,
            replica=home.replica,
            incarnation=home.incarnation,
            prefill_tokens=0,
            locked_tokens=2_000,
            branch=branch,
            session=session,
            version=version,
            home=home,
            tip=tips[0] if turn == 0 else None,
            tips=tips,
            weight=1.0,
            text_bytes=400_000,
            crowd_half_life_s=300.0,
            head=_hex(rng, 16),
        )
        acquired = await store.acquire(FLEET, claim)
        assert isinstance(acquired, Acquired), acquired
        version = acquired.version
        settlement = Settlement(lease, home.replica, home.incarnation, branch, 100_000, 99_000, 2_000)
        await store.settle(FLEET, settlement)


async def fill(store: RedisStore, sessions: int, boundaries: int, *, subagents: bool) -> None:
    """That many sessions."""
    rng = random.Random(1)

    async def one(number: int) -> None:
        session = _hex(rng, 16)
        await remember(store, rng, session, boundaries)
        if subagents and number % 4 == 0:
            for _ in range(2):
                await remember(store, rng, session, 3)

    for start in track(range(0, sessions, AT_ONCE), description="filling", transient=True):
        await asyncio.gather(*(one(number) for number in range(start, min(start + AT_ONCE, sessions))))


async def measure(server: str, sessions: int) -> dict[str, Any]:
    """The figures."""
    kept = Settings().store.boundaries_kept
    figures: dict[str, Any] = {"server": server, "sessions": sessions, "boundaries": kept}
    for name, subagents in (("one branch", False), ("with subagents", True)):
        with serving(server) as running:
            path = running.url.removeprefix("unix://")
            store = RedisStore(running.url, timeout_s=10.0)
            await store.open()
            async with Redis(unix_socket_path=path) as redis:
                before = int((await redis.info("memory"))["used_memory"])
                await fill(store, sessions, kept, subagents=subagents)
                after = int((await redis.info("memory"))["used_memory"])
                lasting = 0
                async for key in redis.scan_iter(count=10_000):
                    lasting += await redis.ttl(key) == -1 if b":b:" not in key else 0
                boundless = await _boundaries_that_stay(redis)
                figures[name] = {
                    "bytes_per_session": round((after - before) / sessions),
                    "keys": await redis.dbsize(),
                    "keys_without_expiry": lasting + boundless,
                }
            await store.close()
    return figures


async def _boundaries_that_stay(redis: Redis) -> int:
    """Boundary keys without an expiry, of a sample."""
    sample = [await redis.randomkey() for _ in range(1000)]
    return sum([await redis.ttl(key) == -1 for key in sample if key is not None and b":b:" in key])


def main() -> None:
    """Print what it takes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.state", description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--server", choices=("redis", "valkey"), default="valkey")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    figures = uvloop.run(measure(asked.server, asked.sessions))
    for name in ("one branch", "with subagents"):
        row = figures[name]
        sys.stdout.write(
            f"{asked.server}, {asked.sessions} sessions, {name}: {row['bytes_per_session']} bytes a session, "
            f"{row['keys']} keys, {row['keys_without_expiry']} of them without expiry (the fleet's own)\n"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
