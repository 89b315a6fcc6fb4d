"""Which API a path belongs to, and the few paths that are not simply passed on."""

from __future__ import annotations

import re
from typing import Final

from router.domain.turn import Dialect

__all__ = ["BROADCAST", "error_dialect", "stored_response", "turn_dialect"]

_TURNS: Final = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
    "/generate": Dialect.GENERATE,
}
_STORED: Final = re.compile(r"/v1/responses/([^/]{1,256})(?:/[a-z_]+)?")

BROADCAST: Final = frozenset({"/abort_request", "/flush_cache"})
"""SGLang paths that mean every replica: a request id does not say where it runs, a flush of one cache is no flush."""


def turn_dialect(method: str, path: str) -> Dialect:
    """The dialect of a request that is a turn, else `OTHER`. `path` has no query.

    SGLang takes PUT for POST on /generate (srt/entrypoints/http_server.py).
    """
    if method == "POST" or (method == "PUT" and path == "/generate"):
        return _TURNS.get(path, Dialect.OTHER)
    return Dialect.OTHER


def stored_response(path: str) -> str | None:
    """The id in `/v1/responses/{id}` and below: only the replica that made the response has it."""
    found = _STORED.fullmatch(path)
    return found.group(1) if found is not None else None


def error_dialect(path: str) -> Dialect:
    """In whose words to refuse a request to `path`; OpenAI's where nothing speaks for another."""
    for prefix, dialect in _TURNS.items():
        if path == prefix or path.startswith(prefix + "/"):
            return dialect
    return Dialect.CHAT
