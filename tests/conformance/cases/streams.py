"""Streams come as they are produced, and end as they ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.client import Answer, connection
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect, events
from tests.conformance.replica import Script, Visit
from tests.conformance.rig import Rig, Session, Stage

_EVENTS_MAX = 10
_DEATH = ("https://github.com/dativo-io/talon/pull/254",)


async def told(stage: Stage, session: Session, script: Script) -> tuple[Answer, int]:
    """A streamed turn under this script: the answer, and how many replicas were asked."""
    stage.script(script)
    turn = await session.send()
    return turn.answer, len(turn.replicas)


async def _die(visit: Visit) -> None:
    await visit.begin()
    for event in visit.events[:2]:
        await visit.chunk(event)
    await asyncio.sleep(0.3)
    visit.reset()


@rule(
    "Each event is passed on when it comes: none waits for the next one.",
    "Roost",
    each=DIALECTS,
)
async def at_once(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    next_one = asyncio.Semaphore(1)
    sent: asyncio.Queue[bytes] = asyncio.Queue()

    async def wait_between(visit: Visit) -> None:
        await visit.begin()
        for event in visit.events:
            await next_one.acquire()
            await visit.chunk(event)
            sent.put_nowait(event)
        await visit.end()

    stage.script(wait_between)
    session = stage.session(dialect)
    body, _ = session.next()
    async with connection(stage.router.port) as flow:
        await flow.send("POST", dialect.path, body, session.all_headers)
        got, wanted = b"", b""
        try:
            async with asyncio.timeout(5 * _EVENTS_MAX):
                while TERMINAL[dialect] not in wanted:
                    async with asyncio.timeout(5):
                        wanted += await sent.get()
                        if not got:
                            await flow.head()
                        while len(got) < len(wanted):
                            piece = await flow.piece()
                            check(piece, "the stream ended early")
                            got += piece
                    next_one.release()
        except TimeoutError:
            check(None, f"an event was not passed on within 5 s: {len(wanted)} bytes sent, {len(got)} came")
        next_one.release()


@rule(
    "Events that were apart are not merged: the times between them are kept.",
    "Roost",
)
async def pace(rig: Rig) -> None:
    stage = await rig.shared()

    async def slowly(visit: Visit) -> None:
        await visit.begin()
        for event in visit.events:
            await visit.chunk(event)
            await asyncio.sleep(0.25)
        await visit.end()

    answer, _ = await told(stage, stage.session(), slowly)
    times = [when for when, _ in answer.pieces]
    check(len(times) >= 5, f"5 events came in {len(times)} pieces")
    gaps = [later - sooner for sooner, later in pairwise(times)]
    check(min(gaps[:4]) > 0.05, f"events sent 0.25 s apart came {[round(gap, 2) for gap in gaps]} s apart")


@rule(
    "A stream's bytes pass as they are, with fields, events and characters that nobody expected.",
    "https://github.com/sgl-project/sglang/issues/22740",
    each=DIALECTS,
)
async def stream_bytes(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    odd = (
        b': a comment\n\nevent: ping\ndata: {"type":"ping"}\n\n'
        b'data: {"delta":{"reasoning_content":"\\u00e9 \xe2\x98\x83","tool_calls":[{"index":0,"x-unknown":1.0}]},'
        b'"id":9007199254740993, "a" :  1e400}\r\n\r\n'
    )
    sent: list[bytes] = []

    async def strange(visit: Visit) -> None:
        whole = visit.events
        stream = b"".join(whole[:-1]) + odd + whole[-1]
        sent.append(stream)
        await visit.begin()
        for start in range(0, len(stream), 7):  # characters, lines and events cut anywhere
            await visit.chunk(stream[start : start + 7])
        await visit.end()

    answer, _ = await told(stage, stage.session(dialect), strange)
    check(answer.complete, "the stream was broken off")
    check(answer.body == sent[-1], f"{len(sent[-1])} bytes were sent, {len(answer.body)} others came")


@rule(
    "A stream that its replica breaks off carries no terminal event, and is incomplete or tells an error.",
    *_DEATH,
    each=DIALECTS,
)
async def death_midway(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(2)
    answer, asked = await told(stage, stage.session(dialect), _die)
    check(answer.status == 200, f"the stream began with {answer.short}")
    check(TERMINAL[dialect] not in answer.body, "a broken stream carries the terminal event")
    check(not answer.complete or b"error" in answer.body, "a broken stream was ended cleanly and without an error")
    check(asked == 1, f"a stream of which a part was out was asked of {asked} replicas")


@rule(
    "A stream that its replica breaks off never ends as a complete HTTP message: not every client reads error events.",
    "Roost",
    each=DIALECTS,
)
async def death_is_incomplete(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(2)
    answer, _ = await told(stage, stage.session(dialect), _die)
    check(not answer.complete, f"a broken stream was ended by a last chunk, after {answer.body[-120:]!r}")


@rule(
    "If a broken stream tells an error, it is in the client's own dialect and the last that comes.",
    *_DEATH,
    each=DIALECTS,
)
async def death_in_dialect(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(2)
    answer, _ = await told(stage, stage.session(dialect), _die)
    began = b"".join(sent for sent in events(dialect, "", 1)[:2])
    more = answer.body.rstrip().split(b"\n\n")[began.count(b"\n\n") :]
    if not more:
        return
    wanted = {
        Dialect.MESSAGES: (b"event: error",),
        Dialect.RESPONSES: (b"event: response.failed", b"event: error"),
    }.get(dialect, (b'"error"',))
    check(any(each in more[-1] for each in wanted), f"the last event of a broken stream is {more[-1][:200]!r}")


@rule(
    "A plain answer that its replica breaks off is not a success: an error status, or an incomplete message.",
    *_DEATH,
    each=DIALECTS,
)
async def plain_death(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.stage(2)

    async def die(visit: Visit) -> None:
        await visit.send(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"half":')
        await asyncio.sleep(0.3)
        visit.reset()

    stage.script(die)
    answer = (await stage.session(dialect).send(stream=False)).answer
    check(answer.status >= 500 or not answer.complete, f"half an answer was passed on as {answer.short}")


@rule(
    "A stream that its replica ends without its terminal event is not given one.",
    *_DEATH,
    each=DIALECTS,
)
async def no_terminal_is_made_up(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()

    async def fade(visit: Visit) -> None:
        await visit.stream(visit.events[:2])

    answer, asked = await told(stage, stage.session(dialect), fade)
    check(TERMINAL[dialect] not in answer.body, "a terminal event was made up")
    check(asked == 1, f"{asked} replicas were asked")


@rule(
    "Half a minute of silence before the first byte, as a long prefill takes, is no error and no reason to ask again.",
    "https://github.com/sgl-project/sglang/pull/11775",
    "https://github.com/ai-dynamo/dynamo/issues/13830",
    limit_s=75,
    waits=True,
)
async def long_prefill(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def think(visit: Visit) -> None:
        await asyncio.sleep(32)
        await visit.reply()

    answer, asked = await told(stage, stage.session(), think)
    check(answer.status == 200 and answer.complete, f"after 32 s of silence the turn was answered {answer.short}")
    check(asked == 1, f"{asked} replicas were asked")


@rule(
    "Half a minute of silence before a plain answer is no error and no reason to ask again.",
    "https://github.com/sgl-project/sglang/pull/11775",
    limit_s=75,
    waits=True,
)
async def long_answer(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def think(visit: Visit) -> None:
        await asyncio.sleep(32)
        await visit.reply()

    stage.script(think)
    turn = await stage.session().turn(stream=False)
    check(len(turn.replicas) == 1, f"{len(turn.replicas)} replicas were asked")


@rule(
    "Half a minute of silence in the middle of a stream does not end it.",
    "https://github.com/BerriAI/litellm/issues/17991",
    limit_s=75,
    waits=True,
)
async def long_pause(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def pause(visit: Visit) -> None:
        told = visit.events
        await visit.begin()
        await visit.chunk(told[0])
        await asyncio.sleep(32)
        for event in told[1:]:
            await visit.chunk(event)
        await visit.end()

    answer, _ = await told(stage, stage.session(), pause)
    check(answer.complete and b"[DONE]" in answer.body, f"after 32 s of silence the stream went on {answer.short}")


@rule(
    "A client that reads slowly slows its replica: the router does not keep the rest of the stream in memory.",
    "Roost",
    limit_s=60,
)
async def slow_reader(rig: Rig) -> None:
    stage = await rig.stage(1)
    pushed = 0
    piece = b"data: " + b"x" * 65_000 + b"\n\n"

    async def flood(visit: Visit) -> None:
        nonlocal pushed
        await visit.begin()
        for _ in range(1600):  # 104 MB
            await visit.chunk(piece)
            pushed += len(piece)
        await visit.end()

    stage.script(flood)
    session = stage.session()
    body, _ = session.next()
    before = stage.router.rss_bytes()
    async with connection(stage.router.port, limit=1 << 16) as flow:
        await flow.send("POST", session.dialect.path, body, session.all_headers)
        await flow.head()
        await asyncio.sleep(4)
        grown = stage.router.rss_bytes() - before
        sent = pushed
        flow.abort()
    check(sent < 60 << 20, f"{sent >> 20} MB left the replica while the client read nothing")
    check(grown < 60 << 20, f"the router grew by {grown >> 20} MB while the client read nothing")
