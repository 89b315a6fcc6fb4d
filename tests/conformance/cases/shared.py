"""Several routers act as one."""

from __future__ import annotations

import asyncio
import time

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.replica import Gate
from tests.conformance.rig import Rig, Turn, homes, until


@rule(
    "The turns of a session that alternate between two routers go to one replica.",
    "https://github.com/ai-dynamo/dynamo/issues/11035",
    needs=[Can.SESSIONS, Can.SEVERAL],
)
async def alternating_routers(rig: Rig) -> None:
    stage = await rig.stage(3, routers=2)
    for session in stage.sessions(12):
        found = homes([await session.turn(stage.routers[number % 2]) for number in range(6)])
        check(len(found) == 1, f"6 turns of one session over two routers went to {len(found)} replicas")


@rule(
    "First turns of one session that reach two routers at the same moment make one binding.",
    "https://github.com/ai-dynamo/dynamo/issues/11035",
    "https://github.com/BerriAI/litellm/pull/36146",
    needs=[Can.SESSIONS, Can.SEVERAL],
)
async def racing_routers(rig: Rig) -> None:
    stage = await rig.stage(4, routers=2)
    for session in stage.sessions(10):
        body, _ = session.next()
        path, headers = session.dialect.path, session.all_headers
        await asyncio.gather(*(router.request("POST", path, body, headers) for router in stage.routers for _ in "12"))
        found = homes([await session.turn(stage.routers[number % 2]) for number in range(4)])
        check(len(found) == 1, f"4 later turns of one session went to {len(found)} replicas")


@rule(
    "What runs through one router counts as load in the other at once: new sessions avoid the busy replica.",
    "https://github.com/vllm-project/production-stack/issues/166",
    "https://github.com/ray-project/ray/pull/64949",
    needs=[Can.SESSIONS, Can.STORE],
)
async def load_of_the_other(rig: Rig) -> None:
    stage = await rig.stage(2, routers=2, frozen=True)
    gate = Gate()
    stage.script(gate)
    held = []
    for number, session in enumerate(stage.sessions(8, size_bytes=20_000)):
        body, _ = session.next()
        router = stage.routers[number % 2]
        held.append(asyncio.create_task(router.request("POST", session.dialect.path, body, session.all_headers)))
        await until(lambda number=number: gate.arrived > number, 10.0, "a turn reached no replica")  # type: ignore[misc]
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*held)
    check(max(counts) - min(counts) <= 2, f"8 running sessions over two routers were spread {counts}")


@rule(
    "32 simultaneous subagents through two routers over four replicas whose load reports stand still differ by at most "
    "2.",
    "https://github.com/vllm-project/router/issues/177",
    "https://github.com/ray-project/ray/pull/65010",
    needs=[Can.SESSIONS, Can.STORE],
)
async def burst_through_two(rig: Rig) -> None:
    stage = await rig.stage(4, routers=2, frozen=True)
    gate = Gate()
    stage.script(gate)
    held = []
    for number, session in enumerate(stage.sessions(32, size_bytes=8000)):
        body, _ = session.next()
        router = stage.routers[number % 2]
        held.append(asyncio.create_task(router.request("POST", session.dialect.path, body, session.all_headers)))
    await until(lambda: gate.arrived >= 32, 15.0, "not all of 32 turns reached a replica")
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*held)
    check(max(counts) - min(counts) <= 2, f"32 simultaneous turns through two routers were spread {counts}")


@rule(
    "What a router that was killed had in flight is no load any more within 12 s, and no count is negative.",
    "https://github.com/Dispatcharr/Dispatcharr/issues/962",
    needs=[Can.SESSIONS, Can.STORE, Can.IN_FLIGHT],
    limit_s=60,
    waits=True,
)
async def killed_router(rig: Rig) -> None:
    stage = await rig.stage(2, routers=2)
    first, second = stage.routers
    gate = Gate()
    stage.script(gate)
    held = []
    for session in stage.sessions(20, size_bytes=4000):
        body, _ = session.next()
        held.append(asyncio.create_task(first.request("POST", session.dialect.path, body, session.all_headers)))
    await until(lambda: gate.arrived >= 20, 15.0, "not all of 20 turns reached a replica")
    first.kill_hard()
    await first.ended()
    await asyncio.gather(*held, return_exceptions=True)
    stage.routers.remove(first)
    try:
        await stage.idle(within_s=12.0)
    finally:
        stage.routers.append(first)
    in_flight = await rig.adapter.turns_in_flight(second)
    check(in_flight >= 0, f"{in_flight} turns are in flight")
    gate.open()


@rule(
    "While its Redis accepts and answers nothing, a router serves and keeps known sessions in place, then and later.",
    "https://github.com/BerriAI/litellm/pull/35273",
    needs=[Can.SESSIONS, Can.STORE],
    limit_s=60,
)
async def frozen_redis(rig: Rig) -> None:
    stage = await rig.stage(3, variant="several")
    assert stage.redis is not None
    sessions = stage.sessions(8)
    before = [(await session.turn()).replica for session in sessions]
    slowest = 0.0
    stage.redis.freeze()
    try:
        for session, home in zip(sessions, before, strict=True):
            for _ in range(3):
                started = time.monotonic()
                turn = await session.turn()
                slowest = max(slowest, time.monotonic() - started)
                check(turn.replica is home, "a known session moved while Redis was frozen")
        for session in stage.sessions(3):
            await session.turn()
    finally:
        stage.redis.thaw()
    check(slowest < 2.0, f"a turn took {slowest:.2f} s while Redis was frozen")
    await asyncio.sleep(2)
    for session, home in zip(sessions, before, strict=True):
        check((await session.turn()).replica is home, "a known session moved when Redis came back")


@rule(
    "A Redis that went away, and came back empty, costs no turn.",
    "https://github.com/BerriAI/litellm/pull/35273",
    needs=[Can.SESSIONS, Can.STORE],
    limit_s=60,
)
async def lost_redis(rig: Rig) -> None:
    stage = await rig.stage(3, variant="several")
    assert stage.redis is not None
    sessions = stage.sessions(6)
    before = [(await session.turn()).replica for session in sessions]
    await stage.redis.stop()
    for session, home in zip(sessions, before, strict=True):
        check((await session.turn()).replica is home, "a known session moved while Redis was away")
    await stage.redis.start()
    await asyncio.sleep(2)
    for session in sessions:
        await session.turn()
    for session in stage.sessions(3):
        await session.turn()


@rule(
    "A Redis that is flushed while turns run costs no turn.",
    "https://github.com/BerriAI/litellm/pull/35273",
    needs=[Can.SESSIONS, Can.STORE],
)
async def flushed_redis(rig: Rig) -> None:
    stage = await rig.stage(3, variant="several")
    assert stage.redis is not None
    gate = Gate()
    sessions = stage.sessions(6)
    for session in sessions:
        await session.turn()
    stage.script(gate)
    held: list[asyncio.Task[Turn]] = [asyncio.create_task(session.send()) for session in sessions]
    await until(lambda: gate.arrived >= 6, 10.0, "not all of 6 turns reached a replica")
    await stage.redis.command("FLUSHALL")
    gate.open()
    for turn in await asyncio.gather(*held):
        check(turn.answer.status == 200 and turn.answer.complete, f"a turn was answered {turn.answer.short}")
    for session in [*sessions, *stage.sessions(3)]:
        await session.turn()
    if rig.adapter.in_flight:
        await stage.idle()


@rule(
    "Frozen and thawed, Redis fills no log: at most a line per change of state, not one per turn.",
    "https://github.com/BerriAI/litellm/issues/40620",
    needs=[Can.SESSIONS, Can.STORE],
    limit_s=60,
)
async def no_log_storm(rig: Rig) -> None:
    stage = await rig.stage(2, variant="several")
    assert stage.redis is not None
    sessions = stage.sessions(4)
    for session in sessions:
        await session.turn()

    def complaints() -> int:
        return sum("redis" in line.lower() or "store" in line.lower() for line in stage.router.log.splitlines())

    before = complaints()
    stage.redis.freeze()
    try:
        for _ in range(10):
            for session in sessions:
                await session.turn()
    finally:
        stage.redis.thaw()
    wrote = complaints() - before
    check(wrote <= 12, f"{wrote} log lines about the store in 40 turns while Redis was frozen")
