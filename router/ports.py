"""How a turn reaches the world: every protocol that `lifecycle` drives and adapters implement.

The store's methods are atomic: each is one script in Redis and one critical section in memory, and one contract suite
(`tests/contracts`) holds both to the same behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.domain.outcome import Usage
from router.domain.shared import Acquired, Ask, Claim, Lease, Member, Membership, Settlement, Stale, View
from router.domain.tenant import Denied, TenantLimits

__all__ = [
    "Acquired",
    "Ask",
    "BodyReader",
    "Claim",
    "Clock",
    "Downstream",
    "Exchange",
    "ForwardRequest",
    "Lease",
    "Member",
    "Membership",
    "Permits",
    "ResponseHead",
    "Settlement",
    "Stale",
    "Store",
    "Upstream",
    "View",
]


class Clock(Protocol):
    """Time, injected."""

    def now_s(self) -> float:
        """Unix seconds; may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; for durations."""
        ...


class Store(Protocol):
    """Bindings, leases, boundaries, beliefs and membership.

    Every call may raise `StoreUnavailable`, or `StoreForeign` where a key of the store is not Roost's.
    """

    async def open(self) -> None:
        """Connect. Raises `StoreForeign` where another version's keys live too."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """Read what a decision needs. One round trip; changes nothing but expired leases."""
        ...

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """Claim a place. One round trip, all or nothing."""
        ...

    async def progress(self, fleet: str, lease: str) -> None:
        """The first byte came: the lease's tokens no longer wait to be prefilled."""
        ...

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """Release and record."""
        ...

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """Prolong leases, and take those again that are gone (the store was away for long, or came back empty).

        Returns the ids of those taken again. All or nothing for each lease, never for one whose replica lives another
        life by now.
        """
        ...

    async def members(self, fleet: str) -> Membership:
        """Read the membership."""
        ...

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """Add or replace a member. A change counts the version up.

        False, and nothing is changed, where it was there and `only_if_absent`, or where what is recorded is not
        `expected` (compare and set: of two that read the same record and write, one is told to read again).
        """
        ...

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """Forget a member with its load and beliefs; False where it was not there."""
        ...

    async def put_report(self, fleet: str, replica_id: str, raw: bytes, ttl_s: float) -> None:
        """Keep the raw report of a replica's agent for `ttl_s` seconds; `members` returns it."""
        ...


class Permits(Protocol):
    """What named tenants have under way, and how fast they begin turns. Every call may raise `StoreError`."""

    async def take(self, tenant: str, permit: str, limits: TenantLimits, ttl_s: float) -> Denied | None:
        """Begin a turn: one round trip, all or nothing; None: it may. Taking the same permit again changes nothing."""
        ...

    async def renew(self, tenant: str, permits: Sequence[str], ttl_s: float) -> None:
        """Prolong permits of turns under way; those that the store has lost are there again."""
        ...

    async def give(self, tenant: str, permit: str) -> None:
        """The turn is over. Harmless where it was never taken."""
        ...


# --- the upstream ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ForwardRequest:
    """A request as it goes to a replica. Header names and values are raw bytes, in order, hop-by-hop ones already
    gone. Nothing of it changes, but that its body is forgotten once it will not be sent again.
    """

    method: str
    target: str
    """Raw request target (path and query) exactly as the client sent it."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    has_body: bool = True
    """Whether a Content-Length is to be sent (a GET without one stays without)."""
    on_sent: Callable[[], None] | None = None
    """Called when the body is forgotten."""

    def forget_body(self) -> None:
        """It will not be sent again: a stream of minutes should not hold megabytes that nobody reads."""
        self.body = b""
        if self.on_sent is not None:
            self.on_sent()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a replica's response; headers raw, in order, all of them."""

    status: int
    reason: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    content_length: int | None
    """None: the body ends with its chunked framing or with the connection."""


class Exchange(Protocol):
    """One request under way at a replica, its head received. Exactly one of: `relay` to its end, or `abort`."""

    @property
    def head(self) -> ResponseHead:
        """The response's head."""
        ...

    async def relay(self, receive: Callable[[bytes], None]) -> None:
        """Hand over the decoded body as it comes (one call per read, never empty) until the message ends.

        Raises `UpstreamBroken` or `UpstreamSilent`; cancellation aborts. After a clean end the connection is pooled
        again.
        """
        ...

    def pause(self) -> None:
        """Stop reading from the replica (the client is slow)."""
        ...

    def resume(self) -> None:
        """Read on."""
        ...

    def abort(self) -> None:
        """Close the connection at once, so that the engine stops generating. Idempotent; harmless after the end."""
        ...


class Upstream(Protocol):
    """Connections to replicas."""

    async def send(self, url: str, request: ForwardRequest) -> Exchange:
        """Send and wait for the head. Raises `UpstreamUnreachable`, `UpstreamBroken`, `UpstreamSilent`; cancellation
        aborts.

        A pooled connection that the replica had closed in the meantime is replaced by a fresh one once, unseen by the
        caller, when no byte of a response had come.
        """
        ...

    def forget(self, url: str) -> None:
        """A replica left the fleet: its idle connections are closed, those in use once their exchange has ended."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class BodyReader(Protocol):
    """Reads a response in passing and keeps no body; see `router.upstream.sse`. Never raises."""

    def feed(self, data: bytes) -> None:
        """Look at the next bytes of the body."""
        ...

    def finish(self) -> None:
        """The body has ended."""
        ...

    @property
    def first_output(self) -> bool:
        """Whether output (not merely a head event) has come."""
        ...

    @property
    def output_events(self) -> int:
        """Events that carried output."""
        ...

    @property
    def usage(self) -> Usage:
        """Token counts seen so far."""
        ...

    @property
    def terminal(self) -> bool:
        """Whether the dialect's terminal event has come."""
        ...

    @property
    def error(self) -> str | None:
        """A bounded code, where the body carried an error."""
        ...

    @property
    def error_code(self) -> int | None:
        """The HTTP status that the error stands for, where the engine told."""
        ...

    @property
    def response_id(self) -> str | None:
        """The id under which the engine may have stored the response."""
        ...

    @property
    def mid_event(self) -> bool:
        """Whether a stream stands inside an event."""
        ...

    @property
    def between_events(self) -> bool:
        """Whether an event stream stands between two events and goes on, so that a comment may be put there."""
        ...

    @property
    def next_sequence(self) -> int | None:
        """The `sequence_number` that a further event of a Responses stream must carry."""
        ...


# --- the downstream --------------------------------------------------------------------------------------------------


class Downstream(Protocol):
    """The client's side of one turn."""

    @property
    def started(self) -> bool:
        """Whether the response's head has been written."""
        ...

    def start(self, head: ResponseHead, extra: Sequence[tuple[bytes, bytes]]) -> None:
        """Write the head: the replica's, without its hop-by-hop headers, and `extra` ones."""
        ...

    def bind(self, exchange: Exchange) -> None:
        """Pause and resume `exchange` as the client falls behind and catches up."""
        ...

    def write(self, data: bytes) -> None:
        """Write body bytes, at once."""
        ...

    def end(self) -> None:
        """End the body cleanly."""
        ...
