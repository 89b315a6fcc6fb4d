"""A scripted replica, the relay, and raw clients, over real sockets on this host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from aiohttp import web

from router.api.bodies import Bodies, BodyLimits
from router.api.connection import ClientLimits
from router.api.downstream import Downstream
from router.api.server import RelayServer
from router.domain.errors import RequestError, UpstreamError
from router.ports import ForwardRequest
from router.upstream.client import UpstreamClient, UpstreamLimits
from router.upstream.wire import forward_request_headers, via_of

PATIENCE_S = 20.0
"""Far beyond what any step takes; a step that takes longer hangs."""


class Talk:
    """One accepted connection at a replica, as its script sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> tuple[bytes, bytes]:
        head = await self.head()
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return head, await self.reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait for the other side to close; what it still sends is thrown away."""
        with suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass


Loop = asyncio.AbstractEventLoop
Script = Callable[[Talk], Awaitable[None]]


class Replica:
    """Runs its script for each connection; `closed` counts the connections that have ended."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.accepted = 0
        self.closed = 0
        self.port = 0
        self._talks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until_closed(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.closed >= count)

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[Replica]:
        server = await asyncio.start_server(self._accept, host, 0, **options)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for talk in list(self._talks):
                talk.cancel()
            await asyncio.gather(*self._talks, return_exceptions=True)
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        self.accepted += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                await self.script(Talk(reader, writer))
        finally:
            self._talks.discard(task)
            writer.close()
            with suppress(Exception):
                await writer.wait_closed()
            async with self._changed:
                self.closed += 1
                self._changed.notify_all()


@dataclass
class Relay:
    """The relay under test: every request goes to `url`."""

    url: str
    upstream: UpstreamClient
    port: int = 0
    body_max_bytes: int = 200 << 20
    extra: tuple[tuple[bytes, bytes], ...] = ()
    outcomes: asyncio.Queue[BaseException | None] = field(default_factory=asyncio.Queue)
    """How each request ended: None, or what the handler saw."""
    handle: Callable[[Relay, web.BaseRequest], Awaitable[web.StreamResponse]] | None = None
    payloads: list[bytes] = field(default_factory=list)

    async def outcome(self) -> BaseException | None:
        async with asyncio.timeout(PATIENCE_S):
            return await self.outcomes.get()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await (self.handle or Relay.turn)(self, request)
        except BaseException as error:
            self.outcomes.put_nowait(error)
            raise
        self.outcomes.put_nowait(None)
        return response

    def receive(self, down: Downstream, data: bytes) -> None:
        self.payloads.append(data)
        down.write(data)

    async def turn(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            limits = BodyLimits(self.body_max_bytes, idle_s=PATIENCE_S, rate_min=0.0)
            body = (await Bodies(limits).read(request, None)).data
        except RequestError as error:
            self.outcomes.put_nowait(error)
            return web.Response(status=error.status, text=error.code)
        down = Downstream(request)
        try:
            exchange = await self.upstream.send(self.url, forward(request, body))
        except UpstreamError as error:
            self.outcomes.put_nowait(error)
            return web.Response(status=error.status, text=error.code)
        try:
            down.start(exchange.head, self.extra)
            down.bind(exchange)
            await exchange.relay(lambda data: self.receive(down, data))
        except UpstreamError as error:
            self.outcomes.put_nowait(error)
            if not down.started:
                return web.Response(status=error.status, text=error.code)
            if down.extensible:
                down.write(b"event: error\n\n")
            down.abort()
            return down.response
        finally:
            exchange.abort()
        down.end()
        return down.response


def forward(request: web.BaseRequest, body: bytes) -> ForwardRequest:
    has_body = request.content_length is not None or bool(body)
    target = request._message.path
    headers = forward_request_headers(request.raw_headers, via_of(request.version))
    return ForwardRequest(request.method, target, headers, body, has_body)


@asynccontextmanager
async def relaying(
    script: Script,
    limits: UpstreamLimits | None = None,
    client_limits: ClientLimits | None = None,
    complaints: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[tuple[Relay, Replica]]:
    """A replica with `script` behind the relay.

    At the end nothing may be left: no task, no connection, and in the log no complaint but `complaints`.
    """
    log = _Complaints()
    logging.getLogger().addHandler(log)
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    try:
        async with Replica(script).serving() as replica:
            upstream = UpstreamClient(limits)
            relay = Relay(replica.url, upstream, **options)
            protocols = RelayServer(relay, client_limits)
            server = await loop.create_server(protocols, "127.0.0.1", 0)
            relay.port = server.sockets[0].getsockname()[1]
            try:
                yield relay, replica
            finally:
                server.close()
                await protocols.shutdown(PATIENCE_S)
                await server.wait_closed()
                async with asyncio.timeout(PATIENCE_S):
                    await upstream.close()
                assert upstream.connections(replica.url) == (0, 0)
        leftovers = asyncio.all_tasks() - before
        if leftovers:
            await asyncio.wait(leftovers, timeout=PATIENCE_S)
        assert not asyncio.all_tasks() - before
        assert unhandled == [], unhandled
        assert tuple(log.records) == complaints, log.records
    finally:
        logging.getLogger().removeHandler(log)
        loop.set_exception_handler(None)


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@dataclass
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    chunks: list[bytes]
    complete: bool


class Client:
    """A client that sees framing: chunks, and whether a message ended properly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int, **options: Any) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
        try:
            async with asyncio.timeout(3 * PATIENCE_S):
                yield cls(reader, writer)
        finally:
            writer.close()
            with suppress(Exception):
                await writer.wait_closed()

    async def post(self, body: bytes = b"{}", *, headers: str = "", path: str = "/v1/x", version: str = "1.1") -> None:
        head = f"POST {path} HTTP/{version}\r\nHost: roost\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def get(self, *, method: str = "GET", headers: str = "", version: str = "1.1") -> None:
        self.writer.write(f"{method} /v1/models HTTP/{version}\r\nHost: roost\r\n{headers}\r\n".encode())
        await self.writer.drain()

    async def head(self) -> Answer:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw[:-4].split(b"\r\n")
        headers = {}
        for line in lines[1:]:
            name, value = line.split(b":", 1)
            headers[name.lower()] = value.strip()
        return Answer(int(lines[0].split(b" ")[1]), headers, b"", [], complete=False)

    async def chunk(self) -> bytes:
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self, *, bodiless: bool = False) -> Answer:
        """Read one response to its end, whatever the end is."""
        answer = await self.head()
        if bodiless:
            answer.complete = True
            return answer
        try:
            if answer.headers.get(b"transfer-encoding") == b"chunked":
                while chunk := await self.chunk():
                    answer.chunks.append(chunk)
                answer.complete = True
            elif b"content-length" in answer.headers:
                answer.chunks.append(await self.reader.readexactly(int(answer.headers[b"content-length"])))
                answer.complete = True
            else:
                answer.chunks.append(await self.reader.read())
                answer.complete = True
        except (ConnectionError, ValueError):
            pass
        except asyncio.IncompleteReadError as error:
            answer.chunks.append(error.partial)
        answer.body = b"".join(answer.chunks)
        return answer

    async def gone(self) -> bool:
        """Whether the relay closed the connection and sent nothing more."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Callable[[], Loop]], None]:
    """Run an async test on asyncio's own loop and on uvloop, which differ in how transports buffer, pause and close."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def run(new_loop: Callable[[], Loop]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test())

    run.__doc__ = test.__doc__
    return run
