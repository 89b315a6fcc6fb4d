"""What a replica may do wrong, and what its client then sees: never a clean end of an unfinished answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from router.domain.errors import MalformedRequest, UpstreamBroken, UpstreamSilent, UpstreamUnreachable
from router.ports import ForwardRequest
from router.upstream.client import UpstreamClient, UpstreamLimits
from tests.integration.relay_rig import (
    LAST_CHUNK,
    PATIENCE_S,
    SSE_HEAD,
    Client,
    Relay,
    Replica,
    Talk,
    chunked,
    forward,
    on_both_loops,
    relaying,
)

POST = ForwardRequest("POST", "/v1/x", (), b"{}")
GET = ForwardRequest("GET", "/v1/x", (), b"", has_body=False)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@on_both_loops
async def test_death_before_the_head() -> None:
    """A fresh connection that dies unanswered is `UpstreamBroken`, not answered: the client gets a whole 502."""

    async def script(talk: Talk) -> None:
        await talk.request()
        talk.reset()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).status == 502
        error = await relay.outcome()
        assert isinstance(error, UpstreamBroken)
        assert not error.answered
        assert replica.accepted == 1


@on_both_loops
async def test_death_in_the_middle_of_a_stream() -> None:
    """Whether by reset or by close: what came reaches the client, then the error event, then an incomplete message."""
    for reset in (True, False):
        cut = asyncio.Event()

        async def script(talk: Talk, reset: bool = reset, cut: asyncio.Event = cut) -> None:
            await talk.request()
            await talk.send(SSE_HEAD + chunked(b"data: 1\n\n"))
            await cut.wait()
            if reset:
                talk.reset()

        async with relaying(script) as (relay, _), Client.to(relay.port) as client:
            await client.post()
            await client.head()
            assert await client.chunk() == b"data: 1\n\n"
            cut.set()
            assert await client.chunk() == b"event: error\n\n"
            assert await client.gone()
            error = await relay.outcome()
            assert isinstance(error, UpstreamBroken)
            assert error.answered


@on_both_loops
async def test_death_in_the_middle_of_a_body_with_a_length() -> None:
    """Nothing can be added to a body of a given length: the client sees fewer bytes than promised."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert not answer.complete
        assert answer.body == b"half"
        assert isinstance(await relay.outcome(), UpstreamBroken)


@on_both_loops
async def test_an_http10_client_does_not_take_death_for_the_end() -> None:
    """Where only the close ends the body, an unfinished one is closed by reset."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"data: 1\n\n"))
        talk.reset()

    async with relaying(script) as (relay, _), Client.to(relay.port) as client:
        await client.post(version="1.0")
        answer = await client.answer()
        assert not answer.complete
        assert isinstance(await relay.outcome(), UpstreamBroken)


NONSENSE = {
    "garbage": b"\x00\x01\x02 what is this\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: %b\r\n" % (b"a" * 1000) * 100,
    "endless header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    "whole but huge head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nhello",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "folded header": b"HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\nContent-Length: 2\r\n\r\nok",
    "NUL in a header": b"HTTP/1.1 200 OK\r\nX-A: 1\x002\r\nContent-Length: 2\r\n\r\nok",
    "status beyond three digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    "endless interim responses": b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" * 20_000,
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_instead_of_a_head(what: str) -> None:
    """A replica that speaks something else than HTTP/1.1 is `UpstreamBroken`; its connection is closed."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(NONSENSE[what])
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).status == 502
        assert isinstance(await relay.outcome(), UpstreamBroken)
        await replica.until_closed(1)


@pytest.mark.parametrize(
    "tail", [b"zz\r\nabc\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"3;" + b"x" * 900_000, b"0\r\nT: " + b"x" * 900_000]
)
async def test_nonsense_in_a_body(tail: bytes) -> None:
    """A body that stops making sense ends as an incomplete message after the bytes that did make sense."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"good") + tail)
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert not answer.complete
        assert answer.body.startswith(b"good")
        assert isinstance(await relay.outcome(), UpstreamBroken)
        await replica.until_closed(1)


@on_both_loops
async def test_bytes_after_a_response_spoil_the_connection_only() -> None:
    """A second, unasked response is never taken for the next request's: the connection is dropped."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        for count in (1, 2):
            await client.post()
            answer = await client.answer()
            assert (answer.complete, answer.body) == (True, b"ok")
            await replica.until_closed(count)
        assert replica.accepted == 2


@on_both_loops
async def test_unasked_bytes_on_an_idle_connection_drop_it() -> None:
    """So is one on which bytes come while nothing was asked."""
    speak = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(OK)
        await speak.wait()
        await talk.send(b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n")
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).body == b"ok"
        assert relay.upstream.connections(replica.url) == (1, 1)
        speak.set()
        await replica.until_closed(1)
        assert relay.upstream.connections(replica.url) == (0, 0)


@on_both_loops
async def test_a_stale_connection_is_replaced_unseen() -> None:
    """A pooled connection that dies at the next request, unanswered, costs one fresh connection and no error."""
    talks = []

    async def script(talk: Talk) -> None:
        talks.append(talk)
        await talk.request()
        await talk.send(OK)
        if len(talks) == 1:
            await talk.head()
            talk.reset()
            return
        await talk.until_closed()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        for _ in range(2):
            await client.post()
            assert (await client.answer()).body == b"ok"
            assert await relay.outcome() is None
        assert replica.accepted == 2


@on_both_loops
async def test_a_stale_connection_is_replaced_once() -> None:
    """A replica that kills every connection is broken, after one retry."""
    requests = 0

    async def script(talk: Talk) -> None:
        nonlocal requests
        while True:
            await talk.request()
            requests += 1
            if requests > 1:
                talk.reset()
                return
            await talk.send(OK)

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).body == b"ok"
        await client.post()
        assert (await client.answer()).status == 502
        assert (requests, replica.accepted) == (3, 2)


@on_both_loops
async def test_an_answered_request_is_never_repeated() -> None:
    """Once a byte of the response has come on a reused connection, its death is the caller's to know."""
    requests = 0

    async def script(talk: Talk) -> None:
        nonlocal requests
        await talk.request()
        await talk.send(OK)
        await talk.request()
        requests += 1
        await talk.send(b"HTTP/1.1 20")
        await asyncio.sleep(0)
        talk.writer.write_eof()

    async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        await client.answer()
        await relay.outcome()
        await client.post()
        assert (await client.answer()).status == 502
        error = await relay.outcome()
        assert isinstance(error, UpstreamBroken)
        assert error.answered
        assert (requests, replica.accepted) == (1, 1)


@on_both_loops
async def test_close_and_http10_are_respected() -> None:
    """`Connection: close` and HTTP/1.0 replicas get a new connection for each request."""
    for answer in (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ):

        async def script(talk: Talk, answer: bytes = answer) -> None:
            await talk.request()
            await talk.send(answer)
            await talk.until_closed()

        async with relaying(script) as (relay, replica), Client.to(relay.port) as client:
            for _ in range(2):
                await client.post()
                assert (await client.answer()).body == b"ok"
            assert replica.accepted == 2


@on_both_loops
async def test_no_head_in_time() -> None:
    """No head within `head_s` is `UpstreamSilent`, 504, and closes the replica's socket. Interim ones do not count."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(b"HTTP/1.1 102 Processing\r\n\r\n")
        await talk.until_closed()

    async with relaying(script, UpstreamLimits(head_s=0.1)) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        assert (await client.answer()).status == 504
        assert isinstance(await relay.outcome(), UpstreamSilent)
        await replica.until_closed(1)


@on_both_loops
async def test_silence_in_the_middle() -> None:
    """No byte within `idle_s`: an incomplete message after what came, and the replica's socket closes."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"data: 1\n\n"))
        await talk.until_closed()

    async with relaying(script, UpstreamLimits(idle_s=0.2)) as (relay, replica), Client.to(relay.port) as client:
        await client.post()
        answer = await client.answer()
        assert not answer.complete
        assert answer.chunks == [b"data: 1\n\n", b"event: error\n\n"]
        assert isinstance(await relay.outcome(), UpstreamSilent)
        await replica.until_closed(1)


@on_both_loops
async def test_idle_connections_expire() -> None:
    """An idle connection is closed after `keepalive_s`; at most `idle_connections_max` are kept."""
    limits = UpstreamLimits(keepalive_s=0.1, idle_connections_max=2)
    together = asyncio.Barrier(5)

    async def script(talk: Talk) -> None:
        await talk.request()
        await together.wait()
        await talk.send(OK)
        await talk.until_closed()

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient(limits)

        async def turn() -> None:
            exchange = await upstream.send(replica.url, POST)
            await exchange.relay(lambda data: None)

        await asyncio.gather(*(turn() for _ in range(5)))
        assert upstream.connections(replica.url)[1] <= 2
        await replica.until_closed(5)
        assert upstream.connections(replica.url) == (0, 0)
        await upstream.close()


@on_both_loops
async def test_the_newest_idle_connection_is_taken() -> None:
    """LIFO: after a burst, one client's turns use one connection, so that the others expire."""
    together = asyncio.Barrier(3)
    served: list[int] = []

    async def script(talk: Talk) -> None:
        me = len(served)
        served.append(0)
        await talk.request()
        await together.wait()
        while True:
            await talk.send(OK)
            served[me] += 1
            await talk.request()

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()

        async def turn() -> None:
            exchange = await upstream.send(replica.url, POST)
            await exchange.relay(lambda data: None)

        await asyncio.gather(*(turn() for _ in range(3)))
        for _ in range(10):
            await turn()
        assert sorted(served) == [1, 1, 11]
        await upstream.close()


@on_both_loops
async def test_nobody_listens() -> None:
    """A refused connection, a name that does not resolve, and a host that does not answer are `UpstreamUnreachable`."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        upstream = UpstreamClient(UpstreamLimits(connect_s=0.2))
        for url in (f"http://127.0.0.1:{taken.getsockname()[1]}", "http://replica.invalid:1", f"http://{'a' * 70}.x:1"):
            with pytest.raises((UpstreamUnreachable, ValueError)):
                await upstream.send(url, POST)
        assert upstream.connections(f"http://127.0.0.1:{taken.getsockname()[1]}") == (0, 0)
        # A listener whose backlog is full drops the handshake: the connection hangs.
        taken.listen(0)
        address = taken.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        with pytest.raises(UpstreamUnreachable):
            await upstream.send(f"http://127.0.0.1:{address[1]}", POST)
        for filler in fillers:
            filler.close()
        await upstream.close()


@on_both_loops
async def test_addresses() -> None:
    """Path prefixes go before the target; IPv6 addresses and names work."""
    targets = []

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.request()
            targets.append(head.split(b"\r\n")[:2])
            await talk.send(OK)

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()
        for url in (f"{replica.url}/a/b/", f"http://localhost:{replica.port}"):
            exchange = await upstream.send(url, POST)
            await exchange.relay(lambda data: None)
        assert targets[0][0] == b"POST /a/b/v1/x HTTP/1.1"
        assert targets[1] == [b"POST /v1/x HTTP/1.1", b"Host: localhost:%d" % replica.port]
        await upstream.close()
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    async with Replica(script).serving("::1") as replica:
        upstream = UpstreamClient()
        exchange = await upstream.send(f"http://[::1]:{replica.port}", POST)
        await exchange.relay(lambda data: None)
        assert targets[-1][1] == b"Host: [::1]:%d" % replica.port
        await upstream.close()


@on_both_loops
async def test_unsendable_requests_are_refused_before_anything_is_sent() -> None:
    """A line break or NUL in a header, or a target that is no path, never reaches a socket."""

    async def script(talk: Talk) -> None:
        await talk.until_closed()

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()
        for request in (
            ForwardRequest("POST", "/", ((b"X", b"a\r\nEvil: 1"),), b""),
            ForwardRequest("POST", "/", ((b"X\n", b"a"),), b""),
            ForwardRequest("POST", "/", ((b"X", b"a\0"),), b""),
            ForwardRequest("GET", "/a b", (), b""),
            ForwardRequest("GET", "a", (), b""),
        ):
            with pytest.raises(MalformedRequest):
                await upstream.send(replica.url, request)
        assert replica.accepted == 0
        await upstream.close()


@on_both_loops
async def test_cancelling_aborts() -> None:
    """Cancelling `send` or `relay` closes the replica's connection at once, in every phase."""
    phase = asyncio.Event()

    async def silent(talk: Talk) -> None:
        await talk.request()
        phase.set()
        await talk.until_closed()

    async def streaming(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"x"))
        phase.set()
        await talk.until_closed()

    async def turn(upstream: UpstreamClient, url: str) -> None:
        exchange = await upstream.send(url, POST)
        await exchange.relay(lambda data: None)

    for script in (silent, streaming):
        phase.clear()
        async with Replica(script).serving() as replica:
            upstream = UpstreamClient()
            task = asyncio.create_task(turn(upstream, replica.url))
            await phase.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await replica.until_closed(1)
            assert upstream.connections(replica.url) == (0, 0)
            await upstream.close()


@on_both_loops
async def test_what_the_receiver_raises_aborts_and_is_raised() -> None:
    """A receiver's own error, on the first payload or a later one, comes out of `relay`; the replica is let go."""
    more = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD + chunked(b"first"))
        await more.wait()
        await talk.send(chunked(b"second"))
        await talk.until_closed()

    for bad in (b"first", b"second"):
        more.clear()

        def receive(data: bytes, bad: bytes = bad) -> None:
            more.set()
            if data == bad:
                raise LookupError(data)

        async with Replica(script).serving() as replica:
            upstream = UpstreamClient()
            exchange = await upstream.send(replica.url, POST)
            with pytest.raises(LookupError):
                await exchange.relay(receive)
            exchange.abort()
            await replica.until_closed(1)
            await upstream.close()


@on_both_loops
async def test_abort_is_harmless_after_the_end() -> None:
    """An exchange that has ended has no power over the connection that was its own."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.request()
            await talk.send(OK)

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()
        first = await upstream.send(replica.url, POST)
        await first.relay(lambda data: None)
        second = await upstream.send(replica.url, POST)
        first.pause()
        first.abort()
        got: list[bytes] = []
        await second.relay(got.append)
        assert got == [b"ok"]
        assert replica.accepted == 1
        await upstream.close()


@on_both_loops
async def test_abort_from_elsewhere_ends_the_relay() -> None:
    """A relay whose exchange another task aborts raises `UpstreamBroken`; `close` does the same to all."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(SSE_HEAD)
        await talk.until_closed()

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()
        for count, end in enumerate(("abort", "close"), start=1):
            exchange = await upstream.send(replica.url, POST)
            relay = asyncio.create_task(exchange.relay(lambda data: None))
            await asyncio.sleep(0)
            if end == "abort":
                exchange.abort()
            else:
                await upstream.close()
            with pytest.raises(UpstreamBroken):
                await relay
            await replica.until_closed(count)
        with pytest.raises(UpstreamUnreachable):
            await upstream.send(replica.url, POST)


@on_both_loops
async def test_a_replica_that_left_keeps_no_connection_but_running_exchanges_finish() -> None:
    """Idle connections go at once, those in use after their exchange, and then nothing is left of the replica."""
    talking, finish = asyncio.Event(), asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.request()
            if head.startswith(b"GET"):
                await talk.send(OK)
                continue
            await talk.send(SSE_HEAD + b"5\r\nhello\r\n")
            talking.set()
            await finish.wait()
            await talk.send(b"3\r\nbye\r\n0\r\n\r\n")

    async with Replica(script).serving() as replica:
        upstream = UpstreamClient()
        streaming = await upstream.send(replica.url, POST)
        short = await upstream.send(replica.url, GET)
        await short.relay(lambda data: None)
        assert upstream.connections(replica.url) == (2, 1)
        got: list[bytes] = []
        relay = asyncio.create_task(streaming.relay(got.append))
        await talking.wait()
        upstream.forget(replica.url)
        upstream.forget(replica.url)
        await replica.until_closed(1)
        assert upstream.connections(replica.url) == (1, 0)
        finish.set()
        await relay
        assert b"".join(got) == b"hellobye"
        await replica.until_closed(2)
        assert upstream.connections(replica.url) == (0, 0)
        upstream.forget(replica.url)
        back = await upstream.send(replica.url, GET)  # it is a member again
        await back.relay(lambda data: None)
        assert upstream.connections(replica.url) == (1, 1)
        await upstream.close()


@on_both_loops
async def test_a_response_head_that_would_split_never_leaves() -> None:
    """An extra header with a line break is refused before anything is written: the client gets a whole error."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.send(OK)
        await talk.until_closed()

    async with (
        relaying(script, extra=((b"x-roost-session", b"a\r\nSet-Cookie: evil=1"),)) as (relay, _),
        Client.to(relay.port) as client,
    ):
        await client.post()
        answer = await client.answer()
        assert (answer.status, answer.complete) == (502, True)
        assert b"set-cookie" not in answer.headers


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    try:
        command = ["openssl", "req", *options.split(), "-keyout", str(key), "-out", str(cert)]
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl cannot make a certificate here")
    return cert, key


async def test_tls_replicas(tmp_path: Path) -> None:
    """`https` replicas are verified; a certificate nobody vouches for is `UpstreamUnreachable`."""
    cert, key = _certificate(tmp_path)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(cert, key)

    async def script(talk: Talk) -> None:
        while True:
            await talk.request()
            await talk.send(SSE_HEAD + chunked(b"a" * 100_000) + LAST_CHUNK)

    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    async with Replica(script).serving(ssl=served) as replica:
        url = f"https://localhost:{replica.port}"
        stranger = UpstreamClient()
        with pytest.raises(UpstreamUnreachable):
            await stranger.send(url, POST)
        await stranger.close()
        friend = UpstreamClient(tls=ssl.create_default_context(cafile=str(cert)))
        for _ in range(2):
            got: list[bytes] = []
            exchange = await friend.send(url, POST)
            await exchange.relay(got.append)
            assert b"".join(got) == b"a" * 100_000
        assert friend.connections(url) == (1, 1)
        async with asyncio.timeout(PATIENCE_S):
            await friend.close()


@on_both_loops
async def test_pauses_are_idempotent_and_lifted_for_the_next_exchange() -> None:
    """An exchange that ends while paused leaves a connection that reads."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.request()
            await talk.send(SSE_HEAD + chunked(b"a"))
            await talk.send(LAST_CHUNK)

    async def handle(relay: Relay, request: web.BaseRequest) -> web.StreamResponse:
        exchange = await relay.upstream.send(relay.url, forward(request, b"{}"))
        exchange.pause()
        exchange.pause()
        exchange.resume()
        exchange.resume()

        def receive(data: bytes) -> None:
            exchange.pause()
            asyncio.get_running_loop().call_soon(exchange.resume)

        await exchange.relay(receive)
        exchange.resume()
        return web.Response()

    async with relaying(script, handle=handle) as (relay, replica), Client.to(relay.port) as client:
        for _ in range(3):
            await client.post()
            assert (await client.answer()).status == 200
        assert replica.accepted == 1
