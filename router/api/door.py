"""The admin API's door: tokens that may read or change, and nothing for web pages of others.

    no tokens     everything, but only under a name of one's own (see below)
    read token    GET and HEAD, /metrics too
    write token   everything

/livez and /readyz are open: a kubelet has no token and they tell nothing. A token comes as `Authorization: Bearer` and
is compared in constant time.

An admin API on loopback without tokens is in reach of every page that a browser on that machine shows. So a request
must not come from another site (`Origin`, `Sec-Fetch-Site`) where it would change anything, and must ask for loopback
by an address or as localhost: a page that has its own name resolve to 127.0.0.1 (DNS rebinding) is no other site by
then, but its name still stands in `Host`.
"""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["Door"]

_OPEN: Final = frozenset({"/livez", "/readyz"})
_SAFE: Final = frozenset({"GET", "HEAD"})
_OWN_SITE: Final = frozenset({"same-origin", "none"})


class Door:
    """Decides what an admin request may do. Keeps digests of tokens, not tokens."""

    def __init__(self, read: tuple[str, ...] = (), write: tuple[str, ...] = (), *, own_names: frozenset[str] | None):
        """`own_names`: under which the API may be asked for without tokens, besides addresses; None: any."""
        self._read = tuple(map(_digest, read))
        self._write = tuple(map(_digest, write))
        self._own_names = own_names

    def middleware(self) -> Middleware:
        """For `web.Application`, before all others."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return self.refusal(request) or await handler(request)

        return guard

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a request that may not do what it asks; None where it may."""
        changes = request.method not in _SAFE
        if request.path in _OPEN and not changes:
            return None
        if changes and _foreign_page(request):
            return _refused(403, "a web page of another site may change nothing here")
        if not (self._read or self._write):
            return self._under_a_strange_name(request)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        given = _digest(token.strip())
        may_change, may_read = _is_one_of(given, self._write), _is_one_of(given, self._read)
        if kind.lower() != "bearer" or not (may_change or may_read):
            return _refused(401, "the admin API needs a token: Authorization: Bearer TOKEN")
        if changes and not may_change:
            return _refused(403, "this token may read only; admin.write_token_file has those that may change")
        return None

    def _under_a_strange_name(self, request: web.BaseRequest) -> web.Response | None:
        host = request.headers.get("Host")
        if self._own_names is None or host is None:
            return None
        name = _name_in(host)
        if name in self._own_names or _is_address(name):
            return None
        return _refused(403, "the admin API without tokens is asked for by its address or as localhost, no other name")


def _digest(token: str) -> bytes:
    """Of one length whatever the token's, for a comparison in constant time."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_one_of(given: bytes, known: tuple[bytes, ...]) -> bool:
    return sum(compare_digest(given, each) for each in known) > 0  # all are compared, whichever it is


def _foreign_page(request: web.BaseRequest) -> bool:
    """Whether a browser says that a page of another site has sent this."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None and site not in _OWN_SITE:
        return True
    origin = request.headers.get("Origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower()
    except ValueError:
        return True


def _name_in(host: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refused(status: int, message: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    body = msgspec.json.encode({"error": message})
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")
