"""The waiting room: where new sessions of a fleet that is full wait for room, bounded and fair.

Who waits is decided in `router.placement.admission`; here is in what order they come in, and who is sent away.

- *Fair by tenant*: tenants take turns; within one, the higher `priority` of the request goes first, then who came
  first. Where the next of a tenant does not fit, the others' next may; nobody overtakes within a tenant.
- *Bounded*: at most `queue_max` turns wait in one fleet of this process, each at most `queue_s` seconds. Into a full
  room a turn still gets by taking the last seat of its own tenant if it goes before that, or of the tenant that has
  most if that leaves it no worse than its own.
- *Sent away* is who waited in vain or found no seat, and everybody at shutdown: 503 with a Retry-After that grows with
  the queue and differs from turn to turn, so that they do not all come back at once. Who comes back has its old place.

Room comes as live tokens decay, sessions move and replicas join, whichever router saw it: so the room looks at the
store once a second while somebody waits, and not at all otherwise. A look lets them in one by one, each with a fetch
and a decision of its own, until the first that does not fit.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from router.domain.errors import FleetFull
from router.domain.turn import Facts
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.placing import Attempts, NoRoomError, Placing
from router.lifecycle.settling import Held
from router.placement.admission import Occupancy, admits, occupancy, retry_after_s
from router.placement.cost import Tuning
from router.ports import Clock
from router.telemetry.events import FleetSeen, Observer, TurnWaited, TurnWaiting

__all__ = ["LOOK_S", "Seat", "Waiting", "WaitingRoom", "watch"]

LOOK_S: Final = 1.0
"""Seconds between two looks whether there is room: decay frees a few thousandths of a fleet's room in one."""

RETURNING_MAX: Final = 4096
"""Turns sent away whose place is kept (some hundred bytes each)."""

_Call = Literal["come", "displaced", "closing"]


@dataclass(slots=True)
class Seat:
    """One turn that waits."""

    tenant: str
    who: str | None
    """Its session, or the prompt of a keyless client."""
    turn: str
    priority: int
    number: int
    """Counts arrivals; who was sent away and comes back keeps its first."""
    need_tokens: int
    until_s: float
    """Loop time at which it has waited in vain."""
    call: asyncio.Future[_Call]

    @property
    def order(self) -> tuple[int, int]:
        """Its place in its tenant's queue."""
        return -self.priority, self.number


@dataclass(slots=True)
class _Sweep:
    """One look: what it has found so far."""

    seen: Occupancy | None = None
    """The fleet as the last seat that did not fit saw it."""
    refused: set[str] = field(default_factory=set)
    """Tenants whose next does not fit."""


class WaitingRoom:
    """The seats of one fleet: who is called next, and who loses a seat. Does no I/O; tenants are in turn order."""

    def __init__(self, limit: float, queue_max: int, queue_s: float) -> None:
        self._limit = limit
        self._queue_max = queue_max
        self._queue_s = queue_s
        self._tenants: dict[str, list[Seat]] = {}
        self._arrivals = 0
        self._first: dict[str, int] = {}
        """By who was sent away: its number, oldest first."""
        self._called: Seat | None = None
        """Being placed: the others wait for what becomes of it."""
        self._sweep = _Sweep()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def take(self, turn: str, tenant: str, who: str | None, priority: int, need_tokens: int) -> Seat:
        """A seat. Raises FleetFull where there is none."""
        loop = asyncio.get_running_loop()
        self._arrivals += 1
        number = self._arrivals if who is None else self._first.pop(who, self._arrivals)
        until_s = loop.time() + self._queue_s
        seat = Seat(tenant, who, turn, priority, number, need_tokens, until_s, loop.create_future())
        if self._closed:
            raise self._full(seat, "this router is stopping")
        if len(self) >= self._queue_max and not self._displace(seat):
            raise self._full(seat, f"{len(self)} new sessions wait already")
        insort(self._tenants.setdefault(tenant, []), seat, key=lambda each: each.order)
        self._look_later()
        return seat

    async def called(self, seat: Seat) -> None:
        """Wait to be called. Raises FleetFull where that took too long, or the seat was lost."""
        try:
            async with asyncio.timeout_at(seat.until_s):
                call = await seat.call
        except TimeoutError:
            raise self._full(seat, f"no room for a new session within {self._queue_s:g} s") from None
        if call == "displaced":
            raise self._full(seat, "others go before it, and all seats are taken")
        if call == "closing":
            raise self._full(seat, "this router is stopping")

    def found_none(self, seat: Seat, seen: Occupancy) -> None:
        """It was called, and there is no room for it."""
        seat.call = asyncio.get_running_loop().create_future()
        if self._closed:
            seat.call.set_result("closing")
        if seat is self._called:
            self._called = None
            self._sweep.seen = seen
            self._sweep.refused.add(seat.tenant)
            self._call_next()
        self._look_later()

    def leave(self, seat: Seat, *, admitted: bool) -> None:
        """It is in, or has gone."""
        seats = self._tenants.get(seat.tenant, [])
        if seat in seats:
            seats.remove(seat)
            if not seats:
                del self._tenants[seat.tenant]
            elif admitted:
                self._tenants[seat.tenant] = self._tenants.pop(seat.tenant)
        if admitted:
            self._call_family(seat)
        if seat is self._called:
            self._called = None
            self._call_next()

    def look(self) -> None:
        """Call the first, and after it whoever fits; unless somebody is being placed."""
        if self._called is None:
            self._sweep = _Sweep()
            self._call_next()

    def close(self) -> None:
        """Send everybody away, and whoever comes."""
        self._closed = True
        for seat in self._all():
            if not seat.call.done():
                seat.call.set_result("closing")

    def _all(self) -> Iterable[Seat]:
        return [seat for seats in self._tenants.values() for seat in seats]

    def _call_next(self) -> None:
        for tenant, seats in self._tenants.items():
            seat = next((each for each in seats if not each.call.done()), None)
            if seat is None or tenant in self._sweep.refused:
                continue
            if self._sweep.seen is not None and not admits(seat.need_tokens, self._sweep.seen, self._limit):
                self._sweep.refused.add(tenant)
                continue
            self._called = seat
            seat.call.set_result("come")
            return
        self._look_later()

    def _call_family(self, admitted: Seat) -> None:
        """Others of a session that is in need not wait any more: it is known."""
        for seat in self._tenants.get(admitted.tenant, []):
            if admitted.who is not None and seat.who == admitted.who and not seat.call.done():
                seat.call.set_result("come")

    def _displace(self, newcomer: Seat) -> bool:
        """Have somebody give up its seat to the newcomer: see the module."""
        own, most = self._tenants.get(newcomer.tenant, []), max(self._tenants.values(), key=len, default=[])
        if own and newcomer.order < own[-1].order:
            loser = _last(own)
        else:
            loser = _last(most) if len(most) >= len(own) + 2 else None
        if loser is None:
            return False
        loser.call.set_result("displaced")
        self.leave(loser, admitted=False)
        return True

    def _look_later(self) -> None:
        if self._timer is None and self._called is None and self._tenants:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self.look()

    def _full(self, seat: Seat, why: str) -> FleetFull:
        if seat.who is not None:
            self._first[seat.who] = seat.number
            if len(self._first) > RETURNING_MAX:
                del self._first[next(iter(self._first))]
        pressure = len(self) / self._queue_max if self._queue_max else 1.0
        return FleetFull(f"the fleet is full: {why}", retry_after_s(seat.turn, pressure))


def _last(seats: list[Seat]) -> Seat | None:
    """The last that nobody has called."""
    return next((each for each in reversed(seats) if not each.call.done()), None)


class Waiting:
    """Places turns, and lets those wait that begin a session for which there is no room."""

    def __init__(self, placing: Placing, clock: Clock, observer: Observer, queue_max: int, queue_s: float) -> None:
        self._placing = placing
        self._clock = clock
        self._observer = observer
        self._room_for: Callable[[float], WaitingRoom] = lambda limit: WaitingRoom(limit, queue_max, queue_s)
        self._rooms: dict[str, WaitingRoom] = {}
        self._closed = False

    async def place(self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: Attempts) -> Held:
        """Get the turn its first place. Raises NotPlaced, and FleetFull of these where it waited in vain."""
        if fleet.spec.admission <= 0:
            return await self._placing.place(fleet, facts, turn_id, attempts, self._clock.monotonic_s())
        room = self._rooms.get(fleet.name)
        if room is None:
            room = self._rooms[fleet.name] = self._room_for(fleet.spec.admission)
            if self._closed:
                room.close()
        attempts.patient, attempts.behind = True, len(room) > 0
        try:
            return await self._placing.place(fleet, facts, turn_id, attempts, self._clock.monotonic_s())
        except NoRoomError as full:
            return await self._wait(room, fleet, facts, turn_id, attempts, full.need_tokens)
        finally:
            attempts.patient = False

    def close(self) -> None:
        """Let nobody wait any more: the process stops."""
        self._closed = True
        for room in self._rooms.values():
            room.close()

    async def _wait(
        self, room: WaitingRoom, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: Attempts, need_tokens: int
    ) -> Held:
        who = facts.session or (facts.chain.hashes[-1] if facts.chain else None)
        seat = room.take(turn_id, facts.tenant, who, facts.priority or 0, need_tokens)
        began_s, admitted = self._clock.monotonic_s(), False
        self._observer.emit(TurnWaiting(turn_id, fleet.name))
        try:
            while True:
                await room.called(seat)
                began_anew_s = self._clock.monotonic_s()
                attempts.behind, attempts.count, attempts.waited_s = False, 0, began_anew_s - began_s
                try:
                    held = await self._placing.place(fleet, facts, turn_id, attempts, began_anew_s)
                except NoRoomError as full:
                    room.found_none(seat, full.seen)
                    continue
                admitted = True
                return held
        finally:
            room.leave(seat, admitted=admitted)
            self._observer.emit(TurnWaited(turn_id, fleet.name, self._clock.monotonic_s() - began_s, admitted))


async def watch(fleets: Iterable[FleetRuntime], tuning: Tuning, observer: Observer) -> None:
    """Tell once a second how full each fleet is, until cancelled."""
    fleets = tuple(fleets)
    while True:
        for fleet in fleets:
            seen = fleet.latest()
            if seen is not None:
                observer.emit(FleetSeen(fleet.name, occupancy(seen, tuning).share))
        await asyncio.sleep(LOOK_S)
