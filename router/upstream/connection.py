"""One connection to a replica, and the exchange under way on it.

A connection is in one of three states, and one lazily moved timer serves them all:

    state      who holds it     deadline                                      bytes or EOF mean
    idle       the pool         `keepalive_s` after the last response         drop it
    waiting    an exchange      `head_s` after the request was written        the head, or broken
    relaying   an exchange      `idle_s` after the last byte, none if paused  payload, the end, or broken

The payload of each read is handed to the receiver inside `data_received`: no task wakes up for a chunk. Payload that
comes before `relay` is kept, and reading pauses at the second such read, so that what is kept is bounded by two reads.

The deadline moves with every read, but the loop's timer does not: it fires at an old deadline, looks, and is set anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import cast

from router.domain.errors import UpstreamBroken, UpstreamSilent
from router.ports import ResponseHead
from router.upstream.response import ResponseReader

__all__ = ["Connection", "LiveExchange", "UpstreamLimits"]

_STALE_WINDOW_S = 1.0
"""A reused connection that dies this soon after a request, unanswered, was most likely closed before the request came.
Later the replica may have died of the request itself: that is for the caller to see."""

_SPLIT_BODY_BYTES = 65_536
"""Bodies up to this size are joined with their head into one write; larger ones are not copied."""


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Patience with replicas. There is no limit on the whole: a turn may stream for hours."""

    connect_s: float = 5.0
    head_s: float = 900.0
    """From the request to the response's head: queueing, prefill, and without streaming the whole generation."""
    idle_s: float = 300.0
    """Between two reads of the body; does not run while the client's slowness holds reading back."""
    keepalive_s: float = 4.0
    """An idle connection is closed after this: SGLang closes after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE)."""
    idle_connections_max: int = 256
    """Idle connections kept per replica."""
    head_max_bytes: int = 65_536


class LiveExchange:
    """`router.ports.Exchange` over a `Connection`."""

    __slots__ = ("_connection", "_error", "_head", "_loop", "_pending", "_receive", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self._loop = loop
        self._connection: Connection | None = connection
        self._head: ResponseHead | None = None
        self._pending: list[bytes] = []
        self._receive: Callable[[bytes], None] | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def head(self) -> ResponseHead:
        """The response's head. Known once `router.ports.Upstream.send` has returned this exchange."""
        assert self._head is not None
        return self._head

    async def relay(self, receive: Callable[[bytes], None]) -> None:
        """See `router.ports.Exchange.relay`. What `receive` raises aborts the exchange and is raised here."""
        pending = self._pending
        if pending:
            self._pending = []
            try:
                receive(pending[0] if len(pending) == 1 else b"".join(pending))
            except BaseException:
                self.abort()
                raise
        if self._error is not None:
            raise self._error
        if self._connection is None:
            return
        self._receive = receive
        self._connection.release_hold()
        await self.wait()

    def pause(self) -> None:
        """See `router.ports.Exchange.pause`. Idempotent."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """See `router.ports.Exchange.resume`. Idempotent."""
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """See `router.ports.Exchange.abort`. A `relay` under way elsewhere raises `UpstreamBroken`."""
        if self._connection is not None:
            self._connection.fail(UpstreamBroken("aborted by the router"))

    # For the connection.

    async def wait(self) -> None:
        """Wait for the head or for the end; cancellation aborts."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    @property
    def announced(self) -> bool:
        """Whether the head has come."""
        return self._head is not None

    def announce(self, head: ResponseHead) -> None:
        """The head has come."""
        self._head = head
        self._wake(None)

    def deliver(self, payload: bytes) -> bool:
        """Hand over or keep; False where it was kept."""
        if self._receive is None:
            self._pending.append(payload)
            return False
        self._receive(payload)
        return True

    def detach(self, error: BaseException | None) -> None:
        """The connection is done with this exchange: cleanly, or for `error`."""
        self._connection = None
        self._receive = None
        self._error = error
        self._wake(error)

    def _wake(self, error: BaseException | None) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


class Connection(asyncio.Protocol):
    """A keep-alive connection to a replica; at most one exchange at a time."""

    __slots__ = (
        "_deadline",
        "_exchange",
        "_held",
        "_limits",
        "_loop",
        "_on_idle",
        "_on_lost",
        "_paused",
        "_reader",
        "_reading",
        "_sent_at",
        "_timer",
        "_timer_at",
        "_transport",
        "stale",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: UpstreamLimits,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        """`on_idle`: a response ended and the connection may serve again; `on_lost`: it never will."""
        self._loop = loop
        self._limits = limits
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._reader = ResponseReader(limits.head_max_bytes)
        self._transport: asyncio.Transport | None = None
        self._exchange: LiveExchange | None = None
        self._deadline = inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._sent_at = 0.0
        self._reading = True
        self._held = self._paused = False
        self.stale = False
        """Died unanswered so soon after being reused that the replica must have closed it before."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection (it may be closing)."""
        return self._transport is not None

    @property
    def usable(self) -> bool:
        """Whether an idle connection may still be given a request."""
        return self._transport is not None and not self._transport.is_closing() and self._loop.time() < self._deadline

    async def request(self, method: str, head: bytes, body: bytes) -> LiveExchange:
        """Send a request and wait for the response's head.

        Raises `UpstreamBroken` or `UpstreamSilent`; cancellation aborts.
        """
        transport = self._transport
        if transport is None:
            raise UpstreamBroken("closed the connection", answered=False)
        exchange = self._exchange = LiveExchange(self._loop, self)
        self._reader.begin(method)
        self._sent_at = self._loop.time()
        self._move_deadline(self._sent_at + self._limits.head_s)
        if len(body) > _SPLIT_BODY_BYTES:
            transport.writelines((head, body))
        else:
            transport.write(head + body)
        await exchange.wait()
        return exchange

    def close(self) -> None:
        """Close at once, whatever is under way."""
        if self._exchange is not None:
            self.fail(UpstreamBroken("aborted by the router"))
        elif self._transport is not None:
            self._transport.abort()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            _tune(sock)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. The hot path: one call per read of a stream."""
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        reader = self._reader
        waiting = not exchange.announced
        payload = reader.feed(data)
        if waiting and reader.head is not None:
            exchange.announce(reader.head)
            self._move_deadline(self._loop.time() + self._limits.idle_s)
        if payload:
            try:
                taken = exchange.deliver(payload)
            except Exception as error:  # noqa: BLE001  # raised again where `relay` is awaited
                self.fail(error)
                return
            if not (taken or waiting):
                self._held = True
                self._apply_pauses()
        if self._exchange is None:
            return
        if reader.complete:
            self._finish(exchange)
        elif reader.broken is not None:
            self.fail(UpstreamBroken(reader.broken))
        elif self._reading and not waiting:
            self._deadline = self._loop.time() + self._limits.idle_s

    def eof_received(self) -> None:
        """See `asyncio.Protocol`; the transport closes itself afterwards."""
        exchange = self._exchange
        if exchange is None:
            return
        self._reader.eof()
        if self._reader.complete:
            self._finish(exchange)
        else:
            self._lose("")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._exchange is not None:
            self._lose(f"connection lost: {exc or 'closed'}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reader.release()
        self._transport = None
        self._on_lost(self)

    # The exchange's side.

    def fail(self, error: BaseException) -> None:
        """End the exchange with `error` and the connection with it, so that the engine stops generating."""
        exchange = self._exchange
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.detach(error)

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        self._paused = True
        self._apply_pauses()

    def resume(self) -> None:
        """The client takes bytes again."""
        self._paused = False
        self._apply_pauses()

    def release_hold(self) -> None:
        """There is a receiver now."""
        self._held = False
        self._apply_pauses()

    def _apply_pauses(self) -> None:
        reading = not (self._paused or self._held)
        if reading == self._reading or self._transport is None or self._transport.is_closing():
            return
        self._reading = reading
        if reading:
            self._move_deadline(self._loop.time() + self._limits.idle_s)
            self._transport.resume_reading()
        else:
            self._deadline = inf
            self._transport.pause_reading()

    def _finish(self, exchange: LiveExchange) -> None:
        """The response is complete: free the connection for the next, or close it."""
        self._exchange = None
        transport = self._transport
        if transport is not None:
            # A replica that answers before it has read the whole request cannot be given another.
            if self._reader.reusable and not transport.is_closing() and not transport.get_write_buffer_size():
                self._paused = self._held = False
                self._apply_pauses()
                self._move_deadline(self._loop.time() + self._limits.keepalive_s)
                self._on_idle(self)
            else:
                transport.abort()
        exchange.detach(None)

    def _lose(self, why: str) -> None:
        reader = self._reader
        self.stale = not reader.answered and self._loop.time() - self._sent_at < _STALE_WINDOW_S
        self.fail(UpstreamBroken(reader.broken or why, answered=reader.answered))

    # Time.

    def _move_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._timer is None or deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer(deadline)

    def _set_timer(self, at: float) -> None:
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:
            if self._deadline < inf:
                self._set_timer(self._deadline)
        elif self._exchange is None:
            self.close()
        elif self._reader.head is None:
            self.fail(UpstreamSilent(f"no response head within {self._limits.head_s:g} s"))
        else:
            self.fail(UpstreamSilent(f"no byte within {self._limits.idle_s:g} s"))


def _tune(sock: socket.socket) -> None:
    """No Nagle delay; probes that notice a vanished host, since a prefill may be silent for minutes."""
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
