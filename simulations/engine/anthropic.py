"""`/v1/messages`. `input_tokens` leaves cached tokens out; the cached count is there only where it is not 0.

Source: SGLang 0.5.23, entrypoints/anthropic/serving.py and protocol.py, and a live server. The head comes at once,
`message_start` with the first token; a failing stream still has a `message_start`, with zeros, and a `message_stop`.
"""

from __future__ import annotations

from typing import Any

from simulations.engine.voice import FINGERPRINT, Outcome, Prompted, Voice, event

__all__ = ["Messages"]

_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error"}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


class Messages(Voice):
    """`/v1/messages`."""

    holds_head = False

    def first(self) -> bytes:
        """The message's start and its one text block's."""
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return self._start(self._input(self.prompted, 0)) + event("content_block_start", block)

    def delta(self, text: str) -> bytes:
        """A piece of text."""
        piece = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return event("content_block_delta", piece)

    def closing(self, outcome: Outcome) -> bytes:
        """The block's end, stop reason and output tokens, the message's end."""
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOPS[outcome.finish]},
            "usage": {"output_tokens": outcome.output_tokens},
        }
        stop = event("content_block_stop", {"type": "content_block_stop", "index": 0})
        return stop + event("message_delta", ending) + event("message_stop", {"type": "message_stop"})

    def broken(self, status: int, message: str) -> bytes:
        """A start without numbers, the error, the end."""
        error = {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": message}}
        start = self._start({"input_tokens": 0, "output_tokens": 0})
        return start + event("error", error) + event("message_stop", {"type": "message_stop"})

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """A message."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": outcome.text}],
            "model": self.asked.model,
            "stop_reason": _STOPS[outcome.finish],
            "system_fingerprint": FINGERPRINT,
            "usage": self._input(outcome.prompted, outcome.output_tokens),
        }

    @staticmethod
    def fault(status: int, message: str) -> tuple[int, dict[str, Any]]:
        """Anthropic's error object; SGLang keeps the words of what is not the client's fault to itself."""
        words = message if status < 500 else "Internal server error"
        return status, {"type": "error", "error": {"type": _ERRORS.get(status, "api_error"), "message": words}}

    def _start(self, usage: dict[str, int]) -> bytes:
        message = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.asked.model,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        return event("message_start", {"type": "message_start", "message": message})

    def _input(self, prompted: Prompted, output_tokens: int) -> dict[str, int]:
        cached = prompted.cached_tokens if self.cache_report else 0
        usage = {"input_tokens": prompted.prompt_tokens - cached, "output_tokens": output_tokens}
        return {**usage, "cache_read_input_tokens": cached} if cached else usage
