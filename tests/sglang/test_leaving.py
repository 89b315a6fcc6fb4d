"""A client that leaves, or says stop: the engine stops, and nothing stays counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.sglang.client import Conversation, Stream, ask, new_client
from tests.sglang.conftest import StartRoost
from tests.sglang.dialects import CHAT, DIALECTS, GENERATE
from tests.sglang.front import Roost
from tests.sglang.servers import Pair, Server, eventually

_STOPPED_WITHIN_S = 40.0
"""SGLang looks for a client that left every few seconds, more on a busy machine."""


@pytest.fixture(scope="module")
def servers(pair: Pair) -> tuple[Server, Server]:
    """Both servers."""
    return pair.ensure()


@pytest.fixture
def roost(servers: tuple[Server, Server], start_roost: StartRoost) -> Iterator[Roost]:
    """A Roost of each test's own: its decisions are the test's."""
    with start_roost(servers) as roost:
        yield roost


def _all_run(servers: tuple[Server, ...], count: int) -> None:
    """The engines say so a moment later: they tell their load every few steps."""
    eventually(
        lambda: sum(server.running() for server in servers) == count, _STOPPED_WITHIN_S, f"{count} turns running"
    )


def _all_stopped(servers: tuple[Server, ...], roost: Roost) -> None:
    _all_run(servers, 0)
    roost.wait_idle()


async def test_leaving_a_stream_stops_the_engine(servers: tuple[Server, Server], roost: Roost) -> None:
    """In every dialect: the request is aborted, `roost_in_flight` is 0 again, and the turn ended as client_gone."""
    async with new_client() as http:
        streams = []
        for dialect in DIALECTS:
            conversation = Conversation.new(f"leaving {dialect.name}", dialect, system_bytes=300)
            body = conversation.long_body()
            streams.append(await Stream.open(http, roost.url, dialect, body))
        for stream in streams:
            await stream.until_output()
        await asyncio.to_thread(_all_run, servers, len(DIALECTS))
        assert sum(roost.in_flight().values()) == len(DIALECTS)
        for stream in streams:
            stream.leave()
        await asyncio.to_thread(_all_stopped, servers, roost)
    ends = {decision["dialect"]: decision["came_true"]["end"] for decision in roost.decisions()}
    assert ends == {dialect.name: "client_gone" for dialect in DIALECTS}


async def test_leaving_before_an_answer_stops_the_engine(servers: tuple[Server, Server], roost: Roost) -> None:
    """The same for requests that are no streams, of which the client has seen nothing yet."""
    async with new_client() as http:
        asking = []
        for dialect in DIALECTS:
            conversation = Conversation.new(f"waiting {dialect.name}", dialect, system_bytes=300)
            body = conversation.long_body(stream=False)
            asking.append(asyncio.create_task(ask(http, roost.url, dialect, body)))
        await asyncio.to_thread(_all_run, servers, len(DIALECTS))
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(_all_stopped, servers, roost)
    ends = {decision["dialect"]: decision["came_true"]["end"] for decision in roost.decisions()}
    assert ends == {dialect.name: "client_gone" for dialect in DIALECTS}


async def test_abort_request_stops_a_turn_wherever_it_runs(servers: tuple[Server, Server], roost: Roost) -> None:
    """`/abort_request` goes to every replica: the turn of that id ends, the other one, elsewhere, goes on."""
    async with new_client() as http:
        streams = {}
        for dialect in (CHAT, GENERATE):
            conversation = Conversation.new(f"aborted {dialect.name}", dialect, system_bytes=300)
            body = conversation.long_body(rid=f"rid-of-{dialect.name}")
            streams[dialect] = await Stream.open(http, roost.url, dialect, body)
        for stream in streams.values():
            await stream.until_output()
        assert len({stream.replica for stream in streams.values()}) == 2, (
            "two new branches spread over two idle replicas"
        )
        for left, dialect in ((1, CHAT), (0, GENERATE)):
            async with http.post(f"{roost.url}/abort_request", json={"rid": f"rid-of-{dialect.name}"}) as answer:
                assert answer.status == 200
            end = await streams[dialect].rest()
            assert end.reply.ended
            assert end.reply.finish == "abort"
            assert not end.broken
            await asyncio.to_thread(_all_run, servers, left)
        await asyncio.to_thread(_all_stopped, servers, roost)
