"""What HTTP asks of a gateway, response by response: raw bytes said by the replica, raw bytes seen by the client.

Each row names its rule and where it stands: RFC 9110 (semantics), RFC 9112 (HTTP/1.1).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from router.domain.turn import Dialect
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Replica, Visit, replicas
from tests.integration.roosts import Roost, running, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"model":"m","messages":[]}'
OK = b"HTTP/1.1 200 OK\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge() -> AsyncIterator[tuple[Roost, Replica]]:
    """One router before one replica, for all rows."""
    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        yield roost, replica


def asked(method: str = "POST", path: str = "/v1/chat/completions", version: str = "1.1") -> bytes:
    if method != "POST":
        return f"{method} {path} HTTP/{version}\r\nHost: r\r\nConnection: keep-alive\r\n\r\n".encode()
    head = f"POST {path} HTTP/{version}\r\nHost: r\r\nConnection: keep-alive\r\nContent-Length: {len(BODY)}\r\n\r\n"
    return head.encode() + BODY


@dataclass(frozen=True)
class Says:
    """What the replica says, and what the client reads besides Roost's own `x-roost-…` lines: head lines, then body."""

    rule: str
    said: bytes
    read: bytes
    sent: bytes = asked()
    ends: bool = False
    """Whether the replica ends its body, and so Roost this answer, by closing the connection."""
    stays: bool = True
    """Whether the client's connection serves another request."""


SAYS = [
    Says("9112 6.2: a length is kept", OK + b"Content-Length: 2\r\n\r\nhi", OK + b"Content-Length: 2\r\n\r\nhi"),
    Says(
        "9112 7.1: chunks pass as chunks",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ),
    Says(
        "9112 7.1.1, 7.1.2: extensions and trailers end here",
        OK + b"Transfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2;a=b\r\nhi\r\n0\r\nX-T: 1\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ),
    Says(
        "9112 6.3: a body that only the close ends becomes chunks",
        OK + b"\r\nhi",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        ends=True,
    ),
    Says(
        "9112 7.1: HTTP/1.0 clients get no chunks",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        OK + b"Connection: close\r\n\r\nhi",
        sent=asked(version="1.0"),
        stays=False,
    ),
    Says(
        "9112 9.3: HTTP/1.0 clients may keep a connection",
        OK + b"Content-Length: 2\r\n\r\nhi",
        OK + b"Content-Length: 2\r\nConnection: keep-alive\r\n\r\nhi",
        sent=asked(version="1.0"),
    ),
    Says(
        "9110 7.6.1: the replica's hop-by-hop fields end here",
        OK + b"Connection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: b\r\n"
        b"Upgrade: h2c\r\nX-End: 1\r\nContent-Length: 0\r\n\r\n",
        OK + b"X-End: 1\r\nContent-Length: 0\r\n\r\n",
    ),
    Says(
        "9112 9.6: the replica's close is its own",
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        OK + b"Content-Length: 2\r\n\r\nhi",
        ends=True,
    ),
    Says(
        "9110 5.3: Set-Cookie and others are kept apart, in order and case",
        OK + b"Set-Cookie: a=1; Path=/\r\nset-cookie: b=2, c=3\r\nVary: x\r\nVary: y\r\nContent-Length: 0\r\n\r\n",
        OK + b"Set-Cookie: a=1; Path=/\r\nset-cookie: b=2, c=3\r\nVary: x\r\nVary: y\r\nContent-Length: 0\r\n\r\n",
    ),
    Says(
        "9110 5.5: bytes beyond ASCII pass",
        OK + b"X-L: caf\xe9\r\nContent-Length: 0\r\n\r\n",
        OK + b"X-L: caf\xe9\r\nContent-Length: 0\r\n\r\n",
    ),
    Says(
        "9112 4: reasons pass, missing ones too",
        b"HTTP/1.1 299 Odd but \xe9 fine\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 299 Odd but \xe9 fine\r\nContent-Length: 0\r\n\r\n",
    ),
    Says(
        "9110 15.3.5: 204 has neither body nor length",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ),
    Says(
        "9110 15.4.5: 304 has no body and may say a length",
        b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n",
        sent=asked("GET", "/v1/x"),
    ),
    Says(
        "9110 9.3.2: HEAD has no body and keeps its length",
        OK + b"Content-Length: 1234\r\n\r\n",
        OK + b"Content-Length: 1234\r\n\r\n",
        sent=asked("HEAD"),
    ),
    Says(
        "9110 9.3.2: HEAD of what would come in chunks",
        OK + b"Transfer-Encoding: chunked\r\n\r\n",
        OK + b"\r\n",
        sent=asked("HEAD"),
    ),
    Says(
        "9110 15.2: 100 and 103 end here, the answer follows",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + OK
        + b"Content-Length: 2\r\n\r\nhi",
        OK + b"Content-Length: 2\r\n\r\nhi",
    ),
    Says(
        "9112 2.3: an HTTP/1.0 replica",
        b"HTTP/1.0 200 OK\r\nX-A: 1\r\n\r\nhi",
        OK + b"X-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        ends=True,
    ),
    Says(
        "9112 6.3: what follows a whole answer is no answer",
        OK + b"Content-Length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\nX-Evil: 1\r\nContent-Length: 4\r\n\r\nevil",
        OK + b"Content-Length: 2\r\n\r\nhi",
    ),
    Says(
        "9110 6.6.1: Server and Date are the replica's",
        OK + b"server: uvicorn\r\ndate: d\r\nContent-Length: 0\r\n\r\n",
        OK + b"server: uvicorn\r\ndate: d\r\nContent-Length: 0\r\n\r\n",
    ),
]


@pytest.mark.parametrize("row", SAYS, ids=[row.rule for row in SAYS])
async def test_what_a_client_reads(row: Says, edge: tuple[Roost, Replica]) -> None:
    """Byte by byte; then the connection serves another request, or is closed."""
    roost, replica = edge

    async def says(visit: Visit) -> None:
        await visit.send(row.said)
        if row.ends:
            visit.close()

    async def well(visit: Visit) -> None:
        await visit.answer(200, b"{}")

    replica.script = says
    async with Client.to(roost.port) as client:
        client.writer.write(row.sent)
        head = await client.reader.readuntil(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"x-roost-")]
        wanted_head, wanted_body = row.read.split(b"\r\n\r\n", 1)
        assert b"\r\n".join(lines) == wanted_head + b"\r\n\r\n"
        assert await client.reader.readexactly(len(wanted_body)) == wanted_body
        replica.script = well
        if row.stays:
            client.writer.write(asked("GET", "/next"))
            assert (await client.answer()).body == b"{}"
        else:
            assert await client.gone()


BROKEN = {
    "9112 6.3: a length beside chunks": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "9112 6.3: chunks beside a length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "9112 6.3: two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "9112 6.3: a list of lengths": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "9110 8.6: a negative length": OK + b"Content-Length: -5\r\n\r\nhello",
    "9112 6.1: another coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "9112 6.1: chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "9112 5.2: a folded field": OK + b"X-A: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
    "9112 5.1: a space before a colon": OK + b"X-A : 1\r\nContent-Length: 0\r\n\r\n",
    "9112 2.2: LF in a value": OK + b"X-A: 1\nX-B: 2\r\nContent-Length: 0\r\n\r\n",
    "9112 2.2: CR in a value": OK + b"X-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n",
    "9110 5.5: NUL in a value": OK + b"X-A: 1\x002\r\nContent-Length: 0\r\n\r\n",
    "9110 15.2.2: a switch that nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "9110 5.4: a head without end": OK + b"X-A: " + b"a" * 200_000,
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN.keys())
async def test_a_head_that_cannot_be_trusted_is_a_502(said: bytes, edge: tuple[Roost, Replica]) -> None:
    """None of it reaches the client, and the connection to the replica serves nobody else."""
    roost, replica = edge
    closed = asyncio.Event()

    async def says(visit: Visit) -> None:
        await visit.send(said)
        await visit.until_closed()
        closed.set()

    replica.script = says
    for dialect in (Dialect.CHAT, Dialect.MESSAGES):
        closed.clear()
        async with Client.to(roost.port) as client:
            client.writer.write(asked(path=PATHS[dialect]))
            answer = await client.answer()
            assert (answer.status, answer.headers[b"x-roost-error"]) == (502, b"upstream_broken")
            assert (json.loads(answer.body).get("type") == "error") == (dialect is Dialect.MESSAGES)
        await closed.wait()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_before_the_request_is_whole(dialect: Dialect, edge: tuple[Roost, Replica]) -> None:
    """9112 9.3: a replica may refuse early; the client reads its words."""
    roost, replica = edge

    async def early(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!")
        visit.close()

    replica.script = early
    async with Client.to(roost.port) as client:
        client.writer.write(asked(path=PATHS[dialect]))
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"no!")
