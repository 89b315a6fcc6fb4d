"""What passes, passes as it is."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.case import case as rule
from tests.conformance.case import check
from tests.conformance.dialects import DIALECTS, Dialect, ask, whole
from tests.conformance.replica import Seen, Visit
from tests.conformance.rig import Rig, Stage, new_mark

_TYPED = (
    "https://github.com/sgl-project/sglang/issues/22740",
    "https://github.com/sgl-project/sglang/issues/21571",
)
_UNKNOWN: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": True, "x": {"deep": [1, None, {"er": "…"}]}},
    "return_hidden_states": True,
    "rid": "a-rid",
    "priority": 7,
    "client_metadata": {"x-codex-turn-metadata": "{}"},
    "a_field_of_next_year": {"list": [], "object": {}, "null": None},
}


async def arrives(stage: Stage, dialect: Dialect, body: bytes, mark: bytes) -> Seen:
    """How this body reaches a replica."""
    answer = await stage.router.request("POST", dialect.path, body)
    replicas = stage.asked(mark)
    check(replicas, f"no replica was asked; the client got {answer.short}")
    return next(seen for seen in reversed(replicas[0].turns) if seen.mark == mark)


def _tool(dialect: Dialect, schema: dict[str, Any]) -> dict[str, Any]:
    """A function tool in this dialect."""
    match dialect:
        case Dialect.MESSAGES:
            return {"name": "f", "description": "d", "input_schema": schema}
        case Dialect.RESPONSES:
            return {"type": "function", "name": "f", "description": "d", "parameters": schema}
        case _:
            return {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}


def _spliced(dialect: Dialect, extra: str) -> tuple[bytes, bytes]:
    """A request with further fields as they are written, and its mark."""
    mark = new_mark()
    plain = ask(dialect, [f"Hello ☃ {mark}"], stream=False).decode()
    return (plain[:-1] + ", " + extra + "}").encode(), mark.encode()


@rule(
    "Fields that the router does not know reach the replica, nested ones too.",
    *_TYPED,
    "https://github.com/sgl-project/sglang/issues/22743",
    each=DIALECTS,
)
async def unknown_fields(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=False, **_UNKNOWN)
    got = json.loads((await arrives(stage, dialect, body, mark.encode())).body)
    lost = [name for name, value in _UNKNOWN.items() if got.get(name) != value]
    check(not lost, f"lost or changed on the way: {', '.join(lost)}")


@rule(
    "No setting that the client left to the engine is set on the way: a field that is added is null, false or empty.",
    *_TYPED,
    each=DIALECTS,
)
async def nothing_set(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=False)
    got = json.loads((await arrives(stage, dialect, body, mark.encode())).body)
    added = sorted(name for name, value in got.items() if value and name not in json.loads(body))
    check(not added, f"set on the way: {', '.join(added)}")


@rule(
    "Numbers in a tool's schema reach the replica as written, 1.0 and 2^53+1 too: they are part of the prompt.",
    *_TYPED,
    each=(Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES),
)
async def numbers(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    schema = {"type": "object", "properties": {"n": {"type": "number", "default": 1.0, "maximum": 9007199254740993}}}
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=False, tools=[_tool(dialect, schema)])
    got = (await arrives(stage, dialect, body, mark.encode())).body
    lost = [each for each in (b"9007199254740993", b"1.0") if each not in got]
    check(not lost, f"changed on the way: {lost}")


@rule(
    "The order of keys in tools and messages is kept: it is part of the prompt, and a changed prompt is a lost cache.",
    "https://github.com/atomantic/PortOS/issues/4777",
    each=(Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES),
)
async def key_order(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    schema = {"type": "object", "properties": {"zeta": {"type": "string"}, "alpha": {"type": "integer"}}}
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=False, tools=[_tool(dialect, schema)])
    got = json.loads((await arrives(stage, dialect, body, mark.encode())).body)
    seen = json.dumps(got["tools"])
    check(seen.index("zeta") < seen.index("alpha"), f"the order of a tool's properties was changed: {seen}")


@rule(
    "Bytes of a request that mean the same in JSON are not rewritten: white space, escapes, order, duplicate keys.",
    "Roost",
    each=DIALECTS,
)
async def request_body(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    body, mark = _spliced(dialect, '"z" : "\\u00e9\\ud83d\\ude00\\/" ,\n\t"a":1.0 , "a":2,"seed":9007199254740993')
    got = await arrives(stage, dialect, body, mark)
    check(got.body == body, f"the replica got {got.body[:160]!r}")


@rule(
    "A plain answer's bytes pass as they are.",
    *_TYPED,
    each=DIALECTS,
)
async def plain_answer(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    told = whole(dialect, "an-id", 3)[:-1] + b' , "x-unknown" : {"n":9007199254740993, "f":1.0,"u":"\\u2603"}}\n'

    async def tell(visit: Visit) -> None:
        await visit.answer(200, told)

    stage.script(tell)
    answer = (await stage.session(dialect).send(stream=False)).answer
    check(answer.status == 200, f"a plain turn was answered {answer.short}")
    check(answer.body == told, f"{len(told)} bytes were sent, others came: {answer.body[-160:]!r}")


@rule(
    "Path and query reach the replica as the client wrote them.",
    "https://github.com/sgl-project/sglang/pull/20566",
    each=(Dialect.CHAT, Dialect.MESSAGES),
)
async def query(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    target = f"{dialect.path}?beta=true&x=a%2Fb"
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=False)
    answer = await stage.router.request("POST", target, body)
    replicas = stage.asked(mark.encode())
    check(replicas, f"no replica was asked; the client got {answer.short}")
    check(replicas[0].turns[-1].target == target, f"{target} reached the replica as {replicas[0].turns[-1].target}")


@rule(
    "An odd but valid body is passed on: a router need not understand what the engine might.",
    "https://github.com/sgl-project/sglang/issues/8500",
    each=(Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES),
)
async def odd_tools(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    mark = new_mark()
    tools = [
        {"type": "local_shell"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "function", "function": {"name": "no_parameters"}, "name": "no_parameters"},
    ]
    body = ask(dialect, [f"Hello {mark}"], stream=False, tools=tools)
    answer = await stage.router.request("POST", dialect.path, body)
    check(stage.asked(mark.encode()), f"a router refused what the engine might accept: {answer.short}")
