"""The last decisions of this process, every candidate's cost term by term, and what then came true."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from router.domain.decision import Cost, Placed
from router.domain.outcome import Outcome
from router.domain.turn import Dialect, Turn
from router.placement.lineage import Lineage

__all__ = ["Recent", "Record", "explain"]


@dataclass(slots=True)
class Record:
    """One decision. `outcome` is None while the turn runs."""

    at_s: float
    fleet: str
    policy: str
    dialect: Dialect
    session_source: str
    boundaries: int
    """How many the prompt has."""
    lineage: Lineage
    turn: Turn
    placed: Placed
    attempt: int
    store_calls: int
    place_s: float
    waited_s: float
    """How long its session waited for room."""
    blind: bool
    outcome: Outcome | None = None


class Recent:
    """The last `limit` decisions, oldest first."""

    def __init__(self, limit: int) -> None:
        self._records: deque[Record] = deque(maxlen=limit)

    def add(self, record: Record) -> None:
        """Remember a decision; the oldest is forgotten."""
        self._records.append(record)

    def newest(self, limit: int) -> list[Record]:
        """At most `limit` decisions, newest first."""
        return list(self._records)[: -limit - 1 : -1] if limit > 0 else []


def explain(record: Record) -> dict[str, Any]:
    """A decision as the admin API shows it: seconds, tokens, ids that are digests."""
    turn, placed, outcome = record.turn, record.placed, record.outcome
    return {
        "at_s": round(record.at_s, 3),
        "turn": turn.id,
        "fleet": record.fleet,
        "policy": record.policy,
        "dialect": record.dialect.value,
        "session": turn.session,
        "session_source": record.session_source,
        "branch": record.lineage.branch,
        "fork": turn.fork,
        "replica": placed.replica,
        "reason": placed.reason.value,
        "attempt": record.attempt,
        "blind": record.blind,
        "store_calls": record.store_calls,
        "place_s": round(record.place_s, 6),
        "waited_s": round(record.waited_s, 3),
        "boundaries": record.boundaries,
        "prompt_tokens": turn.prompt_tokens,
        "shared_tokens": turn.shared_tokens,
        "predicted_cached_tokens": placed.cached_tokens,
        "candidates": [_candidate(cost) for cost in placed.candidates],
        "came_true": None if outcome is None else _outcome(outcome),
    }


def _candidate(cost: Cost) -> dict[str, Any]:
    terms = ("wait_s", "prefill_s", "decode_s", "others_s", "eviction_s", "move_s", "crowd_s", "ramp_s", "total_s")
    return {
        "replica": cost.replica,
        **{term: round(getattr(cost, term), 4) for term in terms},
        "device_tokens": cost.residency.device_tokens,
        "host_tokens": cost.residency.host_tokens,
        **({} if cost.score is None else {"score": cost.score}),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "end": outcome.end.value,
        "status": outcome.status,
        "prompt_tokens": outcome.usage.prompt_tokens,
        "cached_tokens": outcome.usage.cached_tokens,
        "output_tokens": outcome.usage.output_tokens,
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, 4),
        "duration_s": round(outcome.duration_s, 4),
    }
