"""Event streams cut into events, in passing.

Follows the event stream format of the HTML standard (section "Parsing an event stream"): LF, CRLF or CR, a byte order
mark, comments, several data lines; an event whose blank line never came does not count. What is kept is the event that
has not ended yet, at most `EVENT_MAX_BYTES`; a longer one is skipped, counted, and reading goes on behind it.

SGLang writes one whole event per chunk: a chunk that ends as an event and holds only the line feeds of one needs no
buffer. What an event means is `router.upstream.sse`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from router.upstream.body import UNREADABLE, Reader

__all__ = ["EVENT_MAX_BYTES", "StreamReader", "fields"]

EVENT_MAX_BYTES: Final = 1 << 20
"""The longest event that is read. `response.completed` repeats the whole output and every tool's schema."""
_BOM: Final = b"\xef\xbb\xbf"
_Decoded = TypeVar("_Decoded")


class StreamReader(Reader):
    """The framing; a subclass says what an event of its dialect means."""

    __slots__ = ("_after_cr", "_at_start", "_clean", "_event_max", "_skipping", "_tail")

    _LINES: ClassVar[int] = 2
    """Line feeds of one event as SGLang writes it."""

    def __init__(self, event_max_bytes: int = EVENT_MAX_BYTES) -> None:
        super().__init__()
        self._event_max = event_max_bytes
        self._tail = bytearray()
        """The event that has not ended; its line ends are LF."""
        self._at_start = True
        self._after_cr = False
        self._skipping = False
        self._clean = False
        """Nothing is pending: an event may be read straight from its chunk."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream, cut anywhere."""
        size = len(data)
        self.body_bytes += size
        if (
            self._clean
            and data.endswith(b"}\n\n")  # with the next line: exactly one event
            and data.count(b"\n") == self._LINES
            and data.find(b"\r") < 0
            and size <= self._event_max
        ):
            self._event(data)
        elif size:
            self._pieces(data)

    def finish(self) -> None:
        """The stream ended as its framing says; whether it was complete, `terminal` tells."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the unfinished event."""
        return len(self._tail)

    @property
    def mid_event(self) -> bool:
        """Whether bytes of an unfinished event have come."""
        return self._skipping or bool(self._tail.strip(b"\n"))

    @property
    def between_events(self) -> bool:
        """Whether nothing of an event has come that has not ended, not even half a line end, and more may follow.

        (A comment before the first event would hide a byte order mark behind it; engines send none.)
        """
        return not (self.terminal or self.error or self._skipping or self._tail or self._after_cr)

    def _event(self, event: bytes) -> None:
        """Read one event, its line ends LF, its blank line included."""
        raise NotImplementedError

    def _pieces(self, data: bytes) -> None:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # the line feed of a CRLF that was cut in two
        self._after_cr = data.endswith(b"\r")
        if data.find(b"\r") >= 0:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        tail = self._tail
        searched = max(len(tail) - 1, 0)
        tail += data
        if self._at_start:
            if len(tail) < len(_BOM) and _BOM.startswith(tail):
                return
            self._at_start = False
            searched = 0
            if tail.startswith(_BOM):
                del tail[: len(_BOM)]
        start = 0
        while (end := tail.find(b"\n\n", searched)) >= 0:
            if self._skipping:
                self._skipping = False
            elif end - start > self._event_max:
                self._skip()
            elif end > start:
                self._event(bytes(tail[start : end + 2]))
            start = searched = end + 2
        del tail[:start]
        # A line feed at the end may be the first half of the blank line: it is not yet the event's.
        if not self._skipping and len(tail) - tail.endswith(b"\n") > self._event_max:
            self._skip()
            self._skipping = True
        if self._skipping:
            tail[:] = b"\n" if tail.endswith(b"\n") else b""
        self._clean = not (tail or self._skipping or self._after_cr)

    def _skip(self) -> None:
        self.skipped_events += 1

    def _decode(self, decoder: Callable[[bytes], _Decoded], data: bytes) -> _Decoded | None:
        try:
            return decoder(data)
        except UNREADABLE:
            self.skipped_events += 1
            return None


def fields(event: bytes) -> tuple[bytes, bytes | None]:
    """The event's name (empty where unnamed) and its data (None without a data line: clients see no such event)."""
    name = b""
    data: list[bytes] = []
    for line in event.split(b"\n"):
        key, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value
    return name, b"\n".join(data) if data else None
