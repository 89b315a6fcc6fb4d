"""What this router sees of a fleet's replicas: the health of each, and who is told of it.

Ejecting for failed turns stops at half of the replicas that answer: where more fail, it is the network, the clients or
this router, and a fleet that has been ejected serves nobody. Turns at a replica that is lost are given up, to be placed
elsewhere or to end in an error, only while another one answers: else what is lost is more likely this router.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final

from router.contract import Report, decode_report
from router.discovery.observation import Observation
from router.domain.errors import UpstreamError, UpstreamUnreachable
from router.domain.outcome import End
from router.domain.replica import Standing
from router.domain.shared import Member
from router.lifecycle.health import Ejection, Health, State, Verdict, verdict_on
from router.lifecycle.lives import Noticed
from router.lifecycle.lost import Waiters
from router.ports import Clock
from router.upstream.wire import parse_origin

__all__ = ["FOREIGN_WINDOW", "Outside", "Seen", "Watch"]

log = logging.getLogger("roost.fleet")

FOREIGN_WINDOW: Final = 3
"""Polls over which turns beyond our leases must persist to count as other traffic; less is a matter of timing."""


def _nobody(*_: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Who is told what a fleet finds out."""

    left: Callable[[str], None] = _nobody
    """A URL at which no member is any more."""
    ejected: Callable[[str, str, str], None] = _nobody
    """Fleet, replica, and why a replica that served is out: "turns" (they failed) or "dead"."""


@dataclass(slots=True)
class Seen:
    """This router's own view of one replica."""

    health: Health
    foreign: tuple[tuple[int, int], ...] = ()
    """Newest (turns, waiting tokens) beyond our leases, per poll."""
    bad_report: str | None = None
    """Why what its agent says cannot be used."""
    noticed: Noticed = field(default_factory=Noticed)
    why: str = ""
    """Why it is not well, in words."""
    told: State | None = None
    """What the log last said of it."""
    key_told: bool = False
    """The log said that it wants a key."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with what it says."""
        found = self.health.observation
        odd = found.problems if found is not None else ()
        return odd if self.bad_report is None else (self.bad_report, *odd)

    @property
    def foreign_now(self) -> tuple[int, int]:
        """Turns and waiting tokens beyond our leases that have persisted."""
        if len(self.foreign) < FOREIGN_WINDOW:
            return 0, 0
        return min(turns for turns, _ in self.foreign), min(tokens for _, tokens in self.foreign)


class Watch:
    """The replicas of one fleet, by id. It knows no membership but what it is given."""

    def __init__(self, fleet: str, rules: Ejection, clock: Clock, outside: Outside) -> None:
        self._fleet = fleet
        self._rules = rules
        self._clock = clock
        self._outside = outside
        self._seen: dict[str, Seen] = {}
        self._standings: Mapping[str, Standing] = {}
        self._waiters = Waiters()

    # --- who is watched -----------------------------------------------------------------------------------------------

    def of(self, replica: str) -> Seen:
        """What is seen of a replica, from now on if nothing was before."""
        seen = self._seen.get(replica)
        if seen is None:
            seen = self._seen[replica] = Seen(Health(self._rules))
        return seen

    def find(self, replica: str) -> Seen | None:
        """What is seen of a replica, if it is watched."""
        return self._seen.get(replica)

    def all(self) -> Mapping[str, Seen]:
        """Everything seen."""
        return self._seen

    def keep(self, members: Collection[Member]) -> None:
        """Watch these and forget others, but for those whose report cannot be used."""
        self._standings = {member.id: member.standing for member in members}
        for gone in [name for name, seen in self._seen.items() if name not in self._standings and not seen.bad_report]:
            del self._seen[gone]
        for name in self._standings:
            self.of(name)

    def read(self, reports: Mapping[str, bytes]) -> None:
        """Take in what the replicas' agents say now."""
        for seen in self._seen.values():
            seen.health.report = seen.bad_report = None
        for reporter, raw in reports.items():
            seen, report = self.of(reporter), _usable_report(reporter, raw)
            if isinstance(report, str):
                seen.bad_report = report
            else:
                seen.health.report = report

    # --- what is seen -------------------------------------------------------------------------------------------------

    def observed(self, replica: str, look: Observation, foreign: tuple[int, int]) -> None:
        """A probe has come back; `foreign`: the turns and waiting tokens that it saw beyond our leases."""
        seen, now_s = self._seen.get(replica), self._clock.monotonic_s()
        if seen is None:  # it left the fleet meanwhile
            return
        seen.health.observed(look, now_s)
        seen.foreign = (*seen.foreign, foreign)[-FOREIGN_WINDOW:]
        seen.why = "; ".join(look.problems) or "it says so"
        self._tell(replica, seen, now_s)
        if look.wants_key and not seen.key_told:  # once: not every round asks what a key is wanted for
            seen.key_told = True
            log.warning(
                "replica %s of fleet %s wants an API key that Roost does not send: its turns will be a 401 unless "
                "auth.replica_key_file has that key, or auth.client_credentials: pass lets clients show theirs",
                replica, self._fleet,
            )  # fmt: skip
        if seen.health.lost(now_s) and any(self.state(other).usable for other in self._standings if other != replica):
            count = self._waiters.give_up(replica)
            if count:
                log.warning(
                    "replica %s of fleet %s gave no sign of life for %g s: %d turns given up",
                    replica, self._fleet, self._rules.silent_s, count,
                )  # fmt: skip

    def bytes_came(self, replica: str) -> None:
        """A response byte came: the replica is alive."""
        seen = self._seen.get(replica)
        if seen is not None:
            seen.health.bytes_came(self._clock.monotonic_s())

    def unreachable(self, replica: str, error: UpstreamUnreachable) -> None:
        """Somebody got no connection there."""
        seen, now_s = self._seen.get(replica), self._clock.monotonic_s()
        if seen is None:
            return
        self._tell(replica, seen, now_s)
        if error.refused:
            seen.health.refused(now_s)
        else:
            seen.health.unanswered(now_s)
        seen.why = str(error)
        self._tell(replica, seen, now_s)

    def waiting(self, replica: str) -> AbstractAsyncContextManager[None]:
        """Its body waits for bytes of a replica. Raises UpstreamBroken once that is lost."""
        return self._waiters.waiting(replica)

    def turn_began(self, replica: str) -> Seen:
        """A turn of this router has its place there. Exactly one `turn_ended` with what this returns follows."""
        seen = self.of(replica)
        seen.health.turn_began(self._clock.monotonic_s())
        return seen

    def turn_spoke(self, replica: str, seen: Seen, began_s: float) -> None:
        """A turn there has said something for the first time; `began_s`: monotonic time."""
        now_s = self._clock.monotonic_s()
        seen.health.turn_spoke(began_s, now_s)
        self._tell(replica, seen, now_s)

    def turn_ended(
        self, replica: str, seen: Seen, end: End, status: int | None, error: UpstreamError | None, began_s: float
    ) -> None:
        """A turn there is over. `status` and `error` as for `verdict_on`; `began_s`: monotonic time."""
        now_s = self._clock.monotonic_s()
        self._tell(replica, seen, now_s)
        verdict = verdict_on(end, status, error, flows=seen.health.flows(now_s))
        may_eject = verdict is Verdict.FAULT and self._can_do_without(replica)
        if seen.health.turn_ended(verdict, began_s, now_s, may_eject=may_eject):
            seen.why = f"its turns fail, the last one so: {error or f'it answered {status}'}"
        self._tell(replica, seen, now_s)

    # --- what is so ---------------------------------------------------------------------------------------------------

    def state(self, replica: str) -> State:
        """A replica's state now; UNKNOWN where it is not watched."""
        seen = self._seen.get(replica)
        return State.UNKNOWN if seen is None else seen.health.state(self._clock.monotonic_s())

    def described(self, replica: str) -> dict[str, str | float]:
        """A replica's state for the admin API: its name, why it is not well, and for how many seconds it is out."""
        seen, now_s = self.of(replica), self._clock.monotonic_s()
        state = seen.health.state(now_s)
        told: dict[str, str | float] = {"state": state.value}
        if state is State.EJECTED:
            told["for_s"] = round(seen.health.out_for_s(now_s), 3)
        if state is not State.WELL:
            told["why"] = seen.why
        return told

    def _can_do_without(self, replica: str) -> bool:
        """Whether at most half of the replicas that answer are out if this one goes too."""
        states = {
            name: self.state(name) for name, standing in self._standings.items() if standing is not Standing.DRAINING
        }
        alive = sum(state.usable for state in states.values())
        out = sum(state is State.EJECTED for name, state in states.items() if name != replica)
        return 2 * (out + 1) <= alive

    def _tell(self, replica: str, seen: Seen, now_s: float) -> None:
        """One log line for a change of state; being not ready for one reason or another is one state here.

        Called before and after what changes it, since time alone changes it too.
        """
        if self._seen.get(replica) is not seen:  # it left the fleet
            return
        state, before = seen.health.state(now_s), seen.told
        served = before is not None and before.usable
        if state is before or not (state.usable or served or before is None):
            return
        seen.told = state
        match state:
            case State.EJECTED:
                said, level = f"is out for {seen.health.out_for_s(now_s):.3g} s: {seen.why}", logging.WARNING
            case State.PROBATION:
                said, level = "is back on probation: one turn at a time until one has said something", logging.INFO
            case State.WELL:
                said, level = "is ready", logging.INFO
            case _:
                said, level = f"is not ready: {seen.why}", logging.WARNING
        log.log(level, "replica %s of fleet %s %s", replica, self._fleet, said)
        if served and state in (State.DEAD, State.EJECTED):
            self._outside.ejected(self._fleet, replica, "dead" if state is State.DEAD else "turns")


def _usable_report(reporter: str, raw: bytes) -> Report | str:
    """A report, or why it cannot be used."""
    report = decode_report(raw)
    if isinstance(report, str):
        return report
    if report.replica != reporter:
        return "the report speaks of another replica than the one it was filed under"
    try:
        parse_origin(report.url)
    except ValueError:
        return "the report's url is none that a replica can have"
    return report
