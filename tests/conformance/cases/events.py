"""Event streams are bytes: their framing, their headers, their coding and their pauses are the engine's."""

from __future__ import annotations

import asyncio
import gzip
import zlib

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.client import Answer, connection
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect
from tests.conformance.replica import Visit
from tests.conformance.rig import Rig, Stage

_SPEC = "https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream"
_HELD_BACK = (
    "https://github.com/dstackai/dstack/issues/4269",
    "https://github.com/databricks/unity-gateway/issues/361",
    "https://github.com/vllm-project/vllm/pull/51034",
)
_HEADERS = (
    "https://github.com/BerriAI/litellm/pull/29557",
    "https://github.com/BerriAI/litellm/pull/32160",
    "https://github.com/ChronoAIProject/NyxID/pull/1206",
)
_CODED = (
    "https://github.com/vllm-project/production-stack/pull/836",
    "https://github.com/open-webui/open-webui/pull/23876",
)
_CHARACTERS = (
    "https://github.com/BerriAI/litellm/issues/18842",
    "https://github.com/cnighswonger/claude-code-cache-fix/issues/365",
)
_MB = 1 << 20


async def streamed(stage: Stage, pieces: list[bytes], dialect: Dialect = Dialect.CHAT, apart_s: float = 0.0) -> Answer:
    """A turn that is answered by a stream of these chunks."""

    async def tell(visit: Visit) -> None:
        await visit.begin()
        for piece in pieces:
            await visit.chunk(piece)
            if apart_s:
                await asyncio.sleep(apart_s)
        await visit.end()

    stage.script(tell)
    return (await stage.session(dialect).send()).answer


def same(answer: Answer, sent: bytes) -> None:
    """Fail unless this is what came, to its end."""
    check(answer.status == 200 and answer.complete, f"{len(sent)} bytes were sent and came as {answer.short}")
    check(answer.body == sent, f"{len(sent)} bytes were sent, {len(answer.body)} others came: {answer.body[:120]!r}")


@rule(
    "Comments that an engine sends to keep a silent stream alive pass at once, before the first event too.",
    *_HELD_BACK,
    each=DIALECTS,
)
async def comments_at_once(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    beat = b": keep-alive\n\n"
    next_one = asyncio.Semaphore(0)

    async def breathe(visit: Visit) -> None:
        await visit.begin()
        for piece in (beat, beat, beat, visit.events[0], beat, beat, *visit.events[1:]):
            await visit.chunk(piece)
            if piece == beat:
                await next_one.acquire()
        await visit.end()

    stage.script(breathe)
    session = stage.session(dialect)
    body, _ = session.next()
    async with connection(stage.router.port) as flow:
        await flow.send("POST", dialect.path, body, session.all_headers)
        got = b""
        for number in range(1, 6):
            try:
                async with asyncio.timeout(3):
                    if number == 1:
                        await flow.head()
                    while got.count(beat) < number:
                        piece = await flow.piece()
                        check(piece, "the stream ended early")
                        got += piece
            except TimeoutError:
                check(None, f"comment {number} was not passed on within 3 s")
            finally:
                next_one.release()
        answer = await flow.rest()
    check(answer.complete and TERMINAL[dialect] in answer.body, f"the stream came as {answer.short}")


@rule("Headers of an event stream pass: those for proxies further on, the engine's own, repeated ones.", *_HEADERS)
async def headers(rig: Rig) -> None:
    stage = await rig.shared()
    given = [
        ("Cache-Control", "no-cache, no-transform"),
        ("X-Accel-Buffering", "no"),
        ("Openai-Processing-Ms", "12"),
        ("Anthropic-Ratelimit-Requests-Remaining", "7"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
    ]

    async def tell(visit: Visit) -> None:
        await visit.begin(given)
        for event in visit.events:
            await visit.chunk(event)
        await visit.end()

    stage.script(tell)
    answer = (await stage.session().send()).answer
    lost = [name for name, value in given if (name.lower(), value) not in answer.headers]
    check(not lost, f"lost or changed: {', '.join(lost)}")
    check(answer.header("content-type").startswith("text/event-stream"), answer.header("content-type"))


@rule(
    "A stream's framing is the engine's: line ends of each kind, comments, ids, retry times, data of several lines, "
    "events without data, a byte order mark.",
    _SPEC,
    each=(Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES),
)
async def framing(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    forms = [
        b"\xef\xbb\xbfretry: 3000\n\n",
        b": a comment\r\n\r\n",
        b"id: 7\revent: ping\rdata: {}\r\r",
        b'data: {"a":\r\ndata: 1}\r\n\r\n',
        b"event: nothing\n\n\n\n",
        b"data\n\n",
        b'data:{"no":"space"}\n\n',
        b"unknown: field\ndata:  two spaces\n\n",
    ]
    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\ndata: [DONE]\n\n'
    same(await streamed(stage, [*forms, end], dialect), b"".join(forms) + end)
    same(await streamed(stage, [b"".join(forms) + end], dialect), b"".join(forms) + end)


@rule("Events of a megabyte pass, in one chunk or in many.", _SPEC)
async def large_events(rig: Rig) -> None:
    stage = await rig.shared()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * _MB + b'"}}]}\n\n'
    pieces = [event, event[: _MB // 2], event[_MB // 2 :], b"data: [DONE]\n\n"]
    same(await streamed(stage, pieces), b"".join(pieces))


@rule("Characters that are cut anywhere come as they were: a stream that is sent byte by byte.", *_CHARACTERS)
async def byte_by_byte(rig: Rig) -> None:
    stage = await rig.shared()
    text = 'data: {"choices":[{"index":0,"delta":{"content":"무엇을 🧑‍💻 实现 é"}}]}\n\ndata: [DONE]\n\n'.encode()
    same(await streamed(stage, [text[at : at + 1] for at in range(len(text))], apart_s=0.002), text)


@rule("Two thousand small events, a millisecond apart, come all and in order.", "Roost")
async def many_events(rig: Rig) -> None:
    stage = await rig.shared()
    pieces = [b'data: {"choices":[{"index":0,"delta":{"content":"%d "}}]}\n\n' % number for number in range(2000)]
    pieces.append(b"data: [DONE]\n\n")
    same(await streamed(stage, pieces, apart_s=0.001), b"".join(pieces))


@rule(
    "A compressed stream passes as it is, event by event, or unpacked and then not called compressed.",
    *_CODED,
)
async def compressed(rig: Rig) -> None:
    stage = await rig.shared()
    packer = zlib.compressobj(wbits=31)
    sent = b""

    async def tell(visit: Visit) -> None:
        nonlocal sent
        sent = b"".join(visit.events)
        await visit.begin([("Content-Encoding", "gzip")])
        for event in visit.events:
            await visit.chunk(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH))
            await asyncio.sleep(0.05)
        await visit.chunk(packer.flush())
        await visit.end()

    stage.script(tell)
    answer = (await stage.session().send()).answer
    coded = answer.header("content-encoding") == "gzip"
    try:
        body = gzip.decompress(answer.body) if coded else answer.body
    except (OSError, EOFError, zlib.error):
        body = b""
    check(answer.complete and body == sent, f"it is {'' if coded else 'not '}called gzip and came as {answer.short}")


@rule(
    "A stream that ends before its first event comes as empty as it was, or as an error: no event is made up that says "
    "it went well.",
    "https://github.com/vllm-project/vllm-ascend/issues/13140",
    each=DIALECTS,
)
async def empty(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    answer = await streamed(stage, [], dialect)
    check(TERMINAL[dialect] not in answer.body, f"an empty stream came as {answer.short}")
    check(answer.status != 200 or b"error" in answer.body or not answer.body.strip(), f"it came as {answer.short}")


@rule("Forty streams at once do not mix: each client gets its own, whole and in order.", "Roost")
async def do_not_mix(rig: Rig) -> None:
    stage = await rig.shared()

    async def tell(visit: Visit) -> None:
        await visit.begin()
        for number in range(60):
            await visit.chunk(b'data: {"of":"%b","n":%d}\n\n' % (visit.seen.mark, number))
            await asyncio.sleep(0.001)
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    stage.script(tell)

    async def one() -> None:
        session = stage.session()
        body, mark = session.next()
        answer = await stage.router.request("POST", session.dialect.path, body, session.all_headers)
        own = b"".join(b'data: {"of":"%b","n":%d}\n\n' % (mark, number) for number in range(60))
        same(answer, own + b"data: [DONE]\n\n")

    await asyncio.gather(*(one() for _ in range(40)))
