"""Keys go where they belong, and nothing that clients say is written down."""

from __future__ import annotations

import asyncio
import secrets

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import connection
from tests.conformance.dialects import DIALECTS, Dialect, ask
from tests.conformance.replica import Seen
from tests.conformance.rig import Rig, Stage, new_mark

_KEYS = (
    "https://github.com/sgl-project/sglang/pull/27048",
    "https://github.com/sgl-project/sglang/issues/3031",
)


async def _sent(stage: Stage, dialect: Dialect, headers: dict[str, str], *, stream: bool = False) -> Seen:
    mark = new_mark()
    body = ask(dialect, [f"Hello {mark}"], stream=stream)
    answer = await stage.router.request("POST", dialect.path, body, headers)
    replicas = stage.asked(mark.encode())
    check(replicas, f"no replica was asked; the client got {answer.short}")
    return replicas[0].turns[-1]


@rule(
    "A client's Authorization reaches a replica that has no other key from the router, once and unchanged.",
    *_KEYS,
    each=DIALECTS,
)
async def authorization(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    for stream in (False, True):
        seen = await _sent(stage, dialect, {"Authorization": "Bearer sk-of-the-client"}, stream=stream)
        check(seen.header(b"authorization") == [b"Bearer sk-of-the-client"], f"{seen.header(b'authorization')} arrived")


@rule("A request without a key reaches the replica without one.", *_KEYS)
async def no_key(rig: Rig) -> None:
    stage = await rig.shared()
    seen = await _sent(stage, Dialect.CHAT, {})
    check(not seen.header(b"authorization"), f"{seen.header(b'authorization')} was added")


@rule("One client's key never comes with another client's request.", *_KEYS)
async def keys_do_not_mix(rig: Rig) -> None:
    stage = await rig.shared()

    async def one(number: int) -> None:
        for _ in range(4):
            seen = await _sent(stage, Dialect.CHAT, {"Authorization": f"Bearer sk-{number}"}, stream=True)
            check(seen.header(b"authorization") == [f"Bearer sk-{number}".encode()], "a key was mixed up")

    for number in range(6):
        await one(number)


@rule(
    "Neither keys nor prompts nor answers nor session ids are written to the log.",
    "Roost",
)
async def log_is_silent(rig: Rig) -> None:
    stage = await rig.stage(2)
    secret = {name: f"{name}{secrets.token_hex(12)}" for name in ("key", "prompt", "session", "query")}
    await stage.session(name="").turn()
    session = stage.session(name="", headers={"Authorization": f"Bearer {secret['key']}"})
    if rig.adapter.session_header:
        session.headers[rig.adapter.session_header] = secret["session"]
    session.said.append(f"{secret['prompt']} {new_mark()}")
    await session.turn()
    await session.turn(stream=False)
    for path in (f"/v1/nothing?q={secret['query']}", f"/{secret['query']}"):
        await stage.router.request("GET", path)
    await stage.replicas[0].stop()
    await session.send()
    await stage.replicas[1].stop()
    await session.send()
    await asyncio.sleep(0.5)
    log = stage.router.log
    written = [name for name in ("key", "prompt", "session") if secret[name] in log]
    check(not written, f"in the log: {', '.join(written)}")


@rule(
    "Neither keys nor prompts nor session ids are in the metrics.",
    "https://prometheus.io/docs/practices/naming/#labels",
    needs=[Can.METRICS],
)
async def metrics_are_silent(rig: Rig) -> None:
    stage = await rig.stage(2)
    secret = {name: f"{name}{secrets.token_hex(12)}" for name in ("key", "prompt", "session")}
    session = stage.session(name="", headers={"Authorization": f"Bearer {secret['key']}"})
    if rig.adapter.session_header:
        session.headers[rig.adapter.session_header] = secret["session"]
    session.said.append(f"{secret['prompt']} {new_mark()}")
    await session.turn()
    _, _, text = await stage.router.admin("GET", rig.adapter.metrics_path)
    check(text, "there are no metrics")
    written = [name for name, value in secret.items() if value in text]
    check(not written, f"in the metrics: {', '.join(written)}")


@rule(
    "What clients invent (paths, models, methods, headers) makes no new time series without bound.",
    "https://prometheus.io/docs/practices/naming/#labels",
    needs=[Can.METRICS],
)
async def labels_are_bounded(rig: Rig) -> None:
    stage = await rig.stage(1)

    async def series() -> int:
        _, _, text = await stage.router.admin("GET", rig.adapter.metrics_path)
        return sum(not line.startswith("#") for line in text.splitlines())

    async def invent(number: int) -> None:
        token = f"{number}{secrets.token_hex(4)}"
        await stage.router.request("GET", f"/v1/{token}")
        body = ask(Dialect.CHAT, [f"Hello {new_mark()}"], stream=False).replace(b'"m"', f'"{token}"'.encode(), 1)
        await stage.router.request("POST", Dialect.CHAT.path, body, {"user-agent": token, "x-tenant": token})
        await stage.router.request(f"M{token.upper()}"[:12], "/v1/models")

    for number in range(5):
        await invent(number)
    first = await series()
    for number in range(40):
        await invent(number)
    grown = await series() - first
    check(grown <= 40, f"40 invented names made {grown} new time series")


@rule(
    "A client's words cannot forge a line of the log.",
    "https://owasp.org/www-community/attacks/Log_Injection",
)
async def log_injection(rig: Rig) -> None:
    stage = await rig.stage(1)
    forged = "forged-" + secrets.token_hex(6)
    headers = {"user-agent": f"x\\n{forged}"}
    await stage.router.request("GET", f"/v1/a%0A{forged}%0Db", None, headers)
    session = stage.session(name="", headers=headers)
    if rig.adapter.session_header:
        session.headers[rig.adapter.session_header] = f"s%0A{forged}"
    await session.send()
    async with connection(stage.router.port) as flow:
        await flow.raw(f"GET /v1/x\n{forged} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
        await asyncio.sleep(0.5)
    lines = stage.router.log.splitlines()
    check(not any(line.startswith(forged) for line in lines), "a line of the log begins with a client's words")


@rule(
    "A head that never ends is given up, or held without harm to others, and one of a megabyte is refused.",
    "https://owasp.org/www-community/attacks/Slowloris",
)
async def endless_head(rig: Rig) -> None:
    stage = await rig.shared()
    async with connection(stage.router.port) as slow, connection(stage.router.port) as large:
        await slow.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-Slow: ")
        try:
            await large.raw(
                b"GET /v1/models HTTP/1.1\r\nHost: r\r\n"
                + b"".join(b"X-%d: %b\r\n" % (i, b"a" * 1000) for i in range(1000))
            )
            async with asyncio.timeout(5):
                got = await large.reader.read(200)
        except TimeoutError:
            got = b""
            check(None, "a megabyte of headers was taken")
        except ConnectionError:
            got = b""
        check(not got or got[9:10] == b"4", f"a megabyte of headers was answered {got[:100]!r}")
        await stage.session().turn()
