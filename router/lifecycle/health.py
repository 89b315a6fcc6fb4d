"""The health of one replica as this router sees it: a machine that is told what was seen, and when.

It is told looks (probes), connections that failed, bytes, how turns ended, and what the replica's agent reports, each
with the time. It has no clock and does no I/O: the same tellings give the same states.

    state      it is so                                                    turns
    unknown    nobody has looked yet                                       none
    unready    it says so: 503 on `/ready`, or a phase other than ready    none; running ones finish
    dead       nobody listens, or it is silent                             none; see *lost*
    ejected    it answers, and `failures` turns in a row failed there      only where nobody else may
    probation  it was ejected or dead, and no turn has spoken since        one at a time
    well       else                                                        any

- *Busy is not dead.* Silence is `FAILED_PROBES_MAX` probes in a row without an answer while no byte of a turn came for
  `silent_s`. A connection that cannot be made in time says as much as one such probe. A refused one says
  enough at once, and silence after it takes nothing back: only an answer does.
- *Passing probes is not serving.* A turn failed there if the replica broke or reset its connection, before the head or
  within the body, or answered 500, 502 or 504. What the client did, what the replica refuses (4xx, 429, and 503, by
  which it says that it is full) and a first byte that is long in coming while others' bytes flow are no failures, and
  no successes either.
- *Out for longer each time*: `base_s`, doubled at each repeat, `max_s` at most. Each `max_s` in good standing forgets
  one repeat.
- *Back on probation*, from either way out. The first turn that says something makes it well again, a newcomer that is
  ramped up, for an answer may take many minutes to end; but until one has succeeded, the first that fails ejects it.
  Turns that began before count for neither. Where no turn of this router gets there (others keep it busy), probation
  ends after `max_s`. One that succeeds while it is out, for want of another replica, ends that.
- *Lost*: dead, and for `silent_s` neither an answer nor a byte came. Turns that run there will hear nothing more,
  though their connections do not know yet.

What it does not promise: that routers agree (each goes by what it saw itself); that a replica is told apart from a
client whose every turn makes engines fail (so the fleet bounds how many may be out at once); anything about the silence
of a replica that is not probed, which is one that only reports: its reports end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

from router.contract import REPORT_TTL_S, Phase, Report
from router.discovery.observation import Failure, Observation
from router.domain.errors import UpstreamBroken, UpstreamError, UpstreamSilent
from router.domain.outcome import End

__all__ = ["FAILED_PROBES_MAX", "Ejection", "Health", "State", "Verdict", "verdict_on"]

FAILED_PROBES_MAX: Final = 2
"""Probes in a row that must fail before a silent replica is dead."""
FAULT_STATUS: Final = frozenset({500, 502, 504})


class State(StrEnum):
    """See the module. Bounded."""

    UNKNOWN = "unknown"
    UNREADY = "unready"
    DEAD = "dead"
    EJECTED = "ejected"
    PROBATION = "probation"
    WELL = "well"

    @property
    def usable(self) -> bool:
        """Whether a turn may go there at all."""
        return self in (State.WELL, State.PROBATION, State.EJECTED)


class Verdict(StrEnum):
    """What the end of a turn says of its replica."""

    SUCCESS = "success"
    FAULT = "fault"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Ejection:
    """How much is put up with."""

    failures: int = 3
    base_s: float = 5.0
    max_s: float = 60.0
    silent_s: float = 10.0
    """A replica that sent response bytes this recently is alive, whatever its probes say. As long as prefills of other
    turns may hold back its streams: SGLang runs them before the next decode step.
    """


def verdict_on(end: End, status: int | None, error: UpstreamError | None, *, flows: bool) -> Verdict:
    """What a turn says of its replica. `status`: of its response, or what an error within it stands for; `error`: what
    ended it; `flows`: bytes of other turns have come lately.

    A stream that its replica ended in due form, but without the dialect's last event, is held against nobody: not
    every engine sends one.
    """
    if isinstance(error, UpstreamSilent):
        return Verdict.NEITHER if flows else Verdict.FAULT
    if isinstance(error, UpstreamBroken) or (end is End.UPSTREAM_ERROR and status in FAULT_STATUS):
        return Verdict.FAULT
    return Verdict.SUCCESS if end is End.COMPLETE else Verdict.NEITHER


class Health:
    """One replica's health. Every time is monotonic, in seconds, and never earlier than those told before."""

    __slots__ = (
        "_answered_s",
        "_bytes_s",
        "_dead",
        "_doubted",
        "_failed_probes",
        "_judged_since_s",
        "_member_since_s",
        "_on_probation",
        "_refused",
        "_refused_s",
        "_repeats",
        "_row",
        "_rules",
        "_said_unready",
        "_under_way",
        "_until_s",
        "_was_well",
        "observation",
        "report",
    )

    def __init__(self, rules: Ejection) -> None:
        self._rules = rules
        self.observation: Observation | None = None
        """The newest look."""
        self.report: Report | None = None
        """What its agent says; goes before what probes see."""
        self._failed_probes = 0
        self._refused = False
        self._refused_s = -inf
        """When a turn was refused."""
        self._said_unready = False
        """By its newest answer to a probe."""
        self._answered_s = self._bytes_s = -inf
        """The newest answer to a probe, the newest byte of a turn."""
        self._was_well = self._dead = False
        self._doubted = False
        """Another router tells of a newer life."""
        self._row = 0
        """Turns that failed since one succeeded."""
        self._repeats = 0
        """Ejections not forgotten yet."""
        self._until_s: float | None = None
        """The end of an ejection that has not been seen to end yet."""
        self._on_probation = False
        self._judged_since_s = -inf
        """Turns that began earlier say nothing any more."""
        self._member_since_s = -inf
        """When it was last readmitted."""
        self._under_way = 0
        """This router's turns there."""

    # --- what is told -------------------------------------------------------------------------------------------------

    def observed(self, seen: Observation, now_s: float) -> None:
        """A probe has come back."""
        self._move_on(now_s)
        self.observation = seen
        if seen.reachable:
            self._failed_probes, self._refused, self._answered_s = 0, False, now_s
            self._said_unready = seen.ready is False
            self._doubted = False
        else:
            self._failed_probes += 1
            self._refused = self._refused or seen.failure in (Failure.REFUSED, Failure.UNRESOLVED)
        self._move_on(now_s)

    def refused(self, now_s: float) -> None:
        """A turn found nobody listening."""
        self._move_on(now_s)
        self._refused, self._refused_s = True, now_s
        self._move_on(now_s)

    def doubt(self) -> None:
        """Another router tells of a newer life: the next look is to find out."""
        self._doubted = True

    def unanswered(self, now_s: float) -> None:
        """A turn's connection was not accepted in time."""
        self._move_on(now_s)
        self._failed_probes += 1
        self._move_on(now_s)

    def bytes_came(self, now_s: float) -> None:
        """A response byte came."""
        self._bytes_s = now_s

    def turn_began(self, now_s: float) -> None:
        """A turn of this router goes there."""
        self._move_on(now_s)
        self._under_way += 1

    def turn_spoke(self, began_s: float, now_s: float) -> None:
        """Its first output has come."""
        if self.state(now_s) is State.PROBATION and began_s >= self._judged_since_s:
            self._readmit(now_s)
            self._row = self._rules.failures - 1

    def turn_ended(self, verdict: Verdict, began_s: float, now_s: float, *, may_eject: bool) -> bool:
        """It is over. `may_eject`: the fleet can do without this replica. Returns whether it is ejected for this."""
        state = self.state(now_s)
        self._under_way -= 1
        if not state.usable or began_s < self._judged_since_s:
            return False
        if verdict is Verdict.SUCCESS:
            self._row = 0
            if state is not State.WELL:
                self._readmit(now_s)
        if verdict is not Verdict.FAULT or state is State.EJECTED:
            return False
        self._row += 1
        if not may_eject or (state is State.WELL and self._row < self._rules.failures):
            return False
        self._eject(now_s)
        return True

    # --- what is so ---------------------------------------------------------------------------------------------------

    def state(self, now_s: float) -> State:
        """Its state now."""
        reach = self._move_on(now_s)
        if reach is not State.WELL:
            return reach
        if self._until_s is not None:
            return State.EJECTED
        return State.PROBATION if self._on_probation else State.WELL

    def lost(self, now_s: float) -> bool:
        """Whether the turns that run there will hear nothing more."""
        return (
            self.observation is not None
            and self.state(now_s) is State.DEAD
            and now_s - max(self._answered_s, self._bytes_s) >= self._rules.silent_s
        )

    def flows(self, now_s: float) -> bool:
        """Whether bytes of its turns have come lately."""
        return now_s - self._bytes_s < self._rules.silent_s

    @property
    def last_look(self) -> Observation | None:
        """The newest look, as the next should be told of it: a turn that found nobody listening since then, or another
        router's word, speaks for a new life, though no probe may have met the gap between the two.
        """
        if self.observation is not None and (self._refused or self._doubted):
            return replace(self.observation, restart_suspected=True)
        return self.observation

    @property
    def under_way(self) -> int:
        """This router's turns there (count)."""
        return self._under_way

    def out_for_s(self, now_s: float) -> float:
        """Seconds until an ejected one is back on probation; 0 in any other state."""
        return self._until_s - now_s if self.state(now_s) is State.EJECTED and self._until_s is not None else 0.0

    def member_for_s(self, now_s: float) -> float:
        """Seconds since it was readmitted; infinite if it never was out."""
        return now_s - self._member_since_s

    # --- the machine --------------------------------------------------------------------------------------------------

    def _reach(self, now_s: float) -> State:
        """UNKNOWN, UNREADY, DEAD, or WELL for one that would serve, its turns' fate aside."""
        if self.report is not None:
            if self.report.phase is not Phase.READY:
                return State.UNREADY
            return State.DEAD if self._refuses(now_s) else State.WELL
        seen = self.observation
        if self._refused:
            return State.DEAD
        if seen is None:
            return State.UNKNOWN
        silent = not seen.reachable or self._failed_probes > 0
        few = seen.reachable or seen.was_ready
        if silent and not self.flows(now_s) and not (few and self._failed_probes < FAILED_PROBES_MAX):
            return State.DEAD
        return State.UNREADY if self._said_unready else State.WELL

    def _refuses(self, now_s: float) -> bool:
        """Whether a refusal still counts against a report.

        Who only reports is not probed, so it is taken back once every report from before the refusal has expired: an
        agent that still says ready then has seen it.
        """
        if self.observation is not None:
            return self._refused
        return self._refused and now_s - self._refused_s < REPORT_TTL_S

    def _move_on(self, now_s: float) -> State:
        """Let time pass until now, and see what it changes."""
        reach = self._reach(now_s)
        if reach is State.DEAD and self._was_well and not self._dead:
            self._dead, self._until_s, self._on_probation, self._row = True, None, False, 0
        elif reach is State.WELL:
            self._was_well = True
            if self._dead:
                self._dead = False
                self._try(now_s)
            if self._until_s is not None and now_s >= self._until_s:
                since_s, self._until_s = self._until_s, None
                self._try(since_s)
            lapses_s = self._judged_since_s + self._rules.max_s
            if self._on_probation and not self._under_way and now_s >= lapses_s:
                self._readmit(lapses_s)
        return reach

    def _try(self, now_s: float) -> None:
        self._on_probation, self._judged_since_s, self._row = True, now_s, 0

    def _readmit(self, now_s: float) -> None:
        self._until_s, self._on_probation, self._member_since_s = None, False, now_s

    def _eject(self, now_s: float) -> None:
        rules = self._rules
        if self._repeats and not self._on_probation:
            self._repeats = max(0, self._repeats - int(self.member_for_s(now_s) / rules.max_s))
        out_s = min(rules.max_s, rules.base_s * 2.0 ** min(self._repeats, 60))
        self._repeats += 1
        self._until_s, self._judged_since_s, self._on_probation, self._row = now_s + out_s, now_s, False, 0
