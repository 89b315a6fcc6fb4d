"""The demo as a process: terminal or plain lines, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console
from rich.live import Live

from router.domain.errors import RoostError
from simulations.demo.screen import WIDTH, Frame, plain, render
from simulations.demo.show import Plan, Show
from simulations.demo.stage import StageFailed
from simulations.demo.story import LONG, SHORT, Act

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "run", "verdict"]

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells say."""
_PLAIN_EVERY_S: Final = 2.0
_COMPLAINTS_SHOWN: Final = 5
_EXPECTED: Final = (RoostError, StageFailed, OSError)
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Screen(Protocol):
    def draw(self, frame: Frame) -> None: ...

    def last(self, frame: Frame) -> None: ...


def run(*, once: bool, json_file: Path | None, seed: int, port: int, sessions: int) -> int:
    """Play it; the exit code."""
    terminal = sys.stdout.isatty()
    brief = once or not terminal
    plan = Plan(seed=seed, sessions=sessions, port=port, acts=SHORT if brief else LONG, encore=not brief)
    with _complaints() as said, _screen(terminal) as screen:
        try:
            report = asyncio.run(_played(plan, screen))
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED
        except (*_EXPECTED, ExceptionGroup) as error:
            said.extend(_reasons(error))
            report = None
    for line in said[:_COMPLAINTS_SHOWN]:
        sys.stderr.write(f"roost demo: {line}\n")
    if report is None:
        return EXIT_FAILED
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return verdict(report)


def verdict(report: Mapping[str, Any]) -> int:
    """The exit code of a story that was told to its end."""
    well = report["turns"] and not report["errors"] and not report["in_flight_after"]
    return 0 if well else EXIT_FAILED


def _reasons(error: Exception) -> list[str]:
    """What went wrong in words; raises what nobody expects to go wrong."""
    if not isinstance(error, ExceptionGroup):
        return [str(error)]
    expected, others = error.split(_EXPECTED)
    if others is not None:
        raise others
    assert expected is not None
    return [reason for each in expected.exceptions for reason in _reasons(each)]


async def _played(plan: Plan, screen: _Screen) -> dict[str, Any]:
    show = Show(plan, screen.draw)
    playing = asyncio.current_task()
    assert playing is not None
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if show.act is Act.ENCORE:
            show.finish()
        else:
            playing.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupted)
    try:
        report = await show.play()
        screen.last(show.frame())
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return report


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the router warns of meanwhile: kept for the end, so that it does not tear the table."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    # aiohttp logs every stream of an engine that breaks off, as all do at Ctrl-C; where it matters, a turn fails.
    kept = {"roost": Keep(logging.WARNING), "aiohttp.server": logging.NullHandler()}
    before = {name: logging.getLogger(name).propagate for name in kept}
    for name, handler in kept.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    try:
        yield said
    finally:
        for name, handler in kept.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).propagate = before[name]


@contextmanager
def _screen(terminal: bool) -> Iterator[_Screen]:
    if not terminal:
        yield _Lines()
        return
    console = Console()
    with Live(console=console, auto_refresh=False, redirect_stderr=False, redirect_stdout=False) as live:
        yield _Table(live)


class _Table:
    """A table that changes in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def draw(self, frame: Frame) -> None:
        self._live.update(render(frame), refresh=True)

    def last(self, frame: Frame) -> None:
        self.draw(frame)


class _Lines:
    """Plain lines without control codes."""

    def __init__(self) -> None:
        self._console = Console(force_terminal=False, color_system=None, width=WIDTH)
        self._act = ""
        self._at_s = 0.0
        self._said = ""

    def draw(self, frame: Frame) -> None:
        now_s = time.monotonic()
        if frame.act != self._act:
            if not self._act:
                self._say(f"Roost demo  {frame.where}", frame.about)
            self._act, self._at_s = frame.act, 0.0
            self._say("", frame.act)
        if now_s >= self._at_s + _PLAIN_EVERY_S:
            self._at_s = now_s
            line = f"{plain(frame)}\n        {frame.caption}"
            if line != self._said:
                self._said = line
                self._say(line)

    def last(self, frame: Frame) -> None:
        self._say("")
        self._console.print(render(frame))

    def _say(self, *lines: str) -> None:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
