"""What is played where time is virtual, and what came of it. Values only."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["POLICIES", "SESSION_HEADER", "Compared", "Programme"]

POLICIES: Final = ("roost", "round_robin", "session_sticky")
SESSION_HEADER: Final = "x-session-id"
"""By which the clients name their sessions; subagents send their session's, as agents do."""


class Programme(NamedTuple):
    """A showing. Times are of the story, not of a wall clock."""

    profile: str
    seed: int
    sessions: int
    replicas: int
    ramp_s: float
    fan_out_at_s: float
    join_at_s: float
    more_sessions: int
    """That come with the new replica, spread over `more_ramp_s`."""
    more_ramp_s: float
    duration_s: float


class Compared(NamedTuple):
    """One policy's figures. Seconds are simulated."""

    policy: str
    turns: int
    errors: int
    hit_rate: float
    hit_rate_infinite: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    moves: int
    """Turns sent away from their branch's home."""
