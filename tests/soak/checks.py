"""What must hold all the while, and at the end. Violations are collected, not raised: a soak tells all it saw."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from redis.exceptions import RedisError

from tests.soak.clients import Clients
from tests.soak.faults import Ledger
from tests.soak.stage import LEASE_TTL_S, Router, Stage

__all__ = ["Checks", "Sample", "Violations"]

EVERY_S: Final = 2.0
SETTLED_S: Final = LEASE_TTL_S + 5.0
"""After a fault of a store or router this long, the counts must be true again: leases have expired and been renewed."""
SLACK: Final = 3
"""Turns that begin or end while a sample is taken, beyond those that are seen to."""
GROWTH_SHARE: Final = 0.15
GROWTH_BYTES: Final = 12 << 20


@dataclass(slots=True)
class Violations:
    """What went against a rule, the newest last."""

    found: list[tuple[float, str]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, what: str) -> None:
        """Remember it, with when it was."""
        self.found.append((time.monotonic() - self.began_s, what))


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at_s: float
    """Since the beginning."""
    open_turns: int
    in_flight: int | None
    """By the store; None where it could not be read."""
    rss_bytes: tuple[int, ...]
    """Of each router."""
    open_files: tuple[int, ...]
    turns: int
    keys: int | None
    store_bytes: int | None


class Checks:
    """Looks every `EVERY_S`."""

    def __init__(self, stage: Stage, ledger: Ledger, clients: Clients, violate: Callable[[str], None]) -> None:
        self.samples: list[Sample] = []
        self.left: dict[str, object] = {}
        """What `finish` found held after the last turn, once it was nothing or patience ended."""
        self._stage = stage
        self._ledger = ledger
        self._clients = clients
        self._violate = violate
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """One sample and what it must satisfy."""
        before = set(self._clients.open)
        counted = await self._in_flight(self._stage.routers[0])
        after = set(self._clients.open)
        keys = memory = None
        with suppress(OSError, RedisError):
            memory, keys = await self._stage.stores.memory()
        self.samples.append(
            Sample(
                at_s=time.monotonic() - self._began_s,
                open_turns=len(after),
                in_flight=counted,
                rss_bytes=tuple(router.program.rss_bytes() for router in self._stage.routers),
                open_files=tuple(router.program.open_files() for router in self._stage.routers),
                turns=self._clients.tally.turns,
                keys=keys,
                store_bytes=memory,
            )
        )
        if counted is None or time.monotonic() - self._ledger.quiet_since(("store", "router")) < SETTLED_S:
            return
        # Attempts that wait for a place hold no lease, and one that has just ended may not be settled yet.
        most = len(before | after) + SLACK + len(before ^ after)
        if counted > most:
            self._violate(f"{counted} turns in flight by the store, and at most {most} under way")

    async def _in_flight(self, router: Router) -> int | None:
        try:
            told = await self._stage.admin(router, "GET", "/admin/replicas")
        except (aiohttp.ClientError, TimeoutError):
            return None
        counts = [each["load"]["in_flight"] for each in told["replicas"]]
        if any(count < 0 for count in counts):
            self._violate(f"a negative count: {counts}")
        return None if told.get("store") == "away" else sum(counts)

    async def finish(self) -> None:
        """When all is mended and nobody asks any more: nothing in flight, nothing left behind, memory flat."""
        deadline_s = time.monotonic() + SETTLED_S
        while time.monotonic() < deadline_s:
            leases = await self._stage.stores.leases()
            counts = [await self._in_flight(router) for router in self._stage.routers]
            running = [await self._running(engine.port) for engine in self._stage.engines if engine.program.pid]
            self.left = {"leases": leases, "in flight": counts, "running at replicas": running}
            if not leases and not any(counts) and None not in counts and not any(running):
                break
            await asyncio.sleep(0.25)
        else:
            self._violate(f"{SETTLED_S:g} s after the last turn there are still {self.left}")
        self._memory()
        self._logs()

    async def _running(self, port: int) -> int:
        async with self._stage.http.get(f"http://127.0.0.1:{port}/v1/loads") as response:
            told = await response.json()
        return sum(each["num_running_reqs"] + each["num_waiting_reqs"] for each in told["loads"])

    def _memory(self) -> None:
        """The first router's memory, second quarter against last: flat once caches are full and pools grown."""
        sizes = [sample.rss_bytes[0] for sample in self.samples]
        files = [sample.open_files[0] for sample in self.samples]
        quarter = len(sizes) // 4
        if quarter < 10:
            return
        early, late = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
        if late > early * (1 + GROWTH_SHARE) + GROWTH_BYTES:
            self._violate(f"router-0 grew from {early / 1e6:.0f} MB in its second quarter to {late / 1e6:.0f} MB")
        if statistics.median(files[-quarter:]) > 2 * statistics.median(files[quarter : 2 * quarter]) + 50:
            self._violate(f"router-0 holds ever more files: {files[:: max(1, quarter // 4)]}")

    def _logs(self) -> None:
        """No router may have logged an error. Each kind is told once, with its count."""
        for router in self._stage.routers:
            kinds: Counter[str] = Counter()
            for line in router.program.log.read_text(errors="replace").splitlines():
                if line.startswith("Traceback"):
                    kinds[line] += 1
                elif '"level":"error"' in line:
                    told = json.loads(line)
                    kinds[f"{told['message']}: {told.get('exception', '')[-400:]}"] += 1
            for kind, count in kinds.items():
                self._violate(f"{router.program.name} logged {count} errors: {kind}")
