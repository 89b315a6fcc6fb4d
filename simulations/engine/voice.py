"""What every dialect says of a turn: the interface, and the numbers behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from simulations.engine.asked import Asked

__all__ = ["DONE", "FINGERPRINT", "QUEUE_FULL", "Outcome", "Prompted", "Voice", "data", "event"]

FINGERPRINT = "roost-simulated"
DONE = b"data: [DONE]\n\n"
QUEUE_FULL = "The request queue is full."

encode = msgspec.json.encode


def data(value: object) -> bytes:
    """An unnamed event."""
    return b"data: " + encode(value) + b"\n\n"


def event(name: str, value: object) -> bytes:
    """A named event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompt's side of a turn's usage, known when prefill begins."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Found in either tier."""
        return self.device_tokens + self.host_tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """A turn that has ended well."""

    prompted: Prompted
    text: str
    output_tokens: int
    finish: str
    """`stop`, `length` or `abort`."""
    retractions: int = 0
    times_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Queued, to the first token, to the end; all since arrival."""


class Voice(ABC):
    """One reply in one dialect. A stream is `opening`, then `first`, deltas and `closing`; or a fault at any point."""

    holds_head: ClassVar[bool]
    """Whether SGLang sends the response's head with the first chunk only, so that early errors have a status."""

    def __init__(self, asked: Asked, reply_id: str, created_s: int, *, cache_report: bool) -> None:
        self.asked = asked
        self.id = reply_id
        self.created_s = created_s
        self.cache_report = cache_report
        self.prompted = Prompted(0, 0, 0)
        """Set once the prompt's counts are known."""

    def opening(self) -> bytes:
        """What is sent with the head, before anything is known."""
        return b""

    def first(self) -> bytes:
        """What comes before the first text, with it; `prompted` is known by then."""
        return b""

    @abstractmethod
    def delta(self, text: str) -> bytes:
        """More text."""

    @abstractmethod
    def closing(self, outcome: Outcome) -> bytes:
        """The end of a stream that went well."""

    @abstractmethod
    def broken(self, status: int, message: str) -> bytes:
        """The rest of a stream that fails after its head; `status` is what it would have been without a stream."""

    @abstractmethod
    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The reply that is no stream."""

    @staticmethod
    @abstractmethod
    def fault(status: int, message: str) -> tuple[int, dict[str, Any]]:
        """Status and body of an error."""
