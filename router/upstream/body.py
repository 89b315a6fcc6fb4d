"""Response bodies that are no stream, read in passing; and what every reader of a body has in common.

Like the streams' readers (`router.upstream.sse`): no I/O, no clock, nothing raises, any re-chunking reads the same.

A JSON reply of up to `WHOLE_MAX_BYTES` is kept and decoded at its end. A longer one is only scanned: behind every key
`usage` (`meta_info` for generate) the next `SLICE_BYTES` are read, wherever it stands, because in /v1/responses the
tools' schemas follow it and a window at the end would miss it. Inside a JSON string the key would be escaped, so only a
real key is found. A tool call's own (an Anthropic `input` is raw JSON) must look like counts to be taken, and the
engine's comes after it; in /v1/responses, whose output holds no raw JSON, before any other.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from router.domain.outcome import Usage
from router.domain.turn import Dialect
from router.upstream.usage import add, engine_fault, usage_shape

__all__ = ["SLICE_BYTES", "UNREADABLE", "WHOLE_MAX_BYTES", "BodyReader", "Reader"]

WHOLE_MAX_BYTES: Final = 32 << 10
SLICE_BYTES: Final = 4 << 10
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding JSON of any shape may raise."""


class Reader:
    """A body of no known form: counts its bytes. All readers have these attributes."""

    __slots__ = (
        "body_bytes",
        "error",
        "error_code",
        "first_output",
        "next_sequence",
        "output_events",
        "response_id",
        "skipped_events",
        "terminal",
        "usage",
    )

    def __init__(self) -> None:
        self.body_bytes = 0
        self.first_output = False
        """The engine produced something: its prefill is over. Precedes the first visible text where a tool or reasoning
        parser holds text back; an error is no output. Without a stream: the first byte came."""
        self.output_events = 0
        """Stream events that carried output."""
        self.usage = Usage()
        self.terminal = False
        """The dialect's last event was read (`[DONE]`, `message_stop`, `response.completed` and its like); without a
        stream: `finish` was called."""
        self.error: str | None = None
        """The engine's reply reports a failure: overloaded, rate_limited, timeout, invalid_request or internal."""
        self.error_code: int | None = None
        """The HTTP status that error stands for, where the engine told."""
        self.response_id: str | None = None
        """Id of a /v1/responses response."""
        self.next_sequence: int | None = None
        """The `sequence_number` a further event of a /v1/responses stream must carry."""
        self.skipped_events = 0
        """Events that were too long, or not the JSON they should be."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body, cut anywhere."""
        self.body_bytes += len(data)
        if data:
            self.first_output = True

    def finish(self) -> None:
        """The body ended as its framing says. Not called for a body that broke off."""
        self.terminal = True

    @property
    def held_bytes(self) -> int:
        """Bytes of the body kept at this moment."""
        return 0

    @property
    def mid_event(self) -> bool:
        """Whether a stream stands inside an event, so that a frame appended now must first close it."""
        return False

    @property
    def between_events(self) -> bool:
        """Whether this is a stream that stands between two events and goes on: a comment may be put there."""
        return False

    def _fail(self, error: object) -> None:
        self.error, self.error_code = engine_fault(error)

    def _name(self, response_id: object) -> None:
        if isinstance(response_id, str) and 0 < len(response_id) <= 256:
            self.response_id = response_id


class _Reply(msgspec.Struct, gc=False):
    id: Any = None
    object: Any = None
    type: Any = None
    code: Any = None
    message: Any = None
    usage: Any = None
    meta_info: Any = None
    error: Any = None


_reply = msgspec.json.Decoder(_Reply | list[_Reply]).decode
_raw_decode = json.JSONDecoder().raw_decode
_VALUE: Final = re.compile(rb"\s*:\s*(?=\{)")
_FIRST_ID: Final = re.compile(rb'\s*\{\s*"id"\s*:\s*"([\w.:-]{1,256})"')


class BodyReader(Reader):
    """A JSON reply of one of the five dialects (any other path is read as chat is)."""

    __slots__ = ("_carry", "_dialect", "_needle", "_shape", "_whole", "_whole_max")

    def __init__(self, dialect: Dialect, whole_max_bytes: int = WHOLE_MAX_BYTES) -> None:
        super().__init__()
        self._dialect = dialect
        self._shape = usage_shape(dialect)
        self._needle = b'"meta_info"' if dialect is Dialect.GENERATE else b'"usage"'
        self._whole_max = whole_max_bytes
        self._whole: bytearray | None = bytearray()
        self._carry = b""
        """Of a long reply: from a key whose value has not come yet, or what may be the start of one."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the reply, cut anywhere."""
        if not data:
            return
        self.body_bytes += len(data)
        self.first_output = True
        if self._whole is not None:
            self._whole += data
            if len(self._whole) <= self._whole_max:
                return
            data = bytes(self._whole)
            self._whole = None
            if self._dialect is Dialect.RESPONSES and (found := _FIRST_ID.match(data)):
                self._name(found.group(1).decode("ascii", "replace"))
        self._scan(self._carry + data, ended=False)

    def finish(self) -> None:
        """The reply ended: read what was kept."""
        if self.terminal:
            return
        self.terminal = True
        if self._whole is None:
            self._scan(self._carry, ended=True)
            self._carry = b""
        else:
            self._read(bytes(self._whole))
            self._whole = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of the reply kept at this moment."""
        return len(self._carry if self._whole is None else self._whole)

    def _read(self, whole: bytes) -> None:
        try:
            reply = _reply(whole)
        except UNREADABLE:
            self.skipped_events += 1
            return
        if isinstance(reply, list):
            for item in reply:
                self.usage = add(self.usage, self._shape(item.meta_info))
            return
        self.usage = self._shape(reply.meta_info if self._dialect is Dialect.GENERATE else reply.usage)
        if self._dialect is Dialect.RESPONSES:
            self._name(reply.id)
        if reply.error is not None:
            self._fail(reply.error)
        elif reply.object == "error":  # SGLang's flat form (entrypoints/openai/protocol.py, `ErrorResponse`)
            self._fail({"type": reply.type, "code": reply.code, "message": reply.message})

    def _scan(self, data: bytes, *, ended: bool) -> None:
        needle = self._needle
        position = 0
        while (found := data.find(needle, position)) >= 0:
            position = found + len(needle)
            value = data[position : position + SLICE_BYTES]
            if len(value) < SLICE_BYTES and not ended:
                self._carry = data[found:]
                return
            self._consider(value)
        self._carry = data[max(position, len(data) - len(needle) + 1) :]

    def _consider(self, value: bytes) -> None:
        opening = _VALUE.match(value)
        if opening is None:
            return
        try:
            counts, _ = _raw_decode(value[opening.end() :].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return
        usage = self._shape(counts)
        if usage.prompt_tokens is None:
            return
        if self._dialect is Dialect.GENERATE:
            self.usage = add(self.usage, usage)
        elif self._dialect is not Dialect.RESPONSES or self.usage.prompt_tokens is None:
            self.usage = usage
