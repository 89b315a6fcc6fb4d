"""The relay changes no byte, holds none back, and holds few."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket

from aiohttp import web

from router.api.bodies import Bodies, BodyLimits
from router.api.downstream import Downstream
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


def _pieces(seed: int, count: int, size_max: int) -> list[bytes]:
    dice = random.Random(seed)
    return [dice.randbytes(dice.randint(1, size_max)) for _ in range(count)]


@on_both_loops
async def test_a_stream_cut_anywhere_arrives_byte_for_byte() -> None:
    """Whatever the replica's chunks and wherever the network cuts them, the client reads the same body."""
    dice = random.Random(7)
    pieces = _pieces(1, 300, 3000)
    raw = SSE_HEAD + chunked(*pieces) + LAST_CHUNK
    seen = []

    async def script(talk: Talk) -> None:
        while True:
            seen.append((await talk.request())[1])
            at = 0
            while at < len(raw):
                step = dice.choice((1, 7, 100, 5000))
                await talk.send(raw[at : at + step])
                at += step
                await asyncio.sleep(0)

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        sent = [b"", b"x", random.Random(2).randbytes(300_000)]
        for body in sent:
            await client.post(body)
            answer = await client.answer()
            assert answer.complete
            assert answer.body == b"".join(pieces)
            assert await relay.outcome() is None
        assert seen == sent
        assert replica.accepted == 1


@on_both_loops
async def test_each_event_is_forwarded_before_the_next_is_made() -> None:
    """The replica writes event n + 1 only after the client has read event n; the head comes before any."""
    turn = asyncio.Semaphore(0)
    events = [b"data: %d\n\n" % n for n in range(50)]

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        for event in events:
            await turn.acquire()
            await talk.send(chunked(event))
        await turn.acquire()
        await talk.send(LAST_CHUNK)

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        assert (await client.head()).status == 200
        for event in events:
            turn.release()
            assert await client.chunk() == event
        turn.release()
        assert await client.chunk() == b""
        assert await relay.outcome() is None
        assert relay.payloads == events


@on_both_loops
async def test_one_read_is_one_chunk() -> None:
    """Many small chunks that come in one read are handed over in one call, and go out as one chunk."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"a", b"b", b"c") + LAST_CHUNK)

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).chunks == [b"abc"]
        assert await relay.outcome() is None
        assert relay.payloads == [b"abc"]


@on_both_loops
async def test_headers_pass_in_order_and_case() -> None:
    """End-to-end headers pass both ways, duplicates and unknown ones too; those of the connection do not."""
    heads = []

    async def script(talk: Talk) -> None:
        heads.append((await talk.request())[0])
        await talk.send(
            b"HTTP/1.1 207 Odd Reason\r\nX-B: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\nConnection: keep-alive, x-hop\r\n"
            b"X-Hop: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: no\r\nContent-Length: 2\r\nX-A: \xff \r\n\r\nok"
        )

    async with (
        relaying(script, extra=((b"x-roost-replica", b"r1"),)) as (relay, replica),
        Client.to(relay.port) as client,
    ):
        await client.post(
            headers="X-Z: 1\r\nAuthorization: k\r\nConnection: x-mine\r\nX-Mine: 1\r\nTE: trailers\r\nx-z: 2\r\n",
            path="/v1/messages?beta=true&q=%20a",
        )
        raw = await client.reader.readuntil(b"\r\n\r\n")
        assert raw == (
            b"HTTP/1.1 207 Odd Reason\r\nX-B: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\nX-A: \xff\r\n"
            b"x-roost-replica: r1\r\nContent-Length: 2\r\n\r\n"
        )
        assert (
            heads[0]
            == (
                f"POST /v1/messages?beta=true&q=%20a HTTP/1.1\r\nHost: 127.0.0.1:{replica.port}\r\n"
                "X-Z: 1\r\nAuthorization: k\r\nx-z: 2\r\nVia: 1.1 roost\r\nContent-Length: 2\r\n\r\n"
            ).encode()
        )


@on_both_loops
async def test_a_slow_client_slows_the_replica() -> None:
    """While the client reads nothing, the relay stops reading from the replica: what it holds stays bounded."""
    total = 60 << 20
    block = random.Random(3).randbytes(1 << 20)
    paused = asyncio.Event()
    held_bytes = 0

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total // len(block)):
            await talk.send(block)
        await talk.until_closed()

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        body = (await Bodies(BodyLimits(100)).read(request, None)).data
        exchange = await relay.upstream.send(relay.url, forward(request, body))
        down = Downstream(request)
        pause = exchange.pause

        class Watched:
            def pause(self) -> None:
                pause()
                paused.set()

            def resume(self) -> None:
                exchange.resume()

        def receive(data: bytes) -> None:
            nonlocal held_bytes
            down.write(data)
            transport = request.transport
            assert transport is not None
            held_bytes = max(held_bytes, transport.get_write_buffer_size())
            received.append(len(data))

        down.start(exchange.head)
        down.bind(Watched())
        await exchange.relay(receive)
        down.end()
        return down.response

    received: list[int] = []
    async with relaying(script, handle=handle) as (relay, _):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", relay.port))
        await loop.sock_sendall(sock, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        async with asyncio.timeout(PATIENCE_S):
            await paused.wait()
        # Paused means paused: turns of the loop bring no more bytes, though the replica has plenty.
        before = sum(received)
        for _ in range(200):
            await asyncio.sleep(0)
        assert sum(received) == before
        assert before < total // 2
        digest = hashlib.sha256()
        got = bytearray()
        size = 0
        async with asyncio.timeout(3 * PATIENCE_S):
            while b"\r\n\r\n" not in got:
                got += await loop.sock_recv(sock, 4096)
            rest = bytes(got[got.index(b"\r\n\r\n") + 4 :])
            digest.update(rest)
            size = len(rest)
            while size < total:
                data = await loop.sock_recv(sock, 1 << 20)
                digest.update(data)
                size += len(data)
        sock.close()
        expected = hashlib.sha256(block * (total // len(block)))
        assert digest.digest() == expected.digest()
        assert held_bytes < 1 << 20
        assert await relay.outcome() is None


@on_both_loops
async def test_a_hundred_megabytes_go_up_unchanged() -> None:
    """A 100 MB request body reaches the replica with the same SHA-256; a replica that reads slowly is no trouble."""
    body = random.Random(4).randbytes(100 << 20)
    digests = []

    async def script(talk: Talk) -> None:
        await talk.head()
        digest = hashlib.sha256()
        left = len(body)
        while left:
            data = await talk.reader.read(1 << 16)
            left -= len(data)
            digest.update(data)
        digests.append(digest.digest())
        await talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        await talk.until_closed()

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post(body)
        assert (await client.answer(bodiless=True)).status == 204
        assert digests == [hashlib.sha256(body).digest()]


@on_both_loops
async def test_bodies_are_buffered_while_many_upload_at_once() -> None:
    """Uploads of 16 clients at once do not disturb each other."""
    bodies = [random.Random(n).randbytes(4 << 20) for n in range(16)]

    async def script(talk: Talk) -> None:
        _, body = await talk.request()
        digest = hashlib.sha256(body).hexdigest().encode()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n" + digest)
        await talk.until_closed()

    async def upload(port: int, body: bytes) -> bytes:
        async with Client.to(port) as client:
            await client.post(body)
            return (await client.answer()).body

    async with relaying(script) as (relay, _):
        answers = await asyncio.gather(*(upload(relay.port, body) for body in bodies))
        assert answers == [hashlib.sha256(body).hexdigest().encode() for body in bodies]


@on_both_loops
async def test_what_comes_before_the_relay_begins_is_kept_and_bounded() -> None:
    """A replica that streams while the router has not begun to relay fills two reads, no more; nothing is lost."""
    begin = asyncio.Event()
    sent = asyncio.Event()
    total = 30 << 20
    kept = []

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total // 65_536):
            await talk.send(b"z" * 65_536)
            sent.set()
        await talk.until_closed()

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        exchange = await relay.upstream.send(relay.url, forward(request, b"{}"))
        await sent.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        kept.append(sum(map(len, exchange._pending)))
        begin.set()
        size = 0

        def receive(data: bytes) -> None:
            nonlocal size
            size += len(data)

        await exchange.relay(receive)
        return web.Response(text=str(size))

    async with relaying(script, handle=handle) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).body == str(total).encode()
        assert kept[0] <= 1 << 20


@on_both_loops
async def test_a_body_that_ends_with_the_connection() -> None:
    """No length and no chunks: the close is the end, and the client gets a complete chunked message."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\n\r\n")
        await talk.send(b"one ")
        await talk.send(b"two")

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert answer.complete
        assert answer.body == b"one two"
        assert relay.upstream.connections(replica.url)[1] == 0


@on_both_loops
async def test_interim_responses_and_trailers_are_dropped() -> None:
    """100 and 103 from the replica are skipped; trailers do not reach the client."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        await talk.send(SSE_HEAD + chunked(b"abc") + b"0\r\nX-Trailer: 1\r\n\r\n")
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n!")
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert (answer.status, answer.body, answer.complete) == (200, b"abc", True)
        assert b"link" not in answer.headers
        await client.post()
        assert (await client.answer()).body == b"!"
        assert replica.accepted == 1


@on_both_loops
async def test_responses_without_a_body() -> None:
    """HEAD, 204 and 304 end with their head; lengths they speak of are passed on, bodies not waited for."""

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.request()
            if head.startswith(b"HEAD"):
                await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            elif b"want-304" in head:
                await talk.send(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\nETag: x\r\n\r\n")
            else:
                await talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.get(method="HEAD")
        answer = await client.answer(bodiless=True)
        assert (answer.status, answer.headers[b"content-length"]) == (200, b"1000")
        await client.get(headers="want-304: 1\r\n")
        answer = await client.answer(bodiless=True)
        assert (answer.status, answer.headers[b"content-length"]) == (304, b"1000")
        await client.get()
        answer = await client.answer(bodiless=True)
        assert (answer.status, b"content-length" in answer.headers) == (204, False)
        assert b"transfer-encoding" not in answer.headers
        await client.post()
        assert (await client.answer(bodiless=True)).status == 204


@on_both_loops
async def test_an_answer_before_the_request_was_read() -> None:
    """A replica may answer before it has read the body; its connection is not used again."""

    async def script(talk: Talk) -> None:
        await talk.head()
        await talk.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post(b"x" * (60 << 20))
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"big")
        assert relay.upstream.connections(replica.url)[1] == 0
