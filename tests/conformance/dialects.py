"""The five dialects: where they live, what is asked in them, and what SGLang 0.5.23 answers, event by event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any


class Dialect(StrEnum):
    """An API of the engine."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    COMPLETIONS = "completions"
    GENERATE = "generate"

    @property
    def path(self) -> str:
        return PATHS[self]


PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.GENERATE: "/generate",
}
DIALECTS = tuple(Dialect)
OF_PATH = {path: dialect for dialect, path in PATHS.items()}
MODEL = "m"

TERMINAL = {
    Dialect.CHAT: b"[DONE]",
    Dialect.MESSAGES: b"message_stop",
    Dialect.RESPONSES: b"response.completed",
    Dialect.COMPLETIONS: b"[DONE]",
    Dialect.GENERATE: b"[DONE]",
}
"""Bytes that only a stream that ended well contains."""


def ask(
    dialect: Dialect, said: Sequence[str], *, stream: bool = True, system: str = "You are a coding agent.", **more: Any
) -> bytes:
    """A request: `said` by user and assistant in turn, the user first."""
    asked: dict[str, Any] = {"model": MODEL, **more}
    roles = ["assistant" if index % 2 else "user" for index in range(len(said))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    match dialect:
        case Dialect.CHAT:
            asked |= {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": 16}
        case Dialect.MESSAGES:
            asked |= {"system": system, "messages": messages, "max_tokens": 16}
        case Dialect.RESPONSES:
            asked |= {"instructions": system, "input": messages, "max_output_tokens": 16}
        case Dialect.COMPLETIONS:
            asked |= {"prompt": system + "\n" + "\n".join(said), "max_tokens": 16}
        case Dialect.GENERATE:
            asked |= {"text": system + "\n" + "\n".join(said), "sampling_params": {"max_new_tokens": 16}}
    asked["stream"] = stream
    return json.dumps(asked).encode()


def whole(dialect: Dialect, answer_id: str, prompt_tokens: int, text: str = "fine ☃") -> bytes:
    """An answer that is no stream."""
    told: dict[str, Any]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + 2, "completion_tokens": 2}
    head = {"id": answer_id, "created": 1795967097, "model": MODEL}
    match dialect:
        case Dialect.CHAT:
            message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "matched_stop": None}
            told = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        case Dialect.COMPLETIONS:
            piece = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop", "matched_stop": None}
            told = {**head, "object": "text_completion", "choices": [piece], "usage": usage}
        case Dialect.RESPONSES:
            told = _response(answer_id, prompt_tokens, text)
        case Dialect.MESSAGES:
            told = {
                "id": answer_id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                "model": MODEL,
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": prompt_tokens, "output_tokens": 2},
            }
        case Dialect.GENERATE:
            told = {"text": text, "output_ids": [1, 2], "meta_info": _meta(answer_id, prompt_tokens, 2, done=True)}
    return json.dumps(told, ensure_ascii=False).encode()


def events(dialect: Dialect, answer_id: str, prompt_tokens: int, pieces: Sequence[str] = ("fi", "ne ☃")) -> list[bytes]:
    """A stream, event by event, with its terminal event last."""
    found: list[bytes] = []
    match dialect:
        case Dialect.MESSAGES:
            return _messages(answer_id, prompt_tokens, pieces)
        case Dialect.RESPONSES:
            return _responses(answer_id, prompt_tokens, pieces)
        case Dialect.GENERATE:
            for number in range(1, len(pieces) + 1):
                meta = _meta(answer_id, prompt_tokens, number, done=number == len(pieces))
                text = "".join(pieces[:number])
                found.append(_data({"text": text, "output_ids": list(range(number)), "meta_info": meta}))
        case Dialect.CHAT:
            head = {"id": answer_id, "object": "chat.completion.chunk", "created": 1795967097, "model": MODEL}
            deltas: list[dict[str, Any]] = [{"reasoning_content": None, "role": "assistant", "content": ""}]
            deltas += [{"reasoning_content": None, "content": piece} for piece in pieces]
            rest = {"logprobs": None, "finish_reason": None, "matched_stop": None}
            found = [_data({**head, "choices": [{"index": 0, "delta": delta, **rest}]}) for delta in deltas]
            last = {"index": 0, "delta": {"reasoning_content": None}, **rest, "finish_reason": "stop"}
            found.append(_data({**head, "choices": [last]}))
        case Dialect.COMPLETIONS:
            head = {"id": answer_id, "object": "text_completion", "created": 1795967097, "model": MODEL}
            rest = {"logprobs": None, "finish_reason": None, "matched_stop": None}
            found = [
                _data({**head, "choices": [{"index": 0, "text": piece, **rest}], "usage": None}) for piece in pieces
            ]
            usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + 2, "completion_tokens": 2}
            found.append(_data({**head, "choices": [], "usage": usage}))
    return [*found, b"data: [DONE]\n\n"]


def queue_full(dialect: Dialect, answer_id: str) -> list[bytes]:
    """What SGLang 0.5.23 streams, under a 200, when `--max-queued-requests` is reached."""
    says = "The request queue is full."
    event = b""
    match dialect:
        case Dialect.MESSAGES:
            usage = {"input_tokens": 0, "output_tokens": 0}
            start = {"id": answer_id, "type": "message", "role": "assistant", "content": [], "model": MODEL}
            error = {"type": "overloaded_error", "message": says}
            return [
                _event("message_start", {"message": {**start, "usage": usage}}),
                _event("error", {"error": error}),
                _event("message_stop", {}),
            ]
        case Dialect.RESPONSES:
            shown: dict[str, Any] = {"id": answer_id, "object": "response", "status": "in_progress", "output": []}
            failed = {**shown, "status": "failed", "error": {"code": "server_error", "message": says}}
            return [
                _event("response.created", {"response": shown, "sequence_number": 0}),
                _event("response.in_progress", {"response": shown, "sequence_number": 1}),
                _event("response.failed", {"response": failed, "sequence_number": 2}),
            ]
        case Dialect.GENERATE:
            reason = {"type": "abort", "status_code": 503, "message": says}
            event = _data({"text": "", "meta_info": {"id": answer_id, "finish_reason": reason}})
        case Dialect.CHAT | Dialect.COMPLETIONS:
            error = {"object": "error", "message": says, "type": "SERVICE_UNAVAILABLE"}
            event = b"data: " + json.dumps({"error": {**error, "param": None, "code": 503}}).encode() + b"\n\n"
    return [event, b"data: [DONE]\n\n"]


def refusal(status: int) -> bytes:
    """The body of SGLang's refusal of a request that is no stream."""
    told = {"object": "error", "message": "The request queue is full.", "type": str(status), "param": None}
    return json.dumps({**told, "code": status}).encode()


def _messages(answer_id: str, prompt_tokens: int, pieces: Sequence[str]) -> list[bytes]:
    start: dict[str, Any] = {"id": answer_id, "type": "message", "role": "assistant", "content": [], "model": MODEL}
    start |= {"stop_reason": None, "stop_sequence": None}
    usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
    deltas = [{"index": 0, "delta": {"type": "text_delta", "text": piece}} for piece in pieces]
    stop = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": len(pieces)}}
    return [
        _event("message_start", {"message": {**start, "usage": usage}}),
        _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *(_event("content_block_delta", delta) for delta in deltas),
        _event("content_block_stop", {"index": 0}),
        _event("message_delta", stop),
        _event("message_stop", {}),
    ]


def _responses(answer_id: str, prompt_tokens: int, pieces: Sequence[str]) -> list[bytes]:
    shown = {**_response(answer_id, prompt_tokens, ""), "status": "in_progress", "output": [], "usage": None}
    done = _response(answer_id, prompt_tokens, "".join(pieces))
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": shown}),
        ("response.in_progress", {"response": shown}),
        *(
            ("response.output_text.delta", {"item_id": "i", "output_index": 0, "content_index": 0, "delta": piece})
            for piece in pieces
        ),
        ("response.completed", {"response": done}),
    ]
    return [_event(name, {**more, "sequence_number": number}) for number, (name, more) in enumerate(told)]


def _response(answer_id: str, prompt_tokens: int, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"id": "i", "type": "message", "role": "assistant", "status": "completed", "content": content}]
    usage = {"input_tokens": prompt_tokens, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt_tokens + 2}
    head = {"id": answer_id, "object": "response", "created_at": 1795967097, "model": MODEL}
    return {**head, "status": "completed", "output": output, "usage": usage, "tools": [], "parallel_tool_calls": True}


def _meta(answer_id: str, prompt_tokens: int, completion_tokens: int, *, done: bool) -> dict[str, Any]:
    reason = {"type": "stop"} if done else None
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "cached_tokens": 0}
    return {"id": answer_id, "finish_reason": reason, **counts}


def _event(name: str, value: dict[str, Any]) -> bytes:
    return f"event: {name}\n".encode() + _data({"type": name, **value})


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
