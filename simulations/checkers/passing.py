"""A turn on its way: where it is sent, what comes back, and that it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from router.telemetry.events import TurnFinished, TurnStarted
from simulations.checkers.wellness import Wellness
from simulations.seen import (
    Asked,
    Breach,
    Decided,
    Died,
    Done,
    DownBytes,
    DownEnded,
    DownStarted,
    Headed,
    Quiet,
    Sent,
    Told,
    UpBytes,
    UpEnded,
    request_of,
)

__all__ = ["BytesPass", "EveryTurnEnds", "OneStoryEach", "TriedSafely"]

_TERMINAL: Final = b"data: [DONE]\n\n"
_SENDS_MAX: Final = 3
_HOWS: Final = frozenset({"complete", "left", "router_died", "no_replica", "fleet_full"})
_UPSTREAM: Final = frozenset({"upstream_unreachable", "upstream_broken", "upstream_timeout"})
_LONGEST_S: Final = 3 * (2.0 + 600.0) + 1200.0


@dataclass
class TriedSafely:
    """A turn goes where it was placed, never twice to one replica, to three at most, and to no further one once the
    client has seen a head.
    """

    rule: str = "tried safely"
    source: str = "lifecycle/turn.py; issue 4, tried elsewhere while that is safe"
    _sent: dict[str, list[str]] = field(default_factory=dict)
    _placed: dict[str, str] = field(default_factory=dict)
    _begun: dict[str, None] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Sent: self._send, Decided: self._decided, DownStarted: self._started, Done: self._done}

    def _decided(self, _: float, event: Decided) -> None:
        self._placed[request_of(event.record.turn.id)] = event.record.placed.url

    def _started(self, _: float, event: DownStarted) -> None:
        self._begun[event.request] = None

    def _send(self, _: float, event: Sent) -> None:
        sent = self._sent.setdefault(event.request, [])
        if event.request in self._begun:
            raise Breach(self.rule, f"{event.request} was sent to {event.url} after its head went out")
        if event.url in sent:
            raise Breach(self.rule, f"{event.request} was sent to {event.url} a second time")
        if self._placed.get(event.request) != event.url:
            raise Breach(self.rule, f"{event.request} went to {event.url}, not to {self._placed.get(event.request)}")
        sent.append(event.url)
        if len(sent) > _SENDS_MAX:
            raise Breach(self.rule, f"{event.request} was sent to {sent}")

    def _done(self, _: float, event: Done) -> None:
        for kept in (self._sent, self._placed, self._begun):
            kept.pop(event.request, None)


@dataclass(slots=True)
class _Body:
    """One response."""

    up: bytearray = field(default_factory=bytearray)
    down_bytes: int = 0
    status: int = 0
    up_ended: str = ""


@dataclass
class BytesPass:
    """The client gets the replica's bytes, all of them in order and nothing else, and a clean end only where the
    replica's response ended cleanly, behind its terminal event.
    """

    rule: str = "bytes pass"
    source: str = "architecture.md, stream; issue 4, never a clean end for a stream that died"
    _bodies: dict[str, _Body] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {
            Headed: self._headed,
            UpBytes: self._up,
            UpEnded: self._up_ended,
            DownStarted: self._started,
            DownBytes: self._down,
            DownEnded: self._ended,
            Done: self._done,
        }

    def _headed(self, _: float, event: Headed) -> None:
        self._bodies[event.request] = _Body(status=event.status)

    def _up(self, _: float, event: UpBytes) -> None:
        body = self._bodies.get(event.request)
        if body is not None:
            body.up += event.data

    def _up_ended(self, _: float, event: UpEnded) -> None:
        body = self._bodies.get(event.request)
        if body is not None and not body.up_ended:
            body.up_ended = event.how

    def _started(self, _: float, event: DownStarted) -> None:
        body = self._bodies.get(event.request)
        if body is None or body.status != event.status:
            raise Breach(self.rule, f"{event.request} got a head of its own: {event.status}")

    def _down(self, _: float, event: DownBytes) -> None:
        body = self._bodies[event.request]
        until = body.down_bytes + len(event.data)
        if body.up[body.down_bytes : until] != event.data:
            raise Breach(self.rule, f"{event.request} got {event.data[:80]!r} at byte {body.down_bytes}")
        body.down_bytes = until

    def _ended(self, _: float, event: DownEnded) -> None:
        body = self._bodies[event.request]
        if body.up_ended != "clean" or body.down_bytes != len(body.up):
            told = f"after {body.down_bytes} of {len(body.up)} bytes; the replica's end: {body.up_ended or 'none'}"
            raise Breach(self.rule, f"{event.request} got a clean end {told}")
        if body.status == 200 and not body.up.endswith(_TERMINAL):
            raise Breach(self.rule, f"{event.request} got a clean end without a terminal event")

    def _done(self, _: float, event: Done) -> None:
        body = self._bodies.pop(event.request, None)
        if event.how == "complete" and (body is None or body.up_ended != "clean"):
            raise Breach(self.rule, f"{event.request} counts as complete without a whole response")


@dataclass
class EveryTurnEnds:
    """Every request ends, in time, in a way that has a name; an error of the replica's is told only where a replica
    failed it or was ill when it was given up, and the store's being away is never the client's business.
    """

    wellness: Wellness
    rule: str = "every turn ends"
    source: str = "issue 4, Nothing is lost; domain/errors.py"
    _open: dict[str, float] = field(default_factory=dict)
    _failed: dict[str, list[str]] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Asked: self._asked, UpEnded: self._up_ended, Done: self._done, Quiet: self._quiet}

    def _asked(self, at_s: float, event: Asked) -> None:
        self._open[event.request] = at_s

    def _up_ended(self, at_s: float, event: UpEnded) -> None:
        if event.how in _UPSTREAM:
            self._failed.setdefault(event.request, []).append(event.how)
        elif event.how == "aborted" and self.wellness.ill_lately(at_s, event.router, event.url):
            self._failed.setdefault(event.request, []).append("upstream_broken")

    def _done(self, at_s: float, event: Done) -> None:
        began_s = self._open.pop(event.request)
        failed = self._failed.pop(event.request, [])
        if event.how in _UPSTREAM:
            if event.how not in failed:
                raise Breach(self.rule, f"{event.request} was told {event.how}, its replicas {failed or 'did nothing'}")
        elif event.how not in _HOWS:
            raise Breach(self.rule, f"{event.request} ended as {event.how!r}")
        if at_s - began_s > _LONGEST_S:
            raise Breach(self.rule, f"{event.request} took {at_s - began_s:.0f} s")

    def _quiet(self, _: float, __: Quiet) -> None:
        if self._open:
            raise Breach(self.rule, f"{sorted(self._open)} never ended")


@dataclass
class OneStoryEach:
    """Every start of a turn that a router tells has its one end, and no end comes without its start."""

    rule: str = "one story each"
    source: str = "telemetry/events.py, TurnStarted"
    _under_way: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Told: self._told, Died: self._died, Quiet: self._quiet}

    def _told(self, _: float, event: Told) -> None:
        told = event.event
        if not isinstance(told, TurnStarted | TurnFinished):
            return
        name = (event.router, told.turn, told.replica)
        if isinstance(told, TurnStarted):
            self._under_way[name] += 1
        elif not self._under_way[name]:
            raise Breach(self.rule, f"turn {told.turn} ended at {told.replica} without having begun")
        else:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    def _died(self, _: float, event: Died) -> None:
        for name in [name for name in self._under_way if name[0] == event.router]:
            del self._under_way[name]

    def _quiet(self, _: float, __: Quiet) -> None:
        if self._under_way:
            raise Breach(self.rule, f"turns that began and never ended: {sorted(self._under_way)}")
