"""The probe against real sockets: SGLang's shape, other servers, and servers that misbehave."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import unittest.mock
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from router.discovery import Engine, Failure, Observation, Probe, open_session
from router.discovery.probe import _failure

Raw = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engineish:
    """A small server with SGLang's paths; what it says can be changed, and it counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.ready_status = 200
        self.startup_s = 1.8129
        self.prefilled = 100_000
        self.answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        if request.path in self.answers:
            return await self.answers[request.path](request)
        if request.path == "/ready":
            return web.Response(status=self.ready_status)
        if request.path == "/metrics":
            return web.Response(text='sglang:hicache_host_total_tokens{tp_rank="0"} 40000.0\n')
        bodies: dict[str, object] = {
            "/v1/loads": {"version": "0.5.23", "loads": [self.rank()]},
            "/v1/models": {"data": [{"id": "tiny", "owned_by": "sglang", "max_model_len": 8192}]},
            "/model_info": {"served_model_name": "tiny", "model_path": "somewhere"},
            "/server_info": {
                "version": "0.5.23",
                "random_seed": 1,
                "api_key": "sk-in-the-clear",
                "max_total_num_tokens": 20000,
                "page_size": 16,
                "enable_cache_report": True,
                "internal_states": [{"startup_time": {"scheduler_e2e": self.startup_s}}],
            },
        }
        if request.path not in bodies:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(bodies[request.path])

    def rank(self) -> dict[str, int]:
        return {
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "num_used_tokens": 1360,
            "num_waiting_uncached_tokens": 0,
            "max_total_num_tokens": 20000,
            "max_running_requests": 8,
            "total_prefill_uncached_tokens": self.prefilled,
            "total_prefill_busy_us": 5_000_000,
        }


@asynccontextmanager
async def serving(engine: Engineish, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_serving(handle: Raw) -> AsyncIterator[str]:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened


@pytest.fixture
def engine() -> Engineish:
    return Engineish()


async def observe_once(session: aiohttp.ClientSession, url: str, timeout_s: float = 5.0) -> Observation:
    return await Probe(session, timeout_s=timeout_s).observe(url, None)


# --- SGLang -----------------------------------------------------------------------------------------------------------


async def test_a_first_round_learns_everything(session: aiohttp.ClientSession, engine: Engineish) -> None:
    async with serving(engine) as url:
        seen = await observe_once(session, url + "/")
    assert (seen.reachable, seen.ready, seen.engine, seen.version) == (True, True, Engine.SGLANG, "0.5.23")
    assert (seen.models, seen.device_tokens, seen.host_tokens) == (("tiny",), 20000, 40000)
    assert (seen.page_size, seen.context_length, seen.max_running) == (16, 8192, 8)
    assert (seen.running, seen.used_tokens, seen.cache_report) == (1, 1360, True)
    assert seen.problems == ()
    assert "sk-in-the-clear" not in repr(seen)


async def test_later_rounds_ask_only_what_is_free_until_the_slow_facts_are_due(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    now_s = 1000.0
    probe = Probe(session, timeout_s=5.0, describe_every_s=60.0, monotonic_s=lambda: now_s)
    async with serving(engine) as url:
        seen = await probe.observe(url, None)
        engine.asked.clear()
        now_s += 59
        seen = await probe.observe(url, seen)
        assert engine.asked == ["/ready", "/v1/loads"]
        now_s += 1
        await probe.observe(url, seen)
    assert "/server_info" in engine.asked
    assert not any(path.startswith("/health") for path in engine.asked)


async def test_two_routers_see_the_same_incarnation_and_a_restart_on_the_same_port_changes_it(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    probe = Probe(session, timeout_s=5.0)
    async with serving(engine) as url, open_session() as other_session:
        seen = await probe.observe(url, None)
        assert (await observe_once(other_session, url)).incarnation == seen.incarnation
    gone = await probe.observe(url, seen)
    assert (gone.reachable, gone.failure) == (False, Failure.REFUSED)
    engine.startup_s, engine.prefilled, engine.ready_status = 1.75, 6, 503
    async with serving(engine, int(url.rsplit(":", 1)[1])):
        warming = await probe.observe(url, gone)
        engine.ready_status = 200
        back = await probe.observe(url, warming)
    assert (warming.ready, warming.draining, warming.lives) == (False, False, 1)
    assert warming.incarnation != seen.incarnation
    assert (back.ready, back.incarnation, back.lives) == (True, warming.incarnation, 1)


async def test_a_drain_shows_while_the_server_still_answers(session: aiohttp.ClientSession, engine: Engineish) -> None:
    probe = Probe(session, timeout_s=5.0)
    async with serving(engine) as url:
        seen = await probe.observe(url, None)
        engine.ready_status = 503
        draining = await probe.observe(url, seen)
    assert (draining.reachable, draining.ready, draining.draining, draining.running) == (True, False, True, 1)
    assert draining.problems == ()


async def test_the_replicas_key_goes_along_with_every_request(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    async with serving(engine) as url:
        await Probe(session, timeout_s=5.0, api_key="sk-1").observe(url, None)
    assert engine.keys == {"Bearer sk-1"}


async def test_a_wrong_key_is_told_in_plain_words(session: aiohttp.ClientSession, engine: Engineish) -> None:
    async def unauthorized(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "Unauthorized"}, status=401)

    engine.answers = dict.fromkeys(("/v1/loads", "/server_info", "/v1/models", "/model_info"), unauthorized)
    async with serving(engine) as url:
        seen = await observe_once(session, url)
    assert (seen.reachable, seen.ready, seen.engine) == (True, True, Engine.SGLANG)
    assert "/v1/loads: HTTP 401, the replica wants its API key" in seen.problems
    assert seen.wants_key


async def test_a_scheduler_too_busy_to_describe_itself_is_asked_again_soon_and_keeps_its_life(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    async def busy(_: web.Request) -> web.StreamResponse:
        return web.Response(status=504)

    now_s = 1000.0
    probe = Probe(session, timeout_s=5.0, monotonic_s=lambda: now_s)
    async with serving(engine) as url:
        seen = await probe.observe(url, None)
        engine.answers["/server_info"] = busy
        now_s = seen.describe_at_s
        later = await probe.observe(url, seen)
    assert later.incarnation == seen.incarnation is not None
    assert later.lives == 0
    assert now_s < later.describe_at_s < now_s + 60


# --- other servers ----------------------------------------------------------------------------------------------------


async def test_a_server_that_only_lists_models_is_openai_and_reachable_is_ready(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    async def missing(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def models(_: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "other", "owned_by": "someone"}]})

    engine.answers = dict.fromkeys(("/ready", "/v1/loads", "/server_info", "/model_info", "/metrics"), missing)
    engine.answers["/v1/models"] = models
    probe = Probe(session, timeout_s=5.0)
    async with serving(engine) as url:
        seen = await probe.observe(url, None)
        assert (seen.engine, seen.ready, seen.reachable, seen.models) == (Engine.OPENAI, None, True, ("other",))
        assert (seen.incarnation, seen.problems) == (None, ())
        engine.asked.clear()
        seen = await probe.observe(url, seen)
        assert engine.asked == ["/v1/models"]
    gone = await probe.observe(url, seen)
    assert not gone.reachable
    async with serving(engine, int(url.rsplit(":", 1)[1])):
        back = await probe.observe(url, gone)
    assert (back.engine, back.reachable, back.lives) == (Engine.OPENAI, True, 1)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\x00\xff" * 50, b"{}", b"[]", b'{"loads": "many"}', b""])
async def test_a_server_that_says_nonsense_everywhere_is_unknown_but_reachable(
    session: aiohttp.ClientSession, engine: Engineish, body: bytes
) -> None:
    async def nonsense(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    paths = ("/ready", "/v1/loads", "/server_info", "/v1/models", "/model_info", "/metrics")
    engine.answers = dict.fromkeys(paths, nonsense)
    async with serving(engine) as url:
        seen = await observe_once(session, url)
    assert (seen.engine, seen.ready, seen.reachable, seen.models) == (Engine.UNKNOWN, None, True, ())
    assert 0 < len(seen.problems) <= 8


async def test_redirects_are_not_followed(session: aiohttp.ClientSession, engine: Engineish) -> None:
    elsewhere = Engineish()

    async def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(other + request.path)

    engine.answers = dict.fromkeys(("/ready", "/v1/loads", "/server_info", "/v1/models"), away)
    async with serving(elsewhere) as other, serving(engine) as url:
        seen = await Probe(session, timeout_s=5.0, api_key="sk-1").observe(url, None)
    assert elsewhere.asked == []
    assert "/ready: HTTP 302" in seen.problems
    assert seen.ready is None


# --- servers that misbehave -------------------------------------------------------------------------------------------


async def test_a_body_beyond_the_limit_is_not_read(session: aiohttp.ClientSession, engine: Engineish) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    async def bomb(_: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b" " * 50_000_000), headers={"Content-Encoding": "gzip"})

    engine.answers = {"/v1/loads": endless, "/server_info": bomb}
    async with serving(engine) as url:
        seen = await Probe(session, timeout_s=20.0, body_max_bytes=100_000).observe(url, None)
    assert "/v1/loads: body over 100000 bytes" in seen.problems
    assert any(problem.startswith("/server_info: body ") for problem in seen.problems)
    assert seen.models == ("tiny",), "the other answers still count"


async def test_a_replica_that_hangs_is_a_timeout(session: aiohttp.ClientSession) -> None:
    released = asyncio.Event()

    async def hang(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await released.wait()

    async with raw_serving(hang) as url:
        gone = await observe_once(session, url, timeout_s=0.2)
        released.set()
    assert (gone.reachable, gone.failure, gone.problems) == (False, Failure.TIMEOUT, ("/ready: timeout",))


async def test_a_replica_that_hangs_holds_up_no_other(session: aiohttp.ClientSession, engine: Engineish) -> None:
    asked, released = asyncio.Event(), asyncio.Event()

    async def hang(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await released.wait()

    async with raw_serving(hang) as hanging, serving(engine) as url:
        stuck = [asyncio.create_task(observe_once(session, hanging, timeout_s=60.0)) for _ in range(150)]
        await asked.wait()
        seen = await observe_once(session, url)
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        released.set()
    assert seen.ready


async def test_a_body_that_never_ends_in_time_is_a_problem_of_its_path_only(
    session: aiohttp.ClientSession, engine: Engineish
) -> None:
    released = asyncio.Event()

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await released.wait()
        return response

    engine.answers = {"/v1/loads": trickle}
    async with serving(engine) as url:
        seen = await observe_once(session, url, timeout_s=3.0)
        released.set()
    assert (seen.reachable, seen.ready, seen.running) == (True, True, None)
    assert "/v1/loads: body timeout" in seen.problems


async def answer(writer: asyncio.StreamWriter, text: bytes) -> None:
    writer.write(text)
    await writer.drain()


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (b"", Failure.RESET),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", Failure.NONSENSE),
        (b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n", Failure.NONSENSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\n\r\n", Failure.NONSENSE),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", Failure.NONSENSE),
        (b"HTTP/1.1 999999 \r\n\r\n", Failure.NONSENSE),
    ],
)
async def test_a_peer_that_does_not_speak_http_is_unreachable(
    session: aiohttp.ClientSession, text: bytes, failure: Failure
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer, text)

    async with raw_serving(speak) as url:
        seen = await observe_once(session, url)
    assert (seen.reachable, seen.failure) == (False, failure)


async def test_a_replica_that_resets_is_unreachable(session: aiohttp.ClientSession) -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.abort()

    async with raw_serving(reset) as url:
        seen = await observe_once(session, url)
    assert (seen.reachable, seen.failure) == (False, Failure.RESET)


def test_what_cuts_a_connection_as_it_is_made_is_no_unknown_address() -> None:
    """A balancer without a replica behind it accepts and resets at once; some clients see that while they connect."""
    cut = aiohttp.ClientConnectorError(unittest.mock.MagicMock(), ConnectionResetError(errno.ECONNRESET, "reset"))
    assert _failure(cut) is Failure.RESET
    refused = aiohttp.ClientConnectorError(unittest.mock.MagicMock(), ConnectionRefusedError(errno.ECONNREFUSED, "no"))
    assert _failure(refused) is Failure.REFUSED
    unknown = aiohttp.ClientConnectorDNSError(unittest.mock.MagicMock(), OSError(-2, "Name or service not known"))
    assert _failure(unknown) is Failure.UNRESOLVED


async def test_a_body_cut_short_is_not_taken_for_the_whole(session: aiohttp.ClientSession) -> None:
    models = json.dumps({"data": [{"id": "tiny"}]}).encode()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/ready" in head:
            await answer(writer, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            await answer(writer, b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + models)

    async with raw_serving(cut) as url:
        seen = await observe_once(session, url)
    assert (seen.reachable, seen.models) == (True, ())
    assert "/v1/models: body reset" in seen.problems


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1:1", "http://", "http://[::1", "http://a b:1"])
async def test_an_address_that_is_none_is_unreachable_not_an_error(session: aiohttp.ClientSession, url: str) -> None:
    assert not (await observe_once(session, url)).reachable


async def test_cancelling_a_round_cancels_it(session: aiohttp.ClientSession) -> None:
    asked, released = asyncio.Event(), asyncio.Event()

    async def hang(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await released.wait()

    async with raw_serving(hang) as url:
        task = asyncio.create_task(observe_once(session, url, timeout_s=60.0))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
