"""One of several router processes: what `router.supervisor` starts as `python -m router.worker`.

Standard input is a socket to the supervisor. Down comes one line, the `Task`: over a socket because URLs in it may
carry passwords, which argv and the environment would show. Up goes one line, a `Report`, once the worker accepts, and
one more if it fails. From then on the socket says only one thing, by its end: the supervisor is gone, however it went,
and the worker stops as it does on SIGTERM.

`PROMETHEUS_MULTIPROC_DIR` is in the environment before this module is imported: prometheus-client looks at it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from router.domain.errors import RoostError
from router.main import EXIT_FAILED, EXIT_OK, Listeners, serve
from router.settings import Settings
from router.telemetry.logs import configure

__all__ = ["Report", "Task", "main"]

_STDIN: Final = 0
_READ_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is told."""

    settings: str = field(repr=False)
    """`Settings` as JSON."""
    public_fd: int
    """The listening socket that all workers accept from, inherited by this number."""
    admin_path: str
    """Where the worker serves its admin API, a Unix socket that does not exist yet."""
    store_url: str | None = field(repr=False)
    """The embedded store's socket; None where the settings name the store."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says: that it accepts, or why it ends."""

    problem: str | None = None


def main() -> int:
    """Serve until SIGTERM, SIGINT or the supervisor's end. Returns the exit code."""
    with _control() as control:
        line = _line(control)
        if not line:  # the supervisor died first
            return EXIT_OK
        task = msgspec.json.decode(line, type=Task)
        try:
            settings = Settings.model_validate_json(task.settings)
            configure(settings.log.level, settings.log.format)
            uvloop.run(_until_told(settings, task, control))
        except (RoostError, OSError, RuntimeError) as error:
            _say(control, Report(str(error)))
            return EXIT_FAILED
    return EXIT_OK


def _control() -> socket.socket:
    """Standard input as the socket that it is; nothing is left at its place."""
    control = socket.socket(fileno=os.dup(_STDIN))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), _STDIN)
    return control


def _line(control: socket.socket) -> bytes:
    said = bytearray()
    while not said.endswith(b"\n"):
        piece = control.recv(_READ_BYTES)
        if not piece:
            return b""
        said += piece
    return bytes(said)


def _say(control: socket.socket, report: Report) -> None:
    with contextlib.suppress(OSError):  # nobody is left to hear it
        control.sendall(msgspec.json.encode(report) + b"\n")


async def _until_told(settings: Settings, task: Task, control: socket.socket) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    control.setblocking(False)
    loop.add_reader(control, _supervisor_gone, loop, control, stop)
    try:
        with socket.socket(fileno=task.public_fd) as public, _listening(task.admin_path) as admin:
            public.set_inheritable(False)
            await serve(
                settings,
                Listeners(public, admin),
                stop,
                store_url=task.store_url,
                announce=lambda: _say(control, Report()),
            )
    finally:
        loop.remove_reader(control)


def _supervisor_gone(loop: asyncio.AbstractEventLoop, control: socket.socket, stop: asyncio.Event) -> None:
    try:
        gone = not control.recv(_READ_BYTES)
    except BlockingIOError:
        return
    except OSError:
        gone = True
    if gone:
        loop.remove_reader(control)
        stop.set()


def _listening(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen()
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {path}: {error.strerror or error}") from error
    return sock


if __name__ == "__main__":
    sys.exit(main())
