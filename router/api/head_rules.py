"""What HTTP demands of a request's head beyond its grammar: pure functions.

The parser (llhttp, strict) refuses bad grammar by itself: line breaks and NUL inside fields, folded lines, a space
before a colon, two lengths, a length beside chunks, chunk sizes that are none, a missing or second Host. What it lets
pass, and a gateway must not (RFC 9110, RFC 9112):

    another HTTP than 1.0 and 1.1                         505          9110 section 15.6.6
    CONNECT, TRACE                                        501          9110 sections 9.3.6, 9.3.8
    Transfer-Encoding in HTTP/1.0                         400          9112 section 6.1: framing that cannot be trusted
    a transfer coding besides chunked                     501          9112 section 6.1
    Host that names no host                               400          9112 section 3.2
    a target with a fragment, user or unknown scheme      400          9112 section 3.2, 9110 section 4.2.4
    Expect for something else than 100-continue           417          9110 section 10.1.1
    a switch to WebSocket                                 501          9110 section 7.8 lets a server refuse

Other switches of protocol (h2c, as curl and Java offer with any request) are not refused but passed over, as section
7.8 has it, and the connection is closed after the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from router.domain.errors import ExpectationFailed, MalformedRequest, RequestError, Unsupported, UnsupportedVersion
from router.upstream.wire import Header

__all__ = ["fewer_hops", "head_refusal", "hops_left", "path_of"]

_VERSIONS: Final = ((1, 0), (1, 1))
_NOT_SPOKEN: Final = frozenset({"CONNECT", "TRACE"})
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
_ABSOLUTE: Final = re.compile(r"https?://[^/?#@]+(?=[/?#]|$)", re.IGNORECASE)


def head_refusal(method: str, version: tuple[int, int], target: str, headers: Mapping[str, str]) -> RequestError | None:
    """What this head is to be refused with, if anything. `headers` ignores the case of names."""
    return _framing(method, version, headers) or _target(target) or _wishes(version, headers)


def path_of(target: str) -> str:
    """The path of a request target as a replica's server will read it: without host and query, escapes resolved.

    It decides what a request is; what is forwarded is the target as it came. Were `/v1/%63ompletions` not known for the
    turn that it is at the replica, it would evade placement and limits. (So would `/v1/completions%0a`: Starlette 1.10
    ends its routes' patterns with `$`, which matches before a last line break.)
    """
    if not target.startswith("/") and (absolute := _ABSOLUTE.match(target)) is not None:
        target = target[absolute.end() :] or "/"
        if not target.startswith("/"):
            target = "/" + target
    path = target.split("?", 1)[0]
    return unquote(path).removesuffix("\n") if "%" in path else path


def hops_left(method: str, headers: Mapping[bytes, bytes]) -> int | None:
    """`Max-Forwards` of an OPTIONS request, None where there is none (RFC 9110 section 7.6.2): at 0 it is answered
    here. `headers`: names lower-case.
    """
    value = headers.get(b"max-forwards", b"") if method == "OPTIONS" else b""
    return int(value) if value.isdigit() and len(value) < 10 else None


def fewer_hops(method: str, headers: tuple[Header, ...]) -> tuple[Header, ...]:
    """The headers of a request that goes one hop further."""
    if method != "OPTIONS":
        return headers
    return tuple(
        (name, b"%d" % (int(value) - 1)) if name.lower() == b"max-forwards" and value.isdigit() else (name, value)
        for name, value in headers
    )


def _framing(method: str, version: tuple[int, int], headers: Mapping[str, str]) -> RequestError | None:
    if version not in _VERSIONS:
        return UnsupportedVersion("HTTP/1.1 is spoken here")
    if method in _NOT_SPOKEN:
        return Unsupported(f"{method} is not offered here")
    coding = headers.get("Transfer-Encoding")
    if coding is not None:
        if version == (1, 0):
            return MalformedRequest("Transfer-Encoding in an HTTP/1.0 request")
        if coding.lower() != "chunked":
            return Unsupported("the only transfer coding taken is chunked")
    if not _HOST.fullmatch(headers.get("Host", "")):
        return MalformedRequest("Host names no host")
    return None


def _target(target: str) -> RequestError | None:
    if "#" in target:
        return MalformedRequest("the request target has a fragment")
    if not target.startswith("/") and target != "*" and not _ABSOLUTE.match(target):
        return MalformedRequest("the request target is neither a path nor an http URL without a user")
    return None


def _wishes(version: tuple[int, int], headers: Mapping[str, str]) -> RequestError | None:
    expected = headers.get("Expect")
    if expected is not None and expected.lower() != "100-continue" and version != (1, 0):
        return ExpectationFailed("Expect: only 100-continue can be met")
    upgrade = headers.get("Upgrade")
    if upgrade is not None and "websocket" in upgrade.lower() and "upgrade" in headers.get("Connection", "").lower():
        return Unsupported("WebSocket is not spoken here; use HTTP with server-sent events")
    return None
