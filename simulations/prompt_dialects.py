"""Prompts as request bodies, in the five dialects an SGLang replica speaks.

A tool's answer needs a call it answers: the assistant's message before it carries one, and the request offers that
tool. `completions` and `generate` know no messages and get the text alone.

`ignore_eos` makes SGLang and vLLM go on until the output is as long as the trace's (SGLang 0.5.23,
entrypoints/openai/protocol.py, sampling parameters); servers that refuse unknown fields need it off. Anthropic's and
the Responses API have no such field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from router.domain.turn import Dialect
from simulations.prompt import Message, Prompt, Role

__all__ = ["DIALECTS", "PATHS", "body"]

PATHS: Final[Mapping[Dialect, str]] = MappingProxyType(
    {
        Dialect.CHAT: "/v1/chat/completions",
        Dialect.MESSAGES: "/v1/messages",
        Dialect.RESPONSES: "/v1/responses",
        Dialect.COMPLETIONS: "/v1/completions",
        Dialect.GENERATE: "/generate",
    }
)
DIALECTS: Final = tuple(PATHS)
_TOOL: Final = "run"
_SCHEMA: Final = {"type": "object", "properties": {"command": {"type": "string"}}}
_ABOUT: Final = "Run a command."
_encode = msgspec.json.Encoder().encode


def body(dialect: Dialect, prompt: Prompt, model: str, *, ignore_eos: bool) -> bytes:
    """The body of a streaming request for `prompt.output_tokens` tokens at temperature 0."""
    return _encode(_BODIES[dialect](prompt, model, ignore_eos))


def _call(number: int) -> str:
    return f"call_{number:05d}"


def _chat(prompt: Prompt, model: str, ignore_eos: bool) -> dict[str, Any]:
    function = {"name": _TOOL, "description": _ABOUT, "parameters": _SCHEMA}
    asked = {
        "model": model,
        "messages": [_chat_message(number, message) for number, message in enumerate(prompt.messages)],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return asked | ({"ignore_eos": True} if ignore_eos else {})


def _chat_message(number: int, message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": str(message.role), "content": message.text}
    if message.calls_tool:
        function = {"name": _TOOL, "arguments": "{}"}
        told["tool_calls"] = [{"id": _call(number), "type": "function", "function": function}]
    elif message.role is Role.TOOL:
        told["tool_call_id"] = _call(number - 1)
    return told


def _messages(prompt: Prompt, model: str, _: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "stream": True,
        "tools": [{"name": _TOOL, "description": _ABOUT, "input_schema": _SCHEMA}],
    }
    said = list(enumerate(prompt.messages))
    if said[0][1].role is Role.SYSTEM:
        asked["system"] = said.pop(0)[1].text
    return asked | {"messages": [_anthropic(number, message) for number, message in said]}


def _anthropic(number: int, message: Message) -> dict[str, Any]:
    text = {"type": "text", "text": message.text}
    if message.calls_tool:
        use = {"type": "tool_use", "id": _call(number), "name": _TOOL, "input": {}}
        return {"role": "assistant", "content": [text, use]}
    if message.role is Role.TOOL:
        result = {"type": "tool_result", "tool_use_id": _call(number - 1), "content": message.text}
        return {"role": "user", "content": [result]}
    return {"role": str(message.role), "content": [text]}


def _responses(prompt: Prompt, model: str, _: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "model": model,
        "max_output_tokens": prompt.output_tokens,
        "temperature": 0,
        "stream": True,
        "store": False,
        "tools": [{"type": "function", "name": _TOOL, "description": _ABOUT, "parameters": _SCHEMA}],
    }
    said = list(enumerate(prompt.messages))
    if said[0][1].role is Role.SYSTEM:
        asked["instructions"] = said.pop(0)[1].text
    return asked | {"input": [item for number, message in said for item in _items(number, message)]}


def _items(number: int, message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        return [{"type": "function_call_output", "call_id": _call(number - 1), "output": message.text}]
    kind = "output_text" if message.role is Role.ASSISTANT else "input_text"
    items: list[dict[str, Any]] = [
        {"type": "message", "role": str(message.role), "content": [{"type": kind, "text": message.text}]}
    ]
    if message.calls_tool:
        items.append({"type": "function_call", "call_id": _call(number), "name": _TOOL, "arguments": "{}"})
    return items


def _completions(prompt: Prompt, model: str, ignore_eos: bool) -> dict[str, Any]:
    asked = {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return asked | ({"ignore_eos": True} if ignore_eos else {})


def _generate(prompt: Prompt, _: str, ignore_eos: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": prompt.output_tokens, "temperature": 0}
    return {
        "text": prompt.text,
        "sampling_params": sampling | ({"ignore_eos": True} if ignore_eos else {}),
        "stream": True,
    }


_BODIES: Final[Mapping[Dialect, Callable[[Prompt, str, bool], dict[str, Any]]]] = {
    Dialect.CHAT: _chat,
    Dialect.MESSAGES: _messages,
    Dialect.RESPONSES: _responses,
    Dialect.COMPLETIONS: _completions,
    Dialect.GENERATE: _generate,
}
