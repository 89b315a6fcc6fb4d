"""Where a session is bound when its first turns go wrong, and what clients that left leave behind."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import connection
from tests.conformance.dialects import DIALECTS, Dialect, refusal
from tests.conformance.replica import Gate, Visit
from tests.conformance.rig import Rig, Session, Stage, Turn, homes, until

_EARLY = ("https://github.com/ai-dynamo/dynamo/issues/9920",)
_CLOSED = (
    "https://github.com/sgl-project/sglang/pull/39461",
    "https://github.com/sgl-project/sglang/issues/36552",
    "https://github.com/sgl-project/sglang/issues/34894",
)


def _served(turn: Turn) -> None:
    check(turn.answer.status == 200 and turn.answer.complete, f"a turn was answered {turn.answer.short}")


@rule(
    "A session whose first turn a replica refuses is bound where that turn is answered, not where it was first tried.",
    *_EARLY,
    needs=[Can.SESSIONS],
    limit_s=60,
)
async def where_it_was_served(rig: Rig) -> None:
    stage = await rig.stage(3)
    for _ in range(5):
        tried: list[int] = []

        async def refuse_first(visit: Visit, tried: list[int] = tried) -> None:
            tried.append(visit.replica.port)
            if len(tried) == 1:
                await visit.answer(503, refusal(503))
            else:
                await visit.reply()

        stage.script(refuse_first)
        session = stage.session()
        _served(await session.send())
        home = tried[-1]
        found = homes([await session.turn() for _ in range(4)])
        check(
            set(found) == {home},
            f"after a refused first turn 4 turns went to {len(found)} replicas, not all to its own",
        )


@rule(
    "A bad request as the first turn of a session harms the session in nothing: its next turns are served and stay "
    "together.",
    *_EARLY,
    needs=[Can.SESSIONS],
)
async def bad_first_turn(rig: Rig) -> None:
    stage = await rig.shared(3)

    async def refuse(visit: Visit) -> None:
        await visit.answer(400, b'{"object":"error","message":"too long","code":400}')

    for _ in range(4):
        session = stage.session()
        stage.script(refuse)
        answer = (await session.send()).answer
        check(answer.status == 400, f"a bad request was answered {answer.short}")
        for replica in stage.replicas:
            replica.reset()
        found = homes([await session.turn() for _ in range(4)])
        check(len(found) == 1, f"4 turns after a bad request went to {len(found)} replicas")


@rule(
    "Turns that are over are no load: after twelve sessions have had theirs, eight simultaneous new ones are spread 2 "
    "each, at most one more.",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/3563",
    needs=[Can.SESSIONS],
)
async def over_is_over(rig: Rig) -> None:
    stage = await rig.stage(4)
    for session in stage.sessions(12, size_bytes=20_000):
        await session.turn()
        await session.turn(stream=False)
    for replica in stage.replicas:
        replica.reset()
    gate = Gate()
    stage.script(gate)
    held = [asyncio.create_task(session.send()) for session in stage.sessions(8, size_bytes=8000)]
    await until(lambda: gate.arrived >= 8, 15.0, "not all of 8 turns reached a replica")
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*held)
    check(max(counts) <= 3 and min(counts) >= 1, f"8 running sessions were spread {counts}")


async def _sent(stage: Stage, session: Session, *, stream: bool) -> tuple[asyncio.Task[None], bytes]:
    """A client that sends its turn and goes when its task is cancelled, and the turn's mark."""
    body, mark = session.next(stream=stream)

    async def wait() -> None:
        async with connection(stage.router.port, limit=1 << 16) as flow:
            await flow.send("POST", session.dialect.path, body, session.all_headers)
            try:
                await asyncio.Event().wait()
            finally:
                flow.abort()

    return asyncio.create_task(wait()), mark


@rule(
    "A turn whose client has gone is tried nowhere else, and stays in nobody's queue.",
    *_CLOSED,
    each=DIALECTS,
)
async def gone_is_not_tried_again(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared(3)
    gate = Gate()
    stage.script(gate)
    for stream in (True, False):
        left = gate.left
        client, mark = await _sent(stage, stage.session(dialect), stream=stream)
        await until(partial(stage.asked, mark), 10.0, "a turn reached no replica")
        client.cancel()
        await until(lambda left=left: gate.left > left, 2.5, "a client left and its replica saw nothing of it")  # type: ignore[misc]
        await asyncio.sleep(1.5)
        times = len(stage.asked(mark))
        check(times == 1, f"a turn whose client had gone was sent {times} times")


@rule(
    "A client that stopped reading and then goes is gone for its replica too, though the stream was stuck: its "
    "connection is closed, not merely unread.",
    *_CLOSED,
    limit_s=60,
)
async def stuck_and_gone(rig: Rig) -> None:
    stage = await rig.stage(1)
    replica = stage.replicas[0]
    ended = asyncio.Event()
    piece = b"data: " + b"x" * 65_000 + b"\n\n"

    async def flood(visit: Visit) -> None:
        try:
            await visit.begin()
            while True:
                await visit.chunk(piece)
        finally:
            ended.set()

    replica.script = flood
    client, _ = await _sent(stage, stage.session(), stream=True)
    await until(lambda: replica.running == 1, 10.0, "the turn reached no replica")
    await asyncio.sleep(2)  # until every buffer between them is full
    check(not ended.is_set(), "the stream was broken while its client was there")
    client.cancel()
    try:
        async with asyncio.timeout(3):
            await ended.wait()
    except TimeoutError:
        check(None, "3 s after the client left, its replica's connection was still open")
    if stage.adapter.in_flight and Can.IN_FLIGHT in stage.adapter.can:
        await stage.idle(within_s=2.5)


@rule(
    "A client that goes in the middle of its request's body harms nobody: no half of a turn is answered, and the next "
    "one is served.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-8",
)
async def gone_in_the_body(rig: Rig) -> None:
    stage = await rig.shared()
    session = stage.session()
    for coding in ("Content-Length: 100000", "Transfer-Encoding: chunked"):
        body, _ = session.next()
        framed = b"%x\r\n%b\r\n" % (len(body), body) if "chunked" in coding else body
        async with connection(stage.router.port) as flow:
            start = (
                f"POST {Dialect.CHAT.path} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n{coding}\r\n\r\n"
            )
            await flow.raw(start.encode() + framed)
            await asyncio.sleep(0.3)
            flow.abort()
        await asyncio.sleep(0.5)
        whole = [seen for replica in stage.replicas for seen in replica.turns]
        check(not whole, "half of a request reached a replica as a whole one")
    await session.turn()
