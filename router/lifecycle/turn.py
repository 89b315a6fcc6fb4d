"""One turn through its life: placed, streamed, settled.

Rules kept here:

- *What was acquired is always settled*, on every path: after a clean end, an error, a client that left, a cancellation.
  Settling runs as a task of its own that cancellation does not reach, and `drained` waits for all of them.
- *A turn is tried elsewhere only while that is safe*: nobody listened, the connection broke before a byte of a
  response, the replica is lost (see `health`) and the client has seen nothing, or the replica said it is full, by its
  status or inside its stream (see `opening`). Never twice on one replica, at most `retries` times, never after the head
  went out; and not at all where it continues a stored response.
- *A stream that ends without its terminal event* passes as it came, cleanly if it came so, but counts as broken.
- *The client leaving is not an error of the replica*, and after the terminal event not an error at all (Codex closes
  its connection right after `response.completed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from router.domain.decision import Placed, Reason
from router.domain.errors import NotPlaced, UpstreamBroken, UpstreamError, UpstreamSilent, UpstreamUnreachable
from router.domain.outcome import End, Outcome, Usage
from router.domain.turn import Facts, Turn
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.heartbeat import Heartbeat
from router.lifecycle.leases import Leases
from router.lifecycle.opening import BUSY_STATUS, Opening, QueueFullError, may_refuse
from router.lifecycle.placing import Attempts, Limits, Placing
from router.lifecycle.recent import Recent
from router.lifecycle.remembered import Remembered
from router.lifecycle.returning import Returning
from router.lifecycle.settling import Held, Settling
from router.lifecycle.waiting import Waiting
from router.placement.cost import Tuning
from router.ports import BodyReader, Clock, Downstream, Exchange, ForwardRequest, ResponseHead, Store, Upstream
from router.telemetry.events import Observer

__all__ = ["Turns"]

OK_STATUS: Final = 200
TOO_MANY_STATUS: Final = 429

ReaderFor = Callable[[Facts, ResponseHead], BodyReader]
Label = Callable[[Placed, Turn], Sequence[tuple[bytes, bytes]]]


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
        self._upstream = upstream
        self._clock = clock
        self._reader_for = reader_for
        self._new_id = new_id
        self._retries = limits.retries
        self._refusal_s = limits.refusal_s
        self._keepalive_s = limits.keepalive_s
        self._remembered = Remembered()
        self._settling = Settling(store, leases, self._remembered, observer, limits.branch_ttl_s)
        self._returning = Returning(
            store, clock, leases, self._settling, self._remembered, new_id, limits.tips_kept, limits.branch_ttl_s
        )
        self._placing = Placing(
            store,
            clock,
            leases,
            self._settling,
            self._remembered,
            self._returning,
            recent,
            observer,
            new_id,
            tuning,
            limits,
        )
        self._waiting = Waiting(self._placing, clock, observer, limits.queue_max, limits.queue_s)
        self._under_way = 0

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
        try:
            attempts = Attempts()
            held = await self._waiting.place(fleet, facts, self._new_id(), attempts)
            client = _Client(down, label, reading)
            while (retry := await self._attempt(held, facts, forward, client, attempts)) is not None:
                held = retry
        finally:
            self._under_way -= 1

    async def run(self, fleets: Iterable[FleetRuntime]) -> None:
        """Tell the store of these fleets what it missed while it was away, until cancelled."""
        await self._returning.run(fleets)

    @property
    def owes(self) -> bool:
        """Whether the store still lacks what this router knows."""
        return self._returning.owes

    def store_changed(self, up: bool) -> None:
        """The store went away, or is back."""
        if up:
            self._returning.returned()

    def stopping(self) -> None:
        """Let nobody wait for room any more."""
        self._waiting.close()

    @property
    def under_way(self) -> int:
        """How many turns are being served, or wait for room."""
        return self._under_way

    async def drained(self) -> None:
        """Wait until everything acquired is settled."""
        await self._settling.drained()

    async def _attempt(
        self,
        held: Held,
        facts: Facts,
        forward: ForwardRequest,
        client: _Client,
        attempts: Attempts,
    ) -> Held | None:
        """Send the turn where it was placed. Returns the place to try next where that is safe, else None when done."""
        passage = _Passage(_NO_READER)
        end = End.UNREACHED
        exchange: Exchange | None = None
        next_place: Held | None = None
        failure: UpstreamError | None = None
        watch, replica = held.fleet.watch, held.record.placed.replica
        seen = watch.turn_began(replica)
        try:
            try:
                async with watch.waiting(replica):
                    exchange = await self._upstream.send(held.record.placed.url, forward)
            except UpstreamError as error:
                failure = error
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
            try:
                await self._relay(held, facts, forward, exchange, passage, client, attempts)
            except QueueFullError:
                end = End.UPSTREAM_ERROR
                next_place = await self._elsewhere(held, facts, attempts, "busy")
                if next_place is None:
                    raise NotPlaced("every replica that could take the turn is full") from None
                return next_place
            except UpstreamError as error:
                failure = error
                next_place = None if client.down.started else await self._after_failure(held, facts, attempts, error)
                if next_place is None:
                    raise
                return next_place
            end = _end_of(exchange.head.status, passage.reader)
            return None
        except asyncio.CancelledError:
            end = End.COMPLETE if passage.reader.terminal else End.CLIENT_GONE
            raise
        finally:
            if exchange is not None:
                exchange.abort()
            status = passage.reader.error_code or passage.status
            watch.turn_ended(replica, seen, end, status, failure, held.since_s)
            settling = self._settling.settle(held, facts, self._outcome(held, facts, passage, end))
            # No await may come before a next place is in the caller's hands.
            if next_place is None:
                await asyncio.shield(settling)

    async def _relay(
        self,
        held: Held,
        facts: Facts,
        forward: ForwardRequest,
        exchange: Exchange,
        passage: _Passage,
        client: _Client,
        attempts: Attempts,
    ) -> None:
        down, head = client.down, exchange.head
        passage.reader = self._reader_for(facts, head)
        client.reading(passage.reader)
        placed, turn = held.record.placed, held.record.turn

        def begin() -> None:
            down.start(head, client.label(placed, turn))
            forward.forget_body()  # no other replica can be tried any more

        opening = Opening(down, exchange, passage.reader, begin)
        if self._refusal_s > 0 and may_refuse(facts, head) and self._another(held, attempts):
            opening.wait(self._refusal_s)
        else:
            opening.open()
        beat = None
        if self._keepalive_s > 0 and head.status == OK_STATUS and head.content_length is None:
            beat = Heartbeat(down, passage.reader, self._keepalive_s)
        try:
            async with held.fleet.watch.waiting(placed.replica):
                await exchange.relay(self._receiver(held, passage, down, opening, beat))
            passage.reader.finish()
            opening.finish()
            down.end()
        finally:
            opening.forget()
            if beat is not None:
                beat.stop()

    def _another(self, held: Held, attempts: Attempts) -> bool:
        """Whether another replica could take the turn, were it refused."""
        left = (cost.replica for cost in held.record.placed.candidates if cost.replica not in attempts.tried)
        return attempts.count <= self._retries and any(each != held.record.placed.replica for each in left)

    def _receiver(
        self, held: Held, passage: _Passage, down: Downstream, opening: Opening, beat: Heartbeat | None
    ) -> Callable[[bytes], None]:
        """What takes the body in, one call per read: no task wakes up for a chunk."""
        reader, watch, clock = passage.reader, held.fleet.watch, self._clock
        replica = held.record.placed.replica
        seen = watch.of(replica)

        def receive(data: bytes) -> None:
            if opening.closed:
                reader.feed(data)
                opening.keep(data)
            else:
                down.write(data)
                reader.feed(data)
            if beat is not None:
                beat.wrote()
            passage.bytes_sent += len(data)
            watch.bytes_came(replica)
            if passage.first_output_s is None and reader.first_output:
                passage.first_output_s = clock.monotonic_s()
                watch.turn_spoke(replica, seen, held.since_s)
                self._settling.first_output(held)

        return receive

    async def _after_failure(self, held: Held, facts: Facts, attempts: Attempts, error: UpstreamError) -> Held | None:
        """A place to try next after the replica failed before its head, or None."""
        if isinstance(error, UpstreamUnreachable):
            held.fleet.watch.unreachable(held.record.placed.replica, error)
        elif isinstance(error, UpstreamSilent) or (isinstance(error, UpstreamBroken) and error.answered):
            return None
        return await self._elsewhere(held, facts, attempts, "gone")

    async def _elsewhere(
        self, held: Held, facts: Facts, attempts: Attempts, why: Literal["busy", "gone"]
    ) -> Held | None:
        attempts.tried[held.record.placed.replica] = why
        # A stored response's holder alone has it: the others would say there is no such response.
        if attempts.count > self._retries or held.record.placed.reason is Reason.STORED:
            return None
        try:
            return await self._placing.place(
                held.fleet, facts, held.record.turn.id, attempts, self._clock.monotonic_s()
            )
        except NotPlaced:
            return None

    def _outcome(self, held: Held, facts: Facts, passage: _Passage, end: End) -> Outcome:
        reader, first_s = passage.reader, passage.first_output_s
        return Outcome(
            end=end,
            status=passage.status,
            usage=reader.usage,
            ttft_s=None if first_s is None else first_s - held.since_s,
            duration_s=self._clock.monotonic_s() - held.since_s,
            output_events=reader.output_events,
            response_bytes=passage.bytes_sent,
            response_id=reader.response_id,
            streamed=facts.stream,
        )


def _end_of(status: int, reader: BodyReader) -> End:
    """How a response ended that its framing says is whole."""
    if 400 <= status < 500 and status != TOO_MANY_STATUS:
        return End.REJECTED
    if status >= 400 or reader.error is not None:
        return End.UPSTREAM_ERROR
    return End.COMPLETE if reader.terminal else End.UPSTREAM_BROKEN


class _NoReader:
    """Stands for a response that never came."""

    first_output = False
    output_events = 0
    terminal = False
    error: str | None = None
    error_code: int | None = None
    response_id: str | None = None
    mid_event = between_events = False
    next_sequence: int | None = None

    usage = Usage()

    def feed(self, data: bytes) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


_NO_READER: Final = _NoReader()
