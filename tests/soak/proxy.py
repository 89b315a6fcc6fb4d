"""A TCP proxy that misbehaves when told: the network between a router and what it talks to."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from enum import StrEnum

__all__ = ["FaultProxy", "Mode"]

READ_BYTES = 65_536
CONNECT_S = 1.0
_RESET = struct.pack("ii", 1, 0)


class Mode(StrEnum):
    """What the network does."""

    PASS = "pass"
    SLOW = "slow"
    """Every read is passed on after `delay_s`."""
    SILENT = "silent"
    """Connections stand, new ones too, and not a byte passes: a partition."""
    REFUSE = "refuse"
    """Connections are reset, and new ones as soon as they are made."""


class FaultProxy:
    """Listens on a port of its own for the whole soak and passes bytes to `target`, which may move."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.port = 0
        self.delay_s = 0.0
        self._mode = Mode.PASS
        self._passing = asyncio.Event()
        self._passing.set()
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def mode(self) -> Mode:
        """What it does now."""
        return self._mode

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut all and listen no more."""
        if self._server is not None:
            self._server.close()
        self._passing.set()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def become(self, mode: Mode, delay_s: float = 0.0) -> None:
        """Misbehave like this from now on."""
        self._mode, self.delay_s = mode, delay_s
        if mode is Mode.SILENT:
            self._passing.clear()
        else:
            self._passing.set()
        if mode is Mode.REFUSE:
            self.reset()

    def reset(self) -> None:
        """End every connection by RST, on both sides."""
        for link in list(self._links):
            link.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._mode is Mode.REFUSE:
            _abort(writer)
            return
        await self._passing.wait()
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await asyncio.open_connection(*self.target)
        except (OSError, TimeoutError):
            _abort(writer)
            return
        link = _Link(writer, far_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer, link))
                both.create_task(self._pump(far_reader, writer, link))
        finally:
            self._links.discard(link)
            link.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
            await self._passing.wait()
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()
        except OSError:
            link.reset()


class _Link:
    """Both sides of one connection."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._writers = (near, far)

    def reset(self) -> None:
        for writer in self._writers:
            _abort(writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
