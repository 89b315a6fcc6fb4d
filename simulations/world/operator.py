"""Makes a schedule of faults happen: begins each at its time and ends it when it is over, or when all is to be well."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from router.domain.errors import StoreError
from router.domain.replica import Standing
from router.domain.shared import Member
from simulations.faults import Fault, Kind
from simulations.seen import Flushed, Seen
from simulations.world.replicas import SimulatedReplica
from simulations.world.routers import FLEET, SimulatedRouter
from simulations.world.storage import SharedStore, Weather

__all__ = ["Operator"]

_AGAIN_S: Final = 2.0
_WEATHER: Final = {
    Kind.STORE_CUT: Weather.CUT,
    Kind.STORE_SLOW: Weather.SLOW,
    Kind.STORE_HANG: Weather.HANGING,
    Kind.STORE_LOSSY: Weather.LOSSY,
}


class Operator:
    """Whoever pulls plugs, and adds and drains replicas through the routers' admin calls."""

    def __init__(
        self,
        replicas: Mapping[str, SimulatedReplica],
        routers: Sequence[SimulatedRouter],
        store: SharedStore,
        join: Callable[[str], SimulatedReplica],
        seen: Seen,
    ) -> None:
        """`replicas` by name; `join` makes one more."""
        self.happened: Counter[str] = Counter()
        self._replicas = dict(replicas)
        self._routers = {router.name: router for router in routers}
        self._store = store
        self._join = join
        self._seen = seen
        self._well = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._joined = 0
        self._until: dict[tuple[str, str], int] = {}
        """How many faults of one sort hold a subject: the last to end heals it."""

    def begin(self, faults: Sequence[Fault]) -> None:
        """Follow a schedule."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(fault)) for fault in faults]

    async def make_well(self) -> None:
        """End what goes on and begin nothing more; until all of it has ended."""
        self._well.set()
        while self._tasks:
            await self._tasks.pop()

    async def _follow(self, fault: Fault) -> None:
        if await self._waited(fault.at_s):
            return
        self.happened[fault.kind.value] += 1
        await self._done(fault)

    async def _waited(self, for_s: float) -> bool:
        """Wait; whether all is to be well before the time is up."""
        try:
            async with asyncio.timeout(for_s):
                await self._well.wait()
        except TimeoutError:
            return False
        return True

    async def _done(self, fault: Fault) -> None:
        subject, waited = fault.subject, partial(self._waited, fault.for_s)
        match fault.kind:
            case Kind.STORE_FLUSH:
                self._store.flush()
                self._seen.tell(Flushed())
            case Kind.STORE_CLOCK:
                self._store.clock.jump(fault.amount)
            case Kind.ROUTER_CLOCK:
                self._routers[subject].clock.jump(fault.amount)
            case Kind.ROUTER_CRASH:
                router = self._routers[subject]
                await router.crash()
                await waited()
                router.boot()
            case Kind.STORE_CUT | Kind.STORE_SLOW | Kind.STORE_HANG | Kind.STORE_LOSSY:
                router = self._routers[subject]
                router.weather(_WEATHER[fault.kind], fault.amount)
                await self._held("weather", subject, waited, router.weather_fine)
            case Kind.CUT:
                name, _, replica = subject.partition("/")
                router = self._routers[name]
                router.cut(replica)
                await self._held("cut", subject, waited, lambda: router.heal(replica))
            case Kind.JOIN:
                await self._add()
            case Kind.DRAIN:
                await self._drain(subject, waited)
            case Kind.CORDON:
                await self._stand(subject, Standing.CORDONED)
                await waited()
                await self._stand(subject, Standing.SERVING)
            case _:
                await self._replica_fault(fault, self._replicas[subject], waited)

    async def _replica_fault(
        self, fault: Fault, replica: SimulatedReplica, waited: Callable[[], Coroutine[Any, Any, bool]]
    ) -> None:
        match fault.kind:
            case Kind.CRASH:
                replica.crash()
                await self._held("crash", replica.name, waited, replica.start)
            case Kind.HANG:
                replica.hang()
                await self._held("hang", replica.name, waited, replica.go_on)
            case Kind.SLOW:
                replica.slow(fault.amount)
                await self._held("slow", replica.name, waited, lambda: replica.slow(1.0))
            case Kind.REFUSE:
                replica.refusing = True
                await self._held("refuse", replica.name, waited, lambda: setattr(replica, "refusing", False))
            case Kind.FULL:
                replica.full = True
                await self._held("full", replica.name, waited, lambda: setattr(replica, "full", False))
            case _:
                replica.reset()

    async def _held(
        self, sort: str, subject: str, waited: Callable[[], Coroutine[Any, Any, bool]], heal: Callable[[], None]
    ) -> None:
        """Wait for a fault's end; of several of one sort on one subject the last to end heals."""
        key = (sort, subject)
        self._until[key] = self._until.get(key, 0) + 1
        await waited()
        self._until[key] -= 1
        if not self._until[key]:
            heal()

    # --- what an operator asks of the admin API -----------------------------------------------------------------------

    async def _add(self) -> None:
        self._joined += 1
        name = f"j{self._joined}"
        replica = self._replicas[name] = self._join(name)
        await self._ask(lambda router: _put(router, Member(name, replica.url, "admin")))

    async def _drain(self, name: str, waited: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        await self._stand(name, Standing.DRAINING)
        await waited()
        await self._ask(lambda router: _remove(router, name))
        self._replicas[name].crash()

    async def _stand(self, name: str, standing: Standing) -> None:
        async def change(router: SimulatedRouter) -> bool:
            assert router.life is not None
            fleet = router.life.fleet
            await fleet.refresh()
            member = fleet.member(name)
            return member is None or await fleet.put(replace(member, standing=standing), member)

        await self._ask(change)

    async def _ask(self, call: Callable[[SimulatedRouter], Coroutine[Any, Any, bool]]) -> None:
        """Through whatever router lives, again and again until it is done."""
        while True:
            for router in self._routers.values():
                if router.life is not None:
                    with suppress(StoreError):
                        if await call(router):
                            return
            await asyncio.sleep(_AGAIN_S)


async def _put(router: SimulatedRouter, member: Member) -> bool:
    life = router.life
    assert life is not None
    await life.link.put_member(FLEET, member, only_if_absent=True)
    await life.fleet.refresh()
    return True


async def _remove(router: SimulatedRouter, name: str) -> bool:
    life = router.life
    assert life is not None
    await life.link.remove_member(FLEET, name)
    await life.fleet.refresh()
    return True
