"""Sessions are spread, and what is running counts before anybody has reported it."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import DIALECTS, Dialect
from tests.conformance.replica import Gate
from tests.conformance.rig import Rig, Session, Stage, until


async def hold(stage: Stage, sessions: list[Session], gate: Gate, *, stream: bool) -> list[asyncio.Task[object]]:
    """The next turn of each session, sent at once, all held by the replicas."""
    stage.script(gate)
    arrived = gate.arrived
    tasks: list[asyncio.Task[object]] = []
    for session in sessions:
        body, _ = session.next(stream=stream)
        asked = stage.router.request("POST", session.dialect.path, body, session.all_headers)
        tasks.append(asyncio.create_task(asked))
    await until(
        lambda: gate.arrived >= arrived + len(sessions),
        15.0,
        f"not all of {len(sessions)} simultaneous turns reached a replica",
    )
    return tasks


@rule(
    "Eight heavy sessions are not piled on one of four replicas: two each, at most one more.",
    "https://github.com/sgl-project/sglang/issues/33625",
    needs=[Can.SESSIONS],
)
async def heavy_sessions(rig: Rig) -> None:
    stage = await rig.stage(4)
    gate = Gate()
    tasks = await hold(stage, stage.sessions(8, size_bytes=60_000), gate, stream=True)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) <= 3 and min(counts) >= 1, f"8 running heavy sessions were spread {counts}")


@rule(
    "New sessions that come one after the other, each with running turns, are spread over the replicas.",
    "https://github.com/sgl-project/sglang/issues/33625",
    needs=[Can.SESSIONS],
)
async def one_by_one(rig: Rig) -> None:
    stage = await rig.stage(4)
    gate = Gate()
    tasks: list[asyncio.Task[object]] = []
    for session in stage.sessions(16, size_bytes=8000):
        tasks += await hold(stage, [session], gate, stream=True)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) - min(counts) <= 2, f"16 running sessions were spread {counts}")


@rule(
    "A turn counts as load before its replica has sent a response head: eight at once over four replicas go 2/2/2/2.",
    "https://github.com/smg-project/smg/pull/1714",
    "https://github.com/sgl-project/sglang/pull/15473",
    needs=[Can.SESSIONS],
    each=DIALECTS,
)
async def before_the_head(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(4)
    gate = Gate()
    tasks = await hold(stage, stage.sessions(8, dialect, size_bytes=8000), gate, stream=True)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) - min(counts) <= 1, f"8 turns without a response were spread {counts}")


@rule(
    "A plain turn, too, counts as load before its answer: eight at once over four replicas go 2/2/2/2.",
    "https://github.com/sgl-project/sglang/pull/15473",
    needs=[Can.SESSIONS],
    each=DIALECTS,
)
async def before_the_answer(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(4)
    gate = Gate()
    tasks = await hold(stage, stage.sessions(8, dialect, size_bytes=8000), gate, stream=False)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) - min(counts) <= 1, f"8 turns without a response were spread {counts}")


@rule(
    "32 simultaneous subagents over four equal replicas whose load reports stand still differ by at most 2.",
    "https://github.com/vllm-project/router/issues/177",
    "https://github.com/llm-d/llm-d-router/issues/1598",
    needs=[Can.SESSIONS],
)
async def burst_with_frozen_loads(rig: Rig) -> None:
    stage = await rig.stage(4, frozen=True)
    gate = Gate()
    tasks = await hold(stage, stage.sessions(32, size_bytes=8000), gate, stream=True)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) - min(counts) <= 2, f"32 simultaneous turns were spread {counts}")


@rule(
    "A replica that reports less load than the others does not draw a whole burst.",
    "https://github.com/vllm-project/router/issues/177",
    needs=[Can.SESSIONS],
)
async def no_herd(rig: Rig) -> None:
    stage = await rig.stage(4, frozen=True)
    for replica in stage.replicas[1:]:
        replica.loads = {"num_running_reqs": 1, "num_used_tokens": 4000}
    await asyncio.sleep(2.5)  # routers look about once a second
    gate = Gate()
    tasks = await hold(stage, stage.sessions(32, size_bytes=8000), gate, stream=True)
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*tasks)
    check(max(counts) - min(counts) <= 4, f"32 simultaneous turns were spread {counts}, the first replica the idlest")


@rule(
    "New sessions avoid the replica that is busy.",
    "https://github.com/sgl-project/sglang/pull/14305",
    "https://github.com/sgl-project/sglang/pull/14650",
    needs=[Can.SESSIONS],
)
async def busy_is_avoided(rig: Rig) -> None:
    stage = await rig.stage(2)
    sessions = stage.sessions(12, size_bytes=20_000)
    first = [(await session.turn()).replica for session in sessions]
    busy = first[0]
    gate = Gate()
    busy.script = gate
    mine = [session for session, home in zip(sessions, first, strict=True) if home is busy]
    held: list[asyncio.Task[object]] = [asyncio.create_task(session.send()) for session in mine]
    await until(lambda: gate.arrived >= len(mine), 10.0, "sessions left their replica as soon as it was busy")
    for session in stage.sessions(4, size_bytes=8000):
        body, mark = session.next()
        asked = stage.router.request("POST", session.dialect.path, body, session.all_headers)
        held.append(asyncio.create_task(asked))
        await until(partial(stage.asked, mark), 10.0, "a new session reached no replica")
    new = gate.arrived - len(mine)
    gate.open()
    await asyncio.gather(*held)
    check(new <= 1, f"{new} of 4 new sessions went to a replica that runs {len(mine)} turns, the other runs none")


@rule(
    "Unnamed conversations that no cache holds go to the idle replica, not to the one that runs many.",
    "https://github.com/sgl-project/sglang/pull/14305",
    needs=[Can.KEYLESS],
)
async def misses_go_to_the_idle(rig: Rig) -> None:
    stage = await rig.stage(2)
    gate = Gate()
    stage.script(gate)
    held = []
    for number in range(12):
        session = stage.session(name="", system=f"Agent {number}.", size_bytes=30_000)
        body, _ = session.next()
        held.append(asyncio.create_task(stage.router.request("POST", session.dialect.path, body)))
        await until(lambda number=number: gate.arrived > number, 10.0, "a turn reached no replica")  # type: ignore[misc]
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*held)
    check(max(counts) - min(counts) <= 2, f"12 running conversations that share nothing were spread {counts}")


@rule(
    "A replica that has just joined gets new sessions, more than its share until it is even, but not all of a burst.",
    "https://github.com/NVIDIA/TensorRT-LLM/pull/14307",
    "https://github.com/ai-dynamo/dynamo/pull/10574",
    needs=[Can.SESSIONS, Can.ADD],
    limit_s=60,
)
async def newcomer(rig: Rig) -> None:
    stage = await rig.stage(3)
    old = stage.sessions(12, size_bytes=2000)
    for session in old:
        await session.turn()
    joined = await stage.add_replica()
    gate = Gate()
    tasks = await hold(stage, stage.sessions(12, size_bytes=8000), gate, stream=True)
    got = len(joined.turns)
    gate.open()
    await asyncio.gather(*tasks)
    check(got >= 1, "a replica that joined got none of 12 new sessions")
    check(got <= 10, f"a replica that joined got {got} of a burst of 12 new sessions")
