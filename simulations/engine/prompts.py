"""Prompts as the chat template prints them: what of a request reaches the KV cache, in which order.

The template is Kimi K2's (public Kimi-K2-Instruct-0905): tools first, then a line per message, then the opening of the
assistant's turn. What survives of each dialect follows SGLang 0.5.23 (entrypoints/anthropic/serving.py,
entrypoints/openai/serving_chat.py, entrypoints/openai/serving_responses.py): `cache_control`, ids of blocks, metadata
and sampling fields never do; key order does, whitespace inside JSON does not; `tool_choice: none` takes the tools away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Fault", "from_messages", "from_responses", "render"]

_END = "<|im_end|>"
_ROLES = {"user": "user", "assistant": "assistant"}
_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")
_NO_BLOCKS = frozenset({"document", "server_tool_use", "web_search_tool_result", "redacted_thinking", "search_result"})

Message = Mapping[str, Any]


class Fault(Exception):
    """A request that is answered with an error: HTTP status, and the words."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


def render(messages: Sequence[Message], tools: object = None, tool_choice: object = None) -> bytes:
    """Chat messages and tools to the bytes of a prompt. Raises `Fault`."""
    out = []
    kept = _kept_tools(tools, tool_choice)
    if kept:
        out += ["<|im_system|>tool_declare<|im_middle|>", _json(kept), _END]
    if not messages or messages[0].get("role") not in {"system", "developer"}:
        out += ["<|im_system|>system<|im_middle|>", _DEFAULT_SYSTEM, _END]
    last = len(messages) - 1
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise Fault("messages: each needs a role")
        # SGLang turns an assistant message at the end into the user's.
        out += _turn("user" if index == last and role == "assistant" else role, message)
    out.append("<|im_assistant|>assistant<|im_middle|>")
    return "".join(out).encode("utf-8", "surrogatepass")


def from_messages(body: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """Anthropic's body as chat messages and tools. Raises `Fault`."""
    found: list[Message] = []
    system = body.get("system")
    if isinstance(system, list):
        system = "\n".join(_text(block) for block in system if _text(block))
    if system:
        found.append({"role": "system", "content": system})
    for message in _list(body, "messages"):
        content = message.get("content")
        if isinstance(content, list):
            found += _anthropic_blocks(message.get("role"), content)
        else:
            found.append({"role": message.get("role"), "content": content})
    tools: list[Message] = []
    for tool in body.get("tools") or ():
        kind = tool.get("type") or "custom"
        if kind.startswith(_SERVER_TOOLS):
            continue
        if kind != "custom":
            raise Fault(f"tools: unsupported type {kind!r}")
        function = {"name": tool.get("name"), "description": tool.get("description") or ""}
        tools.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema")}})
    return found, tools


def from_responses(body: Mapping[str, Any]) -> tuple[list[Message], list[Message]]:
    """A Responses body as chat messages and tools. Raises `Fault`."""
    found: list[dict[str, Any]] = []
    if body.get("instructions"):
        found.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        found.append({"role": "user", "content": given})
    else:
        for item in _list(body, "input"):
            _add_item(found, item)
    tools: list[Message] = []
    for tool in body.get("tools") or ():
        if tool.get("type") in {"function", "custom"}:
            function = {"name": tool.get("name"), "description": tool.get("description") or ""}
            tools.append({"type": "function", "function": {**function, "parameters": tool.get("parameters")}})
    return list(found), tools


def _turn(role: str, message: Message) -> list[str]:
    content = _content(message.get("content"))
    if role == "tool":
        return ["<|im_system|>tool<|im_middle|>", f"## Return of {message.get('tool_call_id')}\n", content, _END]
    name = message.get("name") if role != "user" else None
    out = [f"<|im_{_ROLES.get(role, 'system')}|>{name or role}<|im_middle|>"]
    if role == "assistant" and message.get("reasoning_content"):
        out.append(f"<think>{message['reasoning_content']}\n</think>")
    out.append(content)
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls:
        out.append("<|tool_calls_section_begin|>")
        for call in calls:
            function = call.get("function") or {}
            arguments = function.get("arguments")
            out.append(f"<|tool_call_begin|>{call.get('id')}<|tool_call_argument_begin|>{_arguments(arguments)}")
            out.append("<|tool_call_end|>")
        out.append("<|tool_calls_section_end|>")
    out.append(_END)
    return out


def _arguments(value: object) -> str:
    """A call's arguments, parsed and written again as the template does."""
    if not isinstance(value, str):
        return _json(value)
    try:
        return _json(json.loads(value))
    except ValueError:
        raise Fault("tool_calls: arguments are no JSON") from None


def _content(value: object) -> str:
    """Text of a message's content; parts follow one another, and what is no text stands for itself."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return "".join(_text(part) if _text(part) is not None else _json(part) for part in value)
    raise Fault("messages: content is neither text nor a list of parts")


def _text(part: object) -> Any:
    if isinstance(part, str):
        return part
    return part.get("text") if isinstance(part, Mapping) else None


def _kept_tools(tools: object, tool_choice: object) -> list[Any]:
    """The tools that reach the prompt: none under `none`, one where one is named."""
    if not isinstance(tools, list) or tool_choice == "none":
        return []
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") in {"auto", "any"}:
        return tools
    if tool_choice.get("type") == "none":
        return []
    function = tool_choice.get("function")
    wanted = function.get("name") if isinstance(function, Mapping) else tool_choice.get("name")
    return [tool for tool in tools if (tool.get("function") or tool).get("name") == wanted]


def _anthropic_blocks(role: object, blocks: Iterable[Any]) -> list[Message]:
    """One Anthropic message of blocks: tool results become messages of their own, in order."""
    found: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[Any] = []
    thinking = ""
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in _NO_BLOCKS:
            raise Fault(f"messages: content blocks of type {kind!r} are not supported")
        if kind == "tool_result":
            if parts:
                found.append({"role": role, "content": parts})
                parts = []
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block)})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "thinking":
            thinking += block.get("thinking") or ""
        else:
            parts.append({"text": block["text"]} if kind == "text" and "text" in block else block)
    if parts or calls or thinking or not found:
        found.append({"role": role, "content": parts, "tool_calls": calls, "reasoning_content": thinking})
    return list(found)


def _result(block: Mapping[str, Any]) -> object:
    content = block.get("content")
    if not isinstance(content, list):
        return content
    return " ".join(str(_text(part)) if _text(part) is not None else _json(part) for part in content)


def _add_item(found: list[dict[str, Any]], item: Any) -> None:
    """One item of a Responses input; consecutive items of the assistant become one message."""
    kind = item.get("type") or "message"
    if kind == "message":
        said: dict[str, Any] = {"role": item.get("role"), "content": _content(item.get("content"))}
    elif kind in {"function_call", "custom_tool_call"}:
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": arguments or "{}"}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind in {"function_call_output", "custom_tool_call_output"}:
        said = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    elif kind == "reasoning":
        summary = "".join(_text(part) or "" for part in item.get("summary") or ())
        said = {"role": "assistant", "content": "", "reasoning_content": summary}
    else:
        raise Fault(f"Unsupported Responses API input item type: {kind}")
    before = found[-1] if found else {}
    if said["role"] != "assistant" or before.get("role") != "assistant":
        found.append(said)
        return
    both = [text for text in (before.get("content"), said["content"]) if text]
    before["content"] = "\n\n".join(both)
    before["tool_calls"] = [*(before.get("tool_calls") or ()), *(said.get("tool_calls") or ())]
    before["reasoning_content"] = (before.get("reasoning_content") or "") + (said.get("reasoning_content") or "")


def _list(body: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = body.get(key)
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise Fault(f"{key}: a list of objects is needed")
    return value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
