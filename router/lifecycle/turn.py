"""One turn through its life: fetch, decide, commit, stream, learn, settle.

Rules kept here:

- *What was acquired is always settled*, on every path: after a clean end, an error, a client that left, a cancellation.
  Settling runs as a task of its own that cancellation does not reach, and `drained` waits for all of them.
- *Two round trips* to the store before the first byte goes upstream: `fetch` and `acquire`. Only when the world moved
  between them (another router bound the branch, took the place) are they repeated, with growing tolerance; the last
  time the turn asks for a branch of its own, which no rival can take.
- *A turn is tried elsewhere only while that is safe*: nobody listened, the connection broke before a byte of a
  response, or
  the replica said it is full (503). Never twice on one replica, at most `retries` times, never after the head went out.
- *Without the store* turns still flow: placed by rendezvous hash of session or prompt root, alike on every router.
- *The client leaving is not an error of the replica*, and after the terminal event not an error at all (Codex closes
  its
  connection right after `response.completed`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from router.domain.decision import Placed, Reason, Refused
from router.domain.errors import (
    NotPlaced,
    StoreError,
    UpstreamBroken,
    UpstreamError,
    UpstreamSilent,
    UpstreamUnreachable,
)
from router.domain.outcome import End, Outcome
from router.domain.replica import Beliefs, Fleet
from router.domain.session import Binding
from router.domain.shared import Acquired, Claim, Settlement, View
from router.domain.turn import Facts, Turn
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.leases import Leases
from router.lifecycle.recent import Recent, Record
from router.placement.cost import Rates, Tuning, branch_weight, rates_of
from router.placement.decide import decide, turn_of
from router.placement.learn import learn
from router.placement.lineage import Lineage, apart, ask_for, heads_of, kept_tips, trace
from router.ports import BodyReader, Clock, Downstream, Exchange, ForwardRequest, ResponseHead, Store, Upstream
from router.telemetry.events import Observer, TurnFinished, TurnStarted

__all__ = ["Limits", "Turns"]

log = logging.getLogger("roost.turn")

WAITING_TOKENS_MIN: Final = 1024
"""Shorter prefills are not counted as waiting: they last milliseconds, and ending the wait costs a store call."""
BUSY_STATUS: Final = 503
"""What SGLang answers when its queue is full (srt/managers/scheduler.py `_abort_on_queued_limit`)."""

ReaderFor = Callable[[Facts, ResponseHead], BodyReader]
Label = Callable[[Placed, Turn], Sequence[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How hard a turn tries."""

    attempts: int = 8
    """Decisions made anew because the world moved; the last heeds neither rivals nor how busy its replica is."""
    retries: int = 2
    """Further replicas tried when one fails before its head."""
    tips_kept: int = 16
    branch_ttl_s: float = 21_600.0


@dataclass(slots=True)
class _Held:
    """A place that a turn holds, and what was believed when it got it."""

    lease: str
    fleet: FleetRuntime
    snapshot: Fleet
    rates: Rates
    record: Record
    since_s: float
    """Monotonic time of the commit."""


@dataclass(slots=True)
class _Passage:
    """A response under way to the client."""

    reader: BodyReader
    first_output_s: float | None = None
    bytes_sent: int = 0
    status: int | None = None


@dataclass(frozen=True, slots=True)
class _Client:
    """Who the turn is served to."""

    down: Downstream
    label: Label
    reading: Callable[[BodyReader], None]


@dataclass(slots=True)
class _Attempts:
    """What a turn has tried so far."""

    tried: dict[str, Literal["busy", "gone"]] = field(default_factory=dict)
    count: int = 0


class Turns:
    """Serves turns of all fleets."""

    def __init__(
        self,
        store: Store,
        upstream: Upstream,
        clock: Clock,
        leases: Leases,
        recent: Recent,
        observer: Observer,
        reader_for: ReaderFor,
        new_id: Callable[[], str],
        tuning: Tuning,
        limits: Limits,
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._clock = clock
        self._leases = leases
        self._recent = recent
        self._observer = observer
        self._reader_for = reader_for
        self._new_id = new_id
        self._tuning = tuning
        self._limits = limits
        self._sequence = 0
        self._again: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By fleet: held while a turn that lost a race is decided anew."""
        self._settling: set[asyncio.Task[None]] = set()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def serve(
        self,
        fleet: FleetRuntime,
        facts: Facts,
        forward: ForwardRequest,
        down: Downstream,
        label: Label,
        reading: Callable[[BodyReader], None],
    ) -> None:
        """Serve one turn. `label` gives the headers that explain the placement; `reading` is told of the response's
        reader.

        Raises NotPlaced and UpstreamError; when `down.started` by then, the response broke midway.
        """
        self._under_way += 1
        self._idle.clear()
        try:
            attempts = _Attempts()
            held = await self._place(fleet, facts, self._new_id(), attempts, self._clock.monotonic_s())
            client = _Client(down, label, reading)
            while (retry := await self._attempt(held, facts, forward, client, attempts)) is not None:
                held = retry
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def idle(self, patience_s: float) -> int:
        """Wait until no turn is under way, at most `patience_s`; returns how many still are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        return self._under_way

    async def drained(self) -> None:
        """Wait until everything acquired is settled."""
        while self._settling:
            await asyncio.wait(self._settling)

    # --- fetch, decide, commit ----------------------------------------------------------------------------------------

    async def _place(
        self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: _Attempts, began_s: float
    ) -> _Held:
        """Get the turn a place. Raises NotPlaced."""
        attempts.count += 1
        self._sequence += 1
        sequence = self._sequence
        for attempt in range(self._limits.attempts):
            # Losers of a race go on one at a time: deciding anew all at once, they would but race again.
            async with self._again[fleet.name] if attempt else nullcontext():
                held = await self._round(fleet, facts, turn_id, attempts, sequence, attempt)
            if held is not None:
                return self._committed(held, began_s)
        raise NotPlaced(f"fleet {fleet.name} kept changing while the turn was placed")

    async def _round(
        self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: _Attempts, sequence: int, attempt: int
    ) -> _Held | None:
        """Fetch, decide, claim. None where the world moved in between; a blind place where the store is away."""
        last = attempt + 1 == self._limits.attempts
        try:
            view = await self._store.fetch(fleet.name, ask_for(facts))
            if view.membership_version != fleet.version:
                await fleet.refresh()
            held = self._decide(fleet, facts, view, turn_id, attempts, sequence, last=last)
            held.record.store_calls = 2 * (attempt + 1)
            acquired = await self._acquire(held, self._claim(held, view, facts, slack=None if last else attempt // 2))
        except StoreError:
            return self._decide_blind(fleet, facts, turn_id, attempts, sequence)
        return held if acquired else None

    async def _acquire(self, held: _Held, claim: Claim) -> bool:
        """Claim the place. A call that was cut short may still have been carried out, so what it asked for is given
        back.
        """
        try:
            acquired = isinstance(await self._store.acquire(held.fleet.name, claim), Acquired)
        except (StoreError, asyncio.CancelledError):
            undone = Settlement(claim.lease, claim.replica, claim.incarnation, claim.branch)
            _ = self._background(self._quietly(self._store.settle(held.fleet.name, undone)))
            raise
        if acquired:
            self._leases.add(held.fleet.name, held.lease)
        return acquired

    def _decide(
        self,
        fleet: FleetRuntime,
        facts: Facts,
        view: View,
        turn_id: str,
        attempts: _Attempts,
        sequence: int,
        *,
        last: bool,
    ) -> _Held:
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
        )
        if isinstance(decision, Refused):
            raise NotPlaced(decision.why, decision.retry_after_s)
        return self._hold(fleet, snapshot, rates, facts, lineage, turn, decision, attempts, blind=False)

    def _decide_blind(
        self, fleet: FleetRuntime, facts: Facts, turn_id: str, attempts: _Attempts, sequence: int
    ) -> _Held:
        """Place without the store: by hash of the session, or of the first message after the system prompt."""
        nothing = View(self._clock.now_s(), fleet.version, loads={}, incarnations={}, beliefs={})
        snapshot = fleet.snapshot(nothing, blind=True)
        lineage = trace(facts, nothing, turn_id)
        if facts.session is None and facts.chain:
            root = facts.chain[min(facts.head, len(facts.chain) - 1)].hash
            lineage = replace(lineage, session=root)
        rates = rates_of(snapshot)
        turn = turn_of(turn_id, facts, lineage, rates, self._tuning, sequence)
        decision = decide(turn, lineage, snapshot, "rendezvous", self._tuning, tried=attempts.tried)
        if isinstance(decision, Refused):
            raise NotPlaced(decision.why, decision.retry_after_s)
        return self._hold(fleet, snapshot, rates, facts, lineage, turn, decision, attempts, blind=True)

    def _hold(
        self,
        fleet: FleetRuntime,
        snapshot: Fleet,
        rates: Rates,
        facts: Facts,
        lineage: Lineage,
        turn: Turn,
        placed: Placed,
        attempts: _Attempts,
        *,
        blind: bool,
    ) -> _Held:
        record = Record(
            at_s=snapshot.now_s,
            fleet=fleet.name,
            policy=fleet.spec.policy,
            facts=facts,
            lineage=lineage,
            turn=turn,
            placed=placed,
            attempt=attempts.count,
            store_calls=0,
            place_s=0.0,
            blind=blind,
        )
        return _Held(self._new_id(), fleet, snapshot, rates, record, 0.0)

    def _claim(self, held: _Held, view: View, facts: Facts, slack: int | None) -> Claim:
        record = held.record
        placed, lineage, turn = record.placed, record.lineage, record.turn
        known = lineage.known
        chosen = held.snapshot.get(placed.replica)
        checked = placed.reason not in (Reason.HOME, Reason.STORED) and slack is not None
        observed = chosen.load.in_flight if checked and chosen is not None else None
        waiting = placed.prefill_tokens if placed.prefill_tokens >= WAITING_TOKENS_MIN else 0
        tip = lineage.tip if lineage.keeps_tip else None
        homeless = _session_home(facts, view, lineage, held.snapshot) is None
        sticky = record.policy == "session_sticky" and facts.session is not None and homeless
        return Claim(
            lease=held.lease,
            replica=placed.replica,
            incarnation=placed.incarnation,
            prefill_tokens=waiting,
            locked_tokens=turn.prompt_tokens + turn.output_tokens,
            branch=lineage.branch,
            session=lineage.session,
            version=known.version if known is not None else None,
            home=placed.binding,
            tip=tip,
            tips=kept_tips(known, tip, self._limits.tips_kept),
            weight=branch_weight(turn.prompt_tokens),
            text_bytes=lineage.tip.text_bytes if lineage.tip is not None else 0,
            crowd_half_life_s=self._tuning.crowd_half_life_s,
            observed_in_flight=observed,
            slack=slack or 0,
            head=ask_for(facts).head,
            heads_of=heads_of(facts),
            session_home=placed.binding if sticky else None,
            branch_ttl_s=self._limits.branch_ttl_s,
            lease_ttl_s=self._leases.ttl_s,
        )

    def _committed(self, held: _Held, began_s: float) -> _Held:
        held.since_s = self._clock.monotonic_s()
        held.record.place_s = held.since_s - began_s
        self._recent.add(held.record)
        placed = held.record.placed
        self._observer.emit(TurnStarted(held.record.turn.id, held.fleet.name, placed.replica))
        return held

    # --- stream -------------------------------------------------------------------------------------------------------

    async def _attempt(
        self,
        held: _Held,
        facts: Facts,
        forward: ForwardRequest,
        client: _Client,
        attempts: _Attempts,
    ) -> _Held | None:
        """Send the turn where it was placed. Returns the place to try next where that is safe, else None when done."""
        passage = _Passage(_NO_READER)
        end = End.UNREACHED
        exchange: Exchange | None = None
        next_place: _Held | None = None
        try:
            try:
                exchange = await self._upstream.send(held.record.placed.url, forward)
            except UpstreamError as error:
                next_place = await self._after_failure(held, facts, attempts, error)
                if next_place is None:
                    raise
                return next_place
            end = End.UPSTREAM_ERROR
            passage.status = exchange.head.status
            if exchange.head.status == BUSY_STATUS:
                next_place = await self._elsewhere(held, facts, attempts, "busy")
                if next_place is not None:
                    return next_place
            end = End.UPSTREAM_BROKEN
            await self._relay(held, facts, exchange, passage, client)
            failed = exchange.head.status >= 400 or passage.reader.error is not None
            end = End.UPSTREAM_ERROR if failed else End.COMPLETE
            return None
        except asyncio.CancelledError:
            end = End.COMPLETE if passage.reader.terminal else End.CLIENT_GONE
            raise
        finally:
            if exchange is not None:
                exchange.abort()
            settling = self._settle(held, facts, passage, end)
            if next_place is None:  # else no await may come before the next place is in the caller's hands
                await asyncio.shield(settling)

    async def _relay(
        self,
        held: _Held,
        facts: Facts,
        exchange: Exchange,
        passage: _Passage,
        client: _Client,
    ) -> None:
        down = client.down
        passage.reader = self._reader_for(facts, exchange.head)
        client.reading(passage.reader)
        down.start(exchange.head, client.label(held.record.placed, held.record.turn))
        down.bind(exchange)
        await exchange.relay(self._receiver(held, passage, down))
        passage.reader.finish()
        down.end()

    def _receiver(self, held: _Held, passage: _Passage, down: Downstream) -> Callable[[bytes], None]:
        """What takes the body in, one call per read: no task wakes up for a chunk."""
        reader, fleet, clock = passage.reader, held.fleet, self._clock
        replica = held.record.placed.replica

        def receive(data: bytes) -> None:
            down.write(data)
            reader.feed(data)
            passage.bytes_sent += len(data)
            fleet.bytes_came(replica)
            if passage.first_output_s is None and reader.first_output:
                passage.first_output_s = clock.monotonic_s()
                self._first_output(held)

        return receive

    def _first_output(self, held: _Held) -> None:
        if held.record.placed.prefill_tokens >= WAITING_TOKENS_MIN and not held.record.blind:
            _ = self._background(self._quietly(self._store.progress(held.fleet.name, held.lease)))

    async def _after_failure(
        self, held: _Held, facts: Facts, attempts: _Attempts, error: UpstreamError
    ) -> _Held | None:
        """A place to try next after the replica failed before its head, or None."""
        if isinstance(error, UpstreamUnreachable):
            held.fleet.refused_connection(held.record.placed.replica)
        elif isinstance(error, UpstreamSilent) or (isinstance(error, UpstreamBroken) and error.answered):
            return None
        return await self._elsewhere(held, facts, attempts, "gone")

    async def _elsewhere(
        self, held: _Held, facts: Facts, attempts: _Attempts, why: Literal["busy", "gone"]
    ) -> _Held | None:
        attempts.tried[held.record.placed.replica] = why
        if attempts.count > self._limits.retries:
            return None
        try:
            return await self._place(held.fleet, facts, held.record.turn.id, attempts, self._clock.monotonic_s())
        except NotPlaced:
            return None

    # --- learn, settle ------------------------------------------------------------------------------------------------

    def _settle(self, held: _Held, facts: Facts, passage: _Passage, end: End) -> asyncio.Task[None]:
        """Tell what came true, and give back what was held as a task that cancellation does not reach."""
        record, placed = held.record, held.record.placed
        reader = passage.reader
        now_s = self._clock.monotonic_s()
        first_s = passage.first_output_s
        outcome = Outcome(
            end=end,
            status=passage.status,
            usage=reader.usage,
            ttft_s=None if first_s is None else first_s - held.since_s,
            duration_s=now_s - held.since_s,
            output_events=reader.output_events,
            response_bytes=passage.bytes_sent,
            response_id=reader.response_id,
            streamed=facts.stream,
        )
        record.outcome = outcome
        usage = outcome.usage
        self._observer.emit(
            TurnFinished(
                turn=record.turn.id,
                fleet=held.fleet.name,
                replica=placed.replica,
                dialect=facts.dialect.value,
                policy=record.policy,
                reason=placed.reason,
                session=record.turn.session,
                session_source=facts.session_source,
                branch=record.lineage.branch,
                outcome=outcome,
                prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else record.turn.prompt_tokens,
                predicted_cached_tokens=placed.cached_tokens,
                place_s=record.place_s,
                attempt=record.attempt,
                blind=record.blind,
            )
        )
        return self._background(self._release(held, facts, outcome))

    async def _release(self, held: _Held, facts: Facts, outcome: Outcome) -> None:
        record, placed = held.record, held.record.placed
        if record.blind:
            return
        self._leases.discard(held.fleet.name, held.lease)
        replica = held.snapshot.get(placed.replica)
        beliefs: Beliefs | None = None
        tokens = prompt_tokens = admitted = 0
        if replica is not None:
            text_bytes = record.lineage.tip.text_bytes if record.lineage.tip is not None else 0
            learned = learn(record.turn, text_bytes, placed, replica, held.rates, outcome)
            beliefs, tokens = learned.beliefs, learned.tokens
            prompt_tokens, admitted = learned.prompt_tokens, learned.admitted_tokens
        settlement = Settlement(
            lease=held.lease,
            replica=placed.replica,
            incarnation=placed.incarnation,
            branch=record.lineage.branch,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            admitted_tokens=admitted,
            beliefs=beliefs,
            response_id=outcome.response_id if facts.stores_response else None,
            branch_ttl_s=self._limits.branch_ttl_s,
        )
        await self._quietly(self._store.settle(held.fleet.name, settlement))

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    async def _quietly(self, call: Coroutine[Any, Any, None]) -> None:
        """A store call whose failure costs no turn: what it would have released expires with its lease."""
        try:
            await call
        except StoreError as error:
            log.debug("not settled in the store, its lease will expire: %s", error)


def _session_home(facts: Facts, view: View, lineage: Lineage, snapshot: Fleet) -> Binding | None:
    """Where the session is bound, if that life still lives; a keyless session's home is its branch's."""
    bound = view.session if facts.session is not None else lineage.known
    home = bound.home if bound is not None else None
    if home is None:
        return None
    replica = snapshot.get(home.replica)
    return home if replica is not None and replica.healthy and replica.incarnation == home.incarnation else None


class _NoReader:
    """Stands for a response that never came."""

    first_output = False
    output_events = 0
    terminal = False
    error: str | None = None
    response_id: str | None = None
    mid_event = False
    next_sequence: int | None = None

    def __init__(self) -> None:
        self.usage = Outcome(End.UNREACHED).usage

    def feed(self, data: bytes) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


_NO_READER: Final = _NoReader()
