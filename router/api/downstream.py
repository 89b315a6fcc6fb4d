"""The reply that is written straight to the client's transport.

    exchange = await upstream.send(…)
    down = Downstream(request)
    down.start(exchange.head, extra)         head, framed for this client
    down.bind(exchange)                      the client's pace becomes the replica's
    await exchange.relay(down.write)         no task wakes up for a chunk
    down.end()                               or down.abort(): the client sees an incomplete message
    return down.response                     aiohttp finds it written already, and goes on with keep-alive

Framing follows the client and what the replica said: `Content-Length` as it was; else chunked for HTTP/1.1; else, for
HTTP/1.0, until close. A reply whose end was never written ends as an incomplete message: a missing last chunk, a body
shorter than its length, or a reset where only the close would end it. Agents retry on these, and take a clean end for
the whole answer (Kimi Code stores it so).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Final, cast

from aiohttp import web
from aiohttp.http import HttpVersion11

from router.api.connection import ClientConnection, Flow
from router.ports import ResponseHead
from router.upstream.wire import Header, forward_response_headers, has_no_body, response_head

__all__ = ["Downstream"]


class _Framing(Enum):
    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


class _Written:
    """A response aiohttp has nothing left to do for."""

    __slots__ = ("keep_alive",)

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """The head is written."""

    async def write_eof(self) -> None:
        """So is the end."""


_KEPT: Final = _Written(True)
_CLOSING: Final = _Written(False)


class Downstream:
    """The reply to one request. All methods are synchronous, and harmless when the client has gone."""

    __slots__ = ("_connection", "_framing", "_held_head", "_keep_alive", "_request", "_started", "_unsent_bytes")

    def __init__(self, request: web.BaseRequest) -> None:
        """`request` came over a `ClientConnection`."""
        self._request = request
        self._connection = cast("ClientConnection", request.protocol)
        self._framing = _Framing.NONE
        self._held_head = b""
        self._keep_alive = False
        self._started = False
        self._unsent_bytes = 0

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns, after `end` or `abort`."""
        return cast("web.StreamResponse", _KEPT if self._keep_alive else _CLOSING)

    @property
    def started(self) -> bool:
        """Whether a head was written: from then on no other answer can be given."""
        return self._started

    @property
    def extensible(self) -> bool:
        """Whether the router may add to the body, say an error event. A body of a given length cannot grow."""
        return self._framing in (_Framing.CHUNKED, _Framing.CLOSE)

    def start(self, head: ResponseHead, extra: Sequence[Header] = ()) -> None:
        """Write the head: the replica's end-to-end headers, then `extra`, then this connection's own.

        Raises `UpstreamBroken` where a header could split the response; then nothing was written. The head goes out
        with the first piece of the body, or by itself when none comes before the event loop's next turn.
        """
        request = self._request
        modern = request.version >= HttpVersion11
        keep_alive = request.keep_alive and not self._connection.closes_next
        headers = [*forward_response_headers(head), *extra]
        length = head.content_length
        if has_no_body(request.method, head.status):
            framing = _Framing.NONE
            if length is not None and head.status != 204:
                headers.append((b"Content-Length", b"%d" % length))
        elif length is not None:
            framing = _Framing.LENGTH
            headers.append((b"Content-Length", b"%d" % length))
        elif modern:
            framing = _Framing.CHUNKED
            headers.append((b"Transfer-Encoding", b"chunked"))
        else:
            framing = _Framing.CLOSE
            keep_alive = False
        if not keep_alive:
            headers.append((b"Connection", b"close"))
        elif not modern:
            headers.append((b"Connection", b"keep-alive"))
        self._held_head = response_head(head.status, head.reason, headers)
        self._started = True
        self._framing = framing
        self._keep_alive = keep_alive
        self._unsent_bytes = length or 0
        self._connection.reply_open = True
        # Every write is a system call: a head whose body is here already should not cost one more.
        asyncio.get_running_loop().call_soon(self._flush)

    def bind(self, flow: Flow) -> None:
        """From now on `flow` is paused while the client is slow."""
        self._connection.bind(flow)

    def write(self, data: bytes) -> None:
        """Write a piece of the body, as one chunk where the body is chunked. Bodies of HEAD are skipped."""
        framing = self._framing
        if framing is _Framing.CHUNKED:
            if data:
                self._send(b"%x\r\n%b\r\n" % (len(data), data))
        elif framing is _Framing.LENGTH:
            self._unsent_bytes -= len(data)
            if self._unsent_bytes < 0:
                raise ValueError("more body than its length")
            self._send(data)
        elif framing is _Framing.CLOSE:
            self._send(data)

    def end(self) -> None:
        """End the body. One that is shorter than its length was said to be is aborted instead."""
        if self._framing is _Framing.LENGTH and self._unsent_bytes:
            self.abort()
            return
        if self._framing is _Framing.CHUNKED:
            self._send(b"0\r\n\r\n")
        self._flush()
        self._connection.reply_open = False
        self._connection.bind(None)

    def abort(self) -> None:
        """Close the connection after what is written, so that the client sees an incomplete message."""
        self._keep_alive = False
        self._flush()
        self._connection.cut(reset=self._framing in (_Framing.CLOSE, _Framing.NONE))

    def _flush(self) -> None:
        if self._held_head:
            self._send(b"")

    def _send(self, data: bytes) -> None:
        if self._held_head:
            data = self._held_head + data
            self._held_head = b""
        transport = self._connection.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
