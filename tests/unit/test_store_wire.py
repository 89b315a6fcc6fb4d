"""One connection's clock: which call fails when, and how often a connection is tried."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from unittest.mock import patch

import pytest

from router.domain.errors import StoreUnavailable
from router.store import wire as module
from router.store.address import Address
from router.store.wire import REDIAL_S, Wire, fixed
from tests.integration.relay_rig import on_both_loops

SHORT_S = 0.02
LONG_S = 30.0


class Server:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.connections = 0
        self.heard = asyncio.Queue[bytes]()
        self.greet: Callable[[asyncio.StreamWriter], None] = lambda _: None
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        self.greet(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard.put_nowait(data)
        writer.close()

    def say(self, data: bytes) -> None:
        self._writers[-1].write(data)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def wired(login: str = "") -> AsyncIterator[tuple[Server, Wire]]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        wire = Wire("here", fixed(Address.parsed(f"redis://{login}127.0.0.1:{port}")))
        try:
            yield server, wire
        finally:
            await wire.close()
            server.close()


def due(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def answering(wire: Wire) -> None:
    while not wire.answers:  # noqa: ASYNC110 (it gives no sign)
        await asyncio.sleep(0)


async def test_a_call_in_a_hurry_does_not_wait_behind_a_patient_one() -> None:
    async with wired() as (server, wire):
        patient = asyncio.create_task(wire.call(("GET", "a"), due(LONG_S)))
        await server.heard.get()
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            await wire.call(("GET", "b"), due(SHORT_S))
        assert not patient.done()
        server.say(b"+one\r\n")
        assert await patient == b"one"


async def test_a_server_that_hangs_a_second_time_costs_a_call_its_time_again() -> None:
    """Not as long as the first hang may still have lasted."""
    async with wired() as (server, wire):
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            await wire.call(("GET", "a"), due(SHORT_S))
        assert not wire.answers
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await wire.call(("GET", "b"), due(LONG_S))
        server.say(b"+late\r\n")
        await answering(wire)
        async with asyncio.timeout(1.0):  # half of what a stall may take
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await wire.call(("GET", "c"), due(SHORT_S))
        assert server.connections == 1


async def test_only_the_first_calls_wait_for_a_connection_that_takes_long() -> None:
    """The server says nothing to the login: a hundred calls do not outlast one attempt."""
    async with wired("user:password@") as (server, wire):
        for _ in range(100):
            with pytest.raises(StoreUnavailable, match="no connection within 20 ms"):
                await wire.call(("GET", "a"), due(SHORT_S))
        assert server.connections == 1
        server.say(b"+OK\r\n")
        await answering(wire)


async def test_a_server_that_refuses_is_not_hammered() -> None:
    async with wired("user:password@") as (server, wire):
        server.greet = lambda writer: writer.write(b"-ERR max number of clients reached\r\n")
        loop = asyncio.get_running_loop()
        began_s, calls = loop.time(), 0
        while server.connections < 3:
            with pytest.raises(StoreUnavailable, match=r"cannot connect to .*: ERR max number of clients"):
                await wire.call(("GET", "a"), due(LONG_S))
            calls += 1
            await asyncio.sleep(0)
        assert loop.time() - began_s >= 2 * REDIAL_S
        assert calls > 3


async def test_an_answer_of_a_replica_ends_the_connection() -> None:
    """Behind a name or a proxy the next one may lead to the master."""
    async with wired() as (server, wire):
        for number in (1, 2):
            asked = asyncio.create_task(wire.call(("SET", "a", number), due(LONG_S)))
            await server.heard.get()
            server.say(b"-READONLY You can't write against a read only replica.\r\n")
            with pytest.raises(Exception, match="READONLY"):
                await asked
            assert not wire.answers
            assert server.connections == number


async def test_a_connection_given_up_while_it_is_made_fails_who_waits_and_is_made_anew() -> None:
    async with wired("user:password@") as (server, wire):
        asked = asyncio.create_task(wire.call(("GET", "a"), due(LONG_S)))
        await server.heard.get()
        wire.lose("elsewhere")
        with pytest.raises(StoreUnavailable, match="connection given up"):
            await asked
        asked = asyncio.create_task(wire.call(("GET", "a"), due(LONG_S)))
        await server.heard.get()
        server.say(b"+OK\r\n")
        await server.heard.get()
        server.say(b"+one\r\n")
        assert await asked == b"one"
        assert server.connections == 2


async def test_a_server_that_repeats_what_it_was_told_gives_no_password_away() -> None:
    async with wired("user:pass%2Fword@") as (server, wire):
        server.greet = lambda writer: writer.write(
            b"-ERR unknown command 'AUTH', with args beginning with: 'user' 'pass/word'\r\n"
        )
        with pytest.raises(StoreUnavailable, match=r"cannot connect to .*'user' '\*\*\*'"):
            await wire.call(("GET", "a"), due(LONG_S))


class Busy(asyncio.Protocol):
    """Whatever comes keeps the loop from everything else, as a large body does while it is read."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def data_received(self, data: bytes) -> None:
        self._work()


@on_both_loops
async def test_an_answer_that_lies_there_unread_is_no_silence() -> None:
    """The loop was held up for longer than the call may take, and uvloop runs its timers before it reads: the answer
    counts, the store is not said to be silent, and the connection stays though the pause outlasted a stall.
    """
    heard, held, said = threading.Event(), threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, patch.object(module, "STALL_S", 0.1):

        def answer() -> None:
            talk, _ = listener.accept()
            with talk:
                talk.recv(65536)
                heard.set()
                held.wait()
                talk.sendall(b"+one\r\n")
                said.set()
                talk.recv(65536)
                talk.sendall(b"+two\r\n")
                talk.recv(65536)

        def work() -> None:
            held.set()
            said.wait()
            time.sleep(0.8)

        server = threading.Thread(target=answer)
        server.start()
        near, far = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: Busy(work), sock=near)
        wire = Wire("here", fixed(Address.parsed(f"redis://127.0.0.1:{listener.getsockname()[1]}")))
        try:
            call = asyncio.create_task(wire.call(("GET", "a"), due(0.5)))
            await asyncio.to_thread(heard.wait)
            far.send(b"x")
            assert await call == b"one"
            assert wire.answers
            assert await wire.call(("GET", "b"), due(LONG_S)) == b"two"
        finally:
            held.set()
            await wire.close()
            transport.close()
            far.close()
            server.join()
