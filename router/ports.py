"""How a turn reaches the world: every protocol that `lifecycle` drives and adapters implement.

The store's methods are atomic: each is one script in Redis and one critical section in memory, and one contract suite
(`tests/contracts`) holds both to the same behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.domain.replica import Beliefs, Capacity, Load, Standing
from router.domain.session import Binding, Boundary, Branch, Session

__all__ = [
    "Acquired",
    "Ask",
    "Claim",
    "Clock",
    "Exchange",
    "ForwardRequest",
    "Member",
    "Membership",
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


# --- the store -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn wants to know before it is placed."""

    session: str | None
    boundaries: tuple[str, ...] = ()
    """Boundary hashes of the prompt, deepest first."""
    head: str | None = None
    """Boundary hash after the leading system messages."""
    response_id: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the store knew at one instant."""

    now_s: float
    """The store's clock, Unix seconds."""
    membership_version: int
    """Counts changes of the fleet's membership; a router that knows an older one reads `Store.members` again."""
    loads: Mapping[str, Load]
    """By replica id. A replica without an entry has had no turn yet. Loads of an incarnation other than the entry's are zero."""
    incarnations: Mapping[str, str]
    """By replica id: the incarnation that `loads` speaks of."""
    beliefs: Mapping[str, Beliefs]
    branch: Branch | None = None
    """The branch of the deepest known boundary."""
    depth: int | None = None
    """Index into `Ask.boundaries` of that boundary."""
    head_branch: Branch | None = None
    """Where no boundary is known: the session's branch that began with the same head (tools and system prompt)."""
    session: Session | None = None
    response_replica: Binding | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """Acquire a lease, and bind the branch, in one step."""

    lease: str
    replica: str
    incarnation: str
    prefill_tokens: int
    locked_tokens: int
    branch: str
    session: str
    """The session the branch belongs to (used when the branch is new)."""
    version: int | None
    """The branch version the decision saw; None: the branch must not exist yet, nor must `tip` be known."""
    home: Binding
    """Where the branch lives from now on."""
    tip: Boundary | None
    """The end of this prompt, by which the next turn finds the branch; None for a turn without a chain."""
    tips: tuple[Boundary, ...]
    """All boundaries the branch keeps from now on, newest first, `tip` included; those it had and that are not here are forgotten."""
    weight: float
    """The branch's share of its home's crowd from now on."""
    text_bytes: int
    crowd_half_life_s: float
    observed_in_flight: int | None = None
    """In-flight turns the decision saw at `replica`; more now (beyond `slack`) is stale. None: not checked."""
    slack: int = 0
    head: str | None = None
    """Head boundary to remember for the session."""
    session_home: Binding | None = None
    """For session policies: bind the session too, if it is unbound or bound to another incarnation than it says."""
    branch_ttl_s: float = 21_600.0
    lease_ttl_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Acquired:
    """The lease is held and the branch bound; `version` is the branch's new version."""

    version: int
    admitted_tokens: int
    """The replica's counter when the turn began."""


@dataclass(frozen=True, slots=True)
class Stale:
    """Nothing was changed: the world moved since the fetch. Fetch and decide again."""

    why: str
    """"branch", "tip" or "load": bounded."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """Release the lease and save what is now believed. Idempotent by lease: a second call changes no count."""

    lease: str
    replica: str
    incarnation: str
    branch: str
    tokens: int = 0
    """Prompt and output tokens of the branch now held there; 0: nothing was left there."""
    prompt_tokens: int = 0
    admitted_tokens: int = 0
    """KV tokens newly written there by this turn."""
    beliefs: Beliefs | None = None
    """New beliefs of that replica, last writer wins; None: nothing learned."""
    response_id: str | None = None
    """Remember that this replica holds this stored response."""
    branch_ttl_s: float = 21_600.0


@dataclass(frozen=True, slots=True)
class Member:
    """A replica as the fleet's membership records it, shared by all routers."""

    id: str
    url: str
    source: str
    """"config", "admin" or "report": who put it there."""
    standing: Standing = Standing.SERVING
    incarnation: str = ""
    capacity: Capacity | None = None
    joined_at_s: float = 0.0
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Membership:
    """All members of one fleet."""

    version: int
    now_s: float
    members: tuple[Member, ...] = field(default=())
    reports: Mapping[str, bytes] = field(default_factory=dict)
    """Raw reports of replica agents by replica id; see `router.contract`."""


class Store(Protocol):
    """Bindings, leases, boundaries, beliefs and membership. Every call may raise `StoreUnavailable`."""

    async def open(self) -> None:
        """Connect; raises `StoreForeign` where another version's keys live, `StoreUnavailable` where nothing answers."""
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

    async def renew(self, fleet: str, leases: Sequence[str], lease_ttl_s: float) -> Sequence[str]:
        """Prolong leases; returns those that had already expired (their counts are gone)."""
        ...

    async def members(self, fleet: str) -> Membership:
        """Read the membership."""
        ...

    async def put_member(self, fleet: str, member: Member, *, only_if_absent: bool = False) -> bool:
        """Add or replace a member; False where it was there and `only_if_absent`. A change counts the version up."""
        ...

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """Forget a member with its load and beliefs; False where it was not there."""
        ...


# --- the upstream ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request as it goes to a replica. Header names and values are raw bytes, in order, hop-by-hop ones already gone."""

    method: str
    target: str
    """Raw request target (path and query) exactly as the client sent it."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    has_body: bool = True
    """Whether a Content-Length is to be sent (a GET without one stays without)."""


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

        Raises `UpstreamBroken` or `UpstreamSilent`; cancellation aborts. After a clean end the connection is pooled again.
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
        """Send and wait for the head. Raises `UpstreamUnreachable`, `UpstreamBroken`, `UpstreamSilent`; cancellation aborts.

        A pooled connection that the replica had closed in the meantime is replaced by a fresh one once, unseen by the caller,
        when no byte of a response had come.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
