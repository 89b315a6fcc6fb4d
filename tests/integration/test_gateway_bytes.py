"""Bytes go through as they are, both ways, as they come."""

from __future__ import annotations

import asyncio
import json
import os
from hashlib import sha256

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Visit, events, replicas, whole
from tests.integration.roosts import running, settings_for

PROMPT_OF = {
    Dialect.CHAT: b'"messages" :\t[{"content":%s,"role":"user"}]',
    Dialect.COMPLETIONS: b'"prompt":%s',
    Dialect.RESPONSES: b'"input":[{"role":"user","content":%s}]',
    Dialect.MESSAGES: b'"messages":[{"role":"user","content":%s}]',
    Dialect.GENERATE: b'"text":%s',
}


def odd_bodies(dialect: Dialect) -> list[bytes]:
    """Valid JSON that a careless proxy would write anew: spaces, escapes, big numbers, names twice, an unknown nest."""
    text = '"☃ \\u2603 \\ud83d\\ude00 é\\/ \\u0000"'.encode()
    prompt = PROMPT_OF[dialect] % text
    odd = b' {\r\n "model": "m" , "big": 9007199254740993 , "float": 1.0, "e": 1E400, "neg": -0, "dup": 1, "dup": 2,'
    nest = b'"chat_template_kwargs": {"z": null, "a": [ ]}, "stream" : true ,'
    return [odd + nest + prompt + b"} \n\n", b'{"model":"m",' + prompt + b"}"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_bodies_are_equal_at_both_ends(dialect: Dialect) -> None:
    """By SHA-256: requests with odd JSON and of 5 MB, replies as streams and as a whole."""
    text = json.dumps("é" * 1000 + "x" * 5_000_000).encode()
    bodies = [*odd_bodies(dialect), b'{"model":"m",' + PROMPT_OF[dialect] % text + b"}"]
    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        for body in bodies:
            answer = await roost.request("POST", PATHS[dialect], body, {"content-type": "application/json"})
            assert answer.status == 200
            seen = replica.seen[-1]
            assert seen.sha256 == sha256(body).hexdigest()
            assert seen.header(b"content-length") == [b"%d" % len(body)]
            number = len(replica.seen) - 1
            response_id = f"resp_{replica.port}_{number}"
            told = (
                b"".join(events(dialect, response_id, len(body) // 4))
                if seen.stream
                else whole(dialect, response_id, len(body) // 4)
            )
            assert answer.sha256 == sha256(told).hexdigest()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_any_reply_passes_whatever_it_is(dialect: Dialect) -> None:
    """5 MB of noise said to be JSON, and as a stream; a compressed reply stays compressed."""
    noise = os.urandom(5_000_000)

    async def said_whole(visit: Visit) -> None:
        await visit.answer(200, noise, [("Content-Encoding", "gzip")])

    async def said_in_chunks(visit: Visit) -> None:
        await visit.begin()
        for start in range(0, len(noise), 777_777):
            await visit.chunk(noise[start : start + 777_777])
        await visit.end()

    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        for script in (said_whole, said_in_chunks):
            replica.script = script
            answer = await roost.request("POST", PATHS[dialect], Conversation("n", dialect).body())
            assert answer.complete
            assert answer.sha256 == sha256(noise).hexdigest()


async def test_a_compressed_request_passes_unread() -> None:
    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        noise = os.urandom(2000)
        answer = await roost.request("POST", PATHS[Dialect.CHAT], noise, {"content-encoding": "zstd"})
        assert answer.status == 200
        assert replica.seen[0].body == noise
        assert replica.seen[0].header(b"content-encoding") == [b"zstd"]


async def test_a_chunked_request_arrives_whole() -> None:
    body = Conversation("chunked").body()
    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        async with Client.to(roost.port) as client:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
            pieces = b"".join(
                b"%x\r\n%b\r\n" % (len(body[i : i + 99]), body[i : i + 99]) for i in range(0, len(body), 99)
            )
            client.writer.write(head + pieces + b"0\r\n\r\n")
            assert (await client.answer()).complete
        assert replica.seen[0].body == body


async def test_unknown_headers_pass_both_ways_with_their_case_order_and_copies() -> None:
    async def told(visit: Visit) -> None:
        await visit.answer(200, b"{}", [("X-Odd", "a"), ("x-oDD", "b"), ("Server", "uvicorn"), ("X-Utf", "caf\xe9")])

    async with replicas(1, script=told) as (replica,), running(settings_for([replica]), [replica]) as roost:
        async with Client.to(roost.port) as client:
            given = "X-Custom: 1\r\nx-CUSTOM: 2\r\nAccept: */*\r\nTraceparent: 00-1\r\n"
            hops = "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
            await client.post(Conversation("h").body(), headers=given + hops, path="/v1/chat/completions")
            raw = await client.reader.readuntil(b"\r\n\r\n")
        assert b"\r\nX-Odd: a\r\nx-oDD: b\r\nServer: uvicorn\r\n" in raw
        assert raw.lower().count(b"content-length") == 1
        kept = [header for header in replica.seen[0].headers if header[0] not in (b"Host", b"Content-Length")]
        assert kept == [
            (b"X-Custom", b"1"),
            (b"x-CUSTOM", b"2"),
            (b"Accept", b"*/*"),
            (b"Traceparent", b"00-1"),
            (b"Via", b"1.1 roost"),
        ]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_each_event_arrives_before_the_next_is_sent(dialect: Dialect) -> None:
    """The replica sends an event only when the client says it has the one before."""
    arrived = asyncio.Semaphore(0)
    told = events(dialect, "resp_1", 10, ["a", "b", "c"])

    async def paced(visit: Visit) -> None:
        await visit.begin()
        for event in told:
            await visit.chunk(event)
            await arrived.acquire()
        await visit.end()

    async with (
        replicas(1, script=paced) as fleet,
        running(settings_for(fleet), fleet) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("paced", dialect).body(), path=PATHS[dialect])
        await client.head()
        for event in told:
            assert await client.chunk() == event
            arrived.release()
        assert await client.chunk() == b""


async def test_the_head_comes_before_the_first_token() -> None:
    """A client may give up where no head comes (Qwen Code after 120 s)."""
    go_on = asyncio.Event()

    async def slow(visit: Visit) -> None:
        await visit.begin()
        await go_on.wait()
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    async with (
        replicas(1, script=slow) as fleet,
        running(settings_for(fleet), fleet) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("slow").body(), path="/v1/chat/completions")
        assert (await client.head()).status == 200
        go_on.set()
        assert await client.chunk() == b"data: [DONE]\n\n"


async def test_a_client_that_leaves_reaches_the_replica_and_leaves_nothing_behind() -> None:
    """Before the head, in the stream, and without a stream while the replica is silent."""
    gone = asyncio.Semaphore(0)
    came = asyncio.Semaphore(0)

    async def silent(visit: Visit) -> None:
        if visit.seen.header(b"x-begin"):
            await visit.begin()
            await visit.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        came.release()
        await visit.until_closed()
        gone.release()

    async with replicas(2, script=silent) as fleet, running(settings_for(fleet), fleet) as roost:
        for number in range(12):
            async with Client.to(roost.port) as client:
                headers = "X-Begin: 1\r\n" if number % 3 == 0 else ""
                asked = Conversation(f"leaver {number}", stream=number % 2 == 0)
                await client.post(asked.body(), path="/v1/chat/completions", headers=headers)
                await came.acquire()
                if headers:
                    await client.head()
                    await client.chunk()
            await gone.acquire()
        await roost.idle()


async def test_a_client_that_closes_after_the_terminal_event_has_had_its_turn() -> None:
    """Codex does so after every turn: it counts as complete."""
    closed = asyncio.Event()

    async def lingering(visit: Visit) -> None:
        await visit.begin()
        for event in events(Dialect.RESPONSES, "resp_1", 10):
            await visit.chunk(event)
        await visit.until_closed()
        closed.set()

    async with replicas(1, script=lingering) as fleet, running(settings_for(fleet), fleet) as roost:
        async with Client.to(roost.port) as client:
            await client.post(Conversation("codex", Dialect.RESPONSES).body(), path="/v1/responses")
            await client.reader.readuntil(b"event: response.completed")
            await client.reader.readuntil(b"\n\n")
        await closed.wait()
        await roost.idle()
        assert (await roost.decisions())[0]["came_true"]["end"] == "complete"
