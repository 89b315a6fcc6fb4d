"""What live sessions take in Redis or Valkey, and whether all of it expires; and what they take in a router.

    python -m tests.bench.state [--sessions N] [--router-sessions N] [--server redis|valkey] [--json FILE]

A session is what dozens of turns leave behind: a main branch with all the boundaries it keeps and residues on two
replicas; every fourth session has two subagents' branches of three boundaries besides. Bytes are the server's own
`used_memory`, so they hold keys, expiry and allocator overhead.

A router remembers the newest branches only (`router.lifecycle.remembered`: 10,000) and the digests of the newest
messages (`router.placement.prefix.Canon`: twice 32,768 of 250 bytes), so its memory must be flat once both are full,
however many sessions come: a real process before scripted replicas is fed sessions of one turn and three messages over
HTTP, and its resident memory is read on the way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml
from redis.asyncio import Redis
from rich.progress import track

from router.domain.session import Binding, Boundary
from router.domain.shared import Acquired, Claim, Settlement
from router.lifecycle.remembered import BRANCHES_MAX
from router.settings import Settings
from router.store.redis import RedisStore
from tests.contracts.servers import serving
from tests.integration.conversations import Conversation
from tests.integration.replicas import PATHS, replicas
from tests.soak.stage import HOST, ROOST, Ports, Program, accepts

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


async def measure_router(server: str, sessions: int) -> list[dict[str, float]]:
    """Resident megabytes of a router after so many sessions: once warm, and then each quarter of the way."""
    ports = Ports()
    port, admin_port = ports.one(), ports.one()
    with serving(server) as running, tempfile.TemporaryDirectory() as folder:
        async with replicas(4, device_tokens=1_000_000_000) as fleet:
            given = {
                "listen": {"host": HOST, "port": port},
                "admin": {"host": HOST, "port": admin_port},
                "store": {"url": running.url, "timeout_s": 10.0},
                "fleets": [{"name": FLEET, "replicas": [each.url for each in fleet]}],
            }
            config = Path(folder) / "router.yaml"
            config.write_text(yaml.safe_dump(given))
            program = Program("router", (ROOST, "router", "--config", str(config)), Path(folder))
            await program.start()
            try:
                await accepts(port)
                return await _feed(program, port, sessions)
            finally:
                await program.end()
                ports.close()


async def _feed(program: Program, port: int, sessions: int) -> list[dict[str, float]]:
    """Sessions of one turn each, `AT_ONCE` at once."""
    numbers = iter(range(sessions))
    quarters = [sessions // 50, *(sessions * quarter // 4 for quarter in range(1, 5))]
    found: list[dict[str, float]] = []
    done = 0
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ready() -> bool:
            if program.pid is None:
                raise SystemExit(f"the router ended: {program.log.read_text()[-1000:]}")
            async with http.get("/readyz") as response:
                return response.status == 200

        while not await ready():  # noqa: ASYNC110 (asking is the only way to know)
            await asyncio.sleep(0.05)

        async def talk() -> None:
            nonlocal done
            for number in numbers:
                asked = Conversation(f"s{number}", size_bytes=300, header=("x-session-id", f"s{number}"))
                asked.grow()
                async with http.post(PATHS[asked.dialect], data=asked.body(), headers=asked.headers) as response:
                    await response.read()
                    assert response.status == 200, response.status
                done += 1
                if done in quarters:
                    found.append({"sessions": done, "rss_mb": round(program.rss_bytes() / 1e6, 1)})

        await asyncio.gather(*(talk() for _ in range(AT_ONCE)))
    return found


async def _boundaries_that_stay(redis: Redis) -> int:
    """Boundary keys without an expiry, of a sample."""
    sample = [await redis.randomkey() for _ in range(1000)]
    return sum([await redis.ttl(key) == -1 for key in sample if key is not None and b":b:" in key])


def main() -> None:
    """Print what it takes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.state", description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000, help="in the store; 0: without")
    parser.add_argument("--router-sessions", type=int, default=4 * BRANCHES_MAX, help="0: without")
    parser.add_argument("--server", choices=("redis", "valkey"), default="valkey")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    figures = uvloop.run(measure(asked.server, asked.sessions)) if asked.sessions else {}
    for name in ("one branch", "with subagents") if asked.sessions else ():
        row = figures[name]
        sys.stdout.write(
            f"{asked.server}, {asked.sessions} sessions, {name}: {row['bytes_per_session']} bytes a session, "
            f"{row['keys']} keys, {row['keys_without_expiry']} of them without expiry (the fleet's own)\n"
        )
    if asked.router_sessions:
        figures["router"] = uvloop.run(measure_router(asked.server, asked.router_sessions))
        for point in figures["router"]:
            sys.stdout.write(f"router after {point['sessions']} sessions: {point['rss_mb']} MB resident\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
