"""What is remembered is bounded."""

from __future__ import annotations

import asyncio

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.rig import Rig, Stage

_TREE = (
    "https://github.com/vllm-project/production-stack/issues/687",
    "https://github.com/ai-dynamo/dynamo/issues/10774",
)
_MB = 1 << 20
_ROOM = 1_000_000_000
"""Tokens: no session need wait for room."""


async def _pass(stage: Stage, count: int, size_bytes: int, *, named: bool) -> None:
    """That many new sessions of one turn, eight at a time."""

    async def some(number: int) -> None:
        for index in range(number):
            name = None if named else ""
            session = stage.session(name=name, system=f"Agent {number} {index}.", size_bytes=size_bytes)
            await session.send(stream=False)
            for replica in stage.replicas:
                replica.seen.clear()

    await asyncio.gather(*(some(count // 8) for _ in range(8)))


async def _plateau(stage: Stage, count: int, size_bytes: int, allowed_bytes: int, *, named: bool) -> None:
    await _pass(stage, count // 2, size_bytes, named=named)
    first = stage.router.rss_bytes()
    await _pass(stage, count, size_bytes, named=named)
    grown = stage.router.rss_bytes() - first
    check(grown < allowed_bytes, f"{count} more sessions of one turn made the router {grown / _MB:.0f} MB larger")


@rule(
    "A thousand further sessions that a header names cost at most 10 KB each of the router's memory.",
    *_TREE,
    needs=[Can.SESSIONS],
    limit_s=120,
)
async def named_sessions(rig: Rig) -> None:
    await _plateau(await rig.stage(2, device_tokens=_ROOM), 1000, 2000, 10 * _MB, named=True)


@rule(
    "Six hundred further conversations of 40 KB that nothing names cost less memory than twice their text.",
    *_TREE,
    needs=[Can.KEYLESS],
    limit_s=120,
)
async def unnamed_conversations(rig: Rig) -> None:
    await _plateau(await rig.stage(2, device_tokens=_ROOM), 600, 40_000, 48 * _MB, named=False)


@rule(
    "What sessions leave in Redis expires.",
    "https://github.com/vllm-project/production-stack/issues/687",
    needs=[Can.SESSIONS, Can.STORE],
)
async def keys_expire(rig: Rig) -> None:
    stage = await rig.stage(2, variant="several")
    assert stage.redis is not None
    await stage.session().turn()
    await asyncio.sleep(0.5)
    first = set(await stage.redis.keys())
    for session in stage.sessions(20):
        await session.turn()
    await asyncio.sleep(0.5)
    added = set(await stage.redis.keys()) - first
    check(added, "sessions left nothing in Redis")
    forever = [key for key in added if await stage.redis.ttl(key) < 0]
    check(not forever, f"{len(forever)} of {len(added)} keys of 20 sessions never expire, {forever[:2]} among them")
