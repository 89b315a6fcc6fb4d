"""What clients do: leave, hurry, dawdle, speak old HTTP or none; a replica is let go whenever its client is gone."""

from __future__ import annotations

import asyncio
import json
import random
import socket

import pytest
from aiohttp import web

from router.api.connection import ClientLimits
from router.api.downstream import Downstream
from router.domain.errors import MalformedRequest, RequestTooLarge
from router.ports import ResponseHead
from tests.integration.relay_rig import (
    LAST_CHUNK,
    PATIENCE_S,
    SSE_HEAD,
    Client,
    Relay,
    Talk,
    chunked,
    forward,
    on_both_loops,
    relaying,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def _echo(talk: Talk) -> None:
    while True:
        _, body = await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@on_both_loops
async def test_a_client_that_leaves_takes_its_exchange_along() -> None:
    """While the replica prefills, mid-stream, in a silent stream: handler cancelled, the replica's socket closed."""
    for answer in (b"", SSE_HEAD, SSE_HEAD + chunked(b"data: 1\n\n")):
        for reset in (True, False):
            asked = asyncio.Event()

            async def script(talk: Talk, answer: bytes = answer, asked: asyncio.Event = asked) -> None:
                await talk.request()
                await talk.send(answer)
                asked.set()
                await talk.until_closed()

            async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
                await client.post()
                await asked.wait()
                if answer:
                    await client.head()
                if reset:
                    client.writer.transport.abort()
                else:
                    client.writer.close()
                await replica.until_closed(1)
                assert isinstance(await relay.outcome(), asyncio.CancelledError)


@on_both_loops
async def test_a_client_that_leaves_while_it_uploads() -> None:
    """A body that never comes whole reaches no replica."""
    async with relaying(_echo) as (relay, replica):
        async with Client.to(relay.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
            await client.writer.drain()
        assert isinstance(await relay.outcome(), asyncio.CancelledError)
        assert replica.accepted == 0


@on_both_loops
async def test_a_client_that_leaves_a_fast_stream() -> None:
    """Bytes that come after the client has gone are dropped without noise, and the replica stops soon."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        while True:
            await talk.send(chunked(b"x" * 1000))

    async with relaying(script) as (relay, replica):
        async with Client.to(relay.port) as client:
            await client.post()
            await client.head()
            for _ in range(10):
                await client.chunk()
            client.writer.transport.abort()
        await replica.until_closed(1)
        assert isinstance(await relay.outcome(), asyncio.CancelledError)


@on_both_loops
async def test_a_client_that_closes_after_the_last_event() -> None:
    """Codex closes once it has read its terminal event, before the last chunk: no noise, the event was delivered."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"event: response.completed\n\n"))
        await talk.until_closed()

    async with relaying(script) as (relay, replica):
        async with Client.to(relay.port) as client:
            await client.post()
            await client.head()
            assert await client.chunk() == b"event: response.completed\n\n"
        await replica.until_closed(1)
        assert isinstance(await relay.outcome(), asyncio.CancelledError)
        assert relay.payloads == [b"event: response.completed\n\n"]


@on_both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent before the answers are read are answered one after the other."""
    async with relaying(_echo) as (relay, _), Client.to(relay.port) as client:
        for n in range(40):
            await client.post(b"%d" % n)
        for n in range(40):
            assert (await client.answer()).body == b"%d" % n


@on_both_loops
async def test_keepalive_on_both_sides() -> None:
    """One client connection and one replica connection serve many turns, streams and plain answers alike."""

    async def script(talk: Talk) -> None:
        while True:
            _, body = await talk.request()
            await talk.send(SSE_HEAD + chunked(body) + LAST_CHUNK if len(body) % 2 else OK)

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        for n in range(20):
            await client.post(b"x" * n)
            answer = await client.answer()
            assert answer.complete
            assert b"connection" not in answer.headers
        assert replica.accepted == 1


@on_both_loops
async def test_a_client_that_asks_to_close() -> None:
    """`Connection: close` is answered in kind and obeyed after the last byte."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"x") + LAST_CHUNK)
        await talk.until_closed()

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post(headers="Connection: close\r\n")
        answer = await client.answer()
        assert (answer.complete, answer.headers[b"connection"]) == (True, b"close")
        assert await client.gone()


@on_both_loops
async def test_http10_clients() -> None:
    """HTTP/1.0: no chunks; a stream ends with the connection, a body of known length keeps it where the client asks."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(OK)
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"a") + chunked(b"b") + LAST_CHUNK)
        await talk.until_closed()

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post(version="1.0", headers="Connection: keep-alive\r\n")
        answer = await client.answer()
        assert (answer.body, answer.headers[b"connection"]) == (b"ok", b"keep-alive")
        await client.post(version="1.0", headers="Connection: keep-alive\r\n")
        answer = await client.answer()
        assert (answer.body, answer.complete, answer.headers[b"connection"]) == (b"ab", True, b"close")
        assert b"transfer-encoding" not in answer.headers


@on_both_loops
async def test_chunked_uploads() -> None:
    """A body without a length is read whole, whatever its chunks, and goes to the replica with its length."""
    body = random.Random(5).randbytes(700_000)
    dice = random.Random(6)
    async with relaying(_echo) as (relay, _), Client.to(relay.port) as client:
        client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        at = 0
        while at < len(body):
            step = dice.choice((1, 100, 70_000))
            client.writer.write(chunked(body[at : at + step]))
            await client.writer.drain()
            at += step
        client.writer.write(LAST_CHUNK)
        assert (await client.answer()).body == body


@on_both_loops
async def test_large_bodies_one_after_the_other() -> None:
    """So much of a body may come before its handler runs that reading was paused; the rest comes all the same."""
    body = random.Random(7).randbytes(900_000)
    async with relaying(_echo) as (relay, _), Client.to(relay.port) as client, asyncio.timeout(20):
        for _ in range(4):
            await client.post(body)
            assert (await client.answer()).body == body


@on_both_loops
async def test_bodies_beyond_the_limit() -> None:
    """Announced ones are refused before a byte is read, others once they exceed it; neither reaches a replica."""
    async with relaying(_echo, None, ClientLimits(linger_s=0.2), body_max_bytes=1000) as (relay, replica):
        async with Client.to(relay.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
            assert (await client.answer()).status == 413
            assert isinstance(await relay.outcome(), RequestTooLarge)
        async with Client.to(relay.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.writer.write(chunked(b"x" * 600, b"y" * 600))
            assert (await client.answer()).status == 413
        async with Client.to(relay.port) as client:
            await client.post(b"x" * 1000)
            assert (await client.answer()).status == 200
        assert replica.accepted == 1


@on_both_loops
async def test_expect_100_continue() -> None:
    """A client that waits to be asked for its body is asked, unless the body is refused; no replica is involved."""
    heads = []

    async def script(talk: Talk) -> None:
        head, body = await talk.request()
        heads.append(head)
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await talk.until_closed()

    async with relaying(script, None, ClientLimits(linger_s=0.2), body_max_bytes=100) as (relay, _):
        async with Client.to(relay.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.writer.write(b"body")
            assert (await client.answer()).body == b"body"
            assert b"expect" not in heads[0].lower()
        async with Client.to(relay.port) as client:
            client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n")
            assert (await client.answer()).status == 413


BAD_REQUESTS = {
    "huge header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "huge target": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "too many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: 1\r\n" * 300 + b"\r\n", 431),
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "length and chunks": (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
async def test_what_is_no_request(what: str) -> None:
    """A clear answer in JSON, a closed connection, nothing of the request in the answer, and no replica hears of it."""
    raw, status = BAD_REQUESTS[what]
    async with relaying(_echo) as (relay, replica), Client.to(relay.port) as client:
        client.writer.write(raw)
        answer = await client.answer()
        assert answer.status == status
        assert "code" in json.loads(answer.body)["error"]
        assert b"aaaa" not in answer.body
        assert await client.gone()
        assert replica.accepted == 0


@on_both_loops
async def test_large_headers_pass() -> None:
    """A header of 60 kB passes both ways: Codex's turn metadata grows with its workspaces."""
    heads = []

    async def script(talk: Talk) -> None:
        heads.append(await talk.reader.readuntil(b"\r\n\r\n"))
        await talk.send(b"HTTP/1.1 200 OK\r\nX-Big: " + b"b" * 60_000 + b"\r\nContent-Length: 0\r\n\r\n")

    async with relaying(script) as (relay, _):
        async with Client.to(relay.port, limit=1 << 20) as client:
            await client.get(headers=f"x-codex-turn-metadata: {'m' * 60_000}\r\n")
            assert len((await client.answer()).headers[b"x-big"]) == 60_000
        assert b"m" * 60_000 in heads[0]


@on_both_loops
async def test_a_body_whose_framing_breaks() -> None:
    """A chunked upload that stops making sense is answered, though its handler was waiting for the rest."""
    begun = asyncio.Event()

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        begun.set()
        return await relay.turn(request)

    async with relaying(_echo, handle=handle) as (relay, replica), Client.to(relay.port) as client:
        client.writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"fine"))
        await begun.wait()
        client.writer.write(b"zz\r\n")
        assert (await client.answer()).status == 400
        assert isinstance(await relay.outcome(), MalformedRequest)
        assert replica.accepted == 0


@on_both_loops
async def test_a_handler_that_fails_within_a_reply() -> None:
    """Whatever a handler raises or returns once its reply has begun, the client sees an incomplete message."""

    async def raises(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        down = Downstream(request)
        down.start(ResponseHead(200, b"OK", (), None))
        down.write(b"half")
        raise web.HTTPNotFound

    async def returns(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        down = Downstream(request)
        down.start(ResponseHead(200, b"OK", (), None))
        down.write(b"half")
        return web.Response(text="another")

    for handle in (raises, returns):
        complaints = ("a reply was left unfinished",)
        async with (
            relaying(_echo, complaints=complaints, handle=handle) as (relay, _),
            Client.to(relay.port) as client,
        ):
            await client.post()
            answer = await client.answer()
            assert (answer.status, answer.complete) == (200, False)
            assert await client.gone()


@on_both_loops
async def test_a_short_body_is_no_end() -> None:
    """`end` of a body shorter than its length closes without completing it."""

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        down = Downstream(request)
        down.start(ResponseHead(200, b"OK", (), 10))
        down.write(b"half")
        with pytest.raises(ValueError, match="more body"):
            down.write(b"x" * 7)
        down.end()
        return down.response

    async with relaying(_echo, handle=handle) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert (answer.complete, answer.body) == (False, b"half")


@on_both_loops
async def test_what_was_written_is_flushed_before_the_cut() -> None:
    """`abort` right after megabytes were written delivers them all, then ends the message abnormally."""

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        down = Downstream(request)
        down.start(ResponseHead(200, b"OK", (), None))
        down.write(b"x" * (8 << 20))
        down.write(b"event: error\n\n")
        down.abort()
        return down.response

    async with relaying(_echo, handle=handle) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert not answer.complete
        assert [len(chunk) for chunk in answer.chunks] == [8 << 20, 14]


@on_both_loops
async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    """After `stall_s` without taking a byte the client is gone, and its replica is let go."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        while True:
            await talk.send(chunked(b"x" * 100_000))

    async with relaying(script, None, ClientLimits(stall_s=0.3)) as (relay, replica):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", relay.port))
        await loop.sock_sendall(sock, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await replica.until_closed(1)
        assert isinstance(await relay.outcome(), asyncio.CancelledError)
        sock.close()


@on_both_loops
async def test_shutdown_waits_for_a_stream_and_says_so() -> None:
    """A reply begun after the server was told to stop says `Connection: close` and ends properly."""
    told = asyncio.Event()
    answered = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"a"))
        await told.wait()
        await talk.send(LAST_CHUNK)
        await talk.until_closed()

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        exchange = await relay.upstream.send(relay.url, forward(request, b"{}"))
        request.protocol.close()
        down = Downstream(request)
        down.start(exchange.head)
        await exchange.relay(down.write)
        down.end()
        answered.set()
        return down.response

    async with relaying(script, handle=handle) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        told.set()
        answer = await client.answer()
        assert (answer.complete, answer.headers[b"connection"]) == (True, b"close")
        async with asyncio.timeout(PATIENCE_S):
            await answered.wait()
        assert await client.gone()
