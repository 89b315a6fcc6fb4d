"""How a response is framed and how it ends: what was sent before the end arrives, and only a proper end is one."""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import termios

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.client import Answer
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect, whole
from tests.conformance.replica import Visit, head
from tests.conformance.rig import PATIENCE_S, Rig, until

_LATE = ("https://github.com/opensandbox-group/OpenSandbox/issues/1461",)
_CUT = ("https://github.com/iii-hq/workers/issues/878", "https://github.com/TriliumNext/Trilium/issues/11124")
_CHUNKS = "https://www.rfc-editor.org/rfc/rfc9112#section-7.1"
_SSE = ("Content-Type", "text/event-stream")
_MB = 1 << 20


async def _reset_after_all(visit: Visit) -> None:
    """Send a reset, once the other side's system has every byte that was sent before: Linux still hands them out."""
    sock: socket.socket = visit.writer.get_extra_info("socket")
    await visit.writer.drain()
    written = visit.writer.transport.get_write_buffer_size
    await until(lambda: not written() and not _unsent(sock), PATIENCE_S, "a replica's bytes were not taken")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    visit.reset()


def _unsent(sock: socket.socket) -> int:
    """Bytes that the other side's system has not acknowledged."""
    found: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    return found


def _arrived(answer: Answer, sent: bytes, of: str = "HTTP/1.1") -> None:
    check(answer.status == 200 and answer.complete, f"{of}: it came as {answer.status}, {len(answer.body)} bytes")
    check(answer.body == sent, f"{of}: {len(sent)} bytes were sent, {len(answer.body)} others came")


def _long(visit: Visit, size_bytes: int) -> list[bytes]:
    """The stream that answers this request, made longer by an event that has that size."""
    filler = b": " + b"x" * (size_bytes - 4) + b"\n\n"
    return [visit.events[0], filler, *visit.events[1:]]


@rule("A replica that resets its connection right after the end of a stream of 2 MB has sent it whole.", *_LATE)
async def reset_after_stream(rig: Rig) -> None:
    stage = await rig.shared()
    sent = b""

    async def hasty(visit: Visit) -> None:
        nonlocal sent
        events = _long(visit, 2 * _MB)
        sent = b"".join(events)
        framed = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
        await visit.send(head(200, [_SSE, ("Transfer-Encoding", "chunked")]) + framed)
        await _reset_after_all(visit)

    stage.script(hasty)
    for _ in range(3):
        _arrived((await stage.session().send()).answer, sent)


@rule("A plain answer of 4 MB is whole, too, if its replica resets the connection right after its last byte.", *_LATE)
async def reset_after_answer(rig: Rig) -> None:
    stage = await rig.shared()
    sent = whole(Dialect.CHAT, "an-id", 3, "y" * (4 * _MB))

    async def hasty(visit: Visit) -> None:
        await visit.send(head(200, [("Content-Type", "application/json"), ("Content-Length", str(len(sent)))]) + sent)
        await _reset_after_all(visit)

    stage.script(hasty)
    for _ in range(3):
        _arrived((await stage.session().send(stream=False)).answer, sent)


@rule(
    "A stream of 2 MB without length or chunks, as HTTP/1.0 servers send it, passes whole up to its connection's end.",
    *_LATE,
    "https://www.rfc-editor.org/rfc/rfc9112#section-6.3",
)
async def until_close(rig: Rig) -> None:
    stage = await rig.shared()
    sent = b""
    version = ""

    async def old(visit: Visit) -> None:
        nonlocal sent
        events = _long(visit, 2 * _MB)
        sent = b"".join(events)
        start = head(200, [_SSE, ("Connection", "close")])
        await visit.send(start.replace(b"HTTP/1.1", version.encode()))
        for event in events:
            await visit.send(event)
        visit.close()

    stage.script(old)
    for version in ("HTTP/1.1", "HTTP/1.0"):
        _arrived((await stage.session().send()).answer, sent, version)


@rule(
    "A stream that is cut inside an event, or inside a character, is neither mended nor ended: what came is what was "
    "sent, and an error that the router adds can be read.",
    *_CUT,
    each=DIALECTS,
)
async def cut_in_event(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    sent = b""
    keep = 0

    async def cut(visit: Visit) -> None:
        nonlocal sent
        last = 'data: {"text":"☃'.encode()
        sent = visit.events[0] + last[: len(last) - keep]
        await visit.begin()
        await visit.chunk(visit.events[0])
        await visit.chunk(last[: len(last) - keep])
        await asyncio.sleep(0.1)
        visit.reset()

    stage.script(cut)
    for keep in (0, 1, 6):
        answer = (await stage.session(dialect).send()).answer
        if answer.status >= 500:  # it was cut before the head had gone out
            continue
        check(answer.body.startswith(sent) or sent.startswith(answer.body), f"it came as {answer.body[-120:]!r}")
        check(TERMINAL[dialect] not in answer.body, f"a terminal event was made up after a cut {keep} bytes early")
        added = answer.body[len(sent) :]
        check(not answer.complete or b"error" in added, "a stream that was cut came as a whole one")
        check(not added.strip() or _readable(added), f"no client can read the error that was added: {added[:160]!r}")


def _readable(added: bytes) -> bool:
    """Whether an event with an error starts after a blank line, apart from what was cut."""
    for block in added.replace(b"\r\n", b"\n").split(b"\n\n")[1:]:
        data = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
        try:
            told = json.loads(b"\n".join(data))
        except ValueError:
            continue
        if b"error" in json.dumps(told).encode():
            return True
    return False


@rule("A stream whose chunks end with trailers is whole.", "https://www.rfc-editor.org/rfc/rfc9112#section-7.1.2")
async def trailers(rig: Rig) -> None:
    stage = await rig.shared()
    sent = b""

    async def trail(visit: Visit) -> None:
        nonlocal sent
        sent = b"".join(visit.events)
        await visit.begin([("Trailer", "X-Checksum")])
        for event in visit.events:
            await visit.chunk(event)
        await visit.send(b"0\r\nX-Checksum: 1\r\nX-Other: 2\r\n\r\n")

    stage.script(trail)
    for _ in range(2):  # and the connection is left in order
        _arrived((await stage.session().send()).answer, sent)


@rule(
    "Chunk sizes in capitals, with leading zeros and with extensions are sizes.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-7.1.1",
)
async def chunk_forms(rig: Rig) -> None:
    stage = await rig.shared()
    sent = b""

    async def odd(visit: Visit) -> None:
        nonlocal sent
        sent = b"".join(visit.events)
        await visit.begin()
        for number, event in enumerate(visit.events):
            more = (b"", b";a", b';a=b;c="d"')[number % 3]
            await visit.send(b"000%X%b\r\n%b\r\n" % (len(event), more, event))
        await visit.send(b"000\r\n\r\n")

    stage.script(odd)
    for _ in range(2):
        _arrived((await stage.session().send()).answer, sent)


@rule("A chunk size that is none breaks a stream: it does not end it.", _CHUNKS)
async def bad_chunk(rig: Rig) -> None:
    stage = await rig.shared()

    async def wrong(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(visit.events[0])
        await asyncio.sleep(0.1)
        await visit.send(b"xyz\r\n" + visit.events[1] + b"\r\n0\r\n\r\n")
        visit.close()

    stage.script(wrong)
    answer = (await stage.session().send()).answer
    check(not answer.complete or b"error" in answer.body, f"a broken stream came as a whole one: {answer.short}")
    check(b"[DONE]" not in answer.body, "a terminal event was made up")


@rule(
    "A replica that answers what is no HTTP gives the client an error, as JSON or not, within seconds.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-15.6.3",
    limit_s=60,
)
async def no_http(rig: Rig) -> None:
    stage = await rig.stage(2)
    junk = b""

    async def babble(visit: Visit) -> None:
        await visit.send(junk)
        visit.close()

    stage.script(babble)
    for junk in (
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"",
    ):
        async with asyncio.timeout(15):
            answer = (await stage.session().send()).answer
        check(500 <= answer.status < 600, f"{junk[:30]!r} was passed on as {answer.short}")


@rule(
    "Bytes after the end of a response belong to nobody: they reach no client, and are no answer to the next turn.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-9.2",
)
async def bytes_after_the_end(rig: Rig) -> None:
    stage = await rig.shared()
    told = whole(Dialect.CHAT, "an-id", 3)
    kind = ("Content-Type", "application/json")
    extra = head(200, [kind, ("Content-Length", "8")]) + b"of-other"

    async def talkative(visit: Visit) -> None:
        await visit.send(head(200, [kind, ("Content-Length", str(len(told)))]) + told + extra)

    stage.script(talkative)
    for _ in range(8):
        answer = (await stage.session().send(stream=False)).answer
        check(b"of-other" not in answer.body, f"a client got what belonged to nobody: {answer.short}")
        check(answer.status == 200 and answer.body == told, f"a turn was answered {answer.short}")
        await asyncio.sleep(0.02)


@rule(
    "A response without a body (204, and the answer to HEAD with a length) ends at its head.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-6.3",
)
async def no_body(rig: Rig) -> None:
    stage = await rig.shared()

    async def nothing(visit: Visit) -> None:
        await visit.send(head(204, []))

    stage.script(nothing)
    for _ in range(2):
        async with asyncio.timeout(5):
            answer = (await stage.session().send(stream=False)).answer
        check(answer.status == 204 and not answer.body, f"a 204 was passed on as {answer.short}")
        check(not answer.header("transfer-encoding"), "a 204 was given a Transfer-Encoding")
    for replica in stage.replicas:
        replica.reset()
    await stage.session().turn()
