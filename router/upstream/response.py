"""Reading a replica's responses, without I/O: bytes in, head and decoded payload out.

llhttp (through httptools) parses, strictly. One reader serves one connection, response after response:

    begin(method) → feed(data)* → head known → complete            pooled again when `reusable`
                                             ↘ broken              nonsense; the connection is worthless
                                   eof()     → complete            where only the connection's end ends the body

Interim responses (1xx) are skipped, trailers dropped. httptools cannot be told that a response to HEAD has no body, nor
that the connection ended: both are known here.
"""

from __future__ import annotations

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from router.ports import ResponseHead
from router.upstream.wire import Header, has_no_body

__all__ = ["ResponseReader"]


class _StopReading(Exception):
    """Raised inside a parser callback to make llhttp stop; never leaves this module."""


class ResponseReader:
    """A parser of the responses that come over one connection.

    After each `feed`, look at `head` (None until known), `complete` and `broken` (None, or what was wrong). `answered`
    says whether any byte of this response has come.
    """

    __slots__ = (
        "_barren_bytes",
        "_head_bytes",
        "_head_max_bytes",
        "_headers",
        "_interim",
        "_method",
        "_parser",
        "_pieces",
        "_reason",
        "_refusal",
        "_until_eof",
        "answered",
        "broken",
        "complete",
        "head",
        "on_body",
        "reusable",
    )

    def __init__(self, head_max_bytes: int) -> None:
        """`head_max_bytes` bounds the head, interim ones included, and each stretch of framing without payload."""
        self._head_max_bytes = head_max_bytes
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self.begin("GET")
        self._parser = HttpResponseParser(self)

    def begin(self, method: str) -> None:
        """A request with this method was sent; its response is expected. Only after `complete` and while `reusable`."""
        self._method = method
        self._headers: list[Header] = []
        self._reason = b""
        self._head_bytes = self._barren_bytes = 0
        self._interim = self._until_eof = False
        self._refusal = ""
        self.head: ResponseHead | None = None
        self.complete = self.answered = False
        self.broken: str | None = None
        self.reusable = True

    def feed(self, data: bytes) -> bytes:
        """Parse one read; returns the payload in it, joined, maybe empty."""
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.reusable = False
            if not self.complete:
                self.broken = self._refusal or f"not HTTP: {error}"
        pieces = self._pieces
        if not pieces:
            if not self.complete:
                self._count_framing(len(data))
            return b""
        self._barren_bytes = 0
        payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return payload

    def eof(self) -> None:
        """The replica closed the connection: the proper end of a body without a length, and of nothing else."""
        self.reusable = False
        if self.complete or self.broken is not None:
            return
        if self._until_eof:
            self.complete = True
        else:
            self.broken = "closed the connection before its response was complete"

    def release(self) -> None:
        """Let go of the parser, which refers back to this reader."""
        del self._parser

    def _count_framing(self, size_bytes: int) -> None:
        if self.head is None:
            self._head_bytes += size_bytes
            if self._head_bytes > self._head_max_bytes and self.broken is None:
                self.broken = "response head too large"
        else:
            self._barren_bytes += size_bytes
            if self._barren_bytes > self._head_max_bytes and self.broken is None:
                self.broken = "chunk framing or trailers too large"

    # Callbacks of llhttp, not for others; `on_body` is the list's own `append`.

    def on_message_begin(self) -> None:
        """A status line begins."""
        if self.complete:
            self._refuse("sent bytes after its response")

    def on_status(self, reason: bytes) -> None:
        """A piece of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer."""
        if self.head is not None:
            return
        self._headers.append((name, value.rstrip(b" \t")))
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._head_max_bytes:
            self._refuse("response head too large")

    def on_headers_complete(self) -> None:
        """The head has ended."""
        parser = self._parser
        status = parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                self._refuse(f"unexpected status {status}")
            self._interim = True
            return
        length, chunked = self._framing()
        self.head = ResponseHead(status, self._reason, tuple(self._headers), length)
        self.reusable = parser.should_keep_alive()
        if self._method == "HEAD":
            self.complete = True
            self._refuse("answered HEAD")
        self._until_eof = length is None and not chunked and not has_no_body(self._method, status)

    def on_message_complete(self) -> None:
        """The body has ended."""
        if self._interim:
            self._interim = False
            self._headers = []
            self._reason = b""
        else:
            self.complete = True

    def _framing(self) -> tuple[int | None, bool]:
        """Content-Length, and whether the body is chunked. Other transfer codings would reach the client undeclared."""
        length: int | None = None
        chunked = False
        for name, value in self._headers:
            # Comparing sizes first spares most headers the lower-casing.
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                length = int(value)
            elif size == 17 and name.lower() == b"transfer-encoding":
                if chunked or value.lower() != b"chunked":
                    self._refuse("unknown transfer coding")
                chunked = True
        return length, chunked

    def _refuse(self, why: str) -> None:
        self._refusal = why
        raise _StopReading(why)
