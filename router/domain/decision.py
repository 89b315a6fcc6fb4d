"""What the decision says: placed or refused, with every candidate's cost term by term."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from router.domain.session import Binding

__all__ = ["Cost", "Decision", "Placed", "Reason", "Refused", "Residency"]


class Reason(StrEnum):
    """Why a turn went where it went. Bounded: used as a response header and a metric label."""

    HOME = "home"
    """The branch's own replica was cheapest."""
    NEW = "new"
    """A new branch, placed by cost."""
    FORK = "fork"
    """A new branch that shares a known prefix with another."""
    SPILL = "spill"
    """One turn served elsewhere; the branch keeps its home."""
    REBIND = "rebind"
    """The branch moved for good: elsewhere was cheaper by more than the hysteresis."""
    HOME_GONE = "home_gone"
    """The home is away, draining, restarted or was already tried: the branch moved."""
    POLICY = "policy"
    """A baseline policy chose."""
    STORED = "stored"
    """Only this replica holds the response that the request names."""
    PASS = "pass"  # noqa: S105 (no password)
    """Not a turn: any healthy replica."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Tokens of a branch believed to be held by a replica."""

    device_tokens: int = 0
    host_tokens: int = 0


class Cost(NamedTuple):
    """The cost of one choice in seconds, term by term (see `router.placement.cost`).

    A tuple, since one is made per replica and turn and a frozen dataclass takes three times as long to make.
    """

    replica: str
    wait_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    others_s: float = 0.0
    eviction_s: float = 0.0
    move_s: float = 0.0
    crowd_s: float = 0.0
    ramp_s: float = 0.0
    residency: Residency = Residency()
    score: float | None = None
    """A baseline policy's own score (lower is better); None under `roost`."""

    @property
    def total_s(self) -> float:
        """Seconds, all terms."""
        _, wait_s, prefill_s, decode_s, others_s, eviction_s, move_s, crowd_s, ramp_s, _, _ = self
        return wait_s + prefill_s + decode_s + others_s + eviction_s + move_s + crowd_s + ramp_s


@dataclass(frozen=True, slots=True)
class Placed:
    """The turn goes to `replica`; `binding` is where its branch lives afterwards."""

    replica: str
    incarnation: str
    url: str
    reason: Reason
    binding: Binding
    candidates: tuple[Cost, ...]
    prefill_tokens: int
    """Uncached prompt tokens expected there; what the lease counts as waiting prefill."""
    cached_tokens: int
    """Cached tokens predicted there; compared with what the engine then reports."""
    held_once_tokens: int = 0
    """Tokens of this prompt that the branch had left there, whether or not they are believed to be there still."""


@dataclass(frozen=True, slots=True)
class Refused:
    """No replica may take the turn."""

    why: str
    retry_after_s: float = 1.0


Decision = Placed | Refused
