"""Turns that come at once spread over the fleet, whatever the replicas' own reports say."""

from __future__ import annotations

import asyncio

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.replicas import DIALECTS, Gate, Replica, replicas
from tests.integration.roosts import Roost, running, settings_for, shared_store, spread


async def at_once(gate: Gate, routers: list[Roost], asked: list[Conversation]) -> list[int]:
    """All these turns at once, one router after the other, no head before all have arrived; how they spread."""
    turns = [asyncio.create_task(routers[n % len(routers)].turn(each)) for n, each in enumerate(asked)]
    await gate.waiting(len(asked))
    gate.open()
    return spread(await asyncio.gather(*turns))


def held(fleet: list[Replica]) -> Gate:
    gate = Gate()
    for replica in fleet:
        replica.script = gate
    return gate


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_big_prompts_at_once_spread_evenly_before_any_head_came(dialect: Dialect, stream: bool) -> None:
    """C10, C11: eight prompts of 32k tokens over four replicas are two each, on every dialect."""
    async with replicas(4) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = [Conversation(f"big {n}", dialect, stream=stream, size_bytes=128_000) for n in range(8)]
        assert await at_once(held(fleet), [roost], asked) == [2, 2, 2, 2]


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_frozen_load_report_makes_no_herd(valkey_url: str, routers: int) -> None:
    """C12: one replica says it is idle and the others that they run a turn, for ever; 32 turns at once differ by 2."""
    async with replicas(4) as fleet:
        for replica in fleet[1:]:
            replica.loads = {"num_running_reqs": 1}
        fleet[0].loads = {"num_running_reqs": 0}
        store = shared_store(valkey_url, f"frozen-{routers}")
        async with (
            running(settings_for(fleet, store), fleet) as first,
            running(settings_for(fleet, store), fleet) as second,
        ):
            gate = held(fleet)
            asked = [Conversation(f"frozen {n}", header=("x-session-id", str(n))) for n in range(32)]
            counts = await at_once(gate, [first, second][:routers], asked)
            assert len(counts) == 4
            assert counts[-1] - counts[0] <= 2


async def test_subagents_of_one_session_spread_and_then_stay() -> None:
    """Twelve first turns with one session id and one system prompt over four replicas; then each keeps its own."""
    async with replicas(4) as fleet, running(settings_for(fleet), fleet) as roost:
        system = "You are a subagent. " * 400
        agents = [Conversation(f"agent {n}", system=system, header=("x-session-id", "parent")) for n in range(12)]
        gate = held(fleet)
        turns = [asyncio.create_task(roost.turn(each)) for each in agents]
        await gate.waiting(12)
        gate.open()
        first = await asyncio.gather(*turns)
        counts = spread(first)
        assert (len(counts), sum(counts)) == (4, 12)
        assert counts[-1] <= 4
        for _ in range(3):
            for agent, answer in zip(agents, first, strict=True):
                agent.grow()
                assert (await roost.turn(agent)).replica == answer.replica


async def test_cached_tokens_that_nobody_uses_are_no_load() -> None:
    """C06: a replica that reports a nearly full cache and no running turn keeps its session."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("warm")
        home = (await roost.turn(asked)).replica
        for replica in fleet:
            if replica.id == home:
                replica.loads = {"num_used_tokens": replica.device_tokens * 95 // 100}
        seen = [replica.probes for replica in fleet]

        async def probed() -> bool:
            return all(replica.probes > before + 8 for replica, before in zip(fleet, seen, strict=True))

        await roost.until(probed)
        for _ in range(3):
            asked.grow()
            assert (await roost.turn(asked)).replica == home


async def test_new_sessions_one_after_the_other_go_round() -> None:
    async with replicas(4) as fleet, running(settings_for(fleet), fleet) as roost:
        answers = [await roost.turn(Conversation(f"one {n}", header=("x-session-id", str(n)))) for n in range(20)]
        assert spread(answers) == [5, 5, 5, 5]
