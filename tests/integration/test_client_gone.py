"""Clients that leave, in every dialect: the replica is let go of at once and nothing stays in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Visit, events, replicas, whole
from tests.integration.roosts import Roost, running, settings_for

WITHIN_S = 2.0
"""What the rule allows. (Measured: milliseconds; a test that waited for the engine to finish would hang.)"""

Moment = Callable[[Visit, Dialect], Awaitable[None]]


async def before_the_head(visit: Visit, dialect: Dialect) -> None:
    """Queueing or prefill: nothing has come."""


async def after_the_head(visit: Visit, dialect: Dialect) -> None:
    """The head is out and the replica silent."""
    await visit.begin()


async def mid_stream(visit: Visit, dialect: Dialect) -> None:
    """Tokens have come and none follow."""
    await visit.begin()
    for event in events(dialect, "resp_1", 10, ["a", "b"])[:2]:
        await visit.chunk(event)


async def mid_event(visit: Visit, dialect: Dialect) -> None:
    await visit.begin()
    await visit.chunk(events(dialect, "resp_1", 10)[0][:15])


async def mid_reply(visit: Visit, dialect: Dialect) -> None:
    """Half of a reply that is no stream."""
    reply = whole(dialect, "resp_1", 10)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(reply)}\r\n\r\n"
    await visit.send(head.encode() + reply[:20])


MOMENTS: list[tuple[Moment, bool, bytes]] = [
    (before_the_head, True, b""),
    (before_the_head, False, b""),
    (after_the_head, True, b"\r\n\r\n"),
    (mid_stream, True, b"\n\n\r\n"),
    (mid_event, True, b"\r\n\r\nf\r\n"),
    (mid_reply, False, b"{"),
]
"""When the client leaves, whether it asked for a stream, and what it has read by then."""


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("moment", "stream", "read"), MOMENTS, ids=[f"{m.__name__}-{s}" for m, s, _ in MOMENTS])
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_client_that_leaves_takes_its_turn_along(
    dialect: Dialect, moment: Moment, stream: bool, read: bytes, reset: bool
) -> None:
    """The connection to the replica is closed, so that the engine aborts; settled as `client_gone`, once."""
    came, let_go = asyncio.Event(), asyncio.Event()

    async def script(visit: Visit) -> None:
        await moment(visit, dialect)
        came.set()
        await visit.until_closed()
        let_go.set()

    async with replicas(2, script=script) as fleet, running(settings_for(fleet), fleet) as roost:
        async with Client.to(roost.port) as client:
            await client.post(Conversation("leaver", dialect, stream=stream).body(), path=PATHS[dialect])
            await came.wait()
            if read:
                await client.reader.readuntil(read)
            if reset:
                client.writer.transport.abort()
        async with asyncio.timeout(WITHIN_S):
            await let_go.wait()
            await roost.idle()
        assert await ends(roost) == ["client_gone"]
        assert sum(len(replica.turns) for replica in fleet) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_client_that_leaves_after_the_terminal_event_has_had_its_turn(dialect: Dialect, reset: bool) -> None:
    """Before the last chunk, as Codex does each time: complete, and the replica is let go of."""
    told = events(dialect, "resp_1", 10)
    let_go = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.begin()
        for event in told:
            await visit.chunk(event)
        await visit.until_closed()
        let_go.set()

    async with replicas(1, script=script) as fleet, running(settings_for(fleet), fleet) as roost:
        async with Client.to(roost.port) as client:
            await client.post(Conversation("codex", dialect).body(), path=PATHS[dialect])
            await client.head()
            got = b""
            while len(got) < len(b"".join(told)):
                got += await client.chunk()
            assert got == b"".join(told)
            if reset:
                client.writer.transport.abort()
        async with asyncio.timeout(WITHIN_S):
            await let_go.wait()
            await roost.idle()
        assert await ends(roost) == ["complete"]


async def ends(roost: Roost) -> list[str]:
    return [each["came_true"]["end"] for each in await roost.decisions()]
