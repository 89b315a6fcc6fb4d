"""A router is told to stop."""

from __future__ import annotations

import asyncio

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import TERMINAL, Dialect
from tests.conformance.replica import Gate
from tests.conformance.rig import Rig, until

_STOP = (
    "https://github.com/smg-project/smg/pull/1745",
    "https://github.com/ai-dynamo/dynamo/issues/13559",
)


@rule("After SIGTERM running streams finish, and then the router ends by itself.", *_STOP, limit_s=60, waits=True)
async def streams_finish(rig: Rig) -> None:
    stage = await rig.stage(2)
    gate = Gate(begin=True)
    stage.script(gate)
    running = [asyncio.create_task(session.send()) for session in stage.sessions(4)]
    await until(lambda: gate.arrived == 4, 10.0, "not all of 4 turns reached a replica")
    stage.router.terminate()
    await asyncio.sleep(5)
    gate.open()
    for turn in await asyncio.gather(*running):
        whole = turn.answer.complete and TERMINAL[Dialect.CHAT] in turn.answer.body
        check(whole, f"a stream that ran at SIGTERM ended {turn.answer.short}")
    code = await stage.router.ended(15)
    check(code is not None, "the router still runs 15 s after its last stream")


@rule(
    "After SIGTERM the router says that it is not ready and yet accepts for a moment, until load balancers know.",
    *_STOP,
    needs=[Can.READINESS],
    limit_s=60,
)
async def accepts_for_a_while(rig: Rig) -> None:
    stage = await rig.stage(2)
    gate = Gate(begin=True)
    session = stage.session()
    await session.turn()
    stage.script(gate)
    running = asyncio.create_task(stage.session().send())
    await until(lambda: gate.arrived == 1, 10.0, "the turn did not reach a replica")
    stage.router.terminate()
    await asyncio.sleep(0.5)
    try:
        told = await stage.router.request("GET", rig.adapter.ready_path)
        check(told.status == 503, f"half a second after SIGTERM readiness was answered {told.status}")
        for replica in stage.replicas:
            replica.script = type(replica)().script
        turn = await stage.session().send()
        check(turn.answer.status == 200, f"half a second after SIGTERM a turn was answered {turn.answer.short}")
    except OSError as error:
        check(None, f"half a second after SIGTERM nobody accepts: {error}")
    finally:
        gate.open()
        await running


@rule("An idle router ends within seconds of SIGTERM, with exit code 0.", *_STOP, limit_s=60)
async def ends(rig: Rig) -> None:
    stage = await rig.stage(2)
    await stage.session().turn()
    stage.router.terminate()
    code = await stage.router.ended(20)
    check(code is not None, "an idle router still runs 20 s after SIGTERM")
    check(code == 0, f"its exit code was {code}")


@rule("Nothing of a router that ended is left: no process of its own goes on.", "Roost", limit_s=60)
async def leaves_no_process(rig: Rig) -> None:
    stage = await rig.stage(1)
    await stage.session().turn()
    family = stage.router.family()
    stage.router.terminate()
    await stage.router.ended(20)
    await until(lambda: not stage.router.alive(family), 5.0, "a child of the router still runs after it ended")
