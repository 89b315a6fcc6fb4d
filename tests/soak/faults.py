"""What goes wrong, and when: drawn from a seed, applied to the stage, and remembered for the checks.

At most two replicas, one router and one store suffer at once, so that a turn always has somewhere to go.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from tests.soak.proxy import Mode
from tests.soak.stage import Engine, Router, Stage

__all__ = ["Drained", "Fault", "Faults", "Ledger"]

REPLICA_EVERY_S: Final = 5.0
STORE_EVERY_S: Final = 25.0
ROUTER_EVERY_S: Final = 45.0
SUFFERING_MAX: Final = 2


@dataclass(slots=True)
class Fault:
    """One thing that went wrong, from `began_s` to `ended_s` (monotonic)."""

    kind: str
    target: str
    began_s: float
    lethal: bool
    """Whether it breaks what is under way there."""
    ended_s: float | None = None


@dataclass(slots=True)
class Drained:
    """A replica that was told to take no new turns."""

    replica: str
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class Ledger:
    """Everything that has gone wrong."""

    faults: list[Fault] = field(default_factory=list)
    drains: list[Drained] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What could not be done, and why."""

    def begin(self, kind: str, target: str, *, lethal: bool) -> Fault:
        """It goes wrong now."""
        fault = Fault(kind, target, time.monotonic(), lethal)
        self.faults.append(fault)
        return fault

    def explains(self, target: str, began_s: float, ended_s: float, linger_s: float) -> bool:
        """Whether something lethal happened to `target` while a turn ran; its effect may be `linger_s` late."""
        return any(
            fault.lethal
            and fault.target == target
            and fault.began_s <= ended_s
            and (fault.ended_s is None or fault.ended_s + linger_s >= began_s)
            for fault in reversed(self.faults)
        )

    def counts(self) -> Mapping[str, int]:
        """How often each kind happened."""
        kinds = sorted({fault.kind for fault in self.faults})
        return {kind: sum(fault.kind == kind for fault in self.faults) for kind in kinds}

    def quiet_since(self, subject: tuple[str, ...]) -> float:
        """When the last fault of these targets ended (monotonic); infinity while one lasts."""
        ends = [f.ended_s for f in self.faults if f.target.startswith(subject)]
        return max((float("inf") if end is None else end for end in ends), default=0.0)


class Faults:
    """Breaks things until told to stop, then mends them all."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.ledger = Ledger()
        self._stage = stage
        self._random = random.Random(seed)
        self._stop = asyncio.Event()
        self._suffering: set[str] = set()

    def stop(self) -> None:
        """Break nothing more."""
        self._stop.set()

    async def run(self) -> None:
        """Until `stop`; returns when all that was broken is mended."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._subject(REPLICA_EVERY_S, self._replica, group))
            group.create_task(self._subject(STORE_EVERY_S, self._store, group))
            group.create_task(self._subject(ROUTER_EVERY_S, self._router, group))

    async def _subject(
        self, every_s: float, draw: Callable[[], Awaitable[None] | None], group: asyncio.TaskGroup
    ) -> None:
        while not await self._pause(self._random.expovariate(1 / every_s)):
            fault = draw()
            if fault is not None:
                group.create_task(self._applied(fault))

    async def _applied(self, fault: Awaitable[None]) -> None:
        try:
            await fault
        except (aiohttp.ClientError, TimeoutError) as error:  # the router that should have been told was away
            self.ledger.skipped.append(repr(error))

    async def _pause(self, seconds: float) -> bool:
        """Let time pass; True where the end came first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return self._stop.is_set()

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _replica(self) -> Awaitable[None] | None:
        *members, _ = self._stage.engines
        well = [engine for engine in members if engine.id not in self._suffering]
        if len(members) - len(well) >= SUFFERING_MAX:
            return None
        engine = self._random.choice(well)
        kinds: dict[str, Callable[[Engine], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._freeze,
            "terminate": self._terminate,
            "reset": self._reset,
            "slow": self._slow,
            "partition": self._partition,
            "refuse": self._refuse,
            "drain": self._drain,
        }
        if "newcomer" not in self._suffering:
            kinds["join"] = self._join
        return kinds[self._random.choice(sorted(kinds))](engine)

    async def _kill(self, engine: Engine) -> None:
        self._suffering.add(engine.id)
        fault = self.ledger.begin("replica killed", engine.id, lethal=True)
        await engine.program.end()
        await self._pause(self._random.uniform(1, 8))
        await engine.start()
        self._mended(fault)

    async def _freeze(self, engine: Engine) -> None:
        self._suffering.add(engine.id)
        fault = self.ledger.begin("replica stopped", engine.id, lethal=True)
        engine.program.tell(signal.SIGSTOP)
        await self._pause(self._random.uniform(1, 12))
        engine.program.tell(signal.SIGCONT)
        self._mended(fault)

    async def _terminate(self, engine: Engine) -> None:
        """SIGTERM: it takes no new turns, finishes those it has, and ends; a new one takes its place."""
        self._suffering.add(engine.id)
        fault = self.ledger.begin("replica terminated", engine.id, lethal=False)
        await engine.program.end(signal.SIGTERM)
        await self._pause(self._random.uniform(0.5, 4))
        await engine.start()
        self._mended(fault)

    async def _reset(self, engine: Engine) -> None:
        fault = self.ledger.begin("replica's connections reset", engine.id, lethal=True)
        engine.proxy.reset()
        fault.ended_s = time.monotonic()

    async def _slow(self, engine: Engine) -> None:
        await self._network(engine, "replica slow", Mode.SLOW, self._random.uniform(5, 15), lethal=False)

    async def _partition(self, engine: Engine) -> None:
        await self._network(engine, "replica partitioned", Mode.SILENT, self._random.uniform(2, 20), lethal=True)

    async def _refuse(self, engine: Engine) -> None:
        await self._network(engine, "replica refuses", Mode.REFUSE, self._random.uniform(1, 8), lethal=True)

    async def _network(self, engine: Engine, kind: str, mode: Mode, seconds: float, *, lethal: bool) -> None:
        self._suffering.add(engine.id)
        fault = self.ledger.begin(kind, engine.id, lethal=lethal)
        engine.proxy.become(mode, delay_s=self._random.uniform(0.01, 0.2) if mode is Mode.SLOW else 0.0)
        await self._pause(seconds)
        engine.proxy.become(Mode.PASS)
        self._mended(fault)

    async def _drain(self, engine: Engine) -> None:
        """By the admin API of one router: no router may send a new turn from a second later on."""
        self._suffering.add(engine.id)
        fault = self.ledger.begin("replica drained", engine.id, lethal=False)
        drained = None
        try:
            await self._told("POST", f"/admin/replicas/{engine.id}/drain")
            drained = Drained(engine.id, time.monotonic() + 1.0)
            self.ledger.drains.append(drained)
            await self._pause(self._random.uniform(3, 15))
        finally:
            if drained is not None:
                drained.until_s = time.monotonic()
            await self._told("POST", f"/admin/replicas/{engine.id}/undrain")
            self._mended(fault)

    async def _join(self, _: Engine) -> None:
        """A newcomer comes, serves for a while, is drained and leaves."""
        newcomer = self._stage.engines[-1]
        self._suffering.add("newcomer")
        fault = self.ledger.begin("replica joined and left", "newcomer", lethal=False)
        if newcomer.program.pid is None:
            await newcomer.start()
        try:
            await self._told("POST", "/admin/replicas", {"url": newcomer.url})
            await self._pause(self._random.uniform(10, 40))
            await self._told("POST", f"/admin/replicas/{newcomer.id}/drain")
            drained = Drained(newcomer.id, time.monotonic() + 1.0)
            self.ledger.drains.append(drained)
            await self._pause(12.0)
            drained.until_s = time.monotonic()
        finally:
            await self._told("DELETE", f"/admin/replicas/{newcomer.id}")
            fault.ended_s = time.monotonic()
            self._suffering.discard("newcomer")

    async def _told(self, method: str, path: str, body: object = None) -> None:
        """Tell whichever router is up, again while the store is away."""
        for attempt in range(40):
            for router in self._stage.routers:
                if not router.up:
                    continue
                try:
                    await self._stage.admin(router, method, path, body)
                    return
                except aiohttp.ClientResponseError as error:
                    if error.status < 500:
                        return  # it is so already, or forgotten by a flush
                except (aiohttp.ClientError, TimeoutError):
                    pass
            await asyncio.sleep(0.5)
            if attempt == 39:
                self.ledger.skipped.append(f"{method} {path}")

    def _mended(self, fault: Fault) -> None:
        fault.ended_s = time.monotonic()
        self._suffering.discard(fault.target)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _store(self) -> Awaitable[None] | None:
        if "store" in self._suffering:
            return None
        kinds = {
            "stop": self._store_stops,
            "restart": self._store_restarts,
            "failover": self._store_fails_over,
            "flush": self._store_flushed,
            "partition": self._store_partitioned,
            "slow": self._store_slow,
        }
        return kinds[self._random.choice(sorted(kinds))]()

    async def _store_stops(self) -> None:
        with self._suffers("store stopped"):
            server = self._stage.stores.servers[self._stage.stores.primary]
            server.tell(signal.SIGSTOP)
            await self._pause(self._random.uniform(0.5, 15))
            server.tell(signal.SIGCONT)

    async def _store_restarts(self) -> None:
        with self._suffers("store restarted empty"):
            await self._stage.stores.servers[self._stage.stores.primary].end()
            await self._pause(self._random.uniform(0.5, 8))
            await self._stage.stores.restart_empty()

    async def _store_fails_over(self) -> None:
        with self._suffers("store failed over"):
            await self._stage.stores.fail_over()

    async def _store_flushed(self) -> None:
        with self._suffers("store flushed"):
            await self._stage.stores.flush()

    async def _store_partitioned(self) -> None:
        router = self._random.choice(self._stage.routers)
        with self._suffers(f"store partitioned from {router.program.name}"):
            router.store.become(Mode.SILENT)
            await self._pause(self._random.uniform(1, 15))
            router.store.become(Mode.PASS)

    async def _store_slow(self) -> None:
        router = self._random.choice(self._stage.routers)
        with self._suffers(f"store slow for {router.program.name}"):
            router.store.become(Mode.SLOW, delay_s=self._random.uniform(0.005, 0.1))
            await self._pause(self._random.uniform(2, 10))
            router.store.become(Mode.PASS)

    def _suffers(self, kind: str) -> _Suffering:
        return _Suffering(self, kind)

    # --- routers ------------------------------------------------------------------------------------------------------

    def _router(self) -> Awaitable[None] | None:
        """Only the second dies: the first's memory is watched from beginning to end."""
        router = self._stage.routers[1]
        if router.program.name in self._suffering:
            return None
        return self._random.choice((self._router_killed, self._router_stopped))(router)

    async def _router_killed(self, router: Router) -> None:
        self._suffering.add(router.program.name)
        fault = self.ledger.begin("router killed", router.program.name, lethal=True)
        router.up = False
        await router.program.end()
        await self._pause(self._random.uniform(1, 14))
        await router.start(self._stage.http)
        self._mended(fault)

    async def _router_stopped(self, router: Router) -> None:
        """SIGTERM as a rolling update does it: the balancer sends nobody any more, running turns finish."""
        self._suffering.add(router.program.name)
        fault = self.ledger.begin("router terminated", router.program.name, lethal=False)
        router.up = False
        code = await router.program.end(signal.SIGTERM)
        if code:
            self.ledger.skipped.append(f"{router.program.name} ended with {code}")
        await self._pause(self._random.uniform(0, 4))
        await router.start(self._stage.http)
        self._mended(fault)


class _Suffering:
    """The store suffers within."""

    def __init__(self, faults: Faults, kind: str) -> None:
        self._faults = faults
        self._kind = kind
        self._fault: Fault | None = None

    def __enter__(self) -> None:
        self._faults._suffering.add("store")
        self._fault = self._faults.ledger.begin(self._kind, "store", lethal=False)

    def __exit__(self, *_: object) -> None:
        assert self._fault is not None
        self._faults._mended(self._fault)
