"""The log: a line a turn, one object a line, and nothing in it that must not be there."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from router.domain.outcome import End, Outcome, Usage
from router.telemetry.events import TurnRefused, TurnStarted
from router.telemetry.logs import TurnLog, configure
from tests.unit.test_metrics import DONE


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    logging.raiseExceptions = True


def written(monkeypatch: pytest.MonkeyPatch, level: str, form: str) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    configure(level, form)
    return text


def test_a_settled_turn_is_one_json_object_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, "info", "json")
    log = TurnLog()
    log.emit(TurnStarted("t", "f", "r"))
    log.emit(TurnRefused("f", "chat", "invalid_request"))
    log.emit(DONE)
    (line,) = text.getvalue().splitlines()
    told = json.loads(line)
    assert (told["logger"], told["level"], told["message"]) == ("roost.turns", "info", "turn")
    assert (told["replica"], told["reason"], told["end"], told["cached_tokens"]) == ("r", "home", "complete", 90)
    assert (told["place_ms"], told["ttft_s"], told["duration_s"]) == (2.0, 0.2, 1.5)


def test_a_session_is_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to find it again, too little to send it."""
    text = written(monkeypatch, "info", "json")
    TurnLog().emit(DONE)
    told = json.loads(text.getvalue())
    assert (told["session"], told["branch"]) == ("s" * 12, "b" * 12)


@pytest.mark.parametrize("end", list(End))
def test_a_turn_that_failed_is_a_warning(monkeypatch: pytest.MonkeyPatch, end: End) -> None:
    """A client that left, or asked for what cannot be, is none."""
    text = written(monkeypatch, "info", "json")
    TurnLog().emit(dataclasses.replace(DONE, outcome=Outcome(end, 200, Usage())))
    level = "info" if end in (End.COMPLETE, End.CLIENT_GONE, End.REJECTED) else "warning"
    assert json.loads(text.getvalue())["level"] == level


def test_the_level_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, "warning", "json")
    TurnLog().emit(DONE)
    logging.getLogger("roost.x").info("quiet")
    assert text.getvalue() == ""


def test_text_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, "info", "text")
    TurnLog().emit(dataclasses.replace(DONE, outcome=Outcome(End.COMPLETE, 200, Usage(1, None, 2))))
    (line,) = text.getvalue().splitlines()
    assert "roost.turns: turn" in line
    assert "replica=r" in line
    assert "cached_tokens" not in line.replace("predicted_cached_tokens", "")


def test_exceptions_and_odd_text_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, "info", "json")
    log = logging.getLogger("roost.x")
    log.error("it failed: %s", "a\nb\u2028c\x00", exc_info=ValueError("two\nlines"))
    log.warning("surrogate %s", "\udcff")
    lines = text.getvalue().rstrip("\n").split("\n")
    assert [json.loads(line)["level"] for line in lines] == ["error", "warning"]
    assert "ValueError" in json.loads(lines[0])["exception"]


def test_warnings_go_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, "warning", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("careful", UserWarning, stacklevel=1)
    assert "careful" in json.loads(text.getvalue().splitlines()[0])["message"]


EVIL = "a\r\n2026-01-01 00:00:00 INFO roost: forged\x1b[2J\x9b31m\u202e\u2028\x00\x85\udc80b\U000e0001"


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_text_can_forge_a_line_or_command_a_terminal(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """In the message, in a field, in an exception: line breaks, ANSI, bidirectional marks, half characters."""
    text = written(monkeypatch, "info", form)
    log = logging.getLogger("roost.test")
    log.info("said %s", EVIL)
    TurnLog().emit(dataclasses.replace(DONE, fleet=EVIL))
    log.error("failed", exc_info=ValueError(EVIL))
    lines = text.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    own = [line for line in lines if line and not line.startswith("    ")]
    assert len(own) == 3
    assert not [line for line in lines if line.startswith("2026-01-01 00:00:00")]
    if form == "json":
        assert json.loads(own[0])["message"].startswith("said a\r\n2026")


def test_a_log_that_cannot_be_written_tells_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python's logging would print the exception being handled to standard error, unformatted."""
    text = written(monkeypatch, "info", "json")
    monkeypatch.undo()
    text.close()
    logging.getLogger("roost.test").error("lost", exc_info=ValueError(EVIL))
    assert capfd.readouterr() == ("", "")
