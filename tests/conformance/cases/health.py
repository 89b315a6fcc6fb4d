"""Busy is not dead, and dead is noticed."""

from __future__ import annotations

import asyncio

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import TERMINAL
from tests.conformance.replica import Visit
from tests.conformance.rig import Rig, homes, until

_STARVED = (
    "https://github.com/sgl-project/sglang/issues/22511",
    "https://github.com/rllm-org/rllm/issues/926",
)


@rule(
    "A replica that streams but does not answer its health probe for 30 s, as in a long prefill, keeps its sessions.",
    *_STARVED,
    needs=[Can.SESSIONS],
    limit_s=75,
    waits=True,
)
async def busy_keeps_sessions(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = stage.session()
    home = (await session.turn()).replica
    enough = asyncio.Event()

    async def keep_streaming(visit: Visit) -> None:
        told = visit.events
        await visit.begin()
        await visit.chunk(told[0])
        while not enough.is_set():
            await visit.chunk(told[1])
            await asyncio.sleep(0.2)
        for event in told[2:]:
            await visit.chunk(event)
        await visit.end()

    home.script = keep_streaming
    other = stage.session(name=session.name)
    running = asyncio.create_task(other.send())
    await until(lambda: home.running == 1, 10.0, "the long turn did not reach its session's replica")
    home.health = "silent"
    await asyncio.sleep(30)
    second = asyncio.create_task(session.send())
    await asyncio.sleep(0.5)
    enough.set()
    turn = await second
    answer = (await running).answer
    check(TERMINAL[session.dialect] in answer.body and answer.complete, f"the long stream ended {answer.short}")
    check(turn.answer.status == 200, f"the session's next turn was answered {turn.answer.short}")
    check(turn.replicas == (home,), "the session was moved away from a replica that streams")


@rule(
    "A replica whose health probe alone hangs, while others work, makes no turn fail.",
    *_STARVED,
    limit_s=60,
    waits=True,
)
async def silent_probe(rig: Rig) -> None:
    stage = await rig.stage(2)
    stage.replicas[0].health = "silent"
    for _ in range(16):
        await asyncio.sleep(0.5)
        turn = await stage.session().send()
        check(turn.answer.status == 200, f"a turn was answered {turn.answer.short}")


@rule(
    "A replica that died costs no turn more than a retry, and after 5 s new turns do not try it any more.",
    "https://github.com/vllm-project/production-stack/issues/1091",
    limit_s=60,
    waits=True,
)
async def dead_is_noticed(rig: Rig) -> None:
    stage = await rig.stage(3)
    for session in stage.sessions(6):
        await session.turn()
    dead = stage.replicas[0]
    await dead.stop()
    for session in stage.sessions(6):
        turn = await session.send()
        check(turn.answer.status == 200, f"a turn after a replica's death was answered {turn.answer.short}")
    await asyncio.sleep(5)
    tried = 0

    async def count_and_die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        start = await reader.read(100)
        tried += start.startswith(b"POST")
        writer.transport.abort()

    server = await asyncio.start_server(count_and_die, "127.0.0.1", dead.port)
    try:
        for session in stage.sessions(6):
            turn = await session.send()
            check(turn.answer.status == 200, f"5 s after a replica's death a turn was answered {turn.answer.short}")
    finally:
        server.close()
    check(tried == 0, f"5 s after a replica's death {tried} of 6 turns tried it")


@rule(
    "A replica that comes back is used again within 15 s.",
    "https://github.com/vllm-project/production-stack/issues/1091",
    limit_s=75,
    waits=True,
)
async def returns(rig: Rig) -> None:
    stage = await rig.stage(2)
    back = stage.replicas[0]
    await back.stop()
    for session in stage.sessions(4):
        turn = await session.send()
        check(turn.answer.status == 200, f"a turn after a replica's death was answered {turn.answer.short}")
    await asyncio.sleep(4)
    await back.restart()
    before = len(back.turns)

    async def used() -> bool:
        for session in stage.sessions(3):
            await session.turn()
        await asyncio.sleep(0.3)
        return len(back.turns) > before

    await until(used, 15.0, "a replica that came back got no turn")


@rule(
    "A replica that says 503 to its probes gets no new session; what runs there goes on.",
    "https://github.com/smg-project/smg/pull/1745",
    needs=[Can.SESSIONS],
    limit_s=60,
    waits=True,
)
async def not_ready(rig: Rig) -> None:
    stage = await rig.stage(2)
    leaving = stage.replicas[0]
    leaving.health = "bad"
    await asyncio.sleep(5)
    before = len(leaving.turns)
    found = homes([await session.turn() for session in stage.sessions(6)])
    check(len(leaving.turns) == before, f"a replica that is not ready got {found[leaving.port]} of 6 new sessions")


@rule(
    "One slow replica does not slow the turns of the others.",
    *_STARVED,
    needs=[Can.SESSIONS],
    limit_s=45,
)
async def slow_alone(rig: Rig) -> None:
    stage = await rig.stage(2)
    sessions = stage.sessions(8)
    before = {session.name: (await session.turn()).replica for session in sessions}
    slow = before[sessions[0].name]
    enough = asyncio.Event()

    async def wait(visit: Visit) -> None:
        await enough.wait()
        await visit.reply()

    slow.script = wait
    held = [asyncio.create_task(session.send()) for session in sessions if before[session.name] is slow]
    try:
        async with asyncio.timeout(10):
            for session in sessions:
                if before[session.name] is not slow:
                    await session.turn()
    finally:
        enough.set()
        await asyncio.gather(*held, return_exceptions=True)
