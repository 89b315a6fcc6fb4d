"""Requests that are odd and yet allowed, and session ids that are odder than one thinks."""

from __future__ import annotations

import asyncio
import json

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import connection
from tests.conformance.dialects import MODEL, Dialect, ask
from tests.conformance.rig import Rig, Session, Stage, homes, new_mark, spread

_PATH = Dialect.CHAT.path
_IDS = ("https://github.com/vllm-project/router/pull/235",)
_CHUNKS = "https://www.rfc-editor.org/rfc/rfc9112#section-7.1"


def _chunked(body: bytes, more: bytes = b"", trailers: bytes = b"") -> bytes:
    """A chat request in chunks of 50 bytes, each with that extension, with those trailers."""
    start = f"POST {_PATH} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
    framed = b"".join(b"0%X%b\r\n%b\r\n" % (len(piece), more, piece) for piece in pieces)
    return start.encode() + framed + b"0\r\n" + trailers + b"\r\n"


def said(body: bytes) -> str:
    """What the user said last, whatever else a router made of the request."""
    found: str = json.loads(body)["messages"][-1]["content"]
    return found


@rule(
    "A request in chunks may have extensions, sizes in capitals and trailers, and the next one on its connection is "
    "read from where it ended.",
    _CHUNKS,
)
async def chunk_forms(rig: Rig) -> None:
    stage = await rig.shared()
    forms = ((b"", b""), (b";a=b", b""), (b"", b"X-Checksum: 1\r\n"), (b';a="b;c"', b"X-A: 1\r\nX-B: 2\r\n"))
    for more, trailers in forms:
        async with connection(stage.router.port) as flow:
            for framed in (_chunked, lambda body, *_: _chunked(body)):
                mark = new_mark()
                body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
                try:
                    await flow.raw(framed(body, more, trailers))
                    await flow.head()
                except (asyncio.IncompleteReadError, ConnectionError):
                    check(framed is not _chunked, f"chunks with {more!r} and {trailers!r} were not answered")
                    break  # whoever ends a connection after a response may
                answer = await flow.rest()
                seen = f"a request in chunks with {more!r} and {trailers!r} was answered {answer.short}"
                check(answer.status == 200, seen)
                replicas = stage.asked(mark.encode())
                check(replicas and said(replicas[0].turns[-1].body) == said(body), f"{seen}, not passed whole")


@rule("A trailer is no header: what decides about a request cannot be sent after it.", f"{_CHUNKS}.2")
async def trailer_is_no_header(rig: Rig) -> None:
    stage = await rig.shared()
    mark = new_mark()
    body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
    async with connection(stage.router.port) as flow:
        await flow.raw(_chunked(body, trailers=b"Authorization: Bearer sk-late\r\nContent-Length: 3\r\n"))
        await flow.head()
        await flow.rest()
    for replica in stage.asked(mark.encode()):
        seen = replica.turns[-1]
        check(not seen.header(b"authorization"), "a trailer became the replica's Authorization")
        check(said(seen.body) == said(body), "a trailer changed the body's length")


@rule(
    "JSON that parsers trip over is passed as it is, or refused by a 400 of whoever reads it: no 5xx and no hang.",
    "https://www.rfc-editor.org/rfc/rfc8259#section-8",
)
async def odd_json(rig: Rig) -> None:
    stage = await rig.shared()
    forms = {
        "a byte order mark": "\ufeff{}".encode(),
        "half of a surrogate pair": rb'{"x":"\ud83d"}',
        "an escaped zero": rb'{"x":"\u0000"}',
        "a number beyond doubles": b'{"x":1e999,"y":-0,"z":1E400}',
        "a number of 400 digits": b'{"x":' + b"7" * 400 + b"}",
        "300 levels": b'{"x":' + b"[" * 300 + b"]" * 300 + b"}",
        "20,000 levels": b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "NaN": b'{"x":NaN}',
        "bytes that are no UTF-8": b'{"x":"\xff\xfe"}',
        "a name that comes twice": b'{"model":"m","model":"m"}',
        "white space around": b'\r\n\t {"x":1} \n\n',
        "10,000 names": b"{" + b",".join(b'"k%d":0' % number for number in range(10_000)) + b"}",
    }
    for name, extra in forms.items():
        mark = new_mark()
        plain = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
        at = extra.index(b"{") + 1
        inner = extra[at:].lstrip()
        body = extra[:at] + plain[1:-1] + (b"" if inner.startswith(b"}") else b",") + extra[at:]
        answer = await stage.router.request("POST", _PATH, body)
        asked = stage.asked(mark.encode())
        check(answer.status == 200 or 400 <= answer.status < 500, f"{name} was answered {answer.short}")
        check(asked or answer.status != 200, f"{name} was answered 200 by nobody")
    await stage.session().turn()


@rule(
    "Content types of a request pass, and none is needed: a JSON body without one, or with a charset, is served.",
    "Roost",
)
async def content_types(rig: Rig) -> None:
    stage = await rig.shared()
    for kind in ("application/json; charset=utf-8", "application/json;charset=UTF-8", "Application/JSON"):
        mark = new_mark()
        body = ask(Dialect.CHAT, [f"Hello {mark}"], stream=False)
        answer = await stage.router.request("POST", _PATH, body, {"Content-Type": kind})
        check(answer.status == 200, f"Content-Type: {kind} was answered {answer.short}")
        kinds = stage.asked(mark.encode())[0].turns[-1].header(b"content-type")
        check(len(kinds) == 1, f"the replica got {len(kinds)} content types")


async def _are_spread(stage: Stage, sessions: list[Session], what: str) -> None:
    """Sessions that are not one are not all at one replica, and each stays."""
    first = [(await session.turn()).replica for session in sessions]
    check(
        len({replica.port for replica in first}) > 1,
        f"{len(sessions)} sessions {what} went all to one of {len(stage.replicas)} replicas",
    )
    for session, home in zip(sessions, first, strict=True):
        check((await session.turn()).replica is home, f"a session {what} did not stay ({spread(stage.replicas)})")


@rule(
    "A session id is told apart to its last character, one of two hundred too.",
    *_IDS,
    needs=[Can.SESSIONS],
)
async def long_ids(rig: Rig) -> None:
    stage = await rig.shared(4)
    start = f"{new_mark()}-{'x' * 200}"
    sessions = [stage.session(name=f"{start}{number:02}", system=f"Agent {number}.") for number in range(16)]
    await _are_spread(stage, sessions, "whose ids differ at their end")


@rule(
    "A session id may be any text that a header can carry: spaces, quotes, commas, escapes, JSON, Latin letters.",
    *_IDS,
    "https://www.rfc-editor.org/rfc/rfc9110#section-5.5",
    needs=[Can.SESSIONS],
)
async def odd_ids(rig: Rig) -> None:
    stage = await rig.shared(4)
    forms = ("a b", 'a"b', "a,b", "a;b=c", "a\\u00e9", '{"id": "a"}', "user:1/2?3#4", "é", "%00", "a" * 250, "-", "0")
    for form in forms:
        session = stage.session(name=f"{form}{new_mark()}" if len(form) > 1 else form, system=f"Agent {form}.")
        found = homes([await session.turn() for _ in range(4)])
        check(len(found) == 1, f"4 turns of the session {form[:20]!r} went to {len(found)} replicas")


@rule(
    "What a conversation says is no session id: fields of that name in messages, tools and tool calls name nothing.",
    *_IDS,
    needs=[Can.SESSIONS],
)
async def words_name_nothing(rig: Rig) -> None:
    stage = await rig.shared(4)
    inner = {"session_id": "one-for-all", "user": "u", "metadata": {"session_id": "one-for-all", "user_id": "u"}}
    schema = {"type": "object", "properties": {"session_id": {"type": "string", "default": "one-for-all"}}}
    more = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    sessions = stage.sessions(16, more=more)
    for number, session in enumerate(sessions):
        session.said.append(f"Agent {number}: call {json.dumps(inner)} {json.dumps(json.dumps(inner))}")
    await _are_spread(stage, sessions, "whose messages hold the same session_id")


@rule(
    "A session header that is empty or blank names no session: such conversations are not all one.",
    "Roost",
    needs=[Can.SESSIONS, Can.KEYLESS],
)
async def blank_ids(rig: Rig) -> None:
    stage = await rig.stage(4)
    blank = {stage.adapter.session_header: " "}
    ports = set()
    for number in range(16):
        text = f"You are agent {number} of your own kind. " * 40
        session = stage.session(name="", system=text, size_bytes=2000, headers=blank)
        ports.add((await session.turn()).replica.port)
    check(len(ports) > 1, "16 conversations with a blank session header went all to one of 4 replicas")


@rule(
    "A body's model may stand anywhere in it, and be written with escapes: it names the same.",
    "https://www.rfc-editor.org/rfc/rfc8259#section-8.3",
)
async def model_with_escapes(rig: Rig) -> None:
    stage = await rig.shared()
    for written in (f'"\\u{ord(MODEL):04x}"', f'"{MODEL}"'):
        for last in (True, False):
            mark = new_mark()
            rest = f'"messages":[{{"role":"user","content":"Hello {mark}"}}],"max_tokens":16,"stream":false'
            fields = (rest, f'"model":{written}') if last else (f'"model":{written}', rest)
            answer = await stage.router.request("POST", _PATH, ("{" + ",".join(fields) + "}").encode())
            check(answer.status == 200, f'"model":{written} was answered {answer.short}')
            check(len(stage.asked(mark.encode())) == 1, f'"model":{written} reached no replica')
