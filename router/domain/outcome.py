"""What came true of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["End", "Outcome", "Usage"]


class End(StrEnum):
    """How a turn ended. Bounded: a metric label."""

    COMPLETE = "complete"
    """The upstream's message ended as its protocol says, or its terminal event was relayed before the client left."""
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKEN = "upstream_broken"
    """The upstream died, reset or went silent after its head."""
    REJECTED = "rejected"
    """The replica judged the request wrong (4xx other than 429): the client's doing."""
    UPSTREAM_ERROR = "upstream_error"
    """The upstream answered with an error status or an error event."""
    UNREACHED = "unreached"
    """No head ever came."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the engine reported them; None where it did not say."""

    prompt_tokens: int | None = None
    """All prompt tokens, cached ones included, in every dialect."""
    cached_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was observed of a turn, in seconds from its commit."""

    end: End
    status: int | None = None
    usage: Usage = Usage()
    ttft_s: float | None = None
    """Commit to first output (first body byte where the reply is not a stream)."""
    duration_s: float = 0.0
    output_events: int = 0
    """Stream events that carried output; a stand-in for output tokens where no usage came."""
    response_bytes: int = 0
    response_id: str | None = None
    streamed: bool = False
