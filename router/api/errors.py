"""What a client is told when a turn fails: one table from the error tree to the wire, in the dialect of the path asked.

Shapes (those of the engine's own errors, so that a client meets one kind: SGLang 0.5.23 entrypoints/http_server.py
`validation_exception_handler`, `_create_error_response`; entrypoints/anthropic/serving.py `_error_response`):

    chat, completions, responses, other   {"error": {"message", "type", "param", "code"}}
    messages                              {"type": "error", "error": {"type", "message"}}
    generate                              {"error": {"message", "type", "code": <status>}}

What a client reads is our own words: a replica's id at most, never an upstream body, an address or a prompt. Coding
agents retry a 503 and heed its Retry-After. Names that end an agent's retries are avoided: Codex gives a turn up on
`server_is_overloaded`, and Claude Code counts any error that says `overloaded_error` as a 529, of which it bears few.

A stream that breaks after its head may end in two ways, never cleanly: some agents take that for a complete answer.

    what the agent does then          connection aborted     `error_frame`, then aborted
    Claude Code 2.1                   retries, streaming     retries at once without streaming
    Codex 0.171, OpenCode 1.18, Kimi  retry                  retry
    Qwen Code 0.24                    retries                fails the run

(measured with breaks between and inside events; Claude Code does so on `overloaded_error` too). So the frame is for
clients without retries of their own, which then learn what happened; for agents the bare abort serves better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from router.domain.errors import NotPlaced, OverLimit, RoostError, StoreError, UnknownKey
from router.domain.turn import Dialect

__all__ = ["ERROR_HEADER", "WireError", "error_frame", "render"]

ERROR_HEADER: Final = "x-roost-error"
"""Response header with the error's code, by which Roost's errors are told from a replica's."""
_MESSAGE_MAX_CHARS: Final = 500
_STORE_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class WireError:
    """A whole response, but for the headers every response has."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Names:
    """How an error is called in the dialects that name errors."""

    openai: str
    anthropic: str
    message: str | None = None
    """What the client reads instead of the error's own text, which is for the log; `{replica}` is filled in."""
    param: str | None = None


_SERVER: Final = _Names("server_error", "api_error", "internal error in the router")
_NAMES: Final[Mapping[str, _Names]] = {
    "invalid_request": _Names("invalid_request_error", "invalid_request_error"),
    "invalid_api_key": _Names("authentication_error", "authentication_error"),
    "not_allowed": _Names("permission_error", "permission_error"),
    "rate_limit_exceeded": _Names("rate_limit_error", "rate_limit_error"),
    "model_not_found": _Names("invalid_request_error", "not_found_error", param="model"),
    "response_not_found": _Names("invalid_request_error", "not_found_error"),
    "request_too_large": _Names("invalid_request_error", "request_too_large"),
    "headers_too_large": _Names("invalid_request_error", "invalid_request_error"),
    "request_timeout": _Names("invalid_request_error", "invalid_request_error"),
    "expectation_failed": _Names("invalid_request_error", "invalid_request_error"),
    "not_implemented": _Names("invalid_request_error", "invalid_request_error"),
    "http_version_not_supported": _Names("invalid_request_error", "invalid_request_error"),
    "router_busy": _Names("server_error", "api_error"),
    "no_replica": _Names("server_error", "api_error"),
    "fleet_full": _Names("server_error", "api_error"),
    "upstream_error": _Names("server_error", "api_error", "{replica} failed"),
    "upstream_unreachable": _Names("server_error", "api_error", "{replica} cannot be reached"),
    "upstream_broken": _Names("server_error", "api_error", "{replica} broke off its answer"),
    "upstream_timeout": _Names("server_error", "timeout_error", "{replica} sent nothing for too long"),
    "store_unavailable": _Names("server_error", "api_error", "the router's store is not available"),
}


def render(error: RoostError, dialect: Dialect, *, replica: str | None = None) -> WireError:
    """Say `error` as a whole response. `replica` is the id of the one that failed, where one did."""
    names, message = _words(error, replica)
    headers = [("content-type", "application/json"), (ERROR_HEADER, error.code)]
    retry_after_s = _retry_after_s(error)
    if isinstance(error, UnknownKey):
        headers.append(("www-authenticate", "Bearer"))  # RFC 9110 section 15.5.2 asks for it
    if retry_after_s is not None:
        headers.append(("retry-after", str(max(1, math.ceil(retry_after_s)))))
    return WireError(error.status, tuple(headers), _json(_envelope(error, names, message, dialect)))


def error_frame(
    error: RoostError,
    dialect: Dialect,
    *,
    mid_event: bool,
    replica: str | None = None,
    response_id: str | None = None,
    sequence_number: int | None = None,
) -> bytes:
    """Say `error` at the end of a broken event stream; then close the connection without ending the message.

    (A reset could overtake the frame; without the last chunk the close itself is no clean end.)

    `mid_event`: the stream broke inside an event, which a blank line must close first (its JSON is cut, so the client
    fails there already). `response_id` and `sequence_number` continue a /v1/responses stream, see `Reader`.
    """
    names, message = _words(error, replica)
    opening = b"\n\n" if mid_event else b""
    if dialect is Dialect.MESSAGES:
        return opening + b"event: error\ndata: " + _json(_envelope(error, names, message, dialect)) + b"\n\n"
    if dialect is not Dialect.RESPONSES:
        return opening + b"data: " + _json(_envelope(error, names, message, dialect)) + b"\n\n"
    response: dict[str, object] = {
        "object": "response",
        "status": "failed",
        # The one code of the SDK's `ResponseError` that fits; Codex retries it.
        "error": {"code": "server_error", "message": message},
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    if response_id is not None:
        response = {"id": response_id, **response}
    event: dict[str, object] = {"type": "response.failed", "response": response}
    if sequence_number is not None:
        event["sequence_number"] = sequence_number
    return opening + b"event: response.failed\ndata: " + _json(event) + b"\n\n"


def _words(error: RoostError, replica: str | None) -> tuple[_Names, str]:
    names = _NAMES.get(error.code, _SERVER)
    if names.message is None:
        # JSON escapes what is left, but a client may print it to a terminal.
        text = "".join(c if c.isprintable() else " " for c in str(error)[:_MESSAGE_MAX_CHARS]).strip()
        return names, text or error.code.replace("_", " ")
    return names, names.message.format(replica="the replica" if replica is None else f"replica {replica}")


def _envelope(error: RoostError, names: _Names, message: str, dialect: Dialect) -> dict[str, object]:
    if dialect is Dialect.MESSAGES:
        return {"type": "error", "error": {"type": names.anthropic, "message": message}}
    if dialect is Dialect.GENERATE:
        return {"error": {"message": message, "type": names.openai, "code": error.status}}
    return {"error": {"message": message, "type": names.openai, "param": names.param, "code": error.code}}


def _retry_after_s(error: RoostError) -> float | None:
    if isinstance(error, NotPlaced | OverLimit):
        return error.retry_after_s
    return _STORE_RETRY_AFTER_S if isinstance(error, StoreError) else None


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
