"""A request of any dialect, read: the prompt's bytes, how much to say, and how to say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from simulations.engine import tokens
from simulations.engine.prompts import Fault, from_messages, from_responses, render

__all__ = ["CHAT", "COMPLETIONS", "GENERATE", "MESSAGES", "RESPONSES", "Asked", "chat_prompt", "decoded", "read"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/generate"

_DISPLAYS = (None, "omitted", "summarized")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client wants."""

    path: str
    model: str
    stream: bool
    prompt: bytes
    max_tokens: int | None
    """None: as far as the context reaches."""
    exact: bool = False
    """Say exactly `max_tokens` (`ignore_eos`)."""
    rid: str | None = None
    priority: int = 0
    namespace: int = 0
    """Prompts of different namespaces share no cache (`cache_salt`, `extra_key`)."""
    include_usage: bool = False
    body: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """As it came, for what a reply echoes."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return tokens.count(self.prompt)


def decoded(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body. Raises `Fault`."""
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        raise Fault("JSON decode error") from None
    if not isinstance(body, dict):
        raise Fault("Input should be a valid dictionary")
    return body


def read(path: str, body: dict[str, Any], served_model: str) -> Asked:
    """Read a turn. Raises `Fault` for what SGLang refuses, and for whatever has not the shape it should have."""
    with _shaped():
        asked = _READERS[path](path, body)
    if path == RESPONSES and asked.model != served_model:
        raise Fault(f"The model '{asked.model}' does not exist.", 404)
    return replace(asked, model=served_model) if path == GENERATE else asked


def chat_prompt(path: str, body: dict[str, Any]) -> bytes:
    """The prompt of a chat-like request alone, for counting. Raises `Fault`."""
    with _shaped():
        return _chat_prompt(path, body)


@contextmanager
def _shaped() -> Iterator[None]:
    """A body that is nested differently than any reader expects is the client's fault."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Fault(f"1 validation error:\n {type(error).__name__}") from None


def _chat_prompt(path: str, body: dict[str, Any]) -> bytes:
    if path == MESSAGES:
        _check_thinking(body)
        messages, tools = from_messages(body)
        return render(messages, tools, body.get("tool_choice"))
    if path == RESPONSES:
        messages, tools = from_responses(body)
        return render(messages, tools, body.get("tool_choice"))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise Fault("1 validation error:\n messages: Field required")
    return render(given, body.get("tools"), body.get("tool_choice"))


def _chat(path: str, body: dict[str, Any]) -> Asked:
    limit = _whole(body, "max_completion_tokens") or _whole(body, "max_tokens")
    if isinstance(body.get("input_ids"), list):
        prompt = tokens.bytes_of_ids(body["input_ids"])
    else:
        prompt = _chat_prompt(path, body)
    return _asked(path, body, body.get("model") or "default", prompt, limit)


def _completions(path: str, body: dict[str, Any]) -> Asked:
    prompt = _raw(body.get("prompt"))
    limit = _whole(body, "max_tokens")
    return _asked(path, body, body.get("model") or "default", prompt, 16 if limit is None else limit)


def _messages(path: str, body: dict[str, Any]) -> Asked:
    for key in ("model", "max_tokens", "messages"):
        if key not in body:
            raise Fault(f"{key}: Field required")
    return _asked(path, body, str(body["model"]), _chat_prompt(path, body), _whole(body, "max_tokens"))


def _responses(path: str, body: dict[str, Any]) -> Asked:
    model = body.get("model")
    if not model:
        raise Fault("model: Field required")
    if body.get("previous_response_id"):
        raise Fault("Response store is disabled; previous_response_id cannot be used.")
    return _asked(path, body, model, _chat_prompt(path, body), _whole(body, "max_output_tokens"), rid="request_id")


def _generate(path: str, body: dict[str, Any]) -> Asked:
    sampling = body.get("sampling_params") or {}
    given = body.get("input_ids") if body.get("text") is None else body.get("text")
    limit = _whole(sampling, "max_new_tokens")
    exact = bool(sampling.get("ignore_eos"))
    return _asked(path, body, "", _raw(given), 128 if limit is None else limit, exact=exact)


_READERS = {
    CHAT: _chat,
    COMPLETIONS: _completions,
    MESSAGES: _messages,
    RESPONSES: _responses,
    GENERATE: _generate,
}


def _asked(
    path: str,
    body: dict[str, Any],
    model: str,
    prompt: bytes,
    limit: int | None,
    *,
    exact: bool | None = None,
    rid: str = "rid",
) -> Asked:
    if limit is not None and limit < 1:
        raise Fault("max_tokens must be at least 1")
    if not prompt:
        raise Fault("The prompt is empty")
    options = body.get("stream_options") or {}
    given = body.get(rid)
    return Asked(
        path=path,
        model=str(model),
        stream=body.get("stream") is True,
        prompt=prompt,
        max_tokens=limit,
        exact=bool(body.get("ignore_eos")) if exact is None else exact,
        rid=given if isinstance(given, str) and given else None,
        priority=_whole(body, "priority") or 0,
        namespace=_namespace(body),
        include_usage=bool(options.get("include_usage")),
        body=body,
    )


def _namespace(body: Mapping[str, Any]) -> int:
    names = [body.get(key) for key in ("extra_key", "cache_salt")]
    given = [name for name in names if isinstance(name, str) and name]
    return xxh3_64_intdigest("\0".join(given).encode()) if given else 0


def _raw(given: object) -> bytes:
    """A prompt that no template prints: text, or token ids."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        prompt = given.encode("utf-8", "surrogatepass")
    elif isinstance(given, list) and all(type(each) is int for each in given):
        prompt = tokens.bytes_of_ids(given)
    else:
        raise Fault("the simulated engine takes one prompt a request: a text or a list of token ids")
    if not prompt:
        raise Fault("The prompt is empty")
    return prompt


def _whole(body: Mapping[str, Any], key: str) -> int | None:
    value = body.get(key)
    return value if type(value) is int else None


def _check_thinking(body: Mapping[str, Any]) -> None:
    thinking = body.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("display") not in _DISPLAYS:
        raise Fault("thinking.display: Input should be 'summarized' or 'omitted'")
