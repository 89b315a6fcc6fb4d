"""The tap changes nothing and sees everything: real sockets on both sides."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from tests.harness.tap import Tap
from tests.harness.wire import End, Exchange

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_REQUEST = b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h\r\nModal-Session-Id: s\r\nContent-Length: 2\r\n\r\nhi"
_STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Roost-Replica: r1\r\n\r\n"
_LAST = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def through_tap(serve: Serve, client: Serve) -> list[Exchange]:
    """Run a client against a server with a tap between; the exchanges once both are done."""
    seen: list[Exchange] = []
    served = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.transport.abort()
            served.set()

    async with asyncio.timeout(10):
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Tap("t", 0, port, seen.append, asyncio.get_running_loop().time) as tap:
            reader, writer = await asyncio.open_connection("127.0.0.1", tap.port)
            await client(reader, writer)
            writer.close()
            await served.wait()
    return seen


async def until_request(reader: asyncio.StreamReader) -> None:
    await reader.readexactly(len(_REQUEST))


def reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_bytes_pass_and_a_copy_is_read() -> None:
    """Two exchanges on one connection, one of them chunked: bytes are the same, digests are of the bodies alone."""
    got = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_request(reader)
        writer.write(_STREAM + chunk(b"data: 1\n\n") + chunk(_LAST) + b"0\r\n\r\n")
        await until_request(reader)
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        writer.write(_REQUEST)
        got = await reader.readuntil(b"0\r\n\r\n")
        writer.write(_REQUEST)
        got += await reader.readuntil(b"\r\n\r\nno")

    first, second = await through_tap(serve, client)
    assert got.endswith(b"\r\n\r\nno")
    assert (first.method, first.target, first.status) == ("POST", "/v1/x?y=1", 200)
    assert first.request_headers == {"modal-session-id": "s"}
    assert first.response_headers["x-roost-replica"] == "r1"
    assert first.request.sha256 == sha256(b"hi")
    assert first.response.sha256 == sha256(b"data: 1\n\n" + _LAST)
    assert first.response.events == (sha256(b"data: 1\n\n"), sha256(b"data: 1\n\n" + _LAST))
    assert first.response.terminal
    assert (second.status, second.ordinal, second.port) == (404, 1, first.port)
    assert [each.end for each in (first, second)] == [End.COMPLETE, End.COMPLETE]
    assert first.client_left_s is None


async def test_a_half_close_is_forwarded() -> None:
    """A client that has said all it has to say still gets its answer."""
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == _REQUEST
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        writer.write_eof()
        await writer.drain()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answer
        writer.write(_REQUEST)
        writer.write_eof()
        answer = await reader.read()

    (only,) = await through_tap(serve, client)
    assert answer.endswith(b"until the end")
    assert only.response.sha256 == sha256(b"until the end")
    assert only.client_left_s is not None


async def test_a_reset_by_the_server_is_forwarded_as_a_reset() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_request(reader)
        writer.write(_STREAM + chunk(b"data: 1\n\n"))
        await writer.drain()
        await reader.readexactly(1)  # the client's word that it has the first event
        reset(writer)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_REQUEST)
        await reader.readuntil(b"data: 1\n\n")
        writer.write(b"P")
        with pytest.raises(ConnectionResetError):
            await reader.read()

    broken, *_ = await through_tap(serve, client)
    assert broken.end is End.BROKEN
    assert broken.status == 200
    assert not broken.response.terminal
    assert broken.client_left_s is None


async def test_a_server_that_hangs_up_before_it_answers_is_seen() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_request(reader)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_REQUEST)
        assert await reader.read() == b""

    (only,) = await through_tap(serve, client)
    assert (only.end, only.status, only.head_s) == (End.BROKEN, None, None)


async def test_a_client_that_leaves_early_is_seen_and_forwarded() -> None:
    """As Codex does: it closes after the last event, before the body's end."""
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_request(reader)
        writer.write(_STREAM + chunk(_LAST))
        assert await reader.read() == b""
        left.set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_REQUEST)
        await reader.readuntil(_LAST)

    (only,) = await through_tap(serve, client)
    assert left.is_set()
    assert only.end is End.CLIENT_CLOSED
    assert only.response.terminal
    assert only.client_left_s is not None


async def test_the_answer_to_a_head_has_no_body() -> None:
    """Its length is that of the body a GET would get, so that the next answer on the connection is still understood."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        await reader.read()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for method in (b"HEAD", b"GET"):
            writer.write(method + b" / HTTP/1.1\r\nHost: h\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")

    head, get = await through_tap(serve, client)
    assert (head.method, head.status, head.end) == ("HEAD", 200, End.COMPLETE)
    assert (get.method, get.status, get.end) == ("GET", 204, End.COMPLETE)
