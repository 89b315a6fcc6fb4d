"""Without the store: what a router knows stays where it is, what it does not know goes where every router would send
it, and nothing takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from router.domain.decision import Reason
from router.domain.session import Binding
from router.domain.turn import Facts
from router.lifecycle.recent import Record
from simulations.checkers.wellness import Wellness
from simulations.seen import Asked, Breach, Decided, Died, Done, Sent, request_of

__all__ = ["KnownStay", "PlacedSoon", "UnknownAlike"]


@dataclass
class KnownStay:
    """Placed without the store, a turn whose prompt goes on from a branch's newest that this router has placed goes
    where that branch lived, if that replica is well. (Further back a router need not remember; where it does, and goes
    by an older end that lies deeper in the prompt, it does right.)
    """

    wellness: Wellness
    rule: str = "known branches stay"
    source: str = "placement.md, Shared state"
    _homes: dict[str, dict[tuple[str | None, str], Binding]] = field(default_factory=dict)
    """By router, then by session and prompt end: the newest of each branch."""
    _older: dict[str, dict[tuple[str | None, str], Binding]] = field(default_factory=dict)
    """The same of ends that are no branch's newest any more."""
    _newest: dict[tuple[str, str], tuple[str | None, str]] = field(default_factory=dict)
    """By router and branch: its entry in `_homes`."""
    _asking: dict[str, Facts] = field(default_factory=dict)
    _sent: dict[str, list[str]] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Asked: self._asked, Sent: self._send, Decided: self._decided, Done: self._done, Died: self._died}

    def _asked(self, _: float, event: Asked) -> None:
        self._asking[event.request] = event.facts

    def _send(self, _: float, event: Sent) -> None:
        self._sent.setdefault(event.request, []).append(event.url)

    def _done(self, _: float, event: Done) -> None:
        self._asking.pop(event.request, None)
        self._sent.pop(event.request, None)

    def _died(self, _: float, event: Died) -> None:
        self._homes.pop(event.router, None)
        self._older.pop(event.router, None)

    def _decided(self, at_s: float, event: Decided) -> None:
        record = event.record
        placed, request = record.placed, request_of(record.turn.id)
        facts = self._asking[request]
        if not facts.chain.hashes:
            return
        homes, older = self._homes.setdefault(event.router, {}), self._older.setdefault(event.router, {})
        if record.blind and not record.store_calls:  # else only its claim's answer was lost: it went by the store
            ends = [(facts.session, each) for each in reversed(facts.chain.hashes)]
            deepest = next((end for end in ends if end in homes or older.get(end) == placed.binding), None)
            home = homes.get(deepest) if deepest is not None else None
            if home is not None and (home.replica, home.incarnation) != (placed.replica, placed.incarnation):
                url = f"http://{home.replica}"
                tried = url in self._sent.get(request, ())
                if not tried and self.wellness.well(at_s, event.router, url, home.replica, home.incarnation):
                    told = f"turn {record.turn.id} went to {placed.replica} as {placed.reason.value}"
                    raise Breach(
                        self.rule, f"{told} without the store, though its branch lived at {home}, which is well"
                    )
        name = (facts.session, facts.chain.hashes[-1])
        before = self._newest.get((event.router, record.lineage.branch))
        if before is not None and (left := homes.pop(before, None)) is not None:
            older[before] = left
        self._newest[event.router, record.lineage.branch] = name
        homes[name] = placed.binding


@dataclass
class UnknownAlike:
    """Placed without the store, turns of a session that nobody knows go to one replica from whatever router, where
    those routers may choose among the same.
    """

    rule: str = "unknown turns go alike"
    source: str = "placement.md, Shared state"
    _chosen: dict[tuple[str, frozenset[str]], tuple[str, str]] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Decided: self._decided}

    def _decided(self, _: float, event: Decided) -> None:
        record = event.record
        if not record.blind or record.store_calls:
            return
        if record.lineage.known is not None or record.placed.reason is Reason.STORED:
            return
        among = frozenset(cost.replica for cost in record.placed.candidates)
        name = (record.turn.session, among)
        replica, router = self._chosen.setdefault(name, (record.placed.replica, event.router))
        if replica != record.placed.replica:
            told = f"turn {record.turn.id} of session {record.turn.session} went to {record.placed.replica}"
            raise Breach(self.rule, f"{told} by {event.router}, to {replica} by {router}, among {sorted(among)}")


def _blindly(record: Record) -> bool:
    """Whether the store was away at the decision; with only its claim unanswered, the decision was made by cost."""
    return record.blind and record.placed.candidates[0].score is not None


_LONGEST_S: Final = 5.0
"""Eight rounds of two calls of 50 ms each, and the rounds of those that lost the same race before."""


@dataclass
class PlacedSoon:
    """Placing takes no longer than its rounds of two store calls can, whatever the store does."""

    rule: str = "placed soon"
    source: str = "issue 4, Redis away, refusing, hanging"

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Decided: self._decided}

    def _decided(self, _: float, event: Decided) -> None:
        record = event.record
        if record.place_s - record.waited_s > _LONGEST_S:
            raise Breach(self.rule, f"turn {record.turn.id} took {record.place_s:.3f} s to place")
