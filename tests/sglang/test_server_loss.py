"""A server that drains, is full, or dies: its running turns, the turns that come after, and its next life.

The tests ask for the servers in states of their own (`Pair.ensure`); in this order one restart serves them all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest

from tests.sglang.client import Answer, Conversation, Stream, new_client
from tests.sglang.conftest import StartRoost
from tests.sglang.dialects import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Dialect
from tests.sglang.front import Roost
from tests.sglang.servers import PAGE_TOKENS, TIGHT, Pair, Server, eventually

_NOTICED_WITHIN_S = 30.0
_SPILLING = (CHAT, COMPLETIONS, MESSAGES, GENERATE)
"""Dialects in which SGLang 0.5.23 says 503 when its queue is full; /v1/responses says 400."""


class Scene:
    """Roost before two servers, and conversations that live where the scene wants them."""

    def __init__(self, roost: Roost, http: aiohttp.ClientSession, home: Server, other: Server) -> None:
        self.roost = roost
        self.http = http
        self.home = home
        self.other = other

    async def begin(self, name: str, dialect: Dialect = CHAT) -> Conversation:
        """A conversation whose first turn was served at home, the other server taking no new branches meanwhile."""
        conversation = Conversation.new(name, dialect, system_bytes=1500)
        self.roost.cordon(self.other)
        answer = await conversation.turn(self.http, self.roost.url, 100)
        self.roost.undrain(self.other)
        assert (answer.status, answer.replica) == (200, self.home.id)
        return conversation

    async def stream(self, name: str, dialect: Dialect, *, output: bool = True, **more: Any) -> Stream:
        """A new conversation's long stream at home, with its first output if that is waited for."""
        body = Conversation.new(name, dialect, system_bytes=300).long_body(**more)
        self.roost.cordon(self.other)
        stream = await Stream.open(self.http, self.roost.url, dialect, body)
        self.roost.undrain(self.other)
        assert stream.replica == self.home.id
        if output:
            await stream.until_output()
        return stream

    async def turn(self, conversation: Conversation, **more: Any) -> Answer:
        """Its next turn, which must be answered well."""
        answer = await conversation.turn(self.http, self.roost.url, 100, **more)
        assert answer.status == 200, answer.body
        assert not answer.broken
        assert not answer.reply.errors
        return answer

    async def noticed(self) -> None:
        """Wait until Roost knows that home takes no turns."""
        await asyncio.to_thread(
            eventually,
            lambda: not self.roost.healthy(self.home),
            _NOTICED_WITHIN_S,
            f"{self.home.name} known as not ready",
        )


async def test_a_draining_server_finishes_its_streams_and_serves_again_in_its_next_life(
    pair: Pair, start_roost: StartRoost
) -> None:
    """SIGTERM in the middle of a stream: the stream comes to its end, the server exits cleanly, its branches go on
    elsewhere without an error, also in the moment before Roost has noticed.
    """
    other, home = pair.ensure()
    with start_roost((other, home)) as roost:
        async with new_client() as http:
            scene = Scene(roost, http, home, other)
            early, late = await scene.begin("early"), await scene.begin("late", MESSAGES)
            stream = await scene.stream("drained", CHAT, max_tokens=150)
            home.terminate()
            await scene.turn(early)
            await scene.noticed()
            for conversation in (early, late):
                answer = await scene.turn(conversation)
                assert answer.replica == other.id
            assert {answer.reason for answer in (*early.answers[1:], late.answers[1])} <= {"home", "home_gone"}
            assert late.answers[1].reason == "home_gone"
            end = await stream.rest()
        assert (end.broken, end.reply.ended, end.reply.finish) == (False, True, "length")
        assert end.reply.output_tokens == 150
        assert home.exit_status() == 0
        roost.wait_idle()
        assert {decision["came_true"]["end"] for decision in roost.decisions()} == {"complete"}
        await _next_life(roost, home, other)


async def _next_life(roost: Roost, home: Server, other: Server) -> None:
    """Started again on the same port, it is another incarnation, with the capacity it has now, and serves again."""
    before = roost.replicas()[home.id]
    home.launch(TIGHT)
    home.wait_ready()
    eventually(lambda: roost.healthy(home), _NOTICED_WITHIN_S, "the new life known as ready")
    eventually(
        lambda: roost.replicas()[home.id]["incarnation"] != before["incarnation"], _NOTICED_WITHIN_S, "a new life"
    )
    assert before["capacity"]["max_running"] == 8
    assert roost.replicas()[home.id]["capacity"]["max_running"] == 1
    async with new_client() as http:
        scene = Scene(roost, http, home, other)
        again = await scene.begin("first of the new life")
        assert (await scene.turn(again)).replica == home.id


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_full_server_spills_to_the_other(pair: Pair, start_roost: StartRoost, streamed: bool) -> None:
    """Queue full: the engine's 503, or what it says inside its 200, never reaches the client, the turn is served
    elsewhere, and the branch keeps its home, where the next turn finds its KV.
    """
    dialects = (*_SPILLING, RESPONSES) if streamed else _SPILLING
    other, home = pair.ensure(tight=True)
    with start_roost((other, home)) as roost:
        async with new_client() as http:
            scene = Scene(roost, http, home, other)
            conversations = [await scene.begin(f"spilled {dialect.name}", dialect) for dialect in dialects]
            # The head of /generate's stream comes at once, also while the turn waits in the queue.
            running = await scene.stream("running", GENERATE, max_tokens=5000)
            waiting = await scene.stream("waiting", GENERATE, max_tokens=5000, output=False)
            await asyncio.to_thread(eventually, lambda: home.running() == 2, 30, "one running, one waiting")
            for conversation in conversations:
                answer = await scene.turn(conversation, stream=streamed, max_tokens=4)
                assert (answer.replica, answer.reason) == (other.id, "spill"), conversation.name
                tries = roost.decisions(answer.session)[1:]
                assert [(d["replica"], d["attempt"], d["came_true"]["status"]) for d in tries] == [
                    (home.id, 1, 200 if streamed else 503),
                    (other.id, 2, 200),
                ]
            running.leave()
            waiting.leave()
            await asyncio.to_thread(eventually, lambda: home.running() == 0, 40, "both gone")
            await asyncio.to_thread(roost.wait_idle)
            for conversation in conversations:
                first = conversation.answers[0].reply.prompt_tokens or 0
                answer = await scene.turn(conversation, stream=False, max_tokens=4)
                assert (answer.replica, answer.reason) == (home.id, "home"), conversation.name
                assert (answer.reply.cached_tokens or 0) >= first - PAGE_TOKENS


async def test_a_killed_server_breaks_its_streams_audibly(pair: Pair, start_roost: StartRoost) -> None:
    """SIGKILL in the middle of streams: each client sees an error event and a connection that did not end properly,
    never a clean end; the next turns go elsewhere at once.
    """
    home, other = pair.ensure(tight=pair.servers[1].runs_with(TIGHT))
    with start_roost((home, other)) as roost:
        async with new_client() as http:
            scene = Scene(roost, http, home, other)
            conversation = await scene.begin("bereaved")
            dialects = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE)
            streams = [await scene.stream(f"killed {dialect.name}", dialect) for dialect in dialects]
            # Reading by then: aiohttp's client drops what it has not yet given out when a connection breaks.
            reading = [asyncio.create_task(stream.rest()) for stream in streams]
            await asyncio.sleep(0)
            home.kill()
            for dialect, end in zip(dialects, await asyncio.gather(*reading), strict=True):
                assert (dialect.name, end.broken, end.reply.ended) == (dialect.name, True, False)
                assert len(end.reply.errors) == 1, dialect.name
            answer = await scene.turn(conversation)
            assert (answer.replica, answer.reason) == (other.id, "home_gone")
            answer = await scene.turn(conversation)
            assert (answer.replica, answer.reason) == (other.id, "home")
        roost.wait_idle()
        ends = Counter(decision["came_true"]["end"] for decision in roost.decisions() if decision["replica"] == home.id)
        assert ends["upstream_broken"] == len(dialects)
        assert ends["complete"] == 1
