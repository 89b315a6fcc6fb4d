"""Request lines: methods, paths and queries, and what is found by an id in them."""

from __future__ import annotations

import asyncio
import json

from tests.conformance.case import Can, check, skip
from tests.conformance.case import case as rule
from tests.conformance.client import Answer, connection
from tests.conformance.dialects import Dialect, ask
from tests.conformance.replica import Replica, Seen, Visit
from tests.conformance.rig import Rig, Stage, new_mark

_HOLDER = ("https://github.com/volcano-sh/kthena/issues/1732",)
_AS_WRITTEN = (
    "https://github.com/sgl-project/sglang/pull/20566",
    "https://www.rfc-editor.org/rfc/rfc3986#section-6.2.2",
)
_QUERIES = (
    "a=%2Fb%2f&c=x%20y",
    "a=x+y&b=%2B",
    "q=%C3%A9%e2%98%83",
    "a=1&a=2&a=1",
    "flag&=v&k=&&",
    "a[]=1&b=c;d=e&f=g:h@i/j?k",
    "beta=true&x='\"<>|{}`^".replace('"', "%22").replace("<", "%3C").replace(">", "%3E"),
)


async def line(stage: Stage, first: str, body: bytes = b"", wait_s: float = 10.0) -> Answer:
    """The answer to a request line as it is written here; a bodiless 200 counts as complete."""
    async with connection(stage.router.port) as flow, asyncio.timeout(wait_s):
        framed = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        await flow.raw(f"{first} HTTP/1.1\r\nHost: router.example\r\n{framed}\r\n".encode("latin-1") + body)
        await flow.head()
        return await flow.rest(bodiless=first.startswith("HEAD"))


def reached(stage: Stage) -> list[tuple[Replica, Seen]]:
    """All that reached any replica."""
    return [(replica, seen) for replica in stage.replicas for seen in replica.seen]


@rule("A query reaches the replica byte for byte: escapes, plus signs, repeated, empty and odd keys.", *_AS_WRITTEN)
async def queries(rig: Rig) -> None:
    stage = await rig.shared()
    for query in _QUERIES:
        mark = new_mark()
        target = f"{Dialect.CHAT.path}?{query}"
        answer = await line(stage, f"POST {target}", ask(Dialect.CHAT, [f"Hello {mark}"], stream=False))
        replicas = stage.asked(mark.encode())
        check(replicas, f"?{query} reached no replica; the client got {answer.short}")
        check(replicas[0].turns[-1].target == target, f"?{query} reached the replica as {replicas[0].turns[-1].target}")


@rule(
    "A path that a router does not know is refused or passed as it is written: dots and escapes lead nowhere else.",
    "Roost",
)
async def paths(rig: Rig) -> None:
    stage = await rig.shared()
    for path in (
        "/v1/a/../b",
        "/v1/a/%2e%2e/b",
        "/v1/a%2Fb",
        "/v1/./a",
        "//v1//a",
        "/v1/a.b..c",
        "/v1/%C3%A9",
        "/v1/a;p=1/b",
        "/v1/chat/completions/",
        "/v1/chat/../../admin/replicas",
        "/%2e%2e/%2e%2e/etc/passwd",
    ):
        for replica in stage.replicas:
            replica.seen.clear()
        answer = await line(stage, f"GET {path}")
        targets = [seen.target for _, seen in reached(stage)]
        refused = 300 <= answer.status < 500 or answer.status == 501
        check(targets == [path] or (not targets and refused), f"{path} came as {targets}, answered {answer.short}")


@rule(
    "A request line of 8,000 bytes is served, or told that it is too long; one of a megabyte is told, or cut off.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-3",
)
async def long_line(rig: Rig) -> None:
    stage = await rig.shared()
    mark = new_mark()
    target = f"{Dialect.CHAT.path}?x={'y' * 7900}"
    answer = await line(stage, f"POST {target}", ask(Dialect.CHAT, [f"Hello {mark}"], stream=False))
    check(answer.status in (200, 414, 431), f"8,000 bytes were answered {answer.short}")
    check(answer.status != 200 or stage.asked(mark.encode()), "a turn was answered and no replica was asked")
    try:
        answer = await line(stage, f"GET /v1/models?x={'y' * (1 << 20)}")
    except (ConnectionError, asyncio.IncompleteReadError):
        return  # cut off
    check(400 <= answer.status < 500, f"a megabyte was answered {answer.short}")


@rule(
    "`OPTIONS *` is about the router itself: it is answered, not by a 5xx, and not by a hang.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-9.3.7",
)
async def options_star(rig: Rig) -> None:
    stage = await rig.shared()
    answer = await line(stage, "OPTIONS *")
    check(answer.status < 500 or answer.status == 501, f"it was answered {answer.short}")


@rule(
    "Methods that nobody knows are refused or passed on, by no 500; CONNECT opens no tunnel.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-9.1",
)
async def unknown_methods(rig: Rig) -> None:
    stage = await rig.shared()
    for first in (f"BREW {Dialect.CHAT.path}", "PROPFIND /v1/models", "M-SEARCH /", "PATCH /v1/models"):
        answer = await line(stage, first)
        passed = any(seen.method == first.split()[0] for _, seen in reached(stage))
        refused = 400 <= answer.status < 500 or answer.status == 501
        check(passed or refused, f"{first} was answered {answer.short}")
    port = stage.replicas[0].port
    try:
        answer = await line(stage, f"CONNECT 127.0.0.1:{port}")
    except (ConnectionError, asyncio.IncompleteReadError):
        return  # cut off
    check(answer.status >= 400, f"CONNECT was answered {answer.short}")


@rule(
    "A target in absolute form, as clients send it to a proxy, is served as its path.",
    "https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2",
)
async def absolute_form(rig: Rig) -> None:
    stage = await rig.shared()
    mark = new_mark()
    body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
    answer = await line(stage, f"POST http://router.example{Dialect.CHAT.path}", body)
    check(answer.status == 200, f"it was answered {answer.short}")
    targets = [seen.target for _, seen in reached(stage) if seen.mark == mark.encode()]
    check(targets == [Dialect.CHAT.path], f"it reached replicas as {targets}")


@rule(
    "A stored response is asked for, cancelled and deleted at the replica that has it, whoever asks.",
    *_HOLDER,
    "https://github.com/bytedance/deer-flow/pull/4064",
)
async def stored_responses(rig: Rig) -> None:
    if Dialect.RESPONSES not in rig.target.dialects:
        skip("it does not serve /v1/responses")
    stage = await rig.stage(3)

    async def keep(visit: Visit) -> None:
        held = f"resp_{visit.replica.port}_" in visit.seen.target
        await visit.reply() if visit.seen.dialect or held else await visit.answer(404, b'{"error":"not found"}')

    stage.script(keep)
    for number, session in enumerate(stage.sessions(9, Dialect.RESPONSES)):
        turn = await session.turn(stream=number % 2 == 0)
        made = _id(turn.answer)
        for method, path in (
            ("GET", f"/v1/responses/{made}"),
            ("GET", f"/v1/responses/{made}?stream=true&starting_after=3"),
            ("POST", f"/v1/responses/{made}/cancel"),
            ("DELETE", f"/v1/responses/{made}"),
        ):
            answer = await line(stage, f"{method} {path}", b"{}" if method == "POST" else b"")
            asked = any(made in seen.target and seen.method == method for _, seen in reached(stage))
            if not asked and answer.status in (404, 405, 501):
                if method == "GET":
                    skip(f"it does not serve {method} /v1/responses/{{id}}: {answer.status}")
                continue
            check(answer.status == 200, f"{method} {path} was answered {answer.short}")


@rule(
    "A turn that continues a stored response goes to the replica that has it, without any session header.",
    *_HOLDER,
    needs=[Can.KEYLESS],
)
async def continued_responses(rig: Rig) -> None:
    if Dialect.RESPONSES not in rig.target.dialects:
        skip("it does not serve /v1/responses")
    stage = await rig.stage(3)
    for number in range(6):
        opened = stage.session(Dialect.RESPONSES, name="", system=f"You are agent {number}.", size_bytes=2000)
        turn = await opened.turn(stream=number % 2 == 0)
        home = turn.replica
        for step in range(3):
            mark = new_mark()
            more = {"previous_response_id": _id(turn.answer)}
            body = ask(Dialect.RESPONSES, [f"go on {mark}"], stream=step % 2 == 0, system=f"{mark}", **more)
            answer = await stage.router.request("POST", Dialect.RESPONSES.path, body)
            check(answer.status == 200, f"a turn that continues a response was answered {answer.short}")
            check(stage.asked(mark.encode()) == (home,), "a turn that continues a response did not go to its replica")
            turn = type(turn)(answer, (home,))


def _id(answer: Answer) -> str:
    """The id of the response that this is, streamed or not."""
    start = answer.body.index(b'"id":') + 5
    found: str = json.JSONDecoder().raw_decode(answer.body[start:].decode("utf-8", "ignore").lstrip())[0]
    return found


@rule(
    "A model's own path tells it, or is no path here; one of a model that nobody serves is answered 404.",
    "Roost",
)
async def model_by_name(rig: Rig) -> None:
    stage = await rig.shared()

    async def tell(visit: Visit) -> None:
        known = visit.seen.path == "/v1/models/m"
        await visit.answer(200 if known else 404, b'{"id":"m","object":"model"}' if known else b'{"error":"no such"}')

    stage.script(tell)
    answer = await line(stage, "GET /v1/models/m")
    check(answer.status in (200, 404, 405, 501), f"the model that is served was answered {answer.short}")
    answer = await line(stage, "GET /v1/models/no-such")
    check(answer.status in (404, 405, 501), f"a model that is not served was answered {answer.short}")
