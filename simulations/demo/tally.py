"""The sums behind the table: who lives where, what the router decided, what the joining of a replica did. Pure.

`Seats` follows turns as clients see them, `Placements` the router's own account (`/admin/decisions`), `samples` reads a
Prometheus exposition.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulations.measure import TurnResult, percentile
from simulations.trace import Session, Tree
from simulations.workload import BLOCK_TOKENS

__all__ = ["AWAY", "FIRST", "Placement", "Placements", "Seats", "Spread", "samples", "spread_of"]

AWAY: Final = ("rebind", "spill", "home_gone", "policy")
"""Reasons of turns that were sent away from where their branch's KV is: moves."""
FIRST: Final = 10
"""How many new sessions tell whom they go to before the newcomer is as busy as the rest."""

_SAMPLE: Final = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RECENT: Final = 200
_TERMS: Final = ("wait_s", "prefill_s", "decode_s", "others_s", "eviction_s", "crowd_s", "ramp_s")
"""What may speak against a replica; the price of moving is no quality of it."""


def samples(exposition: str, name: str, label: str | None = None) -> dict[str, float]:
    """The metric's samples by one of its labels, added up over the others; without `label` under the empty key."""
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        match = _SAMPLE.match(line) if line.startswith(name) else None
        if match is not None and match["name"] == name:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            key = labels.get(label, "") if label else ""
            found[key] = found.get(key, 0.0) + float(match["value"])
    return found


class Seats:
    """Sessions (each subagent is one) by the replica that served their last turn, and how long first tokens took."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._where: dict[str, str] = {}
        self._ttft_s: dict[str, deque[float]] = {}

    def enter(self, tree: Tree) -> None:
        """A tree is going to be played: from now on it is known when its sessions end."""
        self._turns.update((session.id, len(session.turns)) for session in tree.sessions)

    def take(self, result: TurnResult) -> None:
        """A turn ended."""
        session, replica = result.ref.session, result.replica
        if replica is None:
            return
        if result.ttft_s is not None:
            self._ttft_s.setdefault(replica, deque(maxlen=_RECENT)).append(result.ttft_s)
        if result.ref.turn + 1 >= self._turns.get(session, 0):
            self._where.pop(session, None)
        else:
            self._where[session] = replica

    def sessions(self) -> Counter[str]:
        """How many that have begun and not ended, by replica."""
        return Counter(self._where.values())

    def ttft_p50_s(self, replica: str) -> float | None:
        """The median of the last turns there, wall seconds."""
        known = self._ttft_s.get(replica)
        return percentile(sorted(known), 0.5) if known else None


@dataclass(frozen=True, slots=True)
class Placement:
    """One decision, and the runner-up."""

    session: str
    """The router's digest."""
    branch: str
    replica: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    """Predicted."""
    at_s: float
    cost_s: float
    other: str | None
    """The next best replica; None where there was no choice."""
    other_s: float
    because: str
    """The term that makes most of the difference."""


class Placements:
    """What the router has decided, taken from its admin API as often as one likes."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.moved_by_join = 0
        """Turns of branches that were there before the join, served by the newcomer although their home was well."""
        self.newcomer_new_sessions = 0
        """Sessions that began after the join, and at the newcomer."""
        self.new_sessions_after_join = 0
        self.newcomer_of_first = 0
        """Of the first `FIRST` sessions that began after the join, those that began at the newcomer."""
        self.sessions: set[str] = set()
        self._seen: set[tuple[str, int]] = set()
        self._homes: dict[str, str] = {}
        self._old: frozenset[str] = frozenset()
        self._newcomer: str | None = None
        self._joined_at_s = 0.0
        self._latest: dict[bool, deque[Placement]] = {True: deque(maxlen=8), False: deque(maxlen=8)}

    @property
    def moves(self) -> int:
        """Turns sent away from their branch's home."""
        return sum(self.reasons[why] for why in AWAY)

    @property
    def old_branches(self) -> int:
        """Branches that were there before the join."""
        return len(self._old)

    def join(self, newcomer: str, at_s: float) -> None:
        """A replica joins now (Unix seconds). What was decided before must have been taken."""
        self._newcomer, self._joined_at_s, self._old = newcomer, at_s, frozenset(self._homes)

    def take(self, decisions: Sequence[Mapping[str, Any]], healthy: Collection[str]) -> None:
        """Decisions as `/admin/decisions` lists them, newest first; those taken before count once."""
        for told in reversed(decisions):
            key = (told["turn"], told["attempt"])
            if key not in self._seen:
                self._seen.add(key)
                self._decided(_placement(told), healthy)

    def recent(self, count: int) -> list[Placement]:
        """The newest turn that went home and the newest others."""
        home = list(self._latest[True])[-1:]
        others = list(self._latest[False])[-(count - len(home)) :]
        return sorted(home + others, key=lambda each: -each.at_s)

    def _decided(self, placed: Placement, healthy: Collection[str]) -> None:
        self.reasons[placed.reason] += 1
        self._latest[placed.reason == "home"].append(placed)
        at_newcomer = placed.replica == self._newcomer
        if self._newcomer is not None and placed.at_s >= self._joined_at_s:
            home = self._homes.get(placed.branch)
            if at_newcomer and placed.branch in self._old and home != self._newcomer and home in healthy:
                self.moved_by_join += 1
            if placed.session not in self.sessions:
                self.new_sessions_after_join += 1
                self.newcomer_new_sessions += at_newcomer
                self.newcomer_of_first += at_newcomer and self.new_sessions_after_join <= FIRST
        self.sessions.add(placed.session)
        self._homes[placed.branch] = placed.replica


def _placement(told: Mapping[str, Any]) -> Placement:
    costs = {each["replica"]: each for each in told["candidates"]}
    here = costs.pop(told["replica"])
    other = min(costs.values(), key=lambda each: each["total_s"], default=None)
    because = "" if other is None else max(_TERMS, key=lambda term: other[term] - here[term]).removesuffix("_s")
    return Placement(
        session=told["session"],
        branch=told["branch"],
        replica=told["replica"],
        reason=told["reason"],
        prompt_tokens=told["prompt_tokens"],
        cached_tokens=told["predicted_cached_tokens"],
        at_s=told["at_s"],
        cost_s=here["total_s"],
        other=None if other is None else other["replica"],
        other_s=0.0 if other is None else other["total_s"],
        because=because,
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the subagents of one session began, and whether they stayed."""

    session: str
    agents: int
    """How many there are."""
    began: Mapping[str, int]
    """By replica, of those whose first turn has ended."""
    later_turns: int
    """Those that extend the turn before; where a history was compacted there is no KV to stay with."""
    stayed: int
    """Of these, served where the turn before was."""


def spread_of(tree: Tree, results: Iterable[TurnResult]) -> Spread:
    """The subagents of a tree, as far as they have come."""
    agents = {session.id: session for session in tree.sessions[1:]}
    began: Counter[str] = Counter()
    where: dict[str, str] = {}
    later = stayed = 0
    for result in results:
        session, replica = result.ref.session, result.replica
        if session not in agents or replica is None:
            continue
        if session not in where:
            began[replica] += 1
        elif _extends(agents[session], result.ref.turn):
            later += 1
            stayed += where[session] == replica
        where[session] = replica
    return Spread(tree.id, len(agents), dict(sorted(began.items())), later, stayed)


def _extends(session: Session, turn: int) -> bool:
    """Whether a turn's prompt keeps more of the one before than tools and system prompt."""
    return session.turns[turn].keep * BLOCK_TOKENS > session.head_tokens
