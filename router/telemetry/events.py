"""The events of a turn. They carry no prompt, no key and no raw session id; every label they feed is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.domain.decision import Reason
from router.domain.outcome import Outcome

__all__ = [
    "Event",
    "FleetSeen",
    "Observer",
    "TurnFinished",
    "TurnRefused",
    "TurnStarted",
    "TurnWaited",
    "TurnWaiting",
]


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn holds its place at a replica. Exactly one `TurnFinished` with the same turn and replica follows."""

    turn: str
    fleet: str
    replica: str


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A turn, or one attempt at it, is settled."""

    turn: str
    fleet: str
    replica: str
    dialect: str
    policy: str
    reason: Reason
    session: str
    """Tenant-scoped session key (a digest)."""
    session_source: str
    branch: str
    outcome: Outcome
    prompt_tokens: int
    """As the engine counted, else as estimated."""
    predicted_cached_tokens: int
    place_s: float
    """Seconds from the request's last byte to the commit: identify, fetch, decide, acquire."""
    attempt: int
    """1 for the first replica tried."""
    blind: bool
    """Placed without the store."""


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """A request that never reached a replica."""

    fleet: str
    dialect: str
    code: str
    """The error's code (`router.domain.errors`)."""
    tenant: str | None = None
    """Its name in the keys file, where there is one."""


@dataclass(frozen=True, slots=True)
class TurnWaiting:
    """A new session waits for room. Exactly one `TurnWaited` with the same turn follows."""

    turn: str
    fleet: str


@dataclass(frozen=True, slots=True)
class TurnWaited:
    """A new session waits no more."""

    turn: str
    fleet: str
    waited_s: float
    admitted: bool
    """False: it was refused, or its client left."""


@dataclass(frozen=True, slots=True)
class FleetSeen:
    """How full a fleet is, told about once a second."""

    fleet: str
    live_share: float
    """Live tokens per token of KV room."""


Event = TurnStarted | TurnFinished | TurnRefused | TurnWaiting | TurnWaited | FleetSeen


class Observer(Protocol):
    """Renders events. Must not raise and must not block."""

    def emit(self, event: Event) -> None:
        """Take in one event."""
        ...
