"""Clients that send no id: told apart by what they say."""

from __future__ import annotations

import asyncio

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation, prose
from tests.integration.replicas import DIALECTS, Gate, replicas
from tests.integration.roosts import Answer, running, settings_for, spread

SYSTEM = prose("system", 80_000)
"""About 20k tokens."""


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_conversations_with_one_system_prompt_spread_and_stay(dialect: Dialect, at_once: bool) -> None:
    """C07: sixteen without an id over four replicas are three to five each, and each stays as it grows."""
    async with replicas(4) as fleet, running(settings_for(fleet), fleet) as roost:
        talks = [Conversation(f"talk {n}", dialect, SYSTEM, size_bytes=800) for n in range(16)]
        first: list[Answer]
        if at_once:
            gate = Gate()
            for replica in fleet:
                replica.script = gate
            turns = [asyncio.create_task(roost.turn(each)) for each in talks]
            await gate.waiting(16)
            gate.open()
            first = await asyncio.gather(*turns)
        else:
            first = [await roost.turn(each) for each in talks]
        counts = spread(first)
        assert len(counts) == 4
        assert 3 <= counts[0] <= counts[-1] <= 5
        assert len({answer.session for answer in first}) == 16
        for _ in range(5):
            for each in talks:
                each.grow()
            if at_once:
                answers = list(await asyncio.gather(*map(roost.turn, talks)))
            else:
                answers = [await roost.turn(each) for each in talks]
            assert [answer.replica for answer in answers] == [answer.replica for answer in first]
            assert [answer.session for answer in answers] == [answer.session for answer in first]
