"""The shared store in virtual time: one `MemoryStore`, and for each router a link to it that may fail.

A call travels, is carried out at one instant, and its answer travels back; what takes longer than `timeout_s` is a
`StoreUnavailable` for the caller, whether or not the call was or will be carried out, as with a real connection. A call
that its caller gave up on the way is carried out in half of the cases.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

from router.domain.errors import StoreUnavailable
from router.domain.replica import Load
from router.domain.shared import Acquired, Ask, Claim, Lease, Member, Membership, Settlement, Stale, View
from router.store.memory import MemoryStore
from simulations.clock import VirtualClock
from simulations.seen import (
    Claimed,
    Event,
    Fetched,
    MemberPut,
    MemberRemoved,
    MembersRead,
    Opened,
    Progressed,
    Renewed,
    Seen,
    Settled,
    StoreFailed,
)

__all__ = ["Link", "SharedStore", "Weather"]

_T = TypeVar("_T")

TIMEOUT_S: Final = 0.05
"""As `store.timeout_s`."""
_HOP_S: Final = (0.0002, 0.001)
_REFUSED_S: Final = 0.0003
_CARRIED_OUT_LATE: Final = 0.5


class SharedStore(MemoryStore):
    """The store, which may lose all it holds."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.clock = clock

    def flush(self) -> None:
        """Emptied, as by `FLUSHALL` or a restart without persistence."""
        self._fleets.clear()

    def loads(self, fleet: str) -> dict[str, Load]:
        """The load of every replica, without giving back what has expired."""
        return {name: life.load for name, life in self._fleet(fleet).lives.items()}

    def lease_count(self, fleet: str) -> int:
        """Leases recorded."""
        return len(self._fleet(fleet).leases)


class Weather(StrEnum):
    """How a link is."""

    FINE = "fine"
    SLOW = "slow"
    LOSSY = "lossy"
    HANGING = "hanging"
    CUT = "cut"


class Link:
    """One router's way to the store: its `Store` port."""

    def __init__(
        self,
        router: str,
        store: SharedStore,
        seen: Seen,
        request: Callable[[], str],
        seed: str,
        *,
        answers_travel: bool,
    ) -> None:
        """`request` names the request in whose course a call is made."""
        self.weather = Weather.FINE
        self.amount = 0.0
        self.dead = False
        self._router = router
        self._store = store
        self._seen = seen
        self._request = request
        self._dice = random.Random(f"link/{seed}")  # noqa: S311 (latencies need no secrecy)
        self._answers_travel = answers_travel
        self._loop = asyncio.get_running_loop()
        self._stuck: list[Callable[[], object]] = []
        """Calls that a silent store will carry out when it wakes."""

    def set(self, weather: Weather, amount: float = 0.0) -> None:
        """The weather changes; a store that wakes carries out what had reached it."""
        self.weather, self.amount = weather, amount
        if weather is not Weather.HANGING:
            stuck, self._stuck = self._stuck, []
            for carry_out in stuck:
                self._late(carry_out)

    def die(self) -> None:
        """The router's process is gone: nothing it still asks arrives. What was on its way may."""
        self.dead = True

    # --- how a call fares ---

    async def _call(self, call: Callable[[], Coroutine[Any, Any, _T]], tell: Callable[[_T], Event]) -> _T:
        def carry_out() -> _T:
            result = _at_once(call())
            self._seen.tell(tell(result))
            return result

        try:
            return await self._sent(carry_out)
        except StoreUnavailable:
            if not self.dead:
                self._seen.tell(StoreFailed(self._router))
            raise

    async def _sent(self, carry_out: Callable[[], _T]) -> _T:
        if self.dead:
            raise StoreUnavailable("this router is no more")
        weather = self.weather
        if weather is Weather.CUT:
            await asyncio.sleep(_REFUSED_S)
            raise StoreUnavailable("connection refused")
        if weather is Weather.HANGING or (weather is Weather.LOSSY and self._dice.random() < self.amount):
            if weather is Weather.HANGING and self._dice.random() < _CARRIED_OUT_LATE:
                self._stuck.append(carry_out)
            await asyncio.sleep(TIMEOUT_S)
            raise StoreUnavailable("no answer in time")
        there_s = self._travel_s()
        began_s = self._loop.time()
        try:
            await asyncio.sleep(min(there_s, TIMEOUT_S))
        except asyncio.CancelledError:
            self._maybe_late(carry_out, began_s + there_s)
            raise
        if there_s >= TIMEOUT_S:
            self._maybe_late(carry_out, began_s + there_s)
            raise StoreUnavailable("no answer in time")
        if self.dead:
            raise StoreUnavailable("this router is no more")
        result = carry_out()
        if weather is Weather.LOSSY and self._dice.random() < self.amount:
            await asyncio.sleep(TIMEOUT_S - there_s)
            raise StoreUnavailable("the answer was lost")
        if self._answers_travel:
            back_s = self._travel_s()
            await asyncio.sleep(min(back_s, TIMEOUT_S - there_s))
            if there_s + back_s >= TIMEOUT_S:
                raise StoreUnavailable("no answer in time")
        return result

    def _travel_s(self) -> float:
        if self.weather is Weather.SLOW:
            return self._dice.uniform(0.0, self.amount)
        return self._dice.uniform(*_HOP_S)

    def _maybe_late(self, carry_out: Callable[[], object], due_s: float) -> None:
        """Whoever asked waits no more; the question may yet arrive."""
        if not self.dead and self._dice.random() < _CARRIED_OUT_LATE:
            self._loop.call_at(due_s, self._late, carry_out)

    def _late(self, carry_out: Callable[[], object]) -> None:
        if not self.dead:
            carry_out()

    # --- the Store port ---

    async def open(self) -> None:
        """See `Store.open`."""
        await self._call(self._store.open, lambda _: Opened(self._router))

    async def close(self) -> None:
        """See `Store.close`."""

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """See `Store.fetch`."""
        request = self._request()
        return await self._call(
            lambda: self._store.fetch(fleet, ask), lambda view: Fetched(self._router, request, view)
        )

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """See `Store.acquire`."""

        def told(result: Acquired | Stale) -> Event:
            return Claimed(self._router, self._now_s(), claim, result.why if isinstance(result, Stale) else None)

        return await self._call(lambda: self._store.acquire(fleet, claim), told)

    async def progress(self, fleet: str, lease: str) -> None:
        """See `Store.progress`."""
        await self._call(
            lambda: self._store.progress(fleet, lease), lambda _: Progressed(self._router, self._now_s(), lease)
        )

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """See `Store.settle`."""
        await self._call(
            lambda: self._store.settle(fleet, settlement), lambda _: Settled(self._router, self._now_s(), settlement)
        )

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """See `Store.renew`."""
        held = tuple(leases)
        return await self._call(
            lambda: self._store.renew(fleet, held, lease_ttl_s),
            lambda taken: Renewed(self._router, self._now_s(), held, tuple(taken), lease_ttl_s),
        )

    async def members(self, fleet: str) -> Membership:
        """See `Store.members`."""
        return await self._call(lambda: self._store.members(fleet), lambda found: MembersRead(self._router, found))

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """See `Store.put_member`."""
        return await self._call(
            lambda: self._store.put_member(fleet, member, only_if_absent=only_if_absent, expected=expected),
            lambda put: MemberPut(self._router, self._now_s(), member, put),
        )

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """See `Store.remove_member`."""
        return await self._call(
            lambda: self._store.remove_member(fleet, replica_id),
            lambda _: MemberRemoved(self._router, self._now_s(), replica_id),
        )

    async def put_report(self, fleet: str, replica_id: str, raw: bytes, ttl_s: float) -> None:
        """See `Store.put_report`."""
        await self._store.put_report(fleet, replica_id, raw, ttl_s)

    def _now_s(self) -> float:
        return self._store.clock.now_s()


def _at_once(call: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing, as all of the memory store's."""
    try:
        call.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    raise RuntimeError("the store in memory waited")
