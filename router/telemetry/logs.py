"""Events as log lines: one structured line a turn, without prompt, key or raw id. Redaction is here: what is not named
in `_turn_fields` cannot reach a line.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import msgspec

from router.domain.outcome import End
from router.telemetry.events import Event, TurnFinished

__all__ = ["TurnLog", "configure"]

log = logging.getLogger("roost.turns")

_ID_SHOWN: Final = 12
"""Hex digits of a digest that a line shows: enough to find a session again, too few to be one."""
_FIELDS: Final = "roost_fields"


class TurnLog:
    """An `Observer` that writes a line for every settled turn."""

    def emit(self, event: Event) -> None:
        """See `router.telemetry.events.Observer`."""
        if isinstance(event, TurnFinished):
            level = (
                logging.INFO if event.outcome.end in (End.COMPLETE, End.CLIENT_GONE, End.REJECTED) else logging.WARNING
            )
            if log.isEnabledFor(level):
                log.log(level, "turn", extra={_FIELDS: _turn_fields(event)})


def _turn_fields(event: TurnFinished) -> dict[str, Any]:
    outcome = event.outcome
    usage = outcome.usage
    return {
        "turn": event.turn,
        "fleet": event.fleet,
        "replica": event.replica,
        "dialect": event.dialect,
        "reason": event.reason.value,
        "end": outcome.end.value,
        "status": outcome.status,
        "session": event.session[:_ID_SHOWN],
        "source": event.session_source,
        "branch": event.branch[:_ID_SHOWN],
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "predicted_cached_tokens": event.predicted_cached_tokens,
        "output_tokens": usage.output_tokens,
        "place_ms": round(event.place_s * 1000, 3),
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, 4),
        "duration_s": round(outcome.duration_s, 4),
        "bytes": outcome.response_bytes,
        "attempt": event.attempt,
        "blind": event.blind,
    }


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line).decode()
        except (UnicodeEncodeError, TypeError):  # half a character in an operating system's text
            return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, _FIELDS, {})
        told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        return f"{line} {told}" if told else line


def configure(level: str, form: str) -> None:
    """Write the process's log to standard error, as `json` or `text`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
