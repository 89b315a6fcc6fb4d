"""Paths and methods that clients use."""

from __future__ import annotations

import json

from tests.conformance.case import case as rule
from tests.conformance.case import check, skip
from tests.conformance.dialects import Dialect, ask
from tests.conformance.replica import Seen
from tests.conformance.rig import Rig, Stage, new_mark

_ROUTES = (
    "https://github.com/sgl-project/sglang/pull/20566",
    "https://github.com/kgateway-dev/kgateway/issues/13251",
)


def seen(stage: Stage) -> list[Seen]:
    """All that reached any replica."""
    return [each for replica in stage.replicas for each in replica.seen]


@rule("`GET /v1/models` lists each model once, in OpenAI's form.", *_ROUTES)
async def models(rig: Rig) -> None:
    stage = await rig.shared()
    answer = await stage.router.request("GET", "/v1/models")
    check(answer.status == 200, f"it was answered {answer.short}")
    told = json.loads(answer.body)
    ids = [each["id"] for each in told.get("data", [])]
    check(ids == ["m"], f"two replicas of one model are listed as {ids}")


@rule("`HEAD` of a path that `GET` serves is answered without a body, and does not hang.", *_ROUTES)
async def head(rig: Rig) -> None:
    stage = await rig.shared()
    answer = await stage.router.request("HEAD", "/v1/models")
    check(answer.status in (200, 404, 405), f"it was answered {answer.status}")
    check(not answer.body, "HEAD was answered with a body")


@rule("`POST /v1/messages/count_tokens` reaches a replica where `/v1/messages` is served.", *_ROUTES)
async def count_tokens(rig: Rig) -> None:
    if Dialect.MESSAGES not in rig.target.dialects:
        skip("it does not serve /v1/messages")
    stage = await rig.shared()
    mark = new_mark()
    body = ask(Dialect.MESSAGES, [f"Hello {mark}"], stream=False)
    answer = await stage.router.request("POST", "/v1/messages/count_tokens?beta=true", body)
    check(stage.asked(mark.encode()), f"no replica was asked; it was answered {answer.short}")


@rule("An unknown path is answered 404, by the replica or in a body that says so, not 500 and not by a hang.", *_ROUTES)
async def unknown_path(rig: Rig) -> None:
    stage = await rig.shared()
    answer = await stage.router.request("GET", "/v1/no/such/path")
    check(answer.status in (404, 405) or any(each.path == "/v1/no/such/path" for each in seen(stage)), answer.short)


@rule("A method that a path does not serve is answered 4xx, not 500.", *_ROUTES)
async def wrong_method(rig: Rig) -> None:
    stage = await rig.shared()
    for method in ("GET", "PUT", "OPTIONS", "TRACE"):
        answer = await stage.router.request(method, Dialect.CHAT.path)
        check(answer.status < 500 or answer.status == 501, f"{method} was answered {answer.short}")


@rule("`GET /` and `HEAD /`, with which Claude Code looks whether anybody is there, are answered at once.", "Roost")
async def root(rig: Rig) -> None:
    stage = await rig.shared()
    for method in ("HEAD", "GET"):
        answer = await stage.router.request(method, "/")
        check(answer.status < 500, f"{method} / was answered {answer.status}")


@rule("The readiness of a router that has replicas is told by a 200.", "https://github.com/smg-project/smg/pull/1745")
async def ready(rig: Rig) -> None:
    stage = await rig.shared()
    answer = await stage.router.request("GET", rig.adapter.ready_path)
    if answer.status == 404:
        skip(f"it does not serve {rig.adapter.ready_path}")
    check(answer.status == 200, f"{rig.adapter.ready_path} was answered {answer.short}")


@rule(
    "A model that no replica serves is refused by a 400 or 404, of the router or of the replica that was asked.",
    "Roost",
)
async def unknown_model(rig: Rig) -> None:
    stage = await rig.shared()
    mark = new_mark()
    asked = json.loads(ask(Dialect.CHAT, [f"Hello {mark}"], stream=False))
    answer = await stage.router.request("POST", Dialect.CHAT.path, json.dumps({**asked, "model": "no-such"}).encode())
    check(answer.status in (400, 404) or stage.asked(mark.encode()), f"it was answered {answer.short}")


@rule(
    "A WebSocket upgrade is passed on or refused, and never answered as if it were a plain request that hangs.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-7.8",
)
async def upgrade(rig: Rig) -> None:
    stage = await rig.shared()
    given = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    answer = await stage.router.request("GET", "/v1/realtime", None, given)
    check(answer.status != 101 or any(each.header(b"upgrade") for each in seen(stage)), "it was upgraded by nobody")
    check(answer.status != 500, f"it was answered {answer.short}")
