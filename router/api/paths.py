"""Which API a path belongs to, and the few paths that are not simply passed on."""

from __future__ import annotations

import re
from typing import Final

from router.domain.turn import Dialect

__all__ = ["BROADCAST", "computes", "error_dialect", "stored_response", "tenant_may", "turn_dialect"]

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


_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_READABLE: Final = frozenset({"/v1/models", "/model_info", "/get_model_info"})
_COMPUTING: Final = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/classify", "/encode"})
_ASKABLE: Final = _COMPUTING | {
    "/v1/messages/count_tokens",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/parse_function_call",
    "/separate_reasoning",
}
"""What SGLang 0.5.23 (srt/entrypoints/http_server.py) offers that concerns nobody but the asker. Left out with the rest
are its ollama paths (turns that would count nowhere), sessions of its own, and /health, which makes it generate."""
_STORED_ID: Final = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,256}(/cancel|/input_items)?")
_STORED_METHODS: Final = {None: frozenset({"GET", "DELETE"}), "/cancel": frozenset({"POST"})}


def tenant_may(method: str, path: str) -> bool:
    """Whether a request concerns nobody but its own tenant: turns, what it stored, and questions about text.

    A list of what is allowed, since an engine's further paths act on the whole of it: they flush caches, load weights,
    abort by a prefix of ids, profile, attach storage.
    """
    if turn_dialect(method, path) is not Dialect.OTHER:
        return True
    if path in _READABLE or path.startswith("/v1/models/"):
        return method in _READS
    if path in _ASKABLE or path in _TURNS:
        return method in ("POST", "OPTIONS")
    stored = _STORED_ID.fullmatch(path)
    return stored is not None and method in _STORED_METHODS.get(stored[1], _READS)


def computes(method: str, path: str) -> bool:
    """Whether a request counts against its tenant's limits: a turn, or another that takes the engine's time."""
    return turn_dialect(method, path) is not Dialect.OTHER or (method == "POST" and path in _COMPUTING)


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
