"""What a replica says of a turn that it does not serve reaches the client, and is not held against the replica."""

from __future__ import annotations

import asyncio
import gzip
import json

from tests.conformance.case import Can, Failed, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect, refusal
from tests.conformance.replica import Visit, head
from tests.conformance.rig import Rig, homes, until

_AS_THEY_ARE = (
    "https://github.com/sgl-project/sglang/pull/39463",
    "https://github.com/Kuadrant/mcp-gateway/issues/1331",
    "https://github.com/kortix-ai/suna/pull/5986",
)
_BUSY = ("https://github.com/sgl-project/sglang/pull/39464", "https://github.com/Abilityai/trinity/issues/1467")
_CODED = (
    "https://github.com/BerriAI/litellm/issues/25624",
    "https://github.com/gadievron/raptor/pull/547",
    "https://www.rfc-editor.org/rfc/rfc9110#section-8.4",
)
_SAYS = b'{"object":"error", "message":"not so \\u2603","type":"X","param":null,"code":%d, "detail" : [1.0]}'


@rule(
    "A replica's own 4xx reaches the client with its status and its message, whichever it is, and is asked of nobody "
    "else.",
    *_AS_THEY_ARE,
    each=(Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES),
)
async def statuses_pass(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    told = 400

    async def refuse(visit: Visit) -> None:
        await visit.answer(told, _SAYS % told)

    stage.script(refuse)
    for told in (400, 401, 403, 404, 409, 413, 415, 422):
        for stream in (True, False):
            turn = await stage.session(dialect).send(stream=stream)
            check(turn.answer.status == told, f"a replica's {told} was passed on as {turn.answer.short}")
            check(b"not so" in turn.answer.body, f"the message of its {told} was passed on as {turn.answer.short}")
            check(len(turn.replicas) == 1, f"{len(turn.replicas)} replicas were asked for what one answered {told}")


@rule(
    "If all replicas say 429, the client is told 429 and Retry-After, not that the gateway is broken.",
    "https://github.com/api7/aisix/issues/144",
    "https://github.com/routatic/proxy/pull/61",
    limit_s=60,
)
async def too_many(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def refuse(visit: Visit) -> None:
        await visit.answer(429, refusal(429), [("Retry-After", "7")])

    stage.script(refuse)
    answer = (await stage.session().send()).answer
    check(answer.status == 429, f"two replicas' 429 was passed on as {answer.short}")
    check(answer.header("retry-after"), f"Retry-After was lost: {answer.headers}")


@rule(
    "If all replicas say 500, the client gets a 5xx, and with it what they said.",
    *_AS_THEY_ARE,
    limit_s=60,
)
async def server_error(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def fail(visit: Visit) -> None:
        await visit.answer(500, _SAYS % 500)

    stage.script(fail)
    answer = (await stage.session().send()).answer
    check(500 <= answer.status < 600, f"two replicas' 500 was passed on as {answer.short}")
    check(b"not so" in answer.body, f"what they said was passed on as {answer.short}")


@rule(
    "An error that comes in chunks passes whole.", "https://www.rfc-editor.org/rfc/rfc9112#section-7.1", *_AS_THEY_ARE
)
async def chunked(rig: Rig) -> None:
    stage = await rig.shared()
    says = _SAYS % 400

    async def refuse(visit: Visit) -> None:
        await visit.send(head(400, [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]))
        for start in range(0, len(says), 9):
            await visit.chunk(says[start : start + 9])
            await asyncio.sleep(0.005)
        await visit.end()

    stage.script(refuse)
    for stream in (True, False):
        answer = (await stage.session().send(stream=stream)).answer
        check(answer.status == 400 and answer.complete, f"a 400 in chunks was passed on as {answer.short}")
        check(b"not so" in answer.body, f"a 400 in chunks was passed on as {answer.short}")


@rule("A compressed error passes as it is, or unpacked and then not called compressed, its length right.", *_CODED)
async def compressed(rig: Rig) -> None:
    stage = await rig.shared()
    says = _SAYS % 422

    async def refuse(visit: Visit) -> None:
        await visit.answer(422, gzip.compress(says), [("Content-Encoding", "gzip")])

    stage.script(refuse)
    answer = (await stage.session().send(stream=False)).answer
    check(answer.status == 422 and answer.complete, f"a compressed 422 was passed on as {answer.short}")
    coded = answer.header("content-encoding") == "gzip"
    try:
        body = gzip.decompress(answer.body) if coded else answer.body
    except OSError:
        body = b""
    check(b"not so" in body, f"it is {'' if coded else 'not '}called gzip and is {answer.short}")


@rule(
    "An error that answers a streamed turn is no success: its status passes, and no stream is made of it.",
    "https://github.com/azrtydxb/Fastllm-proxy/issues/28",
    each=DIALECTS,
)
async def no_stream_of_it(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()

    async def refuse(visit: Visit) -> None:
        await visit.answer(404, _SAYS % 404)

    stage.script(refuse)
    answer = (await stage.session(dialect).send()).answer
    check(answer.status == 404, f"a 404 to a streamed turn was passed on as {answer.short}")
    check("event-stream" not in answer.header("content-type"), "it is called an event stream")
    check(TERMINAL[dialect] not in answer.body, f"a terminal event was added: {answer.short}")


@rule(
    "What an engine says at the end of a stream outside of any event, as the JSON of an error, passes too.",
    "https://github.com/theopenco/llmgateway/issues/3616",
    each=(Dialect.CHAT, Dialect.MESSAGES),
)
async def bare_tail(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    tail = b'{"error":{"message":"out of memory","type":"server_error","code":500}}'
    sent = b""

    async def fail(visit: Visit) -> None:
        nonlocal sent
        sent = visit.events[0] + tail
        await visit.stream([visit.events[0], tail])

    stage.script(fail)
    answer = (await stage.session(dialect).send()).answer
    check(answer.body.startswith(sent), f"{sent[-90:]!r} was passed on as {answer.body[-200:]!r}")
    check(TERMINAL[dialect] not in answer.body[len(sent) :], "a terminal event was added")


@rule(
    "An error within a stream that has begun passes as the engine said it, with empty choices too, and nothing after "
    "it makes a success of it.",
    "https://github.com/diegosouzapw/OmniRoute/issues/8210",
)
async def error_event(rig: Rig) -> None:
    stage = await rig.shared()
    told = {"id": "x", "object": "chat.completion.chunk", "choices": [], "error": {"message": "aborted", "code": 500}}
    sent = b""

    async def fail(visit: Visit) -> None:
        nonlocal sent
        event = b"data: " + json.dumps(told).encode() + b"\n\n"
        sent = b"".join(visit.events[:2]) + event
        await visit.begin()
        for each in (*visit.events[:2], event):
            await visit.chunk(each)
            await asyncio.sleep(0.02)
        await visit.end()

    stage.script(fail)
    answer = (await stage.session().send()).answer
    check(answer.body.startswith(sent), f"an error event was passed on as {answer.body[-200:]!r}")
    check(b"[DONE]" not in answer.body, "a terminal event was added")


@rule(
    "Forty bad requests, each answered 400 by its replica, are no failure of the replica: its sessions stay there.",
    "https://github.com/sgl-project/sglang/issues/25811",
    "https://github.com/vllm-project/router/pull/60",
    needs=[Can.SESSIONS],
    limit_s=60,
)
async def bad_requests_harm_nobody(rig: Rig) -> None:
    stage = await rig.stage(2)
    sessions = stage.sessions(4)
    before = [(await session.turn()).replica for session in sessions]

    async def refuse(visit: Visit) -> None:
        await visit.answer(400, _SAYS % 400)

    stage.script(refuse)
    for number in range(40):
        answer = (await sessions[number % 4].send(stream=number % 2 == 0)).answer
        check(answer.status == 400, f"bad request {number} was answered {answer.short}")
    for replica in stage.replicas:
        replica.reset()
    for session, home in zip(sessions, before, strict=True):
        check((await session.turn()).replica is home, "a session left its replica after bad requests")


@rule(
    "Full is not dead: when replicas that refused forty turns by a 503 have room again, turns are served within 5 s.",
    *_BUSY,
    limit_s=120,
)
async def full_is_not_dead(rig: Rig) -> None:
    stage = await rig.stage(2)

    async def refuse(visit: Visit) -> None:
        await visit.answer(503, refusal(503))

    stage.script(refuse)
    session = stage.session()
    await asyncio.gather(*(stage.session().send() for _ in range(40)))
    for replica in stage.replicas:
        replica.reset()

    async def served() -> bool:
        return (await session.send()).answer.status == 200

    await until(served, 5.0, "no turn is served though all replicas have room again")


@rule(
    "A replica that refuses new sessions while it serves those it has keeps those.",
    *_BUSY,
    needs=[Can.SESSIONS],
    limit_s=90,
)
async def full_keeps_its_own(rig: Rig) -> None:
    stage = await rig.stage(2)
    sessions = stage.sessions(6)
    before = {session.name: (await session.turn()).replica for session in sessions}
    full = before[sessions[0].name]
    mine = [session for session in sessions if before[session.name] is full]
    known = {session.said[0].encode() for session in mine}

    async def picky(visit: Visit) -> None:
        if any(said in visit.seen.body for said in known):
            await visit.reply()
        else:
            await visit.answer(503, refusal(503))

    full.script = picky
    for session in stage.sessions(24):
        await session.send()
    found = homes([await session.turn() for session in mine for _ in range(2)])
    check(set(found) == {full.port}, f"of {len(mine)} sessions some left a replica that serves them: {dict(found)}")


@rule(
    "A replica that accepts connections and answers nothing, probes neither, gets no new session after 30 s, and is "
    "not tried again and again.",
    "https://github.com/AMD-AGI/Infera/issues/82",
    needs=[Can.SESSIONS],
    limit_s=110,
    waits=True,
)
async def mute_stays_out(rig: Rig) -> None:
    stage = await rig.stage(3)
    mute = stage.replicas[0]

    async def say_nothing(visit: Visit) -> None:
        await visit.until_closed()

    mute.script, mute.health = say_nothing, "silent"
    await asyncio.sleep(30)
    before = len(mute.turns)
    for session in stage.sessions(30):
        try:
            async with asyncio.timeout(10):
                turn = await session.send()
        except TimeoutError:
            raise Failed("a new session was not answered within 10 s") from None
        check(turn.answer.status == 200, f"a new session was answered {turn.answer.short}")
        await asyncio.sleep(0.5)
    check(len(mute.turns) - before <= 1, f"of 30 new sessions {len(mute.turns) - before} were sent to a mute replica")
