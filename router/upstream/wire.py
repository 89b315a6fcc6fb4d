"""What a proxy may pass on, and how a message head is written: pure functions over bytes.

Header names keep their case, headers their order and duplicates, and unknown ones pass. What speaks of one connection
only is dropped (RFC 9110 section 7.6.1): `Connection` and every header it names, `Keep-Alive`, `Proxy-*`, `TE`,
`Trailer`, `Transfer-Encoding` and `Upgrade`. Framing (`Content-Length`, `Transfer-Encoding`) is written anew on each
side, since each side has its own.

Every head is checked as a whole before it leaves: CR, LF or NUL inside a name or value never reaches a socket.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from router.contract import ERROR_HEADER, REASON_HEADER, REPAIRED_HEADER, REPLICA_HEADER, SESSION_HEADER
from router.domain.errors import MalformedRequest, UpstreamBroken
from router.ports import ResponseHead

__all__ = [
    "Header",
    "Origin",
    "forward_request_headers",
    "forward_response_headers",
    "has_no_body",
    "parse_origin",
    "replica_root",
    "request_head",
    "response_head",
    "via_of",
]

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"}
)
_REQUEST_DROPS = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_RESPONSE_DROPS = _HOP_BY_HOP | {b"content-length"}
_OWN = frozenset(
    name.encode() for name in (REPLICA_HEADER, REASON_HEADER, SESSION_HEADER, REPAIRED_HEADER, ERROR_HEADER)
)
"""Between clients and Roost only: what Roost says of a turn must be Roost's word, and its sessions are no engine's."""
_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key", b"cookie"})
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
"""Values of `Connection` that name no other header: the usual ones."""

_NETLOC_MAX_BYTES = 255
"""Replicas are named by host and port, and the store keeps a name behind a length byte."""

_TARGET = re.compile(rb"/[\x21-\x7e\x80-\xff]*")
_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a replica listens, read from its URL."""

    host: str
    """Name or address; IPv6 without brackets."""
    port: int
    tls: bool
    prefix: bytes
    """Path that goes before every target; empty, or starting and not ending with a slash."""
    authority: bytes
    """Value of the Host header."""


def parse_origin(url: str) -> Origin:
    """Read a replica's URL: `http` or `https`, host, optional port and path prefix.

    Raises `ValueError` for anything else (another scheme, credentials, query, fragment, bad port).
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http or https URL: {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"a replica's URL has no credentials, query or fragment: {url!r}")
    tls = parts.scheme == "https"
    port = parts.port if parts.port is not None else (443 if tls else 80)
    host = parts.hostname
    shown = f"[{host}]" if ":" in host else host.encode("idna").decode("ascii")
    if port != (443 if tls else 80):
        shown = f"{shown}:{port}"
    prefix = parts.path.rstrip("/").encode()
    if prefix and not _TARGET.fullmatch(prefix):
        raise ValueError(f"bad path in {url!r}")
    return Origin(host=host, port=port, tls=tls, prefix=prefix, authority=shown.encode("ascii"))


def replica_root(url: str) -> str:
    """A replica's URL as an operator may give it, in its one spelling: no trailing slash, host in lower case.

    Stricter than `parse_origin`: a path is most often the `/v1` of a client's base URL, under which nothing would be
    found. Raises `ValueError` with what is wrong, without repeating the URL, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in {"http", "https"}:
        raise ValueError("does not begin with http:// or https://")
    if not parts.hostname or port == 0:
        raise ValueError("names no host" if not parts.hostname else "has port 0")
    if "@" in parts.netloc:
        raise ValueError("has a user or password in it")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError("goes on after HOST:PORT; give the root of the server, without /v1")
    root = f"{parts.scheme}://{parts.netloc.lower()}"
    try:
        parse_origin(root)
    except ValueError:
        raise ValueError("is not a URL") from None
    if any(char.isspace() or not char.isprintable() for char in url):
        raise ValueError("has a space or an unprintable character in it")
    if len(parts.netloc.lower().encode()) > _NETLOC_MAX_BYTES:
        raise ValueError(f"names a replica by more than {_NETLOC_MAX_BYTES} bytes")
    return root


def via_of(version: tuple[int, int]) -> bytes:
    """What Roost adds as `Via` to a request that came by this HTTP version (RFC 9110 section 7.6.3)."""
    return b"%d.%d roost" % tuple(version)


def forward_request_headers(raw: Iterable[Header], via: bytes) -> tuple[Header, ...]:
    """The client's headers as a replica may see them, and `via` as this gateway's own `Via`.

    `Host` and `Content-Length` are gone too, since `request_head` writes its own, and `Expect`, since the body is sent
    at once.
    """
    return (*_forward(raw, _REQUEST_DROPS), (b"Via", via))


def with_credentials(headers: tuple[Header, ...], replica_key: bytes | None, *, keep: bool) -> tuple[Header, ...]:
    """Headers with the one key that a replica is to see: its own where it has one, else the client's if they are kept.

    What counts as the client's: `Authorization`, `X-Api-Key`, `Api-Key`, and `Cookie`, since what sits before Roost may
    log people in by it. (`Proxy-Authorization` is never forwarded.)
    """
    if replica_key is None and keep:
        return headers
    kept = tuple(header for header in headers if header[0].lower() not in _CREDENTIALS)
    return kept if replica_key is None else (*kept, (b"Authorization", b"Bearer " + replica_key))


def forward_response_headers(head: ResponseHead) -> tuple[Header, ...]:
    """A replica's headers as the client may see them, without framing: the client's side adds its own."""
    return _forward(head.headers, _RESPONSE_DROPS)


def _forward(raw: Iterable[Header], drops: frozenset[bytes]) -> tuple[Header, ...]:
    kept = []
    named: set[bytes] = set()
    for header in raw:
        name = header[0].lower()
        if name in drops:
            if name == b"connection" and (value := header[1].lower()) not in _PLAIN_CONNECTION:
                named.update(token.strip() for token in value.split(b","))
        elif name not in _OWN and not name.startswith(b"proxy-"):
            kept.append(header)
    if named:
        kept = [header for header in kept if header[0].lower() not in named]
    return tuple(kept)


def request_head(
    origin: Origin, method: str, target: str, headers: Sequence[Header], content_length: int | None
) -> bytes:
    """The head of a request to `origin`, up to and including the empty line. `content_length` None: no body.

    Raises `MalformedRequest` where the target or a header could not be sent as one line.
    """
    raw = target.encode("utf-8", "surrogateescape")
    if not _TARGET.fullmatch(raw):
        raw = _origin_form(method, raw)
    lines = [b"%b %b%b HTTP/1.1" % (method.encode(), origin.prefix, raw), b"Host: " + origin.authority]
    lines += [b": ".join(header) for header in headers]
    if content_length is not None:
        lines.append(b"Content-Length: %d" % content_length)
    block = b"\r\n".join(lines)
    if not _is_whole(block, len(lines)):
        raise MalformedRequest("a header holds a line break or NUL")
    return block + b"\r\n\r\n"


def response_head(status: int, reason: bytes, headers: Sequence[Header]) -> bytes:
    """The head of a response to a client, up to and including the empty line; HTTP/1.1.

    Raises `UpstreamBroken` where a header could not be sent as one line.
    """
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    lines += [b": ".join(header) for header in headers]
    block = b"\r\n".join(lines)
    if not _is_whole(block, len(lines)):
        raise UpstreamBroken("a response header holds a line break or NUL")
    return block + b"\r\n\r\n"


def has_no_body(method: str, status: int) -> bool:
    """Whether a final response to `method` ends with its head (RFC 9110 section 6.4.1)."""
    return status in (204, 304) or method == "HEAD"


def _origin_form(method: str, raw: bytes) -> bytes:
    """A target in absolute form (`GET http://host/path`) or of `OPTIONS *`, as an origin server takes it."""
    if raw == b"*":
        return raw
    absolute = _ABSOLUTE.match(raw)
    if absolute is None:
        raise MalformedRequest("the request target is not a path")
    rest = raw[absolute.end() :]
    if method == "OPTIONS" and not rest:
        return b"*"  # RFC 9112 section 3.2.4
    path = rest if rest.startswith(b"/") else b"/" + rest
    if not _TARGET.fullmatch(path):
        raise MalformedRequest("the request target holds a space or control character")
    return path


def _is_whole(block: bytes, lines: int) -> bool:
    """Whether the only line breaks are those between `lines` lines, so that no header smuggles in another."""
    breaks = lines - 1
    return block.count(b"\r") == breaks and block.count(b"\n") == breaks and b"\0" not in block
