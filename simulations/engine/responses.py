"""`/v1/responses`. `response.created` and `response.in_progress` come at once and echo the instructions and tools.

Source: SGLang 0.5.23, entrypoints/openai/serving_responses.py and protocol.py, and a live server. Without a stream,
usage lies in the middle of the body; a full queue is then a 400 whose words begin with "503: ".
"""

from __future__ import annotations

from typing import Any

from simulations.engine.voice import FINGERPRINT, Outcome, Prompted, Voice, event

__all__ = ["Responses"]


class Responses(Voice):
    """`/v1/responses`."""

    holds_head = False
    _number = 0
    _text = ""

    @property
    def _item(self) -> str:
        return "msg_" + self.id.removeprefix("resp_")

    def opening(self) -> bytes:
        """Two events that repeat the request."""
        return b"".join(
            self._event(name, {"response": self._response("in_progress", [], None)})
            for name in ("response.created", "response.in_progress")
        )

    def first(self) -> bytes:
        """The output item and its one part."""
        item = {**self._message("", "in_progress"), "content": []}
        part = {"output_index": 0, "item_id": self._item, "content_index": 0, "part": _part("")}
        return self._event("response.output_item.added", {"output_index": 0, "item": item}) + self._event(
            "response.content_part.added", part
        )

    def delta(self, text: str) -> bytes:
        """A piece of text; `type` comes last here, as it does there."""
        self._text += text
        fields = {"content_index": 0, "delta": text, "item_id": self._item, "logprobs": [], "output_index": 0}
        self._number += 1
        named = {**fields, "sequence_number": self._number - 1, "type": "response.output_text.delta"}
        return event("response.output_text.delta", named)

    def closing(self, outcome: Outcome) -> bytes:
        """The ends of part, item and response."""
        at = {"output_index": 0, "content_index": 0, "item_id": self._item}
        item = self._message(outcome.text, "completed")
        status = _status(outcome)
        usage = self._usage(outcome.prompted, outcome.output_tokens)
        return (
            self._event("response.output_text.done", {**at, "text": outcome.text, "logprobs": []})
            + self._event("response.content_part.done", {**at, "part": _part(outcome.text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": item})
            + self._event(f"response.{status}", {"response": self._response(status, [item], usage)})
        )

    def broken(self, status: int, message: str) -> bytes:
        """`response.failed`, which keeps the words and not the status."""
        usage = self._usage(Prompted(0, 0, 0), 0)
        response = self._response("failed", [], usage)
        response["error"] = {"code": "server_error" if status >= 500 else "invalid_prompt", "message": message}
        return self._event("response.failed", {"response": response})

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """A response."""
        item = self._message(outcome.text, "completed")
        return self._response(_status(outcome), [item], self._usage(outcome.prompted, outcome.output_tokens))

    @staticmethod
    def fault(status: int, message: str) -> tuple[int, dict[str, Any]]:
        """OpenAI's error object; what is not the client's fault becomes a 400 too."""
        words = message if status < 500 else f"{status}: {message}"
        status = status if status < 500 else 400
        error = {"message": words, "type": "invalid_request_error", "param": None, "code": status}
        return status, {"error": error}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return event(name, {"type": name, "sequence_number": self._number - 1, **fields})

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item,
            "content": [_part(text)],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": "final_answer",
        }

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = self.asked.body
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "model": self.asked.model,
            "output": output,
            "status": status,
            "usage": usage,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "error": None,
            "incomplete_details": cut,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "previous_response_id": None,
            "reasoning": body.get("reasoning"),
            "store": body.get("store", True),
            "temperature": body.get("temperature"),
            "text": body.get("text"),
            "top_p": body.get("top_p"),
            "truncation": body.get("truncation", "disabled"),
            "user": body.get("user"),
            "metadata": {**(body.get("metadata") or {}), "system_fingerprint": FINGERPRINT},
        }

    @staticmethod
    def _usage(prompted: Prompted, output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": prompted.prompt_tokens,
            "input_tokens_details": {"cached_tokens": prompted.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompted.prompt_tokens + output_tokens,
        }


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _status(outcome: Outcome) -> str:
    return "completed" if outcome.finish == "stop" else "incomplete"
