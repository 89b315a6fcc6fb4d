"""Roost before simulated engines: sessions stay with their KV, and what Roost reads is what the engines say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.settings import Fleet, Placement
from tests.integration.engine_rig import Client, engine
from tests.integration.roosts import PROBE_INTERVAL_S, Roost, running, settings_for
from tests.sglang.client import Conversation, new_client
from tests.sglang.dialects import CHAT, DIALECTS, Dialect

PAGE = 16
TURNS = 5


@asynccontextmanager
async def fleet(count: int, **given: object) -> AsyncIterator[tuple[Roost, str, list[Client]]]:
    """Roost, its URL, and the engines behind it, all known."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(engine(seed=number, **given)) for number in range(count)]  # type: ignore[arg-type]
        urls = tuple(client.engine.url for client in clients)
        settings = settings_for(
            [Fleet(name="default", replicas=urls, probe_interval_s=PROBE_INTERVAL_S)], placement=Placement(ramp_s=0.001)
        )
        roost = await stack.enter_async_context(running(settings))

        async def known() -> bool:
            told = await roost.replicas()
            return len(told) == count and all(each["healthy"] and each["incarnation"] for each in told.values())

        await roost.until(known)
        yield roost, f"http://127.0.0.1:{roost.port}", clients


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_a_conversation_stays_with_its_kv(dialect: Dialect) -> None:
    """Every later turn goes home and finds the turn before it, in every dialect, named or not."""
    async with fleet(3) as (_, url, _), new_client() as http:
        named = Conversation.new("named", dialect, 1500, session="an agent")
        unnamed = Conversation.new("unnamed", dialect, 1500)
        for _ in range(TURNS):
            await asyncio.gather(*(each.turn(http, url, 300) for each in (named, unnamed)))
    for conversation in (named, unnamed):
        assert len({answer.replica for answer in conversation.answers}) == 1
        before = None
        for answer in conversation.answers:
            assert answer.status == 200
            assert answer.headers["x-roost-simulated"] == "true"
            prompt, cached = answer.reply.prompt_tokens, answer.reply.cached_tokens
            assert prompt is not None
            assert cached is not None
            if before is not None:
                assert cached >= before - PAGE - 1
            before = prompt


async def test_what_roost_learned_is_what_the_engines_said() -> None:
    """Prompt, cached and output tokens of every decision came true as the engine counted them."""
    async with fleet(2) as (roost, url, clients), new_client() as http:
        conversations = [Conversation.new(f"c{number}", CHAT, 1200) for number in range(4)]
        for _ in range(TURNS):
            await asyncio.gather(*(each.turn(http, url, 200) for each in conversations))
        await roost.idle()
        counters = [client.engine.driver.snapshot().counters for client in clients]
        replies = [answer.reply for each in conversations for answer in each.answers]
    assert all(counter.prompt_tokens for counter in counters), "both engines were used"
    assert sum(counter.prompt_tokens for counter in counters) == sum(reply.prompt_tokens or 0 for reply in replies)
    assert sum(c.cached_device_tokens for c in counters) == sum(reply.cached_tokens or 0 for reply in replies)


async def test_a_full_engine_is_tried_elsewhere() -> None:
    """Whichever form the full queue has: the client sees an answer of the other engine."""
    async with fleet(2, time_scale=2.0, max_running=1, max_queued=1) as (_, url, clients), new_client() as http:
        conversations = [Conversation.new(f"c{number}", CHAT, 300) for number in range(4)]
        answers = await asyncio.gather(*(each.turn(http, url, 50, max_tokens=20) for each in conversations))
        taken = [client.engine.driver.snapshot().counters.requests for client in clients]
    assert [answer.status for answer in answers] == [200] * 4
    assert not any(answer.reply.errors for answer in answers)
    assert sum(taken) >= 4
