"""What an engine says about a turn, in each dialect's own shape: token counts, and errors inside a 200.

Pure functions over decoded JSON. Nothing here trusts a shape: a field of the wrong type counts as not said.

Where SGLang 0.5.23 puts the counts (entrypoints/openai/usage_processor.py, entrypoints/anthropic/serving.py,
entrypoints/openai/protocol.py, managers/tokenizer_manager.py):

    dialect            object     prompt                 cached                               output
    chat, completions  usage      prompt_tokens          prompt_tokens_details.cached_tokens  completion_tokens
    responses          usage      input_tokens           input_tokens_details.cached_tokens   output_tokens
    messages           usage      input_tokens + cached  cache_read_input_tokens              output_tokens
    generate           meta_info  prompt_tokens          cached_tokens                        completion_tokens

Chat and completions say `prompt_tokens_details: null` unless the engine runs with --enable-cache-report; messages leave
the cached count out both then and when it is 0. Both read as None, "not said". Responses and generate always say it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from router.domain.outcome import Usage
from router.domain.turn import Dialect

__all__ = ["EngineFault", "add", "engine_fault", "merge", "usage_shape"]

_COUNT_MAX: Final = 2**53
EngineFault = tuple[str, int | None]
"""A bounded name (safe as a metric label) and the HTTP status the error stands for, None where the engine gave none."""


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _COUNT_MAX else None


def _nested_count(fields: Mapping[str, object], key: str, nested: str) -> int | None:
    details = fields.get(key)
    return _count(details.get(nested)) if isinstance(details, dict) else None


def _usage(prompt: int | None, cached: int | None, output: int | None) -> Usage:
    # No prompt is empty: SGLang writes zeros for a turn it refused and where it does not know yet (the usage chunk
    # after an error in serving_chat.py; `_ensure_message_started` in anthropic/serving.py).
    if prompt == 0:
        return Usage()
    if prompt is not None and cached is not None:
        cached = min(cached, prompt)
    return Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


def _openai(value: object) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    cached = _nested_count(value, "prompt_tokens_details", "cached_tokens")
    return _usage(_count(value.get("prompt_tokens")), cached, _count(value.get("completion_tokens")))


def _responses(value: object) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    cached = _nested_count(value, "input_tokens_details", "cached_tokens")
    return _usage(_count(value.get("input_tokens")), cached, _count(value.get("output_tokens")))


def _anthropic(value: object) -> Usage:
    """Anthropic's `input_tokens` leaves out what was read from or written to the cache; all three make the prompt."""
    if not isinstance(value, dict):
        return Usage()
    fresh = _count(value.get("input_tokens"))
    cached = _count(value.get("cache_read_input_tokens"))
    written = _count(value.get("cache_creation_input_tokens"))
    prompt = None if fresh is None else fresh + (cached or 0) + (written or 0)
    return _usage(prompt, cached, _count(value.get("output_tokens")))


def _meta_info(value: object) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    counts = (_count(value.get(key)) for key in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    return _usage(*counts)


def usage_shape(dialect: Dialect) -> Callable[[object], Usage]:
    """The function that reads the usage object of `dialect` (`meta_info` for generate); unknown paths are as chat."""
    return _SHAPES.get(dialect, _openai)


_SHAPES: Final[Mapping[Dialect, Callable[[object], Usage]]] = {
    Dialect.RESPONSES: _responses,
    Dialect.MESSAGES: _anthropic,
    Dialect.GENERATE: _meta_info,
}


def merge(old: Usage, new: Usage) -> Usage:
    """The later word wins, field by field; what it leaves out stands."""
    return Usage(
        prompt_tokens=old.prompt_tokens if new.prompt_tokens is None else new.prompt_tokens,
        cached_tokens=old.cached_tokens if new.cached_tokens is None else new.cached_tokens,
        output_tokens=old.output_tokens if new.output_tokens is None else new.output_tokens,
    )


def add(one: Usage, other: Usage) -> Usage:
    """The sum over the items of a batch; None where neither said."""

    def plus(a: int | None, b: int | None) -> int | None:
        return b if a is None else a if b is None else a + b

    return Usage(
        prompt_tokens=plus(one.prompt_tokens, other.prompt_tokens),
        cached_tokens=plus(one.cached_tokens, other.cached_tokens),
        output_tokens=plus(one.output_tokens, other.output_tokens),
    )


# The names engines give their errors, by the HTTP status they stand for. SGLang sends `HTTPStatus.name`
# (serving_chat.py, `_generate_chat_stream`) or Anthropic's names (anthropic/serving.py, `ERROR_TYPE_MAP`).
_STATUS_OF_NAME: Final[Mapping[str, int]] = {
    "authentication_error": 401,
    "bad_request": 400,
    "badrequest": 400,
    "badrequesterror": 400,
    "context_length_exceeded": 400,
    "gateway_timeout": 504,
    "internal_server_error": 500,
    "internalservererror": 500,
    "api_error": 500,
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "not_found_error": 404,
    "overloaded_error": 503,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "request_timeout": 408,
    "request_timeout_error": 408,
    "request_too_large": 413,
    "server_error": 500,
    "server_is_overloaded": 503,
    "service_unavailable": 503,
    "timeout_error": 504,
    "too_many_requests": 429,
}
# /v1/responses keeps an abort's message but not its status: `server_error` in a stream (serving_responses.py,
# `_error_from_finish_reason`), a 400 with "503: " in front where there is no stream. These are the scheduler's words
# for a full queue (managers/scheduler.py, `_abort_on_queued_limit`).
_OVERLOAD_MESSAGES: Final = ("The request queue is full", "The request is aborted by a higher priority request")


def engine_fault(error: object) -> EngineFault:
    """Name an error object of any dialect: overloaded, rate_limited, timeout, invalid_request or internal.

    Understands `{"type", "code", "message"}` in SGLang's, OpenAI's and Anthropic's use, a `finish_reason` of type abort
    (`{"status_code", "err_type", "message"}`), and a bare string.
    """
    status = _status_of(error)
    if status is None:
        return "internal", None
    if status in (503, 529):
        return "overloaded", status
    if status == 429:
        return "rate_limited", status
    if status in (408, 504):
        return "timeout", status
    return ("invalid_request" if status < 500 else "internal"), status


def _status_of(error: object) -> int | None:
    if not isinstance(error, dict):
        return None
    message = error.get("message")
    if isinstance(message, str) and message.removeprefix("503: ").startswith(_OVERLOAD_MESSAGES):
        return 503
    for key in ("code", "status_code", "type", "err_type"):
        value = error.get(key)
        if isinstance(value, str):
            if value.isascii() and value.isdigit() and len(value) == 3:
                value = int(value)
            elif (known := _STATUS_OF_NAME.get(value.lower())) is not None:
                return known
        if type(value) is int and 400 <= value <= 599:
            return value
    return None
