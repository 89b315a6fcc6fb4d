"""Events as log lines: one structured line a turn, without prompt, key or raw id. Redaction is here: what is not named
in `_turn_fields` cannot reach a line. And so is what keeps a line a line: names that replicas, paths and operating
systems give may hold line breaks and terminal commands, which are written out as escapes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
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
            text = msgspec.json.encode(line).decode()
        except (UnicodeEncodeError, TypeError):  # half a character in an operating system's text
            text = json.dumps(line, default=str)
        return _visible(text, _as_json)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, _FIELDS, {})
        told = " ".join(f"{name}={_visible(str(value))}" for name, value in fields.items() if value is not None)
        return f"{line} {told}" if told else line

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return _visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        """The only lines that belong to another; none of them can look like one of its own."""
        return "\n".join(f"    {_visible(line)}" for line in super().formatException(ei).splitlines())


def _as_python(char: str) -> str:
    return ascii(char)[1:-1]


def _as_json(char: str) -> str:
    return json.dumps(char)[1:-1]


def _visible(text: str, escaped: Callable[[str], str] = _as_python) -> str:
    """Text that ends no line, moves no cursor and turns no writing direction, wherever it came from."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else escaped(char) for char in text)


def configure(level: str, form: str) -> None:
    """Write the process's log to standard error, as `json` or `text`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Where a line cannot be written, logging would print a traceback with whatever exception is being handled then,
    # past the formatter.
    logging.raiseExceptions = False
    logging.captureWarnings(capture=True)
