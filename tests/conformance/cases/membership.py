"""Replicas come and go by an operator's will."""

from __future__ import annotations

import asyncio

from tests.conformance.adapters import Members
from tests.conformance.case import Can, Failed, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import TERMINAL, Dialect
from tests.conformance.replica import Gate
from tests.conformance.rig import Rig, Stage, homes, spread, until

_SHED = (
    "https://github.com/ai-dynamo/dynamo/issues/13559",
    "https://github.com/volcano-sh/kthena/issues/1589",
)


def members(stage: Stage) -> Members:
    """How this router's replicas are changed."""
    found = stage.adapter.members
    assert found is not None
    return found


async def _streams_finish(stage: Stage, *, remove: bool) -> None:
    """A stream runs while its replica is taken out; it ends well, and nothing new comes there."""
    session = stage.session()
    home = (await session.turn()).replica
    gate = Gate(begin=True)
    home.script = gate
    running = asyncio.create_task(session.send())
    await until(lambda: gate.arrived == 1, 10.0, "the turn did not reach its replica")
    change = members(stage).remove if remove else members(stage).drain
    await change(stage.router, home.url)
    await asyncio.sleep(6)  # some routers cut what runs after five seconds
    already = len(home.turns)
    others = stage.sessions(6)
    for other in others:
        await other.turn()
    check(len(home.turns) == already, f"new sessions went to a replica that was taken out ({spread(stage.replicas)})")
    gate.open()
    answer = (await running).answer
    check(answer.complete and TERMINAL[Dialect.CHAT] in answer.body, f"the running stream ended {answer.short}")
    found = homes([await session.turn() for _ in range(3)])
    check(home.port not in found and len(found) == 1, f"the session's next 3 turns went to {len(found)} replicas")


@rule(
    "A drained replica finishes its streams and gets no new turn; its sessions move once.",
    *_SHED,
    needs=[Can.SESSIONS, Can.DRAIN],
    limit_s=60,
    waits=True,
)
async def drain(rig: Rig) -> None:
    await _streams_finish(await rig.stage(3), remove=False)


@rule(
    "A replica that is removed finishes its streams and gets no new turn; its sessions move once.",
    *_SHED,
    needs=[Can.SESSIONS, Can.REMOVE],
    limit_s=60,
    waits=True,
)
async def remove(rig: Rig) -> None:
    await _streams_finish(await rig.stage(3), remove=True)


@rule(
    "Sessions of a removed replica are spread over all others, not given to one of them.",
    "Roost",
    needs=[Can.SESSIONS, Can.REMOVE],
)
async def removed_are_spread(rig: Rig) -> None:
    stage = await rig.stage(4)
    sessions = stage.sessions(24)
    before = {session.name: (await session.turn()).replica for session in sessions}
    gone = before[sessions[0].name]
    mine = [session for session in sessions if before[session.name] is gone]
    await members(stage).remove(stage.router, gone.url)
    after = [(await session.turn()).replica for session in mine]
    check(gone not in after, "a session stayed at a removed replica")
    most = max(after.count(replica) for replica in stage.replicas)
    check(most <= max(2, len(mine) - 2), f"of {len(mine)} sessions that had to move {most} went to one replica")


@rule(
    "A replica that was removed and added again is used again.",
    "https://github.com/vllm-project/production-stack/issues/1091",
    needs=[Can.SESSIONS, Can.REMOVE, Can.ADD],
    limit_s=60,
    waits=True,
)
async def comes_back(rig: Rig) -> None:
    stage = await rig.stage(2)
    replica = stage.replicas[0]
    await members(stage).remove(stage.router, replica.url)

    async def gone() -> bool:
        return replica.url not in await members(stage).known(stage.router)

    await until(gone, 15.0, "a removed replica is still listed")
    before = len(replica.turns)
    for session in stage.sessions(3):
        await session.turn()
    check(len(replica.turns) == before, "a removed replica got a turn")

    async def added() -> bool:
        await asyncio.sleep(0.5)
        try:
            await members(stage).add(stage.router, replica.url)
        except Failed:  # it may still be leaving
            return False
        return True

    await until(added, 20.0, "a replica that was removed cannot be added again")

    async def used() -> bool:
        await asyncio.sleep(0.3)
        for session in stage.sessions(4):
            await session.turn()
        return len(replica.turns) > before

    await until(used, 20.0, "a replica that was added again got no turn")
