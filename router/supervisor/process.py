"""One worker process, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import msgspec

from router.worker import Report, Task

__all__ = ["Kin", "Worker"]

# -P: a folder named `router` where the command is run must not be taken for this package.
_COMMAND: Final = (sys.executable, "-P", "-m", "router.worker")


@dataclass(frozen=True, slots=True)
class Kin:
    """What all workers have in common."""

    settings: str = field(repr=False)
    """`Settings` as JSON."""
    public: socket.socket
    lock: int
    """Descriptor that says, while any process has it, that their folder is in use."""
    store_url: str | None = field(repr=False)
    metrics: Path


class Worker:
    """A worker that was started and may have ended."""

    def __init__(
        self,
        place: int,
        admin_path: str,
        process: Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        accepts: Callable[[Worker], None],
    ) -> None:
        self.place = place
        self.admin_path = admin_path
        self.ready = False
        """Whether it accepts; False again when it has ended."""
        self._process = process
        self._control = streams[1]  # kept open: its end tells the worker that the supervisor is gone
        self._problem: str | None = None
        self._listening = asyncio.create_task(self._listen(streams[0], accepts))

    @classmethod
    async def start(cls, place: int, admin_path: str, kin: Kin, accepts: Callable[[Worker], None]) -> Self:
        """Start a worker that will serve its admin API at `admin_path`, and call `accepts` with it once it does.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *_COMMAND,
                    stdin=theirs.fileno(),
                    pass_fds=(kin.public.fileno(), kin.lock),
                    env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(kin.metrics)},
                    start_new_session=True,  # Ctrl-C is for the supervisor, which passes it on
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        streams = await asyncio.open_unix_connection(sock=ours)
        task = Task(kin.settings, kin.public.fileno(), admin_path, kin.store_url)
        streams[1].write(msgspec.json.encode(task) + b"\n")
        return cls(place, admin_path, process, streams, accepts)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ended(self) -> str:
        """Wait for its end; returns how that came."""
        code = await self._process.wait()
        self.ready = False
        await self._listening
        self._control.close()
        with suppress(OSError):
            await self._control.wait_closed()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}: {self._problem}" if self._problem else how

    async def _listen(self, reader: asyncio.StreamReader, accepts: Callable[[Worker], None]) -> None:
        with suppress(OSError):
            async for line in reader:
                report = msgspec.json.decode(line, type=Report)
                if report.problem is None:
                    self.ready = True
                    accepts(self)
                else:
                    self._problem = report.problem
