"""What the shared state is asked and told: the values of `router.ports.Store`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.domain.replica import Beliefs, Capacity, Load, Standing
from router.domain.session import Binding, Boundary, Branch, Session

__all__ = ["Acquired", "Ask", "Claim", "Lease", "Member", "Membership", "Settlement", "Stale", "View", "lease_of"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn wants to know before it is placed."""

    session: str | None
    """The session whose record is read."""
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
    """By replica id. A replica without an entry has had no turn yet. Loads of an incarnation other than the entry's are
    zero."""
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
    """All boundaries the branch keeps from now on, newest first, `tip` included; those it had and that are not here are
    forgotten."""
    weight: float
    """The branch's share of its home's crowd from now on."""
    text_bytes: int
    crowd_half_life_s: float
    live_half_life_s: float = 120.0
    live_tokens: int = 0
    """The branch's share of its home's live tokens from now on."""
    inherited_tokens: int = 0
    """See `Branch.inherited_tokens`."""
    named: bool = False
    """The session has an id of its own, and is remembered even where it has neither head nor home."""
    observed_in_flight: int | None = None
    """In-flight turns the decision saw at `replica`; more now (beyond `slack`) is stale. None: not checked."""
    slack: int = 0
    head: str | None = None
    """Head boundary to remember for the session."""
    heads_of: str | None = None
    """The session whose record remembers head and home; None: `session`. A tenant's keyless conversations share one."""
    session_home: Binding | None = None
    """For session policies: where the session lives from now on; None: its binding stays as it is."""
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
class Lease:
    """What a running turn holds, so that a store which lost it can count it again."""

    id: str
    replica: str
    incarnation: str
    prefill_tokens: int
    """Tokens that still wait to be prefilled; 0 once the first byte has come."""
    locked_tokens: int
    branch: str


def lease_of(claim: Claim) -> Lease:
    """The lease that a claim asks for."""
    return Lease(claim.lease, claim.replica, claim.incarnation, claim.prefill_tokens, claim.locked_tokens, claim.branch)


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
