"""What HTTP asks of a gateway, request by request: raw bytes in, raw bytes seen by the replica.

Each row names its rule and where it stands: RFC 9110 (semantics), RFC 9112 (HTTP/1.1).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.integration.relay_rig import Answer, Client
from tests.integration.replicas import Replica, Seen, Visit, replicas
from tests.integration.roosts import Roost, running, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
TURN = "POST /v1/chat/completions HTTP/1.1"
NEXT = b"GET /next HTTP/1.1\r\nHost: r\r\n\r\n"
SIZE = b"%x" % len(BODY)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge() -> AsyncIterator[tuple[Roost, Replica]]:
    """One router before one replica, for all rows; at the end nothing may be in flight."""

    async def well(visit: Visit) -> None:
        await visit.answer(200, b"{}")

    async with replicas(1, script=well) as (replica,), running(settings_for([replica]), [replica]) as roost:
        yield roost, replica


def request(*lines: str, first: str = TURN, body: bytes = BODY, host: str = "Host: r", length: bool = True) -> bytes:
    """A request with these header lines. Latin-1, so that a line may hold any byte."""
    given = [first, *([host] if host else []), *lines]
    if length:
        given.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*given, "", ""]).encode("latin-1") + body


def chunks(framed: bytes, *lines: str, first: str = TURN) -> bytes:
    return request("Transfer-Encoding: chunked", *lines, first=first, body=framed, length=False)


def seen_of(replica: Replica) -> list[Seen]:
    found = list(replica.seen)
    replica.seen.clear()
    return found


# --- what passes, and how --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """The replica sees `target` (with its method), these header lines and no other, and this body."""

    rule: str
    sent: bytes
    headers: tuple[str, ...] = ()
    target: str = "POST /v1/chat/completions"
    body: bytes | None = BODY
    """None: neither a body nor a length."""
    closes: bool = False
    """Whether the connection closes after the answer; else it serves another request."""
    via: str = "1.1"
    turn: bool = True
    """Whether it is placed as a turn."""


WS = "Sec-WebSocket-Version: 13"
PASSES = [
    Passes(
        "9110 7.6.1: what Connection names goes",
        request("Connection: X-A, x-b", "X-A: 1", "X-B: 2", "X-C: 3"),
        ("X-C: 3",),
    ),
    Passes(
        "9110 7.6.1: in several Connection fields too",
        request("Connection: X-A", "X-A: 1", "Connection: X-B", "X-B: 2"),
    ),
    Passes("9110 7.6.1: names of Connection before it", request("X-A: 1", "Connection: keep-alive, X-A")),
    Passes(
        "9110 7.6.1, 9112 9.6: close is this connection's",
        request("Connection: close, Host, Content-Length"),
        closes=True,
    ),
    Passes(
        "9110 7.6.1: hop-by-hop fields end here, listed or not",
        request("Keep-Alive: timeout=5", "TE: trailers", "Trailer: X-T", "Proxy-Connection: keep-alive"),
    ),
    Passes(
        "9110 11.7: proxy credentials are for this hop",
        request("Proxy-Authorization: Basic eA==", "Proxy-Authenticate: x"),
    ),
    Passes(
        "9110 5.3: order and copies are kept", request("X-A: 1", "X-B: 2", "x-a: 3"), ("X-A: 1", "X-B: 2", "x-a: 3")
    ),
    Passes(
        "9110 5.1: unknown fields pass, underscores too",
        request("session_id: s", "X_y: 1"),
        ("session_id: s", "X_y: 1"),
    ),
    Passes("9112 6.3: Content_Length is another field", request("Content_Length: 3"), ("Content_Length: 3",)),
    Passes("9110 5.5: bytes beyond ASCII pass as they are", request("X-L: caf\xe9 \xff"), ("X-L: caf\xe9 \xff",)),
    Passes(
        "9112 5: whitespace around a value is no part of it", request("X-A: \t a b \t", "X-E:"), ("X-A: a b", "X-E: ")
    ),
    Passes("9110 5.4: one field of 16 KB passes", request("X-Big: " + "b" * 16_384), ("X-Big: " + "b" * 16_384,)),
    Passes(
        "9110 5.4: 256 fields pass",
        request(*(f"X-{n}: v" for n in range(254))),
        tuple(f"X-{n}: v" for n in range(254)),
    ),
    Passes("9110 7.6.3: Via is added to, not replaced", request("Via: 1.0 edge"), ("Via: 1.0 edge",)),
    Passes("9112 3.2: an empty Host is a Host", request(host="Host:")),
    Passes("9112 3.2: Host is the replica's own", request(host="Host: other.example:99")),
    Passes(
        "9112 3.2.2: an absolute target is the same turn",
        request(first="POST http://x.example/v1/chat/completions HTTP/1.1"),
    ),
    Passes(
        "9112 3.2.2: with a port and a query",
        request(first="POST https://x.example:99/v1/chat/completions?a=1 HTTP/1.1"),
        target="POST /v1/chat/completions?a=1",
    ),
    Passes(
        "3986 6.2.2.2: escaped letters name the same turn",
        request(first="POST /v1/%63hat/completions HTTP/1.1"),
        target="POST /v1/%63hat/completions",
    ),
    Passes(
        "a line break behind a turn's path, which Starlette's routes pass over, is the turn too",
        request(first="POST /v1/chat/completions%0a HTTP/1.1"),
        target="POST /v1/chat/completions%0a",
    ),
    Passes(
        "PUT /generate is POST /generate to SGLang", request(first="PUT /generate HTTP/1.1"), target="PUT /generate"
    ),
    Passes(
        "9112 3.2.2: no path is the root",
        request(first="GET http://x.example HTTP/1.1", body=b"", length=False),
        target="GET /",
        body=None,
        turn=False,
    ),
    Passes(
        "9112 3.2.4: OPTIONS of the server as a whole",
        request(first="OPTIONS * HTTP/1.1", body=b"", length=False),
        target="OPTIONS *",
        body=None,
        turn=False,
    ),
    Passes(
        "9112 3.2.4: OPTIONS of a bare authority is OPTIONS *",
        request(first="OPTIONS http://x.example HTTP/1.1", body=b"", length=False),
        target="OPTIONS *",
        body=None,
        turn=False,
    ),
    Passes(
        "9110 7.6.2: Max-Forwards goes down by one",
        request("Max-Forwards: 3", first="OPTIONS /v1/x HTTP/1.1", body=b"", length=False),
        ("Max-Forwards: 2",),
        target="OPTIONS /v1/x",
        body=None,
        turn=False,
    ),
    Passes(
        "9110 7.6.2: Max-Forwards means nothing elsewhere",
        request("Max-Forwards: 0", first="GET /v1/x HTTP/1.1", body=b"", length=False),
        ("Max-Forwards: 0",),
        target="GET /v1/x",
        body=None,
        turn=False,
    ),
    Passes(
        "9112 3.2: escapes, dots and slashes are the replica's to read",
        request(first="GET /a%0d%0aX:%20y/../..//b?x=%00 HTTP/1.1", body=b"", length=False),
        target="GET /a%0d%0aX:%20y/../..//b?x=%00",
        body=None,
        turn=False,
    ),
    Passes(
        "9112 3.2.1: two slashes are a path, no authority",
        request(first="GET //evil.example/x HTTP/1.1", body=b"", length=False),
        target="GET //evil.example/x",
        body=None,
        turn=False,
    ),
    Passes("9112 2.2: empty lines before a request", b"\r\n\r\n" + request()),
    Passes(
        "9110 9.3.1: a GET may have a body",
        request(first="GET /v1/x HTTP/1.1", body=b"abc"),
        target="GET /v1/x",
        body=b"abc",
        turn=False,
    ),
    Passes(
        "9110 9.3.5: a DELETE may have a body",
        request(first="DELETE /v1/x HTTP/1.1", body=b"abc"),
        target="DELETE /v1/x",
        body=b"abc",
        turn=False,
    ),
    Passes(
        "9110 8.6: an empty body keeps its length",
        request(first="POST /v1/x HTTP/1.1", body=b""),
        target="POST /v1/x",
        body=b"",
        turn=False,
    ),
    Passes("9112 6.2: leading zeros", request(f"Content-Length: 00{len(BODY)}", length=False)),
    Passes("9112 7.1: chunks arrive as one body with a length", chunks(SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Passes(
        "9112 7.1: sizes in capitals, with zeros", chunks(b"00" + SIZE.upper() + b"\r\n" + BODY + b"\r\n000\r\n\r\n")
    ),
    Passes(
        "9112 7.1.1: chunk extensions are ignored",
        chunks(SIZE + b';a=b;c="d"\r\n' + BODY + b"\r\n0;last\r\n\r\n"),
    ),
    Passes(
        "9112 7.1.2: trailers are dropped, never merged",
        chunks(
            SIZE + b"\r\n" + BODY + b"\r\n0\r\nX-Trailer: 1\r\nAuthorization: Bearer evil\r\n\r\n", "Trailer: X-Trailer"
        ),
    ),
    Passes(
        "9112 7: coding names ignore case",
        request("transfer-encoding: CHUNKED", body=SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n", length=False),
    ),
    Passes(
        "9112 7.1: no chunk is an empty body",
        chunks(b"0\r\n\r\n", first="POST /v1/x HTTP/1.1"),
        target="POST /v1/x",
        body=b"",
        turn=False,
    ),
    Passes("9110 10.1.1: Expect ends here", request("Expect: 100-Continue")),
    Passes(
        "9110 10.1.1: HTTP/1.0 expects nothing", request("Expect: more", first=TURN[:-1] + "0"), closes=True, via="1.0"
    ),
    Passes("9112 9.3: HTTP/1.0 closes", request(first=TURN[:-1] + "0", host=""), closes=True, via="1.0"),
    Passes(
        "9112 9.3: HTTP/1.0 with keep-alive stays",
        request("Connection: keep-alive", first=TURN[:-1] + "0"),
        via="1.0",
    ),
    Passes(
        "9110 7.8: another protocol than WebSocket is passed over, and the connection closed",
        request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA"),
        closes=True,
    ),
    Passes("9110 7.8: Upgrade without Connection means nothing", request("Upgrade: websocket", WS), (WS,)),
]


@pytest.mark.parametrize("row", PASSES, ids=[row.rule for row in PASSES])
async def test_what_passes(row: Passes, edge: tuple[Roost, Replica]) -> None:
    """Exactly the end-to-end headers, in their order, between the gateway's own Host, Via and Content-Length."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(row.sent)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"{}")
        if row.closes:
            assert answer.headers[b"connection"] == b"close"
            assert await client.gone()
        else:
            client.writer.write(NEXT)
            assert (await client.answer()).status == 200
    seen = seen_of(replica)
    lines = [f"{row.target} HTTP/1.1", f"Host: {replica.id}", *row.headers, f"Via: {row.via} roost"]
    if row.body is not None:
        lines.append(f"Content-Length: {len(row.body)}")
    assert seen[0].head.decode("latin-1") == "\r\n".join([*lines, "", ""])
    assert seen[0].body == (row.body or b"")
    assert [each.target for each in seen[1:]] == ([] if row.closes else ["/next"])
    assert (answer.headers[b"x-roost-reason"] != b"pass") == row.turn


# --- what is refused -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """The client reads a JSON error with this status, the connection closes, and no replica hears of it."""

    rule: str
    sent: bytes
    status: int = 400


def bare(first: str, *lines: str) -> bytes:
    return request(*lines, first=first, body=b"", length=False)


EVIL = b"GET /evil HTTP/1.1\r\nHost: r\r\n\r\n"
REFUSED = [
    Refused("9112 6.3: a length beside chunks", chunks(b"0\r\n\r\n" + EVIL, "Content-Length: 5")),
    Refused(
        "9112 6.3: chunks beside a length",
        request("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n" + EVIL, length=False),
    ),
    Refused("9112 6.3: two lengths that differ", request("Content-Length: 5")),
    Refused("9112 6.3: two lengths, though the same", request(f"Content-Length: {len(BODY)}")),
    Refused("9112 6.3: a list of lengths", request("Content-Length: 5, 5", length=False)),
    Refused("9110 8.6: a length with a sign", request(f"Content-Length: +{len(BODY)}", length=False)),
    Refused("9110 8.6: a negative length", request("Content-Length: -1", length=False)),
    Refused("9110 8.6: a hexadecimal length", request("Content-Length: 0x10", length=False)),
    Refused("9110 8.6: a length with underscores", request("Content-Length: 1_0", length=False)),
    Refused("9110 8.6: a length of two words", request("Content-Length: 1 0", length=False)),
    Refused("9110 8.6: an empty length", request("Content-Length:", length=False)),
    Refused("9110 8.6: a length beyond 64 bits", request("Content-Length: 99999999999999999999", length=False)),
    Refused(
        "9112 6.1: a coding that is not chunked last",
        request("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n", length=False),
    ),
    Refused("9112 6.1: an unknown coding", request("Transfer-Encoding: xchunked", body=b"0\r\n\r\n", length=False)),
    Refused("9112 6.1: identity is none any more", request("Transfer-Encoding: identity")),
    Refused("9112 6.1: chunked twice", request("Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n", length=False)),
    Refused("9112 6.1: two Transfer-Encoding fields", chunks(b"0\r\n\r\n" + EVIL, "Transfer-Encoding: identity")),
    Refused(
        "9112 6.1: a vertical tab before chunked",
        request("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n", length=False),
    ),
    Refused(
        "9112 6.1: a coding that would be lost",
        request("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + EVIL, length=False),
        501,
    ),
    Refused(
        "9112 6.1: chunks in HTTP/1.0", chunks(b"0\r\n\r\n" + EVIL, "Connection: keep-alive", first=TURN[:-1] + "0")
    ),
    Refused("9112 7.1: a size with 0x", chunks(b"0x5\r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: a negative size", chunks(b"-5\r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: a size with a sign", chunks(b"+5\r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: a size beyond 64 bits", chunks(b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: no size", chunks(b"\r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: a space behind a size", chunks(b"5 \r\nhello\r\n0\r\n\r\n")),
    Refused("9112 7.1: a chunk longer than its size", chunks(b"5\r\nhello!\r\n0\r\n\r\n")),
    Refused("9112 7.1: a chunk without its end", chunks(b"5\r\nhello0\r\n\r\n")),
    Refused("9112 2.2: chunks that end in LF alone", chunks(b"5\nhello\n0\n\n")),
    Refused("9112 7.1.1: LF inside an extension", chunks(b"5;a\nb\r\nhello\r\n0\r\n\r\n" + EVIL)),
    Refused("9112 7.1.1: CR inside an extension", chunks(b"5;a\rb\r\nhello\r\n0\r\n\r\n")),
    Refused("9110 6.5.1: framing in a trailer", chunks(b"0\r\nContent-Length: 9\r\n\r\n")),
    Refused("9110 5.4: a huge trailer", chunks(b"0\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"), 431),
    Refused("9112 5.2: a folded field", request("X-A: 1\r\n 2")),
    Refused(
        "9112 5.2: a folded Transfer-Encoding",
        request("Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n", length=False),
    ),
    Refused("9112 2.2: whitespace before the first field", b"GET /x HTTP/1.1\r\n Host: r\r\n\r\n"),
    Refused("9112 2.2: lines that end in LF alone", request().replace(b"\r\n", b"\n")),
    Refused("9112 2.2: LF inside a value", request("X-A: 1\nX-B: 2")),
    Refused("9112 2.2: CR inside a value", request("X-A: 1\rX-B: 2")),
    Refused("9110 5.5: NUL inside a value", request("X-A: 1\x002")),
    Refused("9110 5.5: a control character inside a value", request("X-A: 1\x012")),
    Refused("9112 5.1: a space before the colon", request("X-A : 1")),
    Refused(
        "9112 5.1: a space before Transfer-Encoding's colon",
        request("Transfer-Encoding : chunked", body=b"0\r\n\r\n", length=False),
    ),
    Refused("9110 5.6.2: no name", request(": 1")),
    Refused("9112 5: no colon", request("X-A")),
    Refused("9110 5.6.2: a bracket in a name", request("X(A): 1")),
    Refused("9110 5.6.2: a name beyond ASCII", request("X-\xe9: 1")),
    Refused("9112 3.2: no Host", request(host="")),
    Refused("9112 3.2: two Hosts", request("Host: other")),
    Refused("9112 3.2: Host with a path", request(host="Host: a/b")),
    Refused("9112 3.2: Host with a user", request(host="Host: u@a")),
    Refused("9112 3.2: Host with a space", request(host="Host: a b")),
    Refused("9112 3.2: a port that is none", request(host="Host: a:b")),
    Refused("9112 3.2: a target with a fragment", bare("GET /x#f HTTP/1.1")),
    Refused("9112 3.2: a fragment behind a turn's path", request(first="POST /v1/chat/completions#x HTTP/1.1")),
    Refused("9110 4.2.4: a target with a user", bare("GET http://u:p@x.example/y HTTP/1.1")),
    Refused("9112 3.2.2: a scheme that is not HTTP", bare("GET ftp://x.example/y HTTP/1.1")),
    Refused("9112 3.2.4: an asterisk for GET", bare("GET * HTTP/1.1")),
    Refused("9112 3.2: a target with a space", bare("GET /a b HTTP/1.1")),
    Refused("9112 3.2: a target with a control character", bare("GET /a\x01b HTTP/1.1")),
    Refused("9112 3.2: a target beyond ASCII", bare("GET /caf\xe9 HTTP/1.1")),
    Refused("9112 3.2: a target that is no path", bare("GET \\x HTTP/1.1")),
    Refused("9110 9.1: an unknown method", bare("BREW /x HTTP/1.1")),
    Refused("9110 9.1: methods are capitals", bare("get /x HTTP/1.1")),
    Refused("9110 9.3.6: CONNECT", b"CONNECT x.example:443 HTTP/1.1\r\nHost: x.example:443\r\n\r\n" + EVIL, 501),
    Refused("9110 9.3.8: TRACE", bare("TRACE /x HTTP/1.1", "Cookie: secret"), 501),
    Refused("9110 15.6.6: HTTP/2 in HTTP/1's words", bare("GET /x HTTP/2.0"), 505),
    Refused("9112 2.3: HTTP/0.9", b"GET /x\r\n\r\n", 505),
    Refused("9112 2.3: HTTP/1.2", bare("GET /x HTTP/1.2")),
    Refused("9113 3.4: HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Refused("TLS to a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Refused("9110 10.1.1: Expect for something else", request("Expect: 200-ok"), 417),
    Refused("9110 5.4: a field of 70 KB", request("X-Big: " + "b" * 70_000), 431),
    Refused("9110 5.4: 300 fields", request(*(f"X-{n}: v" for n in range(300))), 431),
    Refused("9112 3: a target of 70 KB", bare("GET /" + "b" * 70_000 + " HTTP/1.1"), 431),
    Refused("9110 5.3: two Content-Types", request("Content-Type: a/b", "Content-Type: c/d")),
    Refused(
        "9110 7.8: WebSocket is refused, and what follows is not read",
        bare("GET /v1/realtime HTTP/1.1", "Connection: Upgrade", "Upgrade: websocket", WS, "Sec-WebSocket-Key: eA==")
        + EVIL,
        501,
    ),
    Refused(
        "9110 7.8: WebSocket with a body too",
        request("Connection: keep-alive, Upgrade", "Upgrade: WebSocket", WS) + EVIL,
        501,
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=[row.rule for row in REFUSED])
async def test_what_is_refused(row: Refused, edge: tuple[Roost, Replica]) -> None:
    """Nothing of the request is repeated, nothing behind it is read as another."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(row.sent)
        answer = await client.answer()
        assert answer.status == row.status
        assert _says_why(answer)
        assert answer.headers.get(b"connection") == b"close"
        assert answer.headers[b"server"] == b"roost"
        assert b"evil" not in answer.body
        client.writer.write_eof()
        assert await client.gone()
    assert seen_of(replica) == []


def _says_why(answer: Answer) -> bool:
    told = json.loads(answer.body)["error"]
    return bool(told["message"]) and answer.headers[b"x-roost-error"].decode() == told["code"]


async def test_a_refused_head_is_answered_in_the_dialect_of_its_path(edge: tuple[Roost, Replica]) -> None:
    roost, _ = edge
    async with Client.to(roost.port) as client:
        client.writer.write(request("Expect: cake", first="POST /v1/messages HTTP/1.1"))
        assert json.loads((await client.answer()).body)["type"] == "error"


# --- what takes more than one look -----------------------------------------------------------------------------------


async def test_nothing_behind_an_offer_of_another_protocol_is_read_as_a_request(edge: tuple[Roost, Replica]) -> None:
    """It might be that protocol's bytes: neither in the same packet nor in later ones (9110 7.8)."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(request("Connection: Upgrade", "Upgrade: h2c") + EVIL[:20])
        client.writer.write(EVIL[20:] + EVIL)
        assert (await client.answer()).status == 200
        assert await client.gone()
    assert [each.target for each in seen_of(replica)] == ["/v1/chat/completions"]


async def test_pipelined_requests_are_answered_in_their_order(edge: tuple[Roost, Replica]) -> None:
    """9112 9.3.2, with bodies of both framings between them."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(request() + chunks(SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n") + NEXT + request("X-N: 4"))
        assert [(await client.answer()).status for _ in range(4)] == [200] * 4
    assert [each.body for each in seen_of(replica)] == [BODY, BODY, b"", BODY]


async def test_a_request_byte_by_byte_is_the_same_request(edge: tuple[Roost, Replica]) -> None:
    """9112 2.2: however a message is cut into packets."""
    roost, replica = edge
    whole = chunks(b"3\r\n" + BODY[:3] + b"\r\n%x\r\n" % (len(BODY) - 3) + BODY[3:] + b"\r\n0\r\n\r\n", "X-A: 1")
    async with Client.to(roost.port) as client:
        for byte in whole:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
    assert seen_of(replica)[0].body == BODY


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 200), ("/readyz", 200), ("/v1/models/none", 404), ("/v1/chat/completions", 200)]
)
async def test_head_is_get_without_the_body(path: str, status: int, edge: tuple[Roost, Replica]) -> None:
    """9110 9.3.2: the length is what GET would have sent; the next answer begins at once."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(bare(f"GET {path} HTTP/1.1"))
        got = await client.answer()
        client.writer.write(bare(f"HEAD {path} HTTP/1.1") + NEXT)
        head = await client.answer(bodiless=True)
        assert (head.status, head.headers[b"content-length"]) == (status, b"%d" % len(got.body))
        assert (await client.answer()).body == b"{}"
    seen_of(replica)


async def test_options_with_no_hop_left_is_answered_here(edge: tuple[Roost, Replica]) -> None:
    """9110 7.6.2."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(bare("OPTIONS /v1/x HTTP/1.1", "Max-Forwards: 0"))
        assert (await client.answer(bodiless=True)).status == 204
    assert seen_of(replica) == []


async def test_expect_is_answered_when_the_body_is_wanted(edge: tuple[Roost, Replica]) -> None:
    """9110 10.1.1: 100 before the body, and none where a body that is too large is refused before it is sent."""
    roost, replica = edge
    async with Client.to(roost.port) as client:
        client.writer.write(request("Expect: 100-continue", f"Content-Length: {len(BODY)}", body=b"", length=False))
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert replica.seen == []
        client.writer.write(BODY)
        assert (await client.answer()).status == 200
    async with Client.to(roost.port) as client:
        client.writer.write(request("Expect: 100-continue", "Content-Length: 999999999", body=b"", length=False))
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (413, b"close")
        client.writer.write_eof()
        assert await client.gone()
    assert len(seen_of(replica)) == 1
