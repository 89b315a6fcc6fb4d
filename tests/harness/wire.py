"""The bytes of one connection, read in passing as HTTP exchanges. No I/O: bytes and ends go in, exchanges come out.

What is kept of a body is its length and digests, never its text: one SHA-256 of the whole, and one after each event of
a stream, so that a stream cut short can be recognised as the beginning of a longer one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import httptools

__all__ = ["Body", "End", "Exchange", "Reader"]

_REQUEST_HEADERS = ("user-agent", "connection", "modal-session-id", "x-stainless-retry-count")
_RESPONSE_HEADERS = (
    "connection",
    "content-length",
    "content-type",
    "retry-after",
    "transfer-encoding",
    "x-roost-error",
    "x-roost-reason",
    "x-roost-replica",
    "x-roost-session",
)
_TERMINAL = (b"event: response.completed", b"event: message_stop", b"data: [DONE]")


class End(StrEnum):
    """How an exchange ended, as the tap saw it."""

    COMPLETE = "complete"
    """The response was whole by its own framing."""
    CLIENT_CLOSED = "client_closed"
    """The client closed before the response was whole."""
    BROKEN = "broken"
    """The server closed or reset before the response was whole."""
    OPEN = "open"
    """Still running when the tap was closed."""


@dataclass(frozen=True, slots=True)
class Body:
    """What is kept of a body."""

    length: int
    sha256: str
    events: tuple[str, ...] = ()
    """SHA-256 of everything up to and including each blank line."""
    terminal: bool = False
    """Whether an event came that says the stream is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its response. Times in seconds on the rig's clock."""

    tap: str
    port: int
    """Local port of the tap's connection to the server: what the server sees as its peer."""
    ordinal: int
    """Of this connection's exchanges, from 0."""
    method: str
    target: str
    request: Body
    request_headers: dict[str, str]
    status: int | None
    response: Body
    response_headers: dict[str, str]
    started_s: float
    head_s: float | None
    ended_s: float
    end: End
    client_left_s: float | None
    """When the client closed its side, if that was before the response was whole."""


class _Digest:
    """A running SHA-256 with marks at blank lines."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._length = 0
        self._pending = b""
        self._events: list[str] = []
        self._terminal = False

    def feed(self, data: bytes) -> None:
        self._length += len(data)
        whole = self._pending + data
        while (at := whole.find(b"\n\n")) >= 0:
            event, whole = whole[: at + 2], whole[at + 2 :]
            self._sha.update(event)
            self._events.append(self._sha.hexdigest())
            self._terminal = self._terminal or any(mark in event for mark in _TERMINAL)
        self._pending = whole

    def body(self) -> Body:
        total = self._sha.copy()
        total.update(self._pending)
        return Body(self._length, total.hexdigest(), tuple(self._events), self._terminal)


@dataclass(slots=True)
class _Open:
    ordinal: int
    started_s: float
    method: str = ""
    target: str = ""
    request: _Digest = field(default_factory=_Digest)
    request_headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    response: _Digest = field(default_factory=_Digest)
    response_headers: dict[str, str] = field(default_factory=dict)
    head_s: float | None = None
    client_left_s: float | None = None


class Reader:
    """Reads both directions of one connection; hands each finished exchange to `sink`.

    A direction that is not HTTP any more is left unread; its exchange then ends as `OPEN`.
    """

    def __init__(self, tap: str, port: int, sink: Callable[[Exchange], None]) -> None:
        self._tap, self._port, self._sink = tap, port, sink
        self._open: deque[_Open] = deque()
        self._count = 0
        self._now_s = 0.0
        self._requests: httptools.HttpRequestParser | None = httptools.HttpRequestParser(_Requests(self))
        self._responses: httptools.HttpResponseParser | None = self._response_parser()
        self._renew = False

    def _response_parser(self) -> httptools.HttpResponseParser:
        parser = httptools.HttpResponseParser(_Responses(self))
        # A server may send more after `connection: close`, and a replica that speaks nonsense must not blind the tap.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def from_client(self, data: bytes, now_s: float) -> None:
        """Bytes on their way to the server."""
        self._now_s = now_s
        if self._requests is not None:
            try:
                self._requests.feed_data(data)
            except httptools.HttpParserError:
                self._requests = None

    def from_server(self, data: bytes, now_s: float) -> None:
        """Bytes on their way to the client."""
        self._now_s = now_s
        if self._responses is not None:
            try:
                self._responses.feed_data(data)
            except httptools.HttpParserError:
                self._responses = None
        if self._renew:  # the answer to a HEAD has a length and no body, which the parser cannot know
            self._renew = False
            self._responses = self._response_parser()

    def client_closed(self, now_s: float) -> None:
        """The client sends no more, or is gone."""
        for each in self._open:
            if each.client_left_s is None:
                each.client_left_s = now_s

    def server_closed(self, now_s: float, *, reset: bool) -> None:
        """The server sends no more, or is gone."""
        while self._open:
            first = self._open[0]
            framed = {"content-length", "transfer-encoding"} & first.response_headers.keys()
            if first.client_left_s is not None:
                end = End.CLIENT_CLOSED
            elif first.head_s is not None and not framed and not reset:
                end = End.COMPLETE
            else:
                end = End.BROKEN
            self._finish(end, now_s)

    def abandon(self, now_s: float) -> None:
        """Nothing more will come: the tap is closed."""
        while self._open:
            left = self._open[0].client_left_s is not None
            self._finish(End.CLIENT_CLOSED if left else End.OPEN, now_s)

    def _begin(self) -> None:
        self._open.append(_Open(self._count, self._now_s))
        self._count += 1

    def _finish(self, end: End, now_s: float) -> None:
        each = self._open.popleft()
        self._sink(
            Exchange(
                tap=self._tap,
                port=self._port,
                ordinal=each.ordinal,
                method=each.method,
                target=each.target,
                request=each.request.body(),
                request_headers=each.request_headers,
                status=each.status,
                response=each.response.body(),
                response_headers=each.response_headers,
                started_s=each.started_s,
                head_s=each.head_s,
                ended_s=now_s,
                end=end,
                client_left_s=each.client_left_s,
            )
        )


class _Requests:
    """Callbacks of the request parser: they fill the newest exchange."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def on_message_begin(self) -> None:
        self._reader._begin()

    def on_url(self, url: bytes) -> None:
        self._reader._open[-1].target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key in _REQUEST_HEADERS:
            self._reader._open[-1].request_headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        parser = self._reader._requests
        assert parser is not None
        self._reader._open[-1].method = parser.get_method().decode("latin-1")

    def on_body(self, data: bytes) -> None:
        if self._reader._open:  # a server may answer, and the exchange end, before the request is whole
            self._reader._open[-1].request.feed(data)


class _Responses:
    """Callbacks of the response parser: they fill the oldest exchange and end it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._informational = False

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key in _RESPONSE_HEADERS and self._reader._open:
            self._reader._open[0].response_headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        reader = self._reader
        assert reader._responses is not None
        status = reader._responses.get_status_code()
        self._informational = 100 <= status < 200
        if self._informational or not reader._open:
            return
        first = reader._open[0]
        first.status, first.head_s = status, reader._now_s
        if first.method == "HEAD":
            reader._finish(End.COMPLETE, reader._now_s)
            reader._renew = True

    def on_body(self, data: bytes) -> None:
        if self._reader._open:
            self._reader._open[0].response.feed(data)

    def on_message_complete(self) -> None:
        if self._reader._open and not self._informational and not self._reader._renew:
            self._reader._finish(End.COMPLETE, self._reader._now_s)
