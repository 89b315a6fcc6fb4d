"""Where a turn goes: fetch, decide, commit.

Two round trips to the store, `fetch` and `acquire`. Only when the world moved between them (another turn bound the
branch or took the place) are they repeated, one turn at a time and with growing tolerance; the last time the turn asks
for a branch of its own, which no rival can take.

Without the store turns still flow: known branches stay where this router last saw them, others go by rendezvous hash of
session or prompt root, alike on every router. A turn whose claim got no answer keeps the place it was given: the store
may have carried the claim out. And a store that knows nothing of a prompt which this router has placed has forgotten
it: the branch stays at its home, and is bound there anew.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

from router.domain.decision import Placed, Reason, Refused
from router.domain.errors import NotPlaced, StoreError, StoreUnavailable
from router.domain.replica import Fleet
from router.domain.session import Binding
from router.domain.shared import Acquired, Ask, Claim, View, lease_of
from router.domain.turn import Facts, Turn
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.leases import Leases
from router.lifecycle.recent import Recent, Record
from router.lifecycle.remembered import Remembered
from router.lifecycle.returning import Returning
from router.lifecycle.settling import WAITING_TOKENS_MIN, Held, Settling
from router.placement.admission import Occupancy, admits, begins_session, live_share, need_of, occupancy
from router.placement.cost import Rates, Tuning, branch_weight, rates_of
from router.placement.decide import decide, turn_of
from router.placement.filters import eligible, is_home
from router.placement.lineage import Lineage, apart, ask_for, head_of, heads_of, kept_tips, trace
from router.placement.scope import record_key
from router.ports import Clock, Store
from router.telemetry.events import Observer, TurnStarted

__all__ = ["Attempts", "Limits", "NoRoomError", "Placing"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard a turn tries."""

    attempts: int = 16
    """Decisions made anew because the world moved; the last heeds neither rivals nor how busy its replica is."""
    retries: int = 2
    """Further replicas tried when one fails before its head."""
    refusal_s: float = 0.25
    """How long the head of a stream waits for a refusal inside it; see `opening`. 0: not at all."""
    keepalive_s: float = 0.0
    """Silence of a stream that is filled with a comment; see `heartbeat`. 0: none."""
    tips_kept: int = 7
    branch_ttl_s: float = 21_600.0
    queue_max: int = 256
    """New sessions that may wait for room in one fleet; see `waiting`."""
    queue_s: float = 30.0
    """How long one waits."""


@dataclass(slots=True)
class Attempts:
    """What a turn has tried so far."""

    tried: dict[str, Literal["busy", "gone"]] = field(default_factory=dict)
    count: int = 0
    patient: bool = False
    """Whether it may be asked to wait: before its first place, where its fleet has a limit of admission."""
    behind: bool = False
    """Whether others wait already."""
    waited_s: float = 0.0


class NoRoomError(Exception):
    """A patient turn begins a session for which there is no room, or for which others wait already."""

    def __init__(self, need_tokens: int, seen: Occupancy) -> None:
        super().__init__("no room for a new session")
        self.need_tokens = need_tokens
        self.seen = seen


class Placing:
    """Gets turns their places."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        leases: Leases,
        settling: Settling,
        remembered: Remembered,
        returning: Returning,
        recent: Recent,
        observer: Observer,
        new_id: Callable[[], str],
        tuning: Tuning,
        limits: Limits,
    ) -> None:
        self._store = store
        self._clock = clock
        self._leases = leases
        self._settling = settling
        self._remembered = remembered
        self._returning = returning
        self._recent = recent
        self._observer = observer
        self._new_id = new_id
        self._tuning = tuning
        self._limits = limits
        self._sequence = 0
        self._again: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By fleet: held while a turn that lost a race is decided anew."""
        self._arriving: defaultdict[str, int] = defaultdict(int)
        """By fleet: KV tokens of new sessions whose claims are under way, which no view shows yet."""

    async def place(self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: Attempts, began_s: float) -> Held:
        """Get the turn a place. Raises NotPlaced, and NoRoomError to a patient turn."""
        attempts.count += 1
        self._sequence += 1
        sequence = self._sequence
        for attempt in range(self._limits.attempts):
            # Losers of a race go on one at a time: deciding anew all at once, they would but race again.
            async with self._again[fleet.name] if attempt else nullcontext():
                held = await self._round(fleet, facts, turn_id, attempts, sequence, attempt)
            if held is not None:
                return self._committed(held, facts, began_s)
        raise NotPlaced(f"fleet {fleet.name} kept changing while the turn was placed")

    async def _round(
        self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: Attempts, sequence: int, attempt: int
    ) -> Held | None:
        """Fetch, decide, claim. None where the world moved in between; a blind place where the store is away."""
        last = attempt + 1 == self._limits.attempts
        try:
            ask = ask_for(facts)
            view = await self._fetch(fleet.name, ask)
            if view.membership_version != fleet.version:
                await fleet.refresh()
            if attempt == 0:  # a rival that made the claim stale has told the store something newer
                view = await self._reminded(fleet, ask, view)
            held = self._decide(fleet, facts, view, turn_id, attempts, sequence, last=last)
            held.record.store_calls = 2 * (attempt + 1)
            need = await self._room_needed(held, facts, view, attempts) if attempts.patient else 0
            self._arriving[fleet.name] += need
            try:
                held.claim = self._claim(held, view, facts, slack=None if last else attempt // 2)
                acquired = await self._acquire(held, held.claim)
            finally:
                self._arriving[fleet.name] -= need
        except StoreError:
            return self._decide_blind(fleet, facts, turn_id, attempts, sequence)
        return held if acquired else None

    async def _room_needed(self, held: Held, facts: Facts, view: View, attempts: Attempts) -> int:
        """KV tokens that a new session is about to take; 0 for a known one. Raises NoRoomError."""
        if not begins_session(facts, held.record.lineage, view):
            return 0
        need, seen = need_of(held.record.turn), occupancy(held.snapshot, self._tuning)
        arriving = self._arriving[held.fleet.name]
        seen = replace(seen, live_tokens=seen.live_tokens + arriving, idle=seen.idle and not arriving)
        if not attempts.behind and admits(need, seen, held.fleet.spec.admission):
            return need
        if facts.parent is not None:
            family = await self._store.fetch(held.fleet.name, Ask(record_key(facts.tenant, facts.parent)))
            if family.session is not None:
                return need
        raise NoRoomError(need, seen)

    async def _acquire(self, held: Held, claim: Claim) -> bool:
        """Claim the place."""
        try:
            return isinstance(await self._store.acquire(held.fleet.name, claim), Acquired)
        except StoreError:
            held.record.blind = True
            return True
        except asyncio.CancelledError:
            self._settling.undo(held.fleet.name, claim)
            raise

    async def _fetch(self, fleet: str, ask: Ask) -> View:
        """Ask the store; once more where it failed, since a stalled loop or a lost connection is no store that is away
        (one that hangs fails the second call at once).
        """
        try:
            return await self._store.fetch(fleet, ask)
        except StoreUnavailable:
            return await self._store.fetch(fleet, ask)

    async def _reminded(self, fleet: FleetRuntime, ask: Ask, view: View) -> View:
        """What the store knows, after it was told what this router alone knows of the prompt."""
        found = self._remembered.recall(fleet.name, ask)
        if found is None or (view.depth is not None and view.depth <= found.depth):
            return view
        entry = found.entry
        if view.branch is not None:
            if entry.written:
                return view  # the store has thinned out an end that is remembered here
            await self._returning.write(fleet, entry)
            return await self._store.fetch(fleet.name, ask)
        if entry.written:
            self._remembered.doubt()  # it was told, and has forgotten: perhaps all
        lives = any(is_home(replica, entry.claim.home) for replica in fleet.snapshot(view).replicas)
        return replace(view, branch=entry.branch(), depth=found.depth) if lives else view

    def _decide(
        self,
        fleet: FleetRuntime,
        facts: Facts,
        view: View,
        turn_id: str,
        attempts: Attempts,
        sequence: int,
        *,
        last: bool,
    ) -> Held:
        snapshot = fleet.snapshot(view)
        name = f"{turn_id}/{attempts.count}"  # a branch named by its turn is new at each replica it is tried on
        lineage = trace(facts, view, name)
        if last:
            lineage = apart(lineage, name)
        rates = rates_of(snapshot)
        turn = turn_of(turn_id, facts, lineage, rates, self._tuning, sequence)
        decision = decide(
            turn,
            lineage,
            snapshot,
            fleet.spec.policy,
            self._tuning,
            session_home=_session_home(facts, view, lineage, snapshot),
            only=view.response_replica,
            tried=attempts.tried,
            rates=rates,
        )
        if isinstance(decision, Refused):
            raise NotPlaced(decision.why, decision.retry_after_s)
        return self._hold(fleet, snapshot, rates, facts, lineage, turn, decision, attempts, blind=False)

    def _decide_blind(self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: Attempts, sequence: int) -> Held:
        """Place without the store: where this router last saw the branch, else by hash of the session, or of the first
        message after the system prompt.
        """
        ask = ask_for(facts)
        found = self._remembered.recall(fleet.name, ask)
        view = View(
            self._clock.now_s(),
            fleet.version,
            loads={},
            incarnations={},
            beliefs={},
            branch=found.entry.branch() if found is not None else None,
            depth=found.depth if found is not None else None,
            response_replica=self._remembered.holder(ask.response_id),
        )
        snapshot = fleet.snapshot(view, blind=True)
        lineage = trace(facts, view, f"{turn_id}/{attempts.count}")
        rates = rates_of(snapshot)
        turn = turn_of(turn_id, facts, lineage, rates, self._tuning, sequence)
        decision = decide(
            replace(turn, session=_root(facts, turn)),
            lineage,
            snapshot,
            "rendezvous",
            self._tuning,
            only=view.response_replica or _serving_home(lineage, snapshot, attempts),
            tried=attempts.tried,
            rates=rates,
        )
        if isinstance(decision, Refused):
            raise NotPlaced(decision.why, decision.retry_after_s)
        held = self._hold(fleet, snapshot, rates, facts, lineage, turn, decision, attempts, blind=True)
        held.claim = self._claim(held, view, facts, slack=None)
        return held

    def _hold(
        self,
        fleet: FleetRuntime,
        snapshot: Fleet,
        rates: Rates,
        facts: Facts,
        lineage: Lineage,
        turn: Turn,
        placed: Placed,
        attempts: Attempts,
        *,
        blind: bool,
    ) -> Held:
        record = Record(
            at_s=snapshot.now_s,
            fleet=fleet.name,
            policy=fleet.spec.policy,
            dialect=facts.dialect,
            session_source=facts.session_source,
            boundaries=len(facts.chain),
            lineage=lineage,
            turn=turn,
            placed=placed,
            attempt=attempts.count,
            store_calls=0,
            place_s=0.0,
            waited_s=attempts.waited_s,
            blind=blind,
        )
        return Held(self._new_id(), fleet, snapshot, rates, record, 0.0)

    def _claim(self, held: Held, view: View, facts: Facts, slack: int | None) -> Claim:
        record = held.record
        placed, lineage, turn = record.placed, record.lineage, record.turn
        known = lineage.known
        chosen = held.snapshot.get(placed.replica)
        # The one turn that a replica on probation may have: of two that want to be it, one is told to look again.
        on_trial = chosen is not None and chosen.probation and not chosen.load.in_flight
        checked = (on_trial or placed.reason not in (Reason.HOME, Reason.STORED)) and slack is not None
        observed = chosen.load.in_flight if checked and chosen is not None else None
        waiting = placed.prefill_tokens if placed.prefill_tokens >= WAITING_TOKENS_MIN else 0
        tip = lineage.tip if lineage.keeps_tip else None
        live_tokens, inherited_tokens = live_share(turn, lineage, placed.binding, named=facts.session is not None)
        sticky = (
            record.policy == "session_sticky"
            and facts.session is not None
            and _session_home(facts, view, lineage, held.snapshot) is None
        )
        return Claim(
            lease=held.lease,
            replica=placed.replica,
            incarnation=placed.incarnation,
            prefill_tokens=waiting,
            locked_tokens=placed.prefill_tokens + turn.output_tokens,
            branch=lineage.branch,
            session=lineage.session,
            version=known.version or None if known is not None else None,
            home=placed.binding,
            tip=tip,
            tips=kept_tips(lineage, self._limits.tips_kept),
            weight=branch_weight(turn.prompt_tokens),
            text_bytes=lineage.tip.text_bytes if lineage.tip is not None else 0,
            crowd_half_life_s=self._tuning.crowd_half_life_s,
            live_half_life_s=self._tuning.live_half_life_s,
            live_tokens=live_tokens,
            inherited_tokens=inherited_tokens,
            named=facts.session is not None,
            observed_in_flight=observed,
            slack=0 if on_trial else slack or 0,
            head=head_of(facts),
            heads_of=heads_of(facts),
            session_home=placed.binding if sticky else None,
            branch_ttl_s=self._limits.branch_ttl_s,
            lease_ttl_s=self._leases.ttl_s,
        )

    def _committed(self, held: Held, facts: Facts, began_s: float) -> Held:
        held.since_s = self._clock.monotonic_s()
        held.record.place_s = held.since_s - began_s
        self._recent.add(held.record)
        fleet, blind = held.fleet.name, held.record.blind
        if held.claim is not None:
            self._leases.add(fleet, lease_of(held.claim))
            chain = ask_for(facts).boundaries[1 if facts.session is None else 2 :] if blind else ()
            self._remembered.note(fleet, held.claim, held.since_s, written=not blind, chain=chain)
        self._observer.emit(TurnStarted(held.record.turn.id, fleet, held.record.placed.replica))
        return held


def _serving_home(lineage: Lineage, snapshot: Fleet, attempts: Attempts) -> Binding | None:
    """The branch's home, if it is among those that may have the turn."""
    home = lineage.known.home if lineage.known is not None else None
    offered = any(is_home(replica, home) for replica in eligible(snapshot, home, attempts.tried))
    return home if offered else None


def _root(facts: Facts, turn: Turn) -> str:
    """What all turns of a conversation share: its session, or the first message after the system prompt."""
    if facts.session is not None or not facts.chain:
        return turn.session
    return facts.chain.hashes[min(facts.head, len(facts.chain) - 1)]


def _session_home(facts: Facts, view: View, lineage: Lineage, snapshot: Fleet) -> Binding | None:
    """Where the session is bound, if that life still lives and serves; a keyless session's home is its branch's."""
    bound = view.session if facts.session is not None else lineage.known
    home = bound.home if bound is not None else None
    if home is None:
        return None
    replica = snapshot.get(home.replica)
    serves = replica is not None and (replica.healthy or replica.unseen) and not replica.ejected
    return home if serves and replica is not None and replica.incarnation == home.incarnation else None
