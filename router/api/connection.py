"""The client's side of the connection: aiohttp's parser, limits and keep-alive, and back-pressure for the relay.

What is added to aiohttp's `RequestHandler` (3.14.5 `web_protocol.py`):

- `pause_writing` / `resume_writing` reach the exchange that feeds this client, so that a slow client slows its replica
  down instead of filling memory; a client that takes nothing for `stall_s` is cut off;
- a reply under way (`router.api.downstream`) is never followed by another: whatever a handler raises or returns, an
  unfinished reply ends as an incomplete message;
- a body whose framing breaks fails at once for the handler that waits for it; aiohttp would let it wait for ever;
- what aiohttp's parser refuses is answered in JSON, with 431 for too large headers, and no excerpt of them is logged;
- a client that dribbles its head is answered with 408 and let go, one whose head does not end with 431 (aiohttp bounds
  a field and their number, which come to 16 MB); so many connections are taken and no more;
- nothing is read behind a request that offers another protocol, whose bytes might follow it;
- an answer that leaves some of its request unread says `Connection: close`; the rest is read and thrown away for a
  while, so that the client gets to see the answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from dataclasses import dataclass
from typing import Protocol, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from router.api.head_rules import path_of
from router.api.paths import error_dialect
from router.api.refusal import SERVER, Refusal, refusal
from router.domain.errors import HeadersTooLarge, MalformedRequest, RoostError, RouterBusy, TooSlow
from router.domain.turn import Dialect

__all__ = ["ClientConnection", "ClientLimits", "Flow", "Places"]

_LOG = logging.getLogger("roost.http")

_WRITE_HIGH_BYTES = 256 * 1024
"""Unsent bytes at which a client counts as slow: one full read from a replica. Streams of tokens never reach it."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a close by RST instead of FIN."""


class Flow(Protocol):
    """What can be told to wait: the reading side of an exchange."""

    def pause(self) -> None:
        """Read no more."""

    def resume(self) -> None:
        """Read on."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Patience with clients."""

    line_max_bytes: int = 65_536
    """Longest request target."""
    header_max_bytes: int = 65_536
    """Longest single header. Codex's turn metadata alone takes 1 kB and grows with its workspaces."""
    headers_max: int = 256
    head_max_bytes: int = 98_304
    """Of a head that is not whole yet. It is held for whoever connects: no key has been looked at by then."""
    head_s: float = 20.0
    """From the first byte of a connection's request to the end of its head. A head that follows another request has
    `keepalive_s` from that one's end."""
    keepalive_s: float = 75.0
    """An idle connection is closed after this."""
    linger_s: float = 30.0
    """How long the rest of an unwanted body is read and thrown away, so that the client gets to see the answer: many
    look only once they have sent everything."""
    connections_max: int = 8192
    """Open connections; further ones are told that the router is busy."""
    stall_s: float = 300.0
    """A client that takes no byte of its answer for this long is cut off."""


class Places:
    """So many connections at once."""

    def __init__(self, count: int) -> None:
        self._free = count

    def take(self) -> bool:
        """Whether there was one left; either way it is to be given back."""
        self._free -= 1
        return self._free >= 0

    def give(self) -> None:
        """A connection has gone."""
        self._free += 1


class ClientConnection(RequestHandler):
    """One client connection."""

    __slots__ = (
        "_flow",
        "_head_bytes",
        "_head_max_bytes",
        "_head_s",
        "_head_timer",
        "_last_body",
        "_linger_s",
        "_places",
        "_retiring",
        "_sent_off",
        "_stall",
        "_stall_s",
        "_switching",
        "reply_open",
    )

    def __init__(
        self, manager: web.Server, places: Places, *, loop: asyncio.AbstractEventLoop, limits: ClientLimits
    ) -> None:
        """`places`: of all connections of the listener."""
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=limits.keepalive_s,
            logger=_LOG,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for "no access log"
            max_line_size=limits.line_max_bytes,
            max_field_size=limits.header_max_bytes,
            max_headers=limits.headers_max,
            lingering_time=limits.linger_s,
            auto_decompress=False,
        )
        self._places = places
        self._flow: Flow | None = None
        self._head_bytes = 0
        """Read since the last request ended."""
        self._head_max_bytes = limits.head_max_bytes
        self._head_s = limits.head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._last_body: StreamReader | None = None
        self._linger_s = limits.linger_s
        self._retiring = False
        self._sent_off = False
        """What still comes is thrown away."""
        self._switching: StreamReader | None = None
        """The body of a request that offers another protocol: what comes behind it is not HTTP for certain."""
        self._stall: asyncio.TimerHandle | None = None
        self._stall_s = limits.stall_s
        self.reply_open = False
        """A reply was begun by `router.api.downstream` and not ended."""

    @property
    def closes_next(self) -> bool:
        """Whether the connection closes after the reply under way whatever the client wishes."""
        return self._close or self._force_close or self._retiring or self._switching is not None

    def bind(self, flow: Flow | None) -> None:
        """Couple the client's pace to `flow` from now on, or to nothing."""
        self._flow = flow
        if flow is not None and self._paused:
            flow.pause()

    def retire(self) -> None:
        """Close now if nothing is under way, else behind the next answer, which says so."""
        self._retiring = True
        idle = self._waiter is not None and not self._messages and self._head_timer is None
        if idle:
            self.force_close()

    def cut(self, *, reset: bool) -> None:
        """Send what is written, then close without ending the message.

        `reset`: by RST, where FIN would look like the end.
        """
        self.reply_open = False
        self._flow = None
        transport = self.transport
        if transport is None:
            return
        if reset:
            if transport.get_extra_info("sslcontext") is not None:
                transport.abort()  # TLS says goodbye on close, which is a clean end; lost bytes are the lesser harm
            else:
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if transport.get_write_buffer_size() and self._stall is None:
            self._stall = self._loop.call_later(self._stall_s, transport.abort)
        self.force_close()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(_WRITE_HIGH_BYTES)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The last bytes of a connection closed by aiohttp are timed by the kernel alone.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._stall_s * 1000))
        if not self._places.take():
            self._send_off(RouterBusy("too many connections"))

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`. aiohttp cancels the handler."""
        self._places.give()
        self._flow = None
        self._stop_stall()
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._sent_off or (self._switching is not None and self._switching.is_eof()):
            return
        within_head = self._last_body is None or self._last_body.is_eof()
        known = self._request_count
        super().data_received(data)
        if self._request_count > known:
            self._stop_head_timer()
            message, body = self._messages[-1]
            self._last_body, self._head_bytes = body, 0
            if isinstance(message, _ErrInfo):
                self._break_bodies()
            elif message.upgrade:
                self._switching = body
        elif within_head:
            self._head_grows(len(data))

    def _head_grows(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._force_close or self._close:
            return
        if self._head_bytes > self._head_max_bytes:
            if self._request_in_progress or self._messages:
                self.force_close()  # an answer is under way, and no other may be written into it
            else:
                self._stop_head_timer()
                # Closing at once would reset what the client still sends, and with it the answer.
                self._send_off(HeadersTooLarge("request headers too large"), self._linger_s)
        elif self._head_timer is None and not self._request_count:
            self._head_timer = self._loop.call_later(self._head_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        self._send_off(TooSlow("the request's head did not come in time"))

    def _send_off(self, error: RoostError, linger_s: float = 0.0) -> None:
        """Answer what has not become a request, and close; in `linger_s` at the latest, or when the client does."""
        _LOG.info("sent a client off: %s", error)
        self._sent_off = True
        if self.transport is not None:
            self.transport.write(refusal(error, Dialect.CHAT))
        if self.transport is not None and linger_s:
            self._head_timer = self._loop.call_later(linger_s, self.force_close)
        else:
            self.force_close()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client is slow."""
        super().pause_writing()
        if self._stall is None and self.transport is not None:
            self._stall = self._loop.call_later(self._stall_s, self.transport.abort)
        if self._flow is not None:
            self._flow.pause()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`: the client took most of what was written."""
        super().resume_writing()
        if self.transport is not None:
            self._stop_stall()
        if self._flow is not None:
            self._flow.resume()

    def _break_bodies(self) -> None:
        """The parser gave up: no body that is not whole by now will be, and nothing more comes."""
        bodies = [payload for _, payload in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if not body.is_eof():
                body.set_exception(RequestPayloadError("the body's framing is broken"))
                body.feed_eof()
                self.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # aiohttp's side.

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See `RequestHandler`. A reply left open is cut, never completed or followed by another."""
        if self.reply_open:
            _LOG.error("a reply was left unfinished")
            self.cut(reset=True)
            return resp, True
        if isinstance(resp, web.Response):
            resp.headers.setdefault("Server", SERVER)
            if self.closes_next or not request.content.is_eof():
                resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See `RequestHandler`: answers what its parser refused, and what a handler failed to catch."""
        if status == 400:
            error: RoostError = HeadersTooLarge("request headers too large")
            if not isinstance(exc, LineTooLong) and "Too many headers" not in (message or ""):
                error = MalformedRequest("not a valid HTTP request")
            _LOG.info("refused a request: %s", error)
            return cast("web.StreamResponse", Refusal(error, Dialect.CHAT))
        _LOG.error("unhandled error in a request handler", exc_info=exc)
        if self.reply_open:
            self.cut(reset=True)
            raise ConnectionError("the reply had begun")
        return cast("web.StreamResponse", Refusal(RoostError(), error_dialect(path_of(request.raw_path))))
