"""`/v1/chat/completions` and `/v1/completions`.

Source: SGLang 0.5.23, entrypoints/openai/protocol.py and a live server. Chat chunks carry no `usage` key but the last;
completion chunks carry `"usage":null`. The error inside a stream is the one JSON with spaces in it.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from simulations.engine.voice import DONE, FINGERPRINT, Outcome, Prompted, Voice, data

__all__ = ["Chat", "Completions", "openai_fault"]


def openai_fault(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """SGLang's own error object."""
    kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else str(status)
    return status, {"object": "error", "message": message, "type": kind, "param": None, "code": status}


class _OpenAI(Voice):
    holds_head = True
    fault = staticmethod(openai_fault)

    def broken(self, status: int, message: str) -> bytes:
        """An error event and the end."""
        error = {"object": "error", "message": message, "type": HTTPStatus(status).name, "param": None, "code": status}
        return b"data: " + json.dumps({"error": error}).encode() + b"\n\n" + DONE

    def _usage(self, prompted: Prompted, output_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": prompted.prompt_tokens,
            "total_tokens": prompted.prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": prompted.cached_tokens} if self.cache_report else None,
            "reasoning_tokens": 0,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.asked.model}


class Chat(_OpenAI):
    """`/v1/chat/completions`."""

    def first(self) -> bytes:
        """The role, which comes with the first token."""
        delta = {"reasoning_content": None, "role": "assistant", "content": ""}
        return data({**self._chunk(delta, None), "system_fingerprint": FINGERPRINT})

    def delta(self, text: str) -> bytes:
        """A piece of content."""
        return data(self._chunk({"reasoning_content": None, "content": text}, None))

    def closing(self, outcome: Outcome) -> bytes:
        """Finish reason, usage if asked for, the end."""
        end = data(self._chunk({"reasoning_content": None}, outcome.finish))
        if self.asked.include_usage:
            usage = {**self._usage(outcome.prompted, outcome.output_tokens), "completion_tokens_details": None}
            head = self._head("chat.completion.chunk")
            end += data({**head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})
        return end + DONE

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """A `chat.completion`."""
        message = {"role": "assistant", "content": outcome.text, "reasoning_content": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": outcome.finish,
            "matched_stop": None,
        }
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": {**self._usage(outcome.prompted, outcome.output_tokens), "completion_tokens_details": None},
            "metadata": {"weight_version": "default"},
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


class Completions(_OpenAI):
    """`/v1/completions`."""

    def delta(self, text: str) -> bytes:
        """A piece of text."""
        return data({**self._head("text_completion"), "choices": [self._choice(text, None)], "usage": None})

    def closing(self, outcome: Outcome) -> bytes:
        """Finish reason, usage if asked for, the end."""
        head = {**self._head("text_completion"), "system_fingerprint": FINGERPRINT}
        end = data({**head, "choices": [self._choice("", outcome.finish)], "usage": None})
        if self.asked.include_usage:
            end += data({**head, "choices": [], "usage": self._usage(outcome.prompted, outcome.output_tokens)})
        return end + DONE

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """A `text_completion`."""
        return {
            **self._head("text_completion"),
            "choices": [self._choice(outcome.text, outcome.finish)],
            "usage": self._usage(outcome.prompted, outcome.output_tokens),
            "metadata": {"weight_version": "default"},
            "system_fingerprint": FINGERPRINT,
        }

    @staticmethod
    def _choice(text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
