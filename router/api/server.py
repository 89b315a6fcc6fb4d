"""The client's side of the connection: aiohttp's parser, limits and keep-alive, and back-pressure for the relay.

aiohttp's low-level server is used, not `web.Application`: no routing, no signals, no access log. What is added to its
`RequestHandler` (aiohttp 3.14.5 `web_protocol.py`):

- `pause_writing` / `resume_writing` reach the exchange that feeds this client, so that a slow client slows its replica
  down instead of filling memory; a client that takes nothing for `stall_s` is cut off;
- a reply under way (`router.api.downstream`) is never followed by another: whatever a handler raises or returns, an
  unfinished reply ends as an incomplete message;
- a body whose framing breaks fails at once for the handler that waits for it; aiohttp would let it wait for ever;
- what aiohttp's parser refuses is answered in JSON, with 431 for too large headers, and no excerpt of them is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from router.domain.errors import HeadersTooLarge, MalformedRequest, RequestError

__all__ = ["ClientConnection", "ClientLimits", "RelayServer"]

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
    keepalive_s: float = 75.0
    """An idle connection is closed after this; also the time a client has to send a whole head."""
    linger_s: float = 5.0
    """How long the rest of an unwanted body is read and thrown away, so that the client gets to see the answer."""
    stall_s: float = 300.0
    """A client that takes no byte of its answer for this long is cut off."""


class ClientConnection(RequestHandler):
    """One client connection."""

    __slots__ = ("_flow", "_stall", "_stall_s", "reply_open")

    def __init__(
        self, manager: RelayServer, *, loop: asyncio.AbstractEventLoop, limits: ClientLimits, debug: bool = False
    ) -> None:
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
            debug=debug,
        )
        self._flow: Flow | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._stall_s = limits.stall_s
        self.reply_open = False
        """A reply was begun by `router.api.downstream` and not ended."""

    @property
    def closes_next(self) -> bool:
        """Whether the connection closes after the reply under way whatever the client wishes: on shutdown."""
        return self._close or self._force_close

    def bind(self, flow: Flow | None) -> None:
        """Couple the client's pace to `flow` from now on, or to nothing."""
        self._flow = flow
        if flow is not None and self._paused:
            flow.pause()

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

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`. aiohttp cancels the handler."""
        self._flow = None
        self._stop_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            self._break_bodies()

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
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002  # aiohttp's signature
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See `RequestHandler`: answers what its parser refused, and what a handler failed to catch."""
        if status == 400:
            refusal: RequestError = HeadersTooLarge("request headers too large")
            if not isinstance(exc, LineTooLong) and "Too many headers" not in (message or ""):
                refusal = MalformedRequest("not a valid HTTP request")
            _LOG.info("refused a request: %s", refusal)
            return _refusal(refusal.status, refusal.code, str(refusal))
        _LOG.error("unhandled error in a request handler", exc_info=exc)
        if self.reply_open:
            self.cut(reset=True)
            raise ConnectionError("the reply had begun")
        return _refusal(500, "internal_error", "internal error")


class RelayServer(web.Server):
    """The protocol factory for `loop.create_server`. Make it inside the running event loop.

    A client that goes away cancels its handler at once, whatever the handler awaits.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._limits = limits or ClientLimits()

    def __call__(self) -> ClientConnection:
        """One protocol per connection."""
        return ClientConnection(self, loop=self._loop, limits=self._limits)


def _refusal(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": code, "code": code, "param": None}
    response = web.Response(status=status, body=json.dumps({"error": error}).encode(), content_type="application/json")
    response.force_close()
    return response
