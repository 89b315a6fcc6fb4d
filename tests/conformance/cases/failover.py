"""A replica fails: who notices, and what is tried."""

from __future__ import annotations

import asyncio
import json

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import Answer
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect, queue_full, refusal
from tests.conformance.replica import Visit
from tests.conformance.rig import Rig, Session, Stage, Turn, spread

_FAILOVER = ("https://github.com/router-for-me/CLIProxyAPI/issues/3884",)


async def bound(stage: Stage, dialect: Dialect = Dialect.CHAT) -> Session:
    """A session whose home is the first replica of `stage.replicas`, which are put in that order."""
    session = stage.session(dialect)
    home = (await session.turn()).replica
    stage.replicas.sort(key=lambda replica: replica is not home)
    return session


def served(turn: Turn) -> bool:
    """Whether the client got a whole, good answer."""
    return turn.answer.status == 200 and turn.answer.complete


def _is_error(answer: Answer) -> bool:
    return answer.status >= 500 or answer.status == 429


@rule(
    "A turn whose replica refuses the connection is answered by another.",
    *_FAILOVER,
    each=DIALECTS,
)
async def refused(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(3)
    session = await bound(stage, dialect)
    await stage.replicas[0].stop()
    turn = await session.send()
    check(served(turn), f"the turn after the replica's death was answered {turn.answer.short}")
    check(TERMINAL[dialect] in turn.answer.body, "the answer is incomplete")


@rule(
    "A session whose replica died is bound anew once, and stays there also when the old one is back.",
    *_FAILOVER,
    needs=[Can.SESSIONS],
    limit_s=60,
    waits=True,
)
async def rebinds_once(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = await bound(stage)
    await stage.replicas[0].stop()
    first = await session.send()
    check(served(first), f"the turn after the replica's death was answered {first.answer.short}")
    home = first.replicas[-1]
    for _ in range(3):
        check((await session.turn()).replica is home, "the session moved again")
    await stage.replicas[0].restart()
    await asyncio.sleep(6)
    for _ in range(3):
        check((await session.turn()).replica is home, "the session moved when its first replica came back")


@rule(
    "A turn whose replica says 503 is tried elsewhere.",
    *_FAILOVER,
    each=DIALECTS,
)
async def full(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(3)
    session = await bound(stage, dialect)

    async def refuse(visit: Visit) -> None:
        await visit.answer(503, refusal(503))

    stage.replicas[0].script = refuse
    turn = await session.send()
    check(served(turn), f"a turn that one replica refused was answered {turn.answer.short}")


@rule(
    "A turn whose replica's queue is full, said by SGLang inside the stream after a 200, is tried elsewhere.",
    "Roost",
    needs=[Can.FIRST_FRAME],
    each=DIALECTS,
)
async def full_in_stream(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(3)
    session = await bound(stage, dialect)

    async def refuse(visit: Visit) -> None:
        await visit.stream(queue_full(dialect, visit.answer_id))

    stage.replicas[0].script = refuse
    turn = await session.send()
    check(served(turn), f"a turn that one replica refused was answered {turn.answer.short}")
    check(len(turn.replicas) == 2, f"{len(turn.replicas)} replicas were asked")
    check(b"queue is full" not in turn.answer.body, "the client saw the refusal")


@rule(
    "No replica is asked twice for the same turn.",
    "Roost",
)
async def never_twice(rig: Rig) -> None:
    stage = await rig.stage(3)

    async def refuse(visit: Visit) -> None:
        await visit.answer(503, refusal(503))

    stage.script(refuse)
    turn = await stage.session().send()
    check(_is_error(turn.answer), f"a turn that all replicas refused was answered {turn.answer.short}")
    most = max(turn.replicas.count(replica) for replica in stage.replicas)
    check(most == 1, f"one turn was asked of the three replicas {spread(stage.replicas)} times")


@rule(
    "When every replica refuses, the client gets an error within seconds, as JSON.",
    "Roost",
    each=DIALECTS,
)
async def all_refuse(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(2)
    for replica in stage.replicas:
        await replica.stop()
    turn = await stage.session(dialect).send()
    check(_is_error(turn.answer), f"with no replica left a turn was answered {turn.answer.short}")
    try:
        told = json.loads(turn.answer.body)
    except ValueError:
        told = None
    check(isinstance(told, dict), f"the error is no JSON object: {turn.answer.short}")


@rule(
    "A replica's own 400 passes to the client with its message and is not tried elsewhere.",
    "Roost",
    each=DIALECTS,
)
async def bad_request_passes(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    says = b'{"object":"error","message":"too long \\u2603","code":400, "detail" : [1.0]}'

    async def refuse(visit: Visit) -> None:
        await visit.answer(400, says)

    stage.script(refuse)
    turn = await stage.session(dialect).send()
    check(turn.answer.status == 400, f"a replica's 400 was passed on as {turn.answer.short}")
    check(b"too long" in turn.answer.body, f"its message was passed on as {turn.answer.short}")
    check(len(turn.replicas) == 1, f"{len(turn.replicas)} replicas were asked for a bad request")


@rule(
    "A turn that a replica took and then broke off before its head is asked of each replica at most once, and answered "
    "or failed with an error.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-9.2.2",
)
async def broken_before_head(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = await bound(stage)

    async def die(visit: Visit) -> None:
        await asyncio.sleep(1.5)  # long enough to tell it from an idle connection that the replica was closing
        visit.reset()

    stage.replicas[0].script = die
    turn = await session.send()
    most = max(turn.replicas.count(replica) for replica in stage.replicas)
    check(most == 1, f"one turn was asked of the three replicas {spread(stage.replicas)} times")
    check(served(turn) or _is_error(turn.answer), f"the turn was answered {turn.answer.short}")


@rule(
    "Replicas that close idle connections cost no turn: 40 turns at about the moment of closing, no error, none twice.",
    "https://github.com/sgl-project/sglang/issues/20851",
    limit_s=75,
    waits=True,
)
async def idle_connections(rig: Rig) -> None:
    stage = await rig.stage(1)
    stage.replicas[0].keepalive_s = 0.5
    sessions = stage.sessions(4)

    async def come_and_go(session: Session, first_s: float) -> None:
        for number in range(10):
            await asyncio.sleep(first_s + 0.02 * number)
            turn = await session.send()
            check(turn.answer.status == 200, f"a turn at about the moment of closing was answered {turn.answer.short}")
            check(len(turn.replicas) == 1, f"it was asked {len(turn.replicas)} times")

    await asyncio.gather(*(come_and_go(each, 0.40 + 0.007 * number) for number, each in enumerate(sessions)))


@rule(
    "A replica's refusal does not spread: other sessions' turns at other replicas are not refused.",
    *_FAILOVER,
    needs=[Can.SESSIONS],
)
async def others_are_untouched(rig: Rig) -> None:
    stage = await rig.stage(3)
    sessions = stage.sessions(9)
    before = {session.name: (await session.turn()).replica for session in sessions}
    dead = before[sessions[0].name]
    await dead.stop()
    for session in sessions:
        turn = await session.send()
        check(served(turn), f"a turn was answered {turn.answer.short} after another replica died")
        if before[session.name] is not dead:
            check(turn.replicas == (before[session.name],), "a session moved though its replica lives")
