"""The five dialects as a client speaks them: the body of a turn, and what a response says.

Written for the tests alone: Roost's own readers are what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.sglang.servers import MODEL

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DIALECTS",
    "GENERATE",
    "MESSAGES",
    "RESPONSES",
    "Dialect",
    "Event",
    "Reply",
    "events_of",
]

Event = tuple[str, Any]
"""Name (empty where unnamed) and data: decoded JSON, or the text itself where it is none (`[DONE]`)."""


@dataclass(slots=True)
class Reply:
    """What a client understood of a response."""

    text: str = ""
    said: Any = None
    """The assistant's turn as this dialect sends it back in the history."""
    prompt_tokens: int | None = None
    """Cached ones included, in every dialect."""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    ended: bool = False
    """A stream's terminal event came."""
    errors: list[Any] = field(default_factory=list)
    response_id: str | None = None


Exchange = tuple[str, Any]
"""What the user said, and `Reply.said`."""


def events_of(data: bytes) -> list[Event]:
    """The whole events of a stream so far."""
    found: list[Event] = []
    for block in data.split(b"\n\n")[:-1]:
        name, lines = "", []
        for line in block.split(b"\n"):
            key, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if key == b"event":
                name = value.decode()
            elif key == b"data":
                lines.append(value.decode())
        text = "\n".join(lines)
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            found.append((name, text))
    return found


class Dialect:
    """One API."""

    name: ClassVar[str]
    path: ClassVar[str]
    endless: ClassVar[dict[str, Any]] = {}
    """What a long turn asks besides: dice, where the end of the text can be ignored. The most likely tokens may go on
    for ever without completing a character, and a stream of them shows nothing.
    """

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        """A turn: always the most likely token, so that the same conversation goes the same way on every server."""
        raise NotImplementedError

    def has_output(self, event: Event) -> bool:
        """Whether a stream's event brings something that the model wrote."""
        raise NotImplementedError

    def streamed(self, events: Sequence[Event]) -> Reply:
        """Read a stream."""
        raise NotImplementedError

    def whole(self, body: Any) -> Reply:
        """Read a response that is no stream."""
        raise NotImplementedError


class _WithChoices(Dialect):
    """OpenAI's older APIs: chunks with choices, usage in the last, then `[DONE]`."""

    def _written(self, choice: dict[str, Any]) -> str:
        """What a choice, or a piece of one, brings of the model's text."""
        raise NotImplementedError

    def _back(self, text: str) -> Any:
        """The assistant's turn for the history."""
        raise NotImplementedError

    def has_output(self, event: Event) -> bool:
        return isinstance(event[1], dict) and any(map(self._written, event[1].get("choices") or []))

    def streamed(self, events: Sequence[Event]) -> Reply:
        reply = Reply()
        for _, data in events:
            if data == "[DONE]":
                reply.ended = True
            elif "error" in data:
                reply.errors.append(data["error"])
            else:
                self._add(reply, data)
        reply.said = self._back(reply.text)
        return reply

    def whole(self, body: Any) -> Reply:
        reply = Reply()
        self._add(reply, body)
        reply.said = self._back(reply.text)
        return reply

    def _add(self, reply: Reply, data: dict[str, Any]) -> None:
        for choice in data["choices"]:
            reply.text += self._written(choice)
            reply.finish = choice["finish_reason"] or reply.finish
        if usage := data.get("usage"):
            reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            reply.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


class _Chat(_WithChoices):
    name, path = "chat", "/v1/chat/completions"
    endless: ClassVar[dict[str, Any]] = {"temperature": 1}

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}]
        for asked, said in history:
            messages += [{"role": "user", "content": asked}, said]
        messages.append({"role": "user", "content": user})
        options = {"stream_options": {"include_usage": True}} if stream else {}
        limits = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": MODEL, "messages": messages, "stream": stream, **limits, **options, **more}

    def _written(self, choice: dict[str, Any]) -> str:
        message = choice.get("delta") or choice.get("message") or {}
        return message.get("content") or message.get("reasoning_content") or ""

    def _back(self, text: str) -> Any:
        return {"role": "assistant", "content": text}


def _raw_prompt(system: str, history: Sequence[Exchange], user: str) -> str:
    turns = "".join(f"\nuser: {asked}\nassistant:\n{said}" for asked, said in history)
    return f"{system}{turns}\nuser: {user}\nassistant:\n"


class _Completions(_WithChoices):
    name, path = "completions", "/v1/completions"
    endless: ClassVar[dict[str, Any]] = {"temperature": 1}

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        prompt = _raw_prompt(system, history, user)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        limits = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": MODEL, "prompt": prompt, "stream": stream, **limits, **options, **more}

    def _written(self, choice: dict[str, Any]) -> str:
        return str(choice["text"])

    def _back(self, text: str) -> Any:
        return text


class _Responses(Dialect):
    name, path = "responses", "/v1/responses"

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        items: list[Any] = []
        for asked, said in history:
            items += [{"role": "user", "content": asked}, *said]
        items.append({"role": "user", "content": user})
        limits = {"max_output_tokens": max_tokens, "temperature": 0, "store": False}
        return {"model": MODEL, "instructions": system, "input": items, "stream": stream, **limits, **more}

    def has_output(self, event: Event) -> bool:
        return event[0] in {"response.output_text.delta", "response.reasoning_text.delta"}

    def streamed(self, events: Sequence[Event]) -> Reply:
        reply, text = Reply(), ""
        for name, data in events:
            if name.endswith("_text.delta"):
                text += data["delta"]
            elif name in {"response.completed", "response.incomplete"}:
                reply = self.whole(data["response"])
                reply.ended = True
            elif name in {"error", "response.failed"}:
                reply.errors.append(data["response"]["error"] if "response" in data else data)
        reply.text = text
        return reply

    def whole(self, body: Any) -> Reply:
        text = "".join(part["text"] for item in body["output"] for part in item.get("content") or [])
        usage = body["usage"]
        return Reply(
            text=text,
            said=body["output"],
            prompt_tokens=usage["input_tokens"],
            cached_tokens=usage["input_tokens_details"]["cached_tokens"],
            output_tokens=usage["output_tokens"],
            finish=body["status"],
            response_id=body["id"],
        )


class _Messages(Dialect):
    name, path = "messages", "/v1/messages"

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        messages: list[Any] = []
        for asked, said in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        messages.append({"role": "user", "content": user})
        limits = {"max_tokens": max_tokens, "temperature": 0}
        return {"model": MODEL, "system": system, "messages": messages, "stream": stream, **limits, **more}

    def has_output(self, event: Event) -> bool:
        return event[0] == "content_block_delta"

    def streamed(self, events: Sequence[Event]) -> Reply:
        reply = Reply()
        blocks: list[dict[str, Any]] = []
        for name, data in events:
            if name == "message_start":
                self._prompt(reply, data["message"]["usage"])
            elif name == "content_block_start":
                blocks.append(dict(data["content_block"]))
            elif name == "content_block_delta":
                delta = data["delta"]
                key = delta["type"].removesuffix("_delta")
                blocks[data["index"]][key] += delta[key]
                reply.text += delta[key]
            elif name == "message_delta":
                reply.finish, reply.output_tokens = data["delta"]["stop_reason"], data["usage"]["output_tokens"]
            elif name == "message_stop":
                reply.ended = True
            elif name == "error":
                reply.errors.append(data["error"])
        reply.said = blocks
        return reply

    def whole(self, body: Any) -> Reply:
        blocks = body["content"]
        text = "".join(block.get("thinking") or block.get("text") or "" for block in blocks)
        reply = Reply(text=text, said=blocks, finish=body["stop_reason"], output_tokens=body["usage"]["output_tokens"])
        self._prompt(reply, body["usage"])
        return reply

    def _prompt(self, reply: Reply, usage: Any) -> None:
        reply.cached_tokens = usage.get("cache_read_input_tokens") or 0
        reply.prompt_tokens = usage["input_tokens"] + reply.cached_tokens


class _Generate(Dialect):
    name, path = "generate", "/generate"

    def body(
        self, system: str, history: Sequence[Exchange], user: str, *, max_tokens: int, stream: bool, **more: Any
    ) -> dict[str, Any]:
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return {"text": _raw_prompt(system, history, user), "sampling_params": sampling, "stream": stream, **more}

    def has_output(self, event: Event) -> bool:
        return isinstance(event[1], dict) and bool(event[1].get("output_ids"))

    def streamed(self, events: Sequence[Event]) -> Reply:
        reply = Reply()
        for _, data in events:
            if data == "[DONE]":
                reply.ended = True
            elif "error" in data:
                reply.errors.append(data["error"])
            else:
                reply = self.whole(data)  # each event repeats everything before it
        return reply

    def whole(self, body: Any) -> Reply:
        meta = body["meta_info"]
        finish = meta["finish_reason"] or {}
        return Reply(
            text=body["text"],
            said=body["text"],
            prompt_tokens=meta.get("prompt_tokens"),
            cached_tokens=meta.get("cached_tokens"),
            output_tokens=meta.get("completion_tokens"),
            finish=finish.get("type"),
            errors=[finish] if finish.get("status_code") else [],
        )


CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = _Chat(), _Completions(), _Responses(), _Messages(), _Generate()
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE)
