"""Decisions: where turns go, and that they have a reason to go there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Final

from router.domain.decision import Reason
from router.domain.replica import Standing
from router.domain.session import Binding
from router.lifecycle.recent import Record
from router.telemetry.events import TurnFinished
from simulations.checkers.wellness import Wellness
from simulations.seen import Asked, Breach, Decided, Done, Fetched, Flushed, Sent, Told, request_of

__all__ = ["BelievesNoMore", "BranchesStay", "BurstsSpread", "NoNewBranchThere", "TenantsApart"]

_TIE_S: Final = 0.0021
"""Costs are compared in steps of a millisecond."""
_ALIKE_S: Final = 1.0
"""Replicas whose costs differ less are alike: less than what one more new branch beside costs."""
_FLOOR_S: Final = 1.0
"""A move costs at least this (`Tuning.move_floor_s`)."""


@dataclass
class NoNewBranchThere:
    """No new branch goes to a replica that was cordoned, and no turn at all to one that was draining, when the store
    was read.
    """

    wellness: Wellness
    rule: str = "no new branch there"
    source: str = "placement.md, What follows from the one formula"
    _read_s: dict[str, float] = field(default_factory=dict)
    """By request: when the store was read for it last."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Fetched: self._fetched, Decided: self._decided, Done: self._done}

    def _fetched(self, at_s: float, event: Fetched) -> None:
        if event.request:
            self._read_s[event.request] = at_s

    def _done(self, _: float, event: Done) -> None:
        self._read_s.pop(event.request, None)

    def _decided(self, _: float, event: Decided) -> None:
        record = event.record
        if record.blind:
            return
        standing = self.wellness.standing(record.placed.replica, self._read_s[request_of(record.turn.id)])
        if standing is Standing.DRAINING or (standing is Standing.CORDONED and record.lineage.known is None):
            raise Breach(self.rule, f"{_told(record)}, which is {standing.value}")


@dataclass
class BranchesStay:
    """A branch's turn goes home, unless home is gone, draining or restarted, refused this very turn, or is dearer by
    more than a move costs; every turn goes where it costs least; a drained replica's branches leave it once.
    """

    wellness: Wellness
    rule: str = "branches stay"
    source: str = "placement.md, What follows from the one formula; issue 4, a binding holds to the incarnation"
    _sent: dict[str, list[str]] = field(default_factory=dict)
    _left: dict[tuple[str, Binding], str] = field(default_factory=dict)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Decided: self._decided, Sent: self._send, Done: self._done, Flushed: self._flushed}

    def _send(self, _: float, event: Sent) -> None:
        self._sent.setdefault(event.request, []).append(event.url)

    def _done(self, _: float, event: Done) -> None:
        self._sent.pop(event.request, None)

    def _flushed(self, _: float, __: Flushed) -> None:
        self._left.clear()

    def _decided(self, at_s: float, event: Decided) -> None:
        record = event.record
        placed = record.placed
        if record.blind or record.policy != "roost":
            return
        if placed.candidates[0].replica != placed.replica:
            raise Breach(self.rule, f"{_told(record)}, not to its first choice {placed.candidates[0].replica}")
        if placed.reason is not Reason.STORED:
            least_s = min([cost.total_s for cost in placed.candidates])
            if placed.candidates[0].total_s > least_s + _TIE_S:
                raise Breach(
                    self.rule, f"{_told(record)} at {placed.candidates[0].total_s} s, there is one at {least_s}"
                )
        known = record.lineage.known
        if known is not None and known.home is not None:
            self._judge(at_s, event.router, record, known.home)
        elif placed.reason not in (Reason.NEW, Reason.FORK, Reason.STORED):
            raise Breach(self.rule, f"{_told(record)} without a home to go from")

    def _judge(self, at_s: float, router: str, record: Record, home: Binding) -> None:
        placed = record.placed
        here = Binding(placed.replica, placed.incarnation)
        if placed.reason is Reason.HOME:
            if here != home or placed.binding != home:
                raise Breach(self.rule, f"{_told(record)}, but home is {home}")
            return
        if here == home:
            raise Breach(self.rule, f"{_told(record)}, which is its home")
        tried = f"http://{home.replica}" in self._sent.get(request_of(record.turn.id), ())
        if placed.reason is Reason.SPILL:
            excused = tried or self.wellness.ill_lately(at_s, router, f"http://{home.replica}")
            if placed.binding != home or not excused:
                raise Breach(self.rule, f"{_told(record)}; home {home} was not asked, or was left for good")
        elif placed.reason is Reason.REBIND:
            self._judge_rebind(record, home)
        elif placed.reason is Reason.HOME_GONE:
            if not tried and self.wellness.well(at_s, router, f"http://{home.replica}", home.replica, home.incarnation):
                raise Breach(self.rule, f"{_told(record)}, and home {home} has been well all along")
            self._judge_leaving(at_s, record, home)
        elif placed.reason is not Reason.STORED:
            raise Breach(self.rule, f"{_told(record)}, but home is {home}")

    def _judge_rebind(self, record: Record, home: Binding) -> None:
        placed = record.placed
        there = placed.candidates[0]
        at_home = next((cost for cost in placed.candidates if cost.replica == home.replica), None)
        if at_home is None or there.move_s < _FLOOR_S or at_home.move_s or at_home.total_s + _TIE_S < there.total_s:
            raise Breach(self.rule, f"{_told(record)} for {there}, home: {at_home}")

    def _judge_leaving(self, at_s: float, record: Record, home: Binding) -> None:
        if self.wellness.standing(home.replica, at_s) is not Standing.DRAINING:
            return
        before = self._left.setdefault((record.lineage.branch, home), record.turn.id)
        if before != record.turn.id:
            raise Breach(self.rule, f"{_told(record)}, but it has left {home} before, with turn {before}")


@dataclass
class TenantsApart:
    """A branch belongs to one tenant, and so does what it continues or forks from."""

    rule: str = "tenants apart"
    source: str = "placement.md, Identity; issue 4, Security"
    _tenants: dict[str, str] = field(default_factory=dict)
    """By branch."""
    _asking: dict[str, str] = field(default_factory=dict)
    """By request."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Asked: self._asked, Decided: self._decided, Done: self._done}

    def _asked(self, _: float, event: Asked) -> None:
        self._asking[event.request] = event.facts.tenant

    def _done(self, _: float, event: Done) -> None:
        self._asking.pop(event.request, None)

    def _decided(self, _: float, event: Decided) -> None:
        lineage = event.record.lineage
        tenant = self._asking[request_of(event.record.turn.id)]
        names = [lineage.branch, *(branch.id for branch in (lineage.known, lineage.parent) if branch is not None)]
        for name in names:
            if self._tenants.setdefault(name, tenant) != tenant:
                raise Breach(
                    self.rule, f"{_told(event.record)}: branch {name} is {self._tenants[name]}'s, not {tenant}'s"
                )


@dataclass
class BelievesNoMore:
    """No replica is believed to hold more of a prompt than a turn has left there in this life, nor more than the prompt
    shares with its branch.
    """

    rule: str = "believes no more"
    source: str = "placement.md, Residency"
    _left: dict[tuple[str, str], int] = field(default_factory=dict)
    """By replica and incarnation: the most tokens of one branch."""
    _lives: dict[tuple[str, str], str] = field(default_factory=dict)
    """By turn under way and replica."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Told: self._told, Decided: self._decided}

    def _told(self, _: float, event: Told) -> None:
        told = event.event
        if not isinstance(told, TurnFinished):
            return
        incarnation = self._lives.pop((told.turn, told.replica), None)
        if incarnation is not None:
            name, outcome = (told.replica, incarnation), told.outcome
            output = outcome.usage.output_tokens if outcome.usage.output_tokens is not None else outcome.output_events
            self._left[name] = max(self._left.get(name, 0), told.prompt_tokens + output)

    def _decided(self, _: float, event: Decided) -> None:
        record = event.record
        placed, turn = record.placed, record.turn
        self._lives[turn.id, placed.replica] = placed.incarnation
        left = self._left.get((placed.replica, placed.incarnation), 0)
        if not record.blind and placed.cached_tokens > min(left, turn.shared_tokens):
            told = f"{placed.cached_tokens} tokens; it shares {turn.shared_tokens}, and {left} were left there"
            raise Breach(self.rule, f"{_told(record)} for {told}")


@dataclass(slots=True)
class _Burst:
    """New branches of one session, from a first one that found all replicas alike."""

    at_s: float
    replicas: int
    tokens: int
    counts: Counter[str]
    disturbed: bool


@dataclass
class BurstsSpread:
    """Equal new branches of one session that begin together spread over replicas that cost nearly the same: none gets
    more than its share and two (one for what they differ in).
    """

    rule: str = "bursts spread"
    source: str = "placement.md, What follows from the one formula (k forks over n replicas); issue 4, 32 subagents"
    within_s: float = 0.25
    _bursts: dict[str, _Burst] = field(default_factory=dict)
    """By session."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {Decided: self._decided}

    def _decided(self, at_s: float, event: Decided) -> None:
        record = event.record
        turn, placed = record.turn, record.placed
        for session, burst in list(self._bursts.items()):
            if at_s - burst.at_s > self.within_s:
                del self._bursts[session]
            elif session != turn.session or not turn.fork or turn.prompt_tokens != burst.tokens or record.blind:
                burst.disturbed = True
        if not turn.fork or record.policy != "roost":
            return
        found = self._bursts.get(turn.session)
        if found is None:
            totals = [cost.total_s for cost in placed.candidates]
            holds = {cost.residency for cost in placed.candidates}  # who holds the context is cheaper for each of them
            unequal = record.blind or bool(self._bursts) or len(holds) > 1 or max(totals) - min(totals) > _ALIKE_S
            found = _Burst(at_s, len(totals), turn.prompt_tokens, Counter(), unequal)
            self._bursts[turn.session] = found
        found.counts[placed.replica] += 1
        if len(placed.candidates) != found.replicas:
            found.disturbed = True
        share = ceil(sum(found.counts.values()) / found.replicas) + 2
        if not found.disturbed and max(found.counts.values()) > share:
            told = f"{dict(found.counts)} over {found.replicas} like replicas"
            raise Breach(self.rule, f"new branches of session {turn.session} went to {told}")


def _told(record: Record) -> str:
    placed = record.placed
    return f"turn {record.turn.id} of branch {record.lineage.branch} went to {placed.replica} as {placed.reason.value}"
