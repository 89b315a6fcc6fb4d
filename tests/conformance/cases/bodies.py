"""Large bodies."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import connection
from tests.conformance.dialects import MODEL, Dialect
from tests.conformance.replica import Visit
from tests.conformance.rig import Rig, Stage, new_mark

_BIG = (
    "https://github.com/kubernetes-sigs/gateway-api-inference-extension/issues/854",
    "https://github.com/sgl-project/sglang/issues/38735",
)
_MB = 1 << 20


async def _passes(stage: Stage, size_bytes: int) -> None:
    """A request of this size, which must reach one replica whole and be answered."""
    mark = new_mark()
    image = "iVBORw0KGgo" * (size_bytes // 11)
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": f"What is this? {mark}"},
    ]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 16, "stream": False}
    body = json.dumps(asked).encode()
    answer = await stage.router.request("POST", Dialect.CHAT.path, body)
    check(answer.status == 200, f"{size_bytes >> 20} MB were answered {answer.short}")
    replicas = stage.asked(mark.encode())
    check(len(replicas) == 1, f"{len(replicas)} replicas were asked")
    seen = replicas[0].turns[-1]
    found = seen.body if len(seen.body) == len(body) else seen.body.replace(b" ", b"")
    whole = image.encode() in found
    check(
        whole or sha256(found).digest() == sha256(body).digest(),
        f"{len(body)} bytes arrived as {len(seen.body)} others",
    )


@rule("A body of 1 MB arrives whole.", *_BIG)
async def one_mb(rig: Rig) -> None:
    await _passes(await rig.shared(), _MB)


@rule("A body of 8 MB arrives whole.", *_BIG)
async def eight_mb(rig: Rig) -> None:
    await _passes(await rig.shared(), 8 * _MB)


@rule("A body of 40 MB arrives whole.", *_BIG, limit_s=60)
async def forty_mb(rig: Rig) -> None:
    await _passes(await rig.shared(), 40 * _MB)


@rule("A body of 100 MB arrives whole.", *_BIG, limit_s=90)
async def hundred_mb(rig: Rig) -> None:
    await _passes(await rig.stage(1), 100 * _MB)


@rule("Sixteen bodies of 4 MB at once arrive whole.", *_BIG, limit_s=90)
async def sixteen_at_once(rig: Rig) -> None:
    stage = await rig.stage(2)
    await asyncio.gather(*(_passes(stage, 4 * _MB) for _ in range(16)))


@rule(
    "Memory that large bodies took is given back or used again: a second round of them costs little more.",
    "Roost",
    limit_s=90,
)
async def memory_is_bounded(rig: Rig) -> None:
    stage = await rig.stage(2)
    for _ in range(3):
        await _passes(stage, 8 * _MB)
    first = stage.router.rss_bytes()
    for _ in range(8):
        await _passes(stage, 8 * _MB)
    grown = stage.router.rss_bytes() - first
    check(grown < 64 * _MB, f"8 more bodies of 8 MB made the router {grown >> 20} MB larger")


@rule(
    "A body above the router's limit is refused by a 413 before it is read.",
    *_BIG,
    needs=[Can.BOUNDED_BODY],
)
async def too_large(rig: Rig) -> None:
    stage = await rig.shared()
    size = rig.adapter.body_limit_bytes + 1
    async with connection(stage.router.port) as flow:
        await flow.raw(
            f"POST {Dialect.CHAT.path} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            f"Content-Length: {size}\r\n\r\n{{".encode()
        )
        async with asyncio.timeout(5):
            await flow.head()
            answer = await flow.rest()
    check(answer.status == 413, f"{size} bytes were announced and answered {answer.short}")


@rule("A response of 40 MB arrives whole.", *_BIG, limit_s=60)
async def large_answer(rig: Rig) -> None:
    stage = await rig.shared()
    told = b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    told += b'"message":{"role":"assistant",'
    told += b'"content":"' + b"y" * (40 * _MB) + b'"},"finish_reason":"stop"}]}'

    async def tell(visit: Visit) -> None:
        await visit.answer(200, told)

    stage.script(tell)
    answer = (await stage.session().send(stream=False)).answer
    check(answer.status == 200 and answer.sha256 == sha256(told).hexdigest(), f"it came as {answer.short}")


@rule(
    "An empty body, and one that is no JSON, are answered by a 4xx, by whom ever, and harm nobody.",
    "Roost",
)
async def no_json(rig: Rig) -> None:
    stage = await rig.shared()

    async def refuse(visit: Visit) -> None:
        await visit.answer(400, b'{"object":"error","message":"no JSON","code":400}')

    stage.script(refuse)
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"model":', b'"text"', b"[" * 5000):
        answer = await stage.router.request("POST", Dialect.CHAT.path, body)
        check(400 <= answer.status < 500, f"the body {body[:20]!r} was answered {answer.short}")
