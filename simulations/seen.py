"""What an onlooker sees of a fleet: the events that checkers judge and that a run's digest is made of.

Events say what happened at a border (a store call as the store carried it out, a request as a replica got it, bytes as
a client got them), never why, and nothing of the scenario. `router` names one life of a router process (`a#0`); a
`request` is one HTTP request of a client, so a client that tries again makes another; ids that a router draws while it
serves a request begin with the request's (`request_of`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from xxhash import xxh3_128

from router.discovery.observation import Observation
from router.domain.shared import Claim, Lease, Member, Membership, Settlement, View
from router.domain.turn import Facts
from router.lifecycle.recent import Record
from router.telemetry.events import Event as RouterEvent
from router.telemetry.events import TurnFinished, TurnStarted

__all__ = [
    "Asked",
    "Booted",
    "Breach",
    "Claimed",
    "Decided",
    "Died",
    "Done",
    "DownBytes",
    "DownEnded",
    "DownStarted",
    "Event",
    "Fetched",
    "Flushed",
    "Headed",
    "MemberPut",
    "MemberRemoved",
    "MembersRead",
    "Onlooker",
    "Opened",
    "Probed",
    "Progressed",
    "Quiet",
    "Renewed",
    "Seen",
    "Sent",
    "Settled",
    "StoreFailed",
    "Told",
    "UpBytes",
    "UpEnded",
    "request_of",
]

_ID_MARK: Final = "."
_LAST_KEPT: Final = 40
_TOLD_AT_ONCE: Final = 256
"""Lines that the digest takes in together."""


def request_of(drawn_id: str) -> str:
    """The request during which a router drew an id."""
    return drawn_id.rsplit(_ID_MARK, 1)[0]


# --- clients and routers ---------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A client's request has reached a router."""

    router: str
    request: str
    facts: Facts

    def __str__(self) -> str:
        chain = self.facts.chain.hashes
        return f"asked {self.router} {self.request} {self.facts.session} {chain[-1] if chain else None}"


class Decided(NamedTuple):
    """A router has placed a turn."""

    router: str
    record: Record

    def __str__(self) -> str:
        record, placed = self.record, self.record.placed
        return (
            f"decided {self.router} {record.turn.id} {placed.reason.value} {placed.replica} {placed.incarnation} "
            f"{record.lineage.branch} {placed.prefill_tokens} {placed.candidates[0].total_s!r} {record.blind}"
        )


class Told(NamedTuple):
    """A router has emitted an event."""

    router: str
    event: RouterEvent

    def __str__(self) -> str:
        event = self.event
        if isinstance(event, TurnStarted):
            return f"started {self.router} {event.turn} {event.replica}"
        if isinstance(event, TurnFinished):
            return f"finished {self.router} {event.turn} {event.replica} {event.outcome.end.value}"
        return f"told {self.router} {event}"


class Done(NamedTuple):
    """A request is over for its client: `complete`, `left`, `router_died`, or an error's code."""

    router: str
    request: str
    how: str

    def __str__(self) -> str:
        return f"done {self.router} {self.request} {self.how}"


class DownStarted(NamedTuple):
    """The client has got a head."""

    router: str
    request: str
    status: int

    def __str__(self) -> str:
        return f"head {self.router} {self.request} {self.status}"


class DownBytes(NamedTuple):
    """The client has got bytes of a body."""

    router: str
    request: str
    data: bytes

    def __str__(self) -> str:
        return f"bytes {self.request} {len(self.data)}"


class DownEnded(NamedTuple):
    """The client has got a clean end."""

    router: str
    request: str

    def __str__(self) -> str:
        return f"end {self.router} {self.request}"


class Booted(NamedTuple):
    """A router process has started."""

    router: str

    def __str__(self) -> str:
        return f"booted {self.router}"


class Died(NamedTuple):
    """A router process is gone, with all its tasks and connections."""

    router: str

    def __str__(self) -> str:
        return f"died {self.router}"


class Quiet(NamedTuple):
    """Nothing has gone on for longer than a lease lives; what routers still hold, by router."""

    held: Mapping[str, int]
    under_way: Mapping[str, int]

    def __str__(self) -> str:
        return f"quiet {sum(self.held.values())} {sum(self.under_way.values())}"


# --- replicas --------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A router sends a request to a replica."""

    router: str
    request: str
    url: str

    def __str__(self) -> str:
        return f"sent {self.router} {self.request} {self.url}"


class Headed(NamedTuple):
    """A replica's response head has come to the router."""

    router: str
    request: str
    url: str
    status: int

    def __str__(self) -> str:
        return f"headed {self.request} {self.url} {self.status}"


class UpBytes(NamedTuple):
    """A replica's bytes have come to the router."""

    router: str
    request: str
    url: str
    data: bytes

    def __str__(self) -> str:
        return f"up {self.request} {len(self.data)}"


class UpEnded(NamedTuple):
    """A response or an attempt at one is over: `clean`, `aborted` by the router, or an error's code."""

    router: str
    request: str
    url: str
    how: str

    def __str__(self) -> str:
        return f"up-end {self.router} {self.request} {self.url} {self.how}"


class Probed(NamedTuple):
    """A router's probe of a replica has come back."""

    router: str
    url: str
    observation: Observation

    def __str__(self) -> str:
        seen = self.observation
        return f"probed {self.router} {self.url} {seen.reachable} {seen.ready} {seen.incarnation} {seen.running}"


# --- the store, as it carries calls out -------------------------------------------------------------------------------


class Fetched(NamedTuple):
    """The store has been read."""

    router: str
    request: str
    view: View

    def __str__(self) -> str:
        branch = self.view.branch
        return f"fetched {self.router} {self.view.now_s!r} {None if branch is None else (branch.id, branch.version)}"


class Claimed(NamedTuple):
    """A claim was granted, or refused with a reason."""

    router: str
    now_s: float
    claim: Claim
    stale: str | None

    def __str__(self) -> str:
        return f"claimed {self.router} {self.claim.lease} {self.claim.replica} {self.claim.branch} {self.stale}"


class Progressed(NamedTuple):
    """A lease's prefill is over."""

    router: str
    now_s: float
    lease: str

    def __str__(self) -> str:
        return f"progressed {self.router} {self.lease}"


class Settled(NamedTuple):
    """A lease is given back."""

    router: str
    now_s: float
    settlement: Settlement

    def __str__(self) -> str:
        it = self.settlement
        return f"settled {self.router} {it.lease} {it.tokens} {it.admitted_tokens} {it.beliefs!r}"


class Renewed(NamedTuple):
    """Leases are prolonged; `taken` had been gone and are counted again."""

    router: str
    now_s: float
    leases: tuple[Lease, ...]
    taken: tuple[str, ...]
    ttl_s: float

    def __str__(self) -> str:
        return f"renewed {self.router} {len(self.leases)} {self.taken}"


class MembersRead(NamedTuple):
    """The membership has been read."""

    router: str
    membership: Membership

    def __str__(self) -> str:
        return f"members {self.router} {self.membership.version}"


class MemberPut(NamedTuple):
    """A member has been written."""

    router: str
    now_s: float
    member: Member
    put: bool

    def __str__(self) -> str:
        member = self.member
        return f"put {self.router} {member.id} {member.standing.value} {member.incarnation} {self.put}"


class MemberRemoved(NamedTuple):
    """A member has been taken out."""

    router: str
    now_s: float
    replica: str

    def __str__(self) -> str:
        return f"removed {self.router} {self.replica}"


class Opened(NamedTuple):
    """The store has been tried, and its schema claimed."""

    router: str

    def __str__(self) -> str:
        return f"opened {self.router}"


class StoreFailed(NamedTuple):
    """A call of a router has failed; it may have been carried out, or may be yet."""

    router: str

    def __str__(self) -> str:
        return f"store-failed {self.router}"


class Flushed(NamedTuple):
    """The store has lost all it held."""

    def __str__(self) -> str:
        return "flushed"


Event = (
    Asked
    | Booted
    | Claimed
    | Decided
    | Died
    | Done
    | DownBytes
    | DownEnded
    | DownStarted
    | Fetched
    | Flushed
    | Headed
    | MemberPut
    | MemberRemoved
    | MembersRead
    | Opened
    | Probed
    | Progressed
    | Quiet
    | Renewed
    | Sent
    | Settled
    | StoreFailed
    | Told
    | UpBytes
    | UpEnded
)


class Breach(Exception):
    """What must not be has been seen. `rule` names the checker."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what


class Onlooker(Protocol):
    """Watches events. Raises `Breach` where what it sees must not be."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """What to call for which kind of event: with the virtual time in seconds and the event."""
        ...


class Seen:
    """Passes every event to whoever watches its kind, and makes the run's digest.

    A breach is kept, not raised: events arise inside the code under test, which must not be able to swallow one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, onlookers: Sequence[Onlooker] = ()) -> None:
        self.count = 0
        self.breach: asyncio.Future[Breach] = loop.create_future()
        """The first."""
        self._now_s = loop.time
        self._digest = xxh3_128()
        self._told: list[str] = []
        """Lines that are not in the digest yet."""
        self._broken = False
        self._last: deque[tuple[float, str]] = deque(maxlen=_LAST_KEPT)
        self._watching: dict[type, list[Callable[..., None]]] = {}
        for onlooker in onlookers:
            for kind, watch in onlooker.watches().items():
                self._watching.setdefault(kind, []).append(watch)

    def tell(self, event: Event) -> None:
        """It happened now."""
        if self._broken:
            return
        at_s, line = self._now_s(), str(event)
        self.count += 1
        self._told.append(f"{at_s!r} {line}\n")
        if len(self._told) >= _TOLD_AT_ONCE:
            self._take_in()
        self._last.append((at_s, line))
        try:
            for watch in self._watching.get(type(event), ()):
                watch(at_s, event)
        except Breach as breach:
            self._break(breach)

    def _take_in(self) -> None:
        """Bring the digest up to date."""
        self._digest.update("".join(self._told).encode())
        self._told.clear()

    def _break(self, breach: Breach) -> None:
        if not self._broken:
            self._broken = True
            self.breach.set_result(breach)

    def failed(self, what: str) -> None:
        """Something has failed that nobody awaits."""
        self._break(Breach("nothing fails unseen", what))

    @property
    def at_s(self) -> float:
        """Of the newest event."""
        return self._last[-1][0] if self._last else 0.0

    @property
    def digest(self) -> str:
        """Of every event so far, with its time."""
        self._take_in()
        return self._digest.hexdigest()

    def last(self) -> list[str]:
        """The newest events, oldest first."""
        return [f"{at_s:12.6f}  {line}" for at_s, line in self._last]
