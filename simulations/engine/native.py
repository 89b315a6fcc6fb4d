"""`/generate`: cumulative text and ids in every event, counts in `meta_info`, whatever the cache report's flag says.

Source: SGLang 0.5.23, managers/tokenizer_manager.py, and a live server.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from simulations.engine import tokens
from simulations.engine.openai import openai_fault
from simulations.engine.voice import DONE, FINGERPRINT, Outcome, Prompted, Voice, data

__all__ = ["Generate"]


class Generate(Voice):
    """`/generate`."""

    holds_head = False
    fault = staticmethod(openai_fault)
    _text = ""

    def delta(self, text: str) -> bytes:
        """All so far."""
        self._text += text
        return data(self._state(self._text, tokens.count(self._text.encode()), self.prompted, None))

    def closing(self, outcome: Outcome) -> bytes:
        """All, with the reason of the end."""
        return data(self.whole(outcome)) + DONE

    def broken(self, status: int, message: str) -> bytes:
        """An abort without counts."""
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": HTTPStatus(status).name}
        meta = {"id": self.id, "finish_reason": reason, "weight_version": "default", "system_fingerprint": FINGERPRINT}
        return data({"text": "", "output_ids": [], "meta_info": meta}) + DONE

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The one object."""
        finish: dict[str, Any] = {"type": outcome.finish}
        match outcome.finish:
            case "length":
                finish["length"] = outcome.output_tokens
            case "stop":
                finish["matched"] = None
            case _:
                finish |= {"message": "Aborted", "status_code": None, "err_type": None}
        reply = self._state(outcome.text, outcome.output_tokens, outcome.prompted, finish)
        queued_s, first_s, end_s = outcome.times_s
        reply["meta_info"] |= {
            "num_retractions": outcome.retractions,
            "queue_time": queued_s,
            "first_token_latency": first_s,
            "e2e_latency": end_s,
        }
        return reply

    def _state(
        self, text: str, output_tokens: int, prompted: Prompted, finish: dict[str, Any] | None
    ) -> dict[str, Any]:
        meta = {
            "id": self.id,
            "finish_reason": finish,
            "prompt_tokens": prompted.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "completion_tokens": output_tokens,
            "cached_tokens": prompted.cached_tokens,
            "cached_tokens_details": {"device": prompted.device_tokens, "host": prompted.host_tokens},
            "reasoning_tokens": 0,
            "dp_rank": None,
            "system_fingerprint": FINGERPRINT,
        }
        return {"text": text, "output_ids": tokens.ids(text.encode()), "meta_info": meta}
