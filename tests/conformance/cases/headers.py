"""What HTTP asks of whoever stands between a client and a server."""

from __future__ import annotations

import asyncio

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.client import Answer, Given, connection
from tests.conformance.dialects import Dialect, ask, whole
from tests.conformance.replica import Seen, Visit, head
from tests.conformance.rig import Rig, Stage, new_mark

_PATH = Dialect.CHAT.path
_HOP = "https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1"
_COPIED = (
    "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/2996",
    "https://github.com/vllm-project/production-stack/issues/836",
)
_SMUGGLING = "https://www.rfc-editor.org/rfc/rfc9112#section-6.1"


async def arrives(stage: Stage, headers: Given) -> tuple[Answer, Seen | None]:
    """A plain chat turn with these headers: the answer, and how it reached a replica."""
    mark = new_mark()
    body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
    async with connection(stage.router.port) as flow:
        await flow.send("POST", _PATH, body, headers)
        await flow.head()
        answer = await flow.rest()
    replicas = stage.asked(mark.encode())
    return answer, replicas[0].turns[-1] if replicas else None


async def raw(stage: Stage, data: bytes, wait_s: float = 5.0) -> bytes:
    """Everything that comes back for these bytes until the router closes, or is silent for that time."""
    got = b""
    async with connection(stage.router.port) as flow:
        await flow.raw(data)
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    piece = await flow.reader.read(65_536)
            except (TimeoutError, ConnectionError):
                return got
            if not piece:
                return got
            got += piece
            wait_s = 0.5


@rule("Headers that nobody knows reach the replica.", "https://www.rfc-editor.org/rfc/rfc9110#section-5.1")
async def unknown_pass(rig: Rig) -> None:
    stage = await rig.shared()
    given = {
        "X-Unheard-Of": "a, b",
        "anthropic-beta": "x-2026",
        "x-stainless-retry-count": "0",
        "traceparent": "00-1-2-01",
    }
    _, seen = await arrives(stage, given)
    assert seen is not None
    lost = [name for name, value in given.items() if seen.header(name.encode()) != [value.encode()]]
    check(not lost, f"lost on the way: {', '.join(lost)}")


@rule("Hop-by-hop headers, and those that Connection names, end at the router.", _HOP, *_COPIED)
async def hop_by_hop_request(rig: Rig) -> None:
    stage = await rig.shared()
    given = {
        "Connection": "keep-alive, X-Mine",
        "X-Mine": "1",
        "Keep-Alive": "timeout=77",
        "Proxy-Authorization": "Basic c2VjcmV0",
        "Proxy-Connection": "keep-alive",
        "TE": "trailers",
    }
    _, seen = await arrives(stage, given)
    assert seen is not None
    names = ("x-mine", "keep-alive", "proxy-connection", "proxy-authorization", "te")
    passed = [name for name in names if seen.header(name.encode())]
    check(not passed, f"passed on to the replica: {', '.join(passed)}")


@rule("A response's hop-by-hop headers end at the router, and its length is told once and rightly.", _HOP, *_COPIED)
async def hop_by_hop_response(rig: Rig) -> None:
    stage = await rig.shared()
    told = whole(Dialect.CHAT, "an-id", 3)

    async def tell(visit: Visit) -> None:
        given = [("Connection", "X-Mine"), ("X-Mine", "1"), ("Keep-Alive", "timeout=77"), ("X-Kept", "1")]
        await visit.answer(200, told, given)

    stage.script(tell)
    answer, _ = await arrives(stage, {})
    check(answer.body == told and answer.complete, f"the answer came as {answer.short}")
    check(not answer.header("x-mine") and not answer.header("keep-alive"), f"passed on to the client: {answer.headers}")
    lengths = [value for name, value in answer.headers if name == "content-length"]
    check(len(lengths) <= 1, f"Content-Length came {len(lengths)} times")
    check(not (lengths and answer.header("transfer-encoding")), "Content-Length and Transfer-Encoding came together")


@rule(
    "Headers of a response reach the client, repeated ones all.", "https://www.rfc-editor.org/rfc/rfc9110#section-5.3"
)
async def response_headers(rig: Rig) -> None:
    stage = await rig.shared()

    async def tell(visit: Visit) -> None:
        given = [
            ("X-Mine", "a"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("x-request-id", "q"),
            ("Retry-After", "7"),
        ]
        await visit.answer(200, whole(Dialect.CHAT, "an-id", 3), given)

    stage.script(tell)
    answer, _ = await arrives(stage, {})
    cookies = [value for name, value in answer.headers if name == "set-cookie"]
    check(answer.header("x-mine") == "a", "a header of the response was lost")
    check(cookies == ["a=1", "b=2"], f"two Set-Cookie headers came as {cookies}")
    check(answer.header("retry-after") == "7", "Retry-After was lost")


@rule("A response carries one Server and one Date header.", *_COPIED)
async def no_double_server(rig: Rig) -> None:
    stage = await rig.shared()

    async def tell(visit: Visit) -> None:
        given = [("Server", "uvicorn"), ("Date", "Sun, 29 Nov 2026 12:00:00 GMT")]
        await visit.answer(200, whole(Dialect.CHAT, "an-id", 3), given)

    stage.script(tell)
    answer, _ = await arrives(stage, {})
    for name in ("server", "date", "content-type", "content-length"):
        count = sum(key == name for key, _ in answer.headers)
        check(count <= 1, f"{name} came {count} times")


@rule("The replica gets exactly one Content-Length, which is right, or chunks.", *_COPIED)
async def one_length(rig: Rig) -> None:
    stage = await rig.shared()
    _, seen = await arrives(stage, {})
    assert seen is not None
    lengths = seen.header(b"content-length")
    codings = seen.header(b"transfer-encoding")
    check(len(lengths) + len(codings) == 1, f"the replica got lengths {lengths} and codings {codings}")


@rule("A request body that comes in chunks arrives whole.", "https://www.rfc-editor.org/rfc/rfc9112#section-7.1")
async def chunked_request(rig: Rig) -> None:
    stage = await rig.shared()
    mark = new_mark()
    body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
    framed = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 9]), body[i : i + 9]) for i in range(0, len(body), 9))
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = await raw(stage, start.encode() + framed + b"0\r\n\r\n")
    replicas = stage.asked(mark.encode())
    check(replicas and b" 200 " in got[:20], f"a request in chunks was answered {got[:200]!r}")


@rule(
    "`Expect: 100-continue` is answered, so that the client sends its body.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-10.1.1",
)
async def expect(rig: Rig) -> None:
    stage = await rig.shared()
    body = ask(Dialect.CHAT, [f"Hello {new_mark()}"], stream=False)
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    async with connection(stage.router.port) as flow:
        await flow.raw(f"{start}Expect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(5):
            first = await flow.reader.readuntil(b"\r\n\r\n")
        check(b" 100 " in first.splitlines()[0], f"Expect was answered {first[:100]!r}")
        await flow.raw(body)
        await flow.head()
        answer = await flow.rest()
    check(answer.status == 200, f"the request was answered {answer.short}")


@rule(
    "16 KB of headers pass, as Codex sends them from many workspaces.",
    "Roost",
)
async def long_headers(rig: Rig) -> None:
    stage = await rig.shared()
    given = {f"x-codex-turn-metadata-{number}": "m" * 1500 for number in range(10)}
    answer, seen = await arrives(stage, given)
    check(answer.status == 200, f"15 KB of headers were answered {answer.short}")
    assert seen is not None
    check(len(seen.header(b"x-codex-turn-metadata-9")) == 1, "a long header was lost")


@rule(
    "A client's Host is not the replica's: the replica sees its own address, or the client's name unchanged.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-3.2",
)
async def host(rig: Rig) -> None:
    stage = await rig.shared()
    _, seen = await arrives(stage, {"Host": "client.example"})
    assert seen is not None
    hosts = seen.header(b"host")
    check(len(hosts) == 1, f"the replica got {len(hosts)} Host headers")
    own = {f"127.0.0.1:{replica.port}".encode() for replica in stage.replicas}
    check(hosts[0] in own | {b"client.example"}, f"the replica got Host {hosts[0]!r}")


@rule("A request with both Content-Length and Transfer-Encoding is not passed on as two.", _SMUGGLING)
async def both_lengths(rig: Rig) -> None:
    stage = await rig.shared()
    hidden = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}"
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    both = f"Content-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = await raw(stage, (start + both).encode() + b"0\r\n\r\n" + hidden)
    check(
        not any(seen.path == "/v1/completions" for each in stage.replicas for seen in each.seen),
        "a hidden request passed",
    )
    check(got.count(b"HTTP/1.1") <= 1, f"one request was answered twice: {got[:300]!r}")


@rule("A request with two different Content-Lengths is refused.", "https://www.rfc-editor.org/rfc/rfc9112#section-6.3")
async def two_lengths(rig: Rig) -> None:
    stage = await rig.shared()
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    got = await raw(stage, f"{start}Content-Length: 2\r\nContent-Length: 5\r\n\r\n{{}}abc".encode())
    check(b" 400 " in got[:20] or not got, f"it was answered {got[:200]!r}")
    check(not any(each.seen for each in stage.replicas), "it reached a replica")


@rule("A Transfer-Encoding that is not exactly chunked is refused.", _SMUGGLING)
async def odd_coding(rig: Rig) -> None:
    stage = await rig.shared()
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    got = await raw(stage, f"{start}Transfer-Encoding: xchunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode(), 3.0)
    check(not got or got[9:10] in b"45", f"it was answered {got[:200]!r}")
    check(not any(each.seen for each in stage.replicas), "it reached a replica")


@rule(
    "A header line with white space before its colon is refused, not read two ways.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-5.1",
)
async def space_before_colon(rig: Rig) -> None:
    stage = await rig.shared()
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    got = await raw(stage, f"{start}Content-Length : 2\r\n\r\n{{}}".encode(), 3.0)
    check(not got or b" 400 " in got[:20], f"it was answered {got[:200]!r}")


@rule(
    "A line feed in a header's value never becomes a header of its own at the replica.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-5.5",
)
async def injection(rig: Rig) -> None:
    stage = await rig.shared()
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    await raw(stage, f"{start}X-Mine: a\rX-Injected: b\r\n\r\n{{}}".encode(), 2.0)
    await raw(stage, start.encode() + b"X-Mine: a\x00b\r\n\r\n{}", 2.0)
    injected = [seen for each in stage.replicas for seen in each.seen if seen.header(b"x-injected")]
    check(not injected, "a header was injected")


@rule("Several requests on one connection are answered in order.", "https://www.rfc-editor.org/rfc/rfc9112#section-9.3")
async def keep_alive(rig: Rig) -> None:
    stage = await rig.shared()
    async with connection(stage.router.port) as flow:
        for number in range(5):
            body = ask(Dialect.CHAT, [f"Hello {new_mark()}"], stream=number % 2 == 0)
            await flow.send("POST", _PATH, body)
            await flow.head()
            answer = await flow.rest()
            check(answer.status == 200 and answer.complete, f"request {number} was answered {answer.short}")


@rule(
    "A response without a length, which ends by its connection's end, passes whole.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-6.3",
)
async def until_close(rig: Rig) -> None:
    stage = await rig.shared()
    told = whole(Dialect.CHAT, "an-id", 3)

    async def tell(visit: Visit) -> None:
        await visit.send(head(200, [("Content-Type", "application/json"), ("Connection", "close")]) + told)
        visit.close()

    stage.script(tell)
    answer, _ = await arrives(stage, {})
    check(answer.body == told and answer.complete, f"it came as {answer.short}")


@rule(
    "A response's head may come in many pieces, and with a 100 before it.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-15.2",
)
async def slow_head(rig: Rig) -> None:
    stage = await rig.shared()
    told = whole(Dialect.CHAT, "an-id", 3)

    async def tell(visit: Visit) -> None:
        await visit.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        whole_head = head(200, [("Content-Type", "application/json"), ("Content-Length", str(len(told)))])
        for start in range(0, len(whole_head), 11):
            await visit.send(whole_head[start : start + 11])
            await asyncio.sleep(0.01)
        await visit.send(told)

    stage.script(tell)
    answer, _ = await arrives(stage, {})
    check(answer.status == 200 and answer.body == told, f"it came as {answer.short}")
