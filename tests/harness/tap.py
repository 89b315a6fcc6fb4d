"""A TCP tap: forwards bytes, half-closes and resets untouched in both directions and reads a copy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType
from typing import Self

from tests.harness.wire import Exchange, Reader

__all__ = ["Tap"]

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _Stop(Enum):
    """Why one direction stopped."""

    EOF = auto()
    SOURCE_GONE = auto()
    TARGET_GONE = auto()


class Tap:
    """Listens on `port` of the loopback and connects each client to `server_port`.

    `clock` gives the seconds that exchanges carry; `sink` gets each exchange once, when it is over.
    """

    def __init__(
        self, name: str, port: int, server_port: int, sink: Callable[[Exchange], None], clock: Callable[[], float]
    ) -> None:
        self._name, self._port, self._server_port = name, port, server_port
        self._sink, self._clock = sink, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port it listens on; the system's choice if 0 was asked for."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and reset what is open."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await self._connection(reader, writer)

    async def _connection(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            _reset(to_client)
            return
        local_port: int = to_server.get_extra_info("sockname")[1]
        copy = Reader(self._name, local_port, self._sink)
        up = asyncio.create_task(self._pump(from_client, to_server, copy.from_client))
        down = asyncio.create_task(self._pump(from_server, to_client, copy.from_server))
        try:
            await self._until_over(up, down, to_client, to_server, copy)
        finally:
            for pump in (up, down):
                pump.cancel()
            copy.abandon(self._clock())
            _reset(to_server)
            _reset(to_client)

    async def _until_over(
        self,
        up: asyncio.Task[_Stop],
        down: asyncio.Task[_Stop],
        to_client: asyncio.StreamWriter,
        to_server: asyncio.StreamWriter,
        copy: Reader,
    ) -> None:
        running = {up, down}
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                stop, now_s = pump.result(), self._clock()
                client_side = (pump is up) != (stop is _Stop.TARGET_GONE)
                if client_side:
                    copy.client_closed(now_s)
                else:
                    copy.server_closed(now_s, reset=stop is not _Stop.EOF)
                if stop is not _Stop.EOF:
                    return
                _half_close(to_server if pump is up else to_client)
        # Both sides have said all they had to: an ordinary close, which the kernel has already carried out for each.
        for writer in (to_server, to_client):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, copy: Callable[[bytes, float], None]
    ) -> _Stop:
        while True:
            try:
                data = await source.read(_CHUNK)
            except OSError:
                return _Stop.SOURCE_GONE
            if not data:
                return _Stop.EOF
            copy(data, self._clock())
            try:
                target.write(data)
                await target.drain()
            except OSError:
                return _Stop.TARGET_GONE


def _half_close(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST, unless it is closed already."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if not writer.transport.is_closing() and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
