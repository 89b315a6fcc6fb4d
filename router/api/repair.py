"""Named repairs: what SGLang 0.5.23 refuses from a harness, mended by splicing bytes. Off by default, told in a header.

A repair replaces the bytes of one top-level value and leaves every other byte of the body as it was. It walks the
body's top-level members in order, so a look-alike inside a message or a tool's schema is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from router.domain.turn import Dialect

__all__ = ["REPAIRS", "repair"]

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MEMBER: Final = re.compile(rb'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_END: Final = re.compile(rb"\s*\}\s*")
_DISPLAYS: Final = (None, "summarized", "omitted")
"""What SGLang accepts in `thinking.display` (srt/entrypoints/anthropic/protocol.py)."""


def repair(names: tuple[str, ...], dialect: Dialect, body: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The body with the named repairs made, and the names of those that were needed."""
    made = []
    for name in names:
        mended = REPAIRS[name](dialect, body)
        if mended is not None:
            body = mended
            made.append(name)
    return body, tuple(made)


def _anthropic_thinking_display(dialect: Dialect, body: bytes) -> bytes | None:
    """Interactive Claude Code sends `thinking.display: "updates"`; SGLang takes only "summarized" and "omitted", and
    streams thinking whatever it says. The member is set to "summarized".
    """
    if dialect is not Dialect.MESSAGES or b'"thinking"' not in body or b'"display"' not in body:
        return None
    span = member_span(body, "thinking")
    if span is None:
        return None
    raw = body[span[0] : span[1]]
    inner = member_span(raw, "display")
    if inner is None:
        return None
    try:
        display = msgspec.json.decode(raw[inner[0] : inner[1]])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if display in _DISPLAYS:
        return None
    start, end = span[0] + inner[0], span[0] + inner[1]
    return body[:start] + b'"summarized"' + body[end:]


def member_span(body: bytes, name: str) -> tuple[int, int] | None:
    """Where the value of a JSON object's own member stands in its bytes.

    None where the body is no object, has no such member, or repeats a name.
    """
    try:
        members = _members.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if name not in members:
        return None
    at = 0
    span: tuple[int, int] | None = None
    for key, raw in members.items():
        found = _MEMBER.match(body, at)
        if found is None or msgspec.json.decode(found.group(1)) != key:
            return None
        at = found.end() + len(bytes(raw))
        if body[found.end() : at] != bytes(raw):
            return None
        if key == name:
            span = found.end(), at
    return span if _END.fullmatch(body, at) else None


REPAIRS: Final[Mapping[str, Callable[[Dialect, bytes], bytes | None]]] = MappingProxyType(
    {"anthropic_thinking_display": _anthropic_thinking_display}
)
