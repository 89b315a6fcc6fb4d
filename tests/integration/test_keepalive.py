"""`streams.keepalive_s` over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.domain.turn import Dialect
from router.lifecycle.heartbeat import COMMENT
from router.settings import Streams
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Visit, events, replicas
from tests.integration.roosts import running, settings_for

EAGER = Streams(keepalive_s=0.02)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_silent_stream_is_kept_alive_between_events_and_otherwise_unchanged(dialect: Dialect) -> None:
    """The replica goes on only once the client has seen comments, at every boundary; within an event none comes."""
    told = events(dialect, "resp_1", 10, ["a", "b", "c"])
    go_on = asyncio.Semaphore(0)

    async def halting(visit: Visit) -> None:
        await visit.begin()
        for event in told:
            await go_on.acquire()
            await visit.chunk(event[:9])
            await asyncio.sleep(0.1)  # five times the interval, in the middle of an event
            await visit.chunk(event[9:])
        await visit.end()

    async with (
        replicas(1, script=halting) as fleet,
        running(settings_for(fleet, streams=EAGER), fleet) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("halting", dialect).body(), path=PATHS[dialect])
        assert (await client.head()).status == 200
        for event in told:
            for _ in range(3):
                assert await client.chunk() == COMMENT
            go_on.release()
            while (chunk := await client.chunk()) == COMMENT:
                pass
            assert chunk == event[:9]
            assert await client.chunk() == event[9:]
        assert await client.chunk() == b""
        await roost.idle()
        assert (await roost.decisions())[0]["came_true"]["end"] == "complete"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_comment_follows_the_terminal_event(dialect: Dialect) -> None:
    """Nor the replica's death: what the client reads last is the error of its dialect."""
    told = events(dialect, "resp_1", 10)
    dies = False

    async def lingering(visit: Visit) -> None:
        await visit.begin()
        for event in told[:1] if dies else told:
            await visit.chunk(event)
        await asyncio.sleep(0.1)
        if dies:
            visit.reset()
        else:
            await visit.end()

    async with replicas(1, script=lingering) as fleet, running(settings_for(fleet, streams=EAGER), fleet) as roost:
        answer = await roost.watch(Conversation("lingering", dialect))
        assert (answer.body.replace(COMMENT, b""), answer.complete) == (b"".join(told), True)
        assert not answer.body.endswith(COMMENT)
        dies = True
        broken = await roost.watch(Conversation("dying", dialect))
        assert not broken.complete
        assert COMMENT in broken.body
        assert b"error" in broken.body[broken.body.rindex(COMMENT) :]
        await roost.idle()


async def test_what_is_no_event_stream_gets_no_comment() -> None:
    """A whole reply, chunked JSON, a compressed stream."""
    reply = json.dumps({"id": "c", "object": "chat.completion", "choices": []}).encode()

    async def slow(visit: Visit) -> None:
        kind = visit.seen.header(b"x-kind")[0].decode()
        head = f"HTTP/1.1 200 OK\r\n{kind.replace(' | ', chr(13) + chr(10))}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await visit.send(head.encode())
        await visit.chunk(reply[:5])
        await asyncio.sleep(0.1)
        await visit.chunk(reply[5:])
        await visit.end()

    kinds = ("Content-Type: application/json", "Content-Type: text/event-stream\r\nContent-Encoding: gzip")
    async with replicas(1, script=slow) as fleet, running(settings_for(fleet, streams=EAGER), fleet) as roost:
        for kind in kinds:
            answer = await roost.request(
                "POST", PATHS[Dialect.CHAT], Conversation("plain").body(), {"x-kind": kind.replace("\r\n", " | ")}
            )
            assert answer.body == reply


async def test_it_is_off_unless_asked_for() -> None:
    """By default a stream passes byte by byte, however long it is silent."""
    told = events(Dialect.CHAT, "", 10)

    async def slow(visit: Visit) -> None:
        await visit.begin()
        await asyncio.sleep(0.1)
        for event in told:
            await visit.chunk(event)
        await visit.end()

    async with replicas(1, script=slow) as fleet, running(settings_for(fleet), fleet) as roost:
        assert (await roost.turn(Conversation("plain"))).body == b"".join(told)
