"""The store of one process, and the reference for every other.

The contract, which `tests/contracts` checks on all stores:

**Leases.** A lease adds one turn, its waiting prefill and its locked tokens to the load of a replica. Each is taken
back once: the prefill by `progress`, the rest by `settle` or by expiry, whichever comes first; no count goes below
zero. `fetch` gives back leases whose time is up before it reads (at most 500 a call); the branch's `in_flight` falls
with them. A lease is recorded until then, so `renew` and `settle` still find one that is late but not yet given back.
A lease id that is recorded cannot be acquired again: `Stale("branch")`. `renew` brings the store to what a router says
it holds: it prolongs what is recorded, gives back prefill that no longer waits, and adds what is not recorded any more
anew, with the branch's `in_flight` where the branch is known; not where the load entry speaks of another life.

**Lives.** A load entry speaks of one incarnation. A claim for another begins a new life at zero, counters and crowd
too. A lease counts only against the life it was taken in: settled or expired later it touches no other, even if the
same incarnation was removed and came back meanwhile. Counter, beliefs and residues are recorded only for the
incarnation that the entry names; once a member is removed, or another incarnation has taken over, what a late
settlement says of the old one is lost.

**Branches.** `acquire` checks all, in the order tip, branch, load, and writes only if all hold. A claim without a
version needs a branch that does not exist and a tip that is unknown; a claim with one needs the branch at that
version. So of two that race for the same tip, or the same branch, one wins. A boundary is known while the branch it
points at is; a claim takes over its new tip, and other tips only where nobody else's live; given up boundaries are
forgotten, unless they have become another branch's. `settle` with 0 tokens leaves residues as they were (the turn
left nothing, earlier ones may have); with more it replaces those of that replica and stamps the counter's value. Four
residues and, in a session, eight heads are kept, newest first. A session is remembered once it has a head or a home,
or its claim says that it is named.

**Crowd.** `acquire` moves the branch's shares of crowd and live tokens, halved every `crowd_half_life_s` and
`live_half_life_s`, out of its old home and its new ones into its new home, each only where the load entry is still of
that incarnation. Never below zero. Both sums are decayed to one instant, `crowd_at_s`.

**Settle** is idempotent by lease: counts change only while the lease is recorded. Tokens, residue, beliefs and
response are written by every call, for a turn may outlive its lease.

**Membership.** The version counts changes: a put that changes nothing does not count. A put that expects a record
compares it as a member, whatever its spelling in the store, and writes only where it is that one. Removing a member
forgets its load and beliefs. Reports are gone when their time is up and do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from router.domain.replica import Beliefs, Load
from router.domain.session import Binding, Branch, Residue, Session
from router.domain.shared import lease_of
from router.ports import Acquired, Ask, Claim, Clock, Lease, Member, Membership, Settlement, Stale, View
from router.store.expiring import Expiring
from router.store.keys import HEADS_KEPT, RESIDUES_KEPT, SWEEP_MAX

__all__ = ["MemoryStore"]

_NEVER_MS: Final = 1 << 62


@dataclass(slots=True)
class _Life:
    """A replica's load in one life."""

    incarnation: str
    load: Load


@dataclass(slots=True)
class _Lease:
    """What a lease has added and not yet given back, and to which life."""

    life: _Life
    branch: str
    prefill_tokens: int
    locked_tokens: int
    expires_ms: int


@dataclass(slots=True)
class _Fleet:
    """Everything about one fleet."""

    version: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    reports: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    lives: dict[str, _Life] = field(default_factory=dict)
    beliefs: dict[str, Beliefs] = field(default_factory=dict)
    leases: dict[str, _Lease] = field(default_factory=dict)
    due_ms: int = 0
    """No lease is due before; so not every reading looks through them all."""
    boundaries: Expiring[str] = field(default_factory=Expiring)
    branches: Expiring[Branch] = field(default_factory=Expiring)
    sessions: Expiring[Session] = field(default_factory=Expiring)
    responses: Expiring[Binding] = field(default_factory=Expiring)

    def life(self, home: Binding | None) -> _Life | None:
        """The load entry of a replica, if it speaks of that incarnation."""
        life = self.lives.get(home.replica) if home is not None else None
        return life if life is not None and home is not None and life.incarnation == home.incarnation else None

    def known(self, boundary: str | None, now_s: float) -> Branch | None:
        """The living branch that a boundary points at."""
        owner = self.boundaries.get(boundary, now_s) if boundary is not None else None
        return self.branches.get(owner, now_s) if owner is not None else None


class MemoryStore:
    """`Store` in this process' memory: for one process, and for simulations."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fleets: dict[str, _Fleet] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """See `Store.fetch`."""
        at, now_s = self._fleet(fleet), self._clock.now_s()
        _sweep(at, now_s)
        session = at.sessions.get(ask.session, now_s) if ask.session is not None else None
        found = ((depth, at.known(boundary, now_s)) for depth, boundary in enumerate(ask.boundaries))
        depth, branch = next(((depth, branch) for depth, branch in found if branch is not None), (None, None))
        head_branch = None
        if branch is None and session is not None and ask.head is not None:
            owner = dict(session.heads).get(ask.head)
            head_branch = at.branches.get(owner, now_s) if owner is not None else None
        return View(
            now_s=now_s,
            membership_version=at.version,
            loads={replica: life.load for replica, life in at.lives.items()},
            incarnations={replica: life.incarnation for replica, life in at.lives.items()},
            beliefs=dict(at.beliefs),
            branch=branch,
            depth=depth,
            head_branch=head_branch,
            session=session,
            response_replica=at.responses.get(ask.response_id, now_s) if ask.response_id is not None else None,
        )

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """See `Store.acquire`."""
        at, now_s = self._fleet(fleet), self._clock.now_s()
        old = at.branches.get(claim.branch, now_s)
        life = at.life(Binding(claim.replica, claim.incarnation))
        why = _stale(at, claim, old, life, now_s)
        if why is not None:
            return Stale(why)
        if life is None:
            life = at.lives[claim.replica] = _Life(claim.incarnation, Load(crowd_at_s=now_s))
        _take(at, life, lease_of(claim), _until_ms(now_s, claim.lease_ttl_s))
        if old is not None:
            since_s = now_s - old.active_at_s
            weight = _decayed(old.weight, since_s, claim.crowd_half_life_s)
            live_tokens = _decayed(old.live_tokens, since_s, claim.live_half_life_s)
            _join(at.life(old.home), -weight, -live_tokens, now_s, claim)
        _join(at.life(claim.home), claim.weight, claim.live_tokens, now_s, claim)
        _register(at, claim, old, now_s)
        branch = replace(
            old if old is not None else Branch(claim.branch, claim.session),
            home=claim.home,
            version=old.version + 1 if old is not None else 1,
            turns=old.turns + 1 if old is not None else 1,
            in_flight=old.in_flight + 1 if old is not None else 1,
            text_bytes=claim.text_bytes,
            weight=claim.weight,
            active_at_s=now_s,
            live_tokens=claim.live_tokens,
            inherited_tokens=claim.inherited_tokens,
            tips=claim.tips,
        )
        at.branches.put(branch.id, branch, now_s, claim.branch_ttl_s)
        _remember(at, claim, now_s)
        return Acquired(branch.version, life.load.admitted_tokens)

    async def progress(self, fleet: str, lease: str) -> None:
        """See `Store.progress`."""
        held = self._fleet(fleet).leases.get(lease)
        if held is not None:
            _progress(held)

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """See `Store.settle`."""
        at, now_s, it = self._fleet(fleet), self._clock.now_s(), settlement
        life = at.life(Binding(it.replica, it.incarnation))
        lease = at.leases.pop(it.lease, None)
        if lease is not None:
            _give_back(at, lease, now_s)
            if life is not None:
                life.load = replace(life.load, admitted_tokens=life.load.admitted_tokens + it.admitted_tokens)
        branch = at.branches.get(it.branch, now_s)
        if branch is not None:
            residues = branch.residues
            if life is not None and it.tokens > 0:
                left = Residue(it.replica, it.incarnation, it.tokens, life.load.admitted_tokens)
                others = [residue for residue in residues if residue.replica != it.replica]
                residues = (left, *others[: RESIDUES_KEPT - 1])
            tokens = it.prompt_tokens if it.prompt_tokens > 0 else branch.tokens
            at.branches.put(it.branch, replace(branch, tokens=tokens, residues=residues), now_s, it.branch_ttl_s)
        if life is not None and it.beliefs is not None:
            at.beliefs[it.replica] = it.beliefs
        if it.response_id is not None:
            at.responses.put(it.response_id, Binding(it.replica, it.incarnation), now_s, it.branch_ttl_s)

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """See `Store.renew`."""
        at, now_s = self._fleet(fleet), self._clock.now_s()
        until_ms = _until_ms(now_s, lease_ttl_s)
        taken = []
        for lease in leases:
            held = at.leases.get(lease.id)
            if held is not None:
                held.expires_ms = max(held.expires_ms, until_ms)
                if lease.prefill_tokens == 0:
                    _progress(held)
            elif _take_again(at, lease, until_ms, now_s):
                taken.append(lease.id)
        return taken

    async def members(self, fleet: str) -> Membership:
        """See `Store.members`."""
        at, now_s = self._fleet(fleet), self._clock.now_s()
        at.reports = {replica: report for replica, report in at.reports.items() if report[0] > _ms(now_s)}
        members = tuple(sorted(at.members.values(), key=lambda member: member.id))
        return Membership(at.version, now_s, members, {replica: raw for replica, (_, raw) in at.reports.items()})

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """See `Store.put_member`."""
        at = self._fleet(fleet)
        if only_if_absent and member.id in at.members:
            return False
        if expected is not None and at.members.get(member.id) != expected:
            return False
        if at.members.get(member.id) != member:
            at.members[member.id] = member
            at.version += 1
        return True

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """See `Store.remove_member`."""
        at = self._fleet(fleet)
        at.lives.pop(replica_id, None)
        at.beliefs.pop(replica_id, None)
        if at.members.pop(replica_id, None) is None:
            return False
        at.version += 1
        return True

    async def put_report(self, fleet: str, replica_id: str, raw: bytes, ttl_s: float) -> None:
        """See `Store.put_report`."""
        self._fleet(fleet).reports[replica_id] = (_until_ms(self._clock.now_s(), ttl_s), raw)

    def _fleet(self, name: str) -> _Fleet:
        return self._fleets.setdefault(name, _Fleet())


def _stale(at: _Fleet, claim: Claim, old: Branch | None, life: _Life | None, now_s: float) -> str | None:
    """Why the claim does not hold, if it does not."""
    if claim.lease in at.leases:
        return "branch"
    if claim.version is None:
        if claim.tip is not None and at.known(claim.tip.hash, now_s) is not None:
            return "tip"
        if old is not None:
            return "branch"
    elif old is None or old.version != claim.version:
        return "branch"
    observed, in_flight = claim.observed_in_flight, life.load.in_flight if life is not None else 0
    return "load" if observed is not None and in_flight > observed + claim.slack else None


def _register(at: _Fleet, claim: Claim, old: Branch | None, now_s: float) -> None:
    """Point the branch's boundaries at it and forget those it gives up; another branch's stay as they are."""
    for tip in claim.tips:
        owner = at.known(tip.hash, now_s)
        if owner is None or owner.id == claim.branch or (claim.tip is not None and tip.hash == claim.tip.hash):
            at.boundaries.put(tip.hash, claim.branch, now_s, claim.branch_ttl_s)
    kept = {tip.hash for tip in claim.tips}
    for tip in old.tips if old is not None else ():
        if tip.hash not in kept and at.boundaries.get(tip.hash, now_s) == claim.branch:
            at.boundaries.pop(tip.hash)


def _remember(at: _Fleet, claim: Claim, now_s: float) -> None:
    """The session's head and home, where there is one to remember."""
    name = claim.heads_of or claim.session
    session = at.sessions.get(name, now_s)
    if session is None:
        if claim.head is None and claim.session_home is None and not claim.named:
            return
        session = Session(name)
    heads = session.heads
    if claim.head is not None:
        others = [head for head in heads if head[0] != claim.head]
        heads = ((claim.head, claim.branch), *others[: HEADS_KEPT - 1])
    home = session.home if claim.session_home is None else claim.session_home
    at.sessions.put(name, replace(session, home=home, heads=heads), now_s, claim.branch_ttl_s)


def _join(life: _Life | None, weight: float, live_tokens: float, now_s: float, claim: Claim) -> None:
    """Add a branch's shares (or take negative ones) to a home's crowd and live tokens."""
    if life is not None:
        load = life.load
        since_s = now_s - load.crowd_at_s
        crowd = _decayed(load.crowd, since_s, claim.crowd_half_life_s) + weight
        live = _decayed(load.live_tokens, since_s, claim.live_half_life_s) + live_tokens
        life.load = replace(load, crowd=max(0.0, crowd), live_tokens=max(0.0, live), crowd_at_s=now_s)


def _decayed(value: float, since_s: float, half_life_s: float) -> float:
    return value * math.pow(2.0, -max(0.0, since_s) / half_life_s)


def _take(at: _Fleet, life: _Life, lease: Lease, until_ms: int) -> None:
    """Record a lease and count it."""
    life.load = replace(
        life.load,
        in_flight=life.load.in_flight + 1,
        prefill_tokens=life.load.prefill_tokens + lease.prefill_tokens,
        locked_tokens=life.load.locked_tokens + lease.locked_tokens,
    )
    at.leases[lease.id] = _Lease(life, lease.branch, lease.prefill_tokens, lease.locked_tokens, until_ms)
    at.due_ms = min(at.due_ms, until_ms)


def _take_again(at: _Fleet, lease: Lease, until_ms: int, now_s: float) -> bool:
    """Count a lease that is not recorded, unless its replica lives another life by now."""
    life = at.lives.setdefault(lease.replica, _Life(lease.incarnation, Load(crowd_at_s=now_s)))
    if life.incarnation != lease.incarnation:
        return False
    branch = at.branches.get(lease.branch, now_s)
    if branch is None:
        # Nobody's: a branch that is written later has not counted this turn, and must not lose it.
        lease = replace(lease, branch="")
    else:
        at.branches.put(branch.id, replace(branch, in_flight=branch.in_flight + 1), now_s, None)
    _take(at, life, lease, until_ms)
    return True


def _progress(held: _Lease) -> None:
    """Its tokens no longer wait."""
    load = held.life.load
    held.life.load = replace(load, prefill_tokens=max(0, load.prefill_tokens - held.prefill_tokens))
    held.prefill_tokens = 0


def _give_back(at: _Fleet, lease: _Lease, now_s: float) -> None:
    """Take back all that a lease still counts for."""
    load = lease.life.load
    lease.life.load = replace(
        load,
        in_flight=max(0, load.in_flight - 1),
        prefill_tokens=max(0, load.prefill_tokens - lease.prefill_tokens),
        locked_tokens=max(0, load.locked_tokens - lease.locked_tokens),
    )
    branch = at.branches.get(lease.branch, now_s)
    if branch is not None and branch.in_flight > 0:
        at.branches.put(branch.id, replace(branch, in_flight=branch.in_flight - 1), now_s, None)


def _sweep(at: _Fleet, now_s: float) -> None:
    """Give back the leases whose time is up, oldest first."""
    now_ms = _ms(now_s)
    if now_ms < at.due_ms:
        return
    due = sorted((lease.expires_ms, name) for name, lease in at.leases.items() if lease.expires_ms <= now_ms)
    for _, name in due[:SWEEP_MAX]:
        _give_back(at, at.leases.pop(name), now_s)
    at.due_ms = min((lease.expires_ms for lease in at.leases.values()), default=_NEVER_MS)


def _ms(now_s: float) -> int:
    """Whole milliseconds, as leases and reports are timed."""
    return int(now_s * 1000)


def _until_ms(now_s: float, ttl_s: float) -> int:
    return _ms(now_s) + max(1, round(ttl_s * 1000))
