"""Every path passes, and what names something reaches whoever has it."""

from __future__ import annotations

import json

import pytest

from router.domain.turn import Dialect
from router.settings import Fleet
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Visit, replicas
from tests.integration.roosts import PROBE_INTERVAL_S, running, settings_for

TARGETS = [
    ("POST", "/v1/messages?beta=true"),
    ("POST", "/v1/messages/count_tokens?beta=true"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/tokenize"),
    ("GET", "/server_info"),
    ("GET", "/nobody/knows/this?a=1&a=2&b=%20&c"),
    ("GET", "/a%2Fb%20c/%E2%98%83/..%2f?q=%3Fx%26"),
    ("GET", "//double//slashes/"),
    ("GET", "/?"),
    ("HEAD", "/"),
    ("HEAD", "/v1/loads"),
    ("OPTIONS", "/v1/chat/completions"),
    ("DELETE", "/v1/responses/resp_1"),
    ("PUT", "/generate"),
    ("PATCH", "/v1/x"),
    ("GET", "/v1/responses/resp_1?include=a"),
    ("GET", "/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "target"), TARGETS)
async def test_method_target_and_query_reach_the_replica_untouched(method: str, target: str) -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        body = b'{"model":"m"}' if method in ("POST", "PUT", "PATCH") else b""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        async with Client.to(roost.port) as client:
            client.writer.write(f"{method} {target} HTTP/1.1\r\nHost: r\r\n{length}\r\n".encode() + body)
            answer = await client.answer(bodiless=method == "HEAD")
        assert answer.status == 200
        assert answer.complete
        assert answer.headers[b"x-roost-replica"].decode() == fleet[0].id
        (seen,) = fleet[0].seen
        assert (seen.method, seen.target, seen.body) == (method, target, body)


async def test_a_get_without_a_body_stays_without_one() -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        await roost.request("GET", "/get_something")
        assert fleet[0].seen[0].header(b"content-length") == []
        assert fleet[0].seen[0].header(b"transfer-encoding") == []


async def test_an_error_of_the_replica_is_the_clients_as_it_is() -> None:
    """Statuses, bodies and headers of refusals are the engine's, on turns and elsewhere."""

    async def refuse(visit: Visit) -> None:
        await visit.answer(418, b'{"error":"no tea"}', [("X-Pot", "small")])

    async with replicas(2, script=refuse) as fleet, running(settings_for(fleet), fleet) as roost:
        for target in (*PATHS.values(), "/v1/embeddings"):
            answer = await roost.request("POST", target, b'{"model":"m"}')
            assert (answer.status, answer.body, answer.headers["x-pot"]) == (418, b'{"error":"no tea"}', "small")
        assert len(fleet[0].seen) + len(fleet[1].seen) == 6


# --- stored responses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_asked_for_where_it_is(stream: bool) -> None:
    """GET, cancel and the turn that continues it all go to the replica that made it."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        by_id = {each.id: each for each in fleet}
        for number in range(6):
            first = Conversation(f"stored {number}", Dialect.RESPONSES, stream=stream)
            answer = await roost.turn(first)
            home = by_id[answer.replica]
            response_id = f"resp_{home.port}_{len(home.seen) - 1}"
            await roost.idle()
            got = await roost.request("GET", f"/v1/responses/{response_id}?stream=false")
            assert (got.replica, got.reason) == (home.id, "stored")
            cancelled = await roost.request("POST", f"/v1/responses/{response_id}/cancel")
            assert (cancelled.replica, cancelled.reason) == (home.id, "stored")
            more = {"model": "m", "input": f"and {number}?", "previous_response_id": response_id}
            continued = await roost.request("POST", "/v1/responses", json.dumps(more).encode())
            assert (continued.replica, continued.reason) == (home.id, "stored")


async def test_an_unknown_response_is_asked_of_some_replica() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        answer = await roost.request("GET", "/v1/responses/resp_nobody")
        assert (answer.status, answer.reason) == (200, "pass")


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache"])
async def test_what_means_every_replica_reaches_every_replica(path: str) -> None:
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        answer = await roost.request("POST", path, b'{"rid":"x"}')
        assert answer.status == 200
        assert [[seen.target for seen in each.seen] for each in fleet] == [[path]] * 3
        assert {seen.body for each in fleet for seen in each.seen} == {b'{"rid":"x"}'}


# --- fleets and models -----------------------------------------------------------------------------------------------

NO_SUCH_MODEL = {
    Dialect.CHAT: ("invalid_request_error", "model_not_found"),
    Dialect.COMPLETIONS: ("invalid_request_error", "model_not_found"),
    Dialect.RESPONSES: ("invalid_request_error", "model_not_found"),
    Dialect.MESSAGES: ("not_found_error", None),
    Dialect.GENERATE: ("invalid_request_error", 404),
}


async def test_each_model_goes_to_its_fleet_and_models_is_their_union() -> None:
    """One fleet names its models, the other serves what its replicas say."""
    async with replicas(2, model="big") as big, replicas(2, model="small") as small:
        fleets = (
            Fleet(name="big", replicas=tuple(each.url for each in big), probe_interval_s=PROBE_INTERVAL_S),
            Fleet(
                name="small",
                models=("small", "alias"),
                replicas=tuple(each.url for each in small),
                probe_interval_s=PROBE_INTERVAL_S,
            ),
        )
        async with running(settings_for(fleets), [*big, *small]) as roost:
            homes = {"big": big, "small": small, "alias": small, "small:adapter": small, "big:adapter": big}
            for model, fleet in homes.items():
                for dialect in DIALECTS:
                    answer = await roost.turn(Conversation(f"{model} {dialect}", dialect, model=model))
                    assert answer.replica in {each.id for each in fleet}

            listed = await roost.request("GET", "/v1/models")
            assert [entry["id"] for entry in json.loads(listed.body)["data"]] == ["big", "small", "alias"]
            one = await roost.request("GET", "/v1/models/alias")
            assert (one.status, json.loads(one.body)["id"]) == (200, "alias")
            assert (await roost.request("GET", "/v1/models/huge")).status == 404

            counted = await roost.request("POST", "/v1/messages/count_tokens", b'{"model":"small","messages":[]}')
            assert counted.replica in {each.id for each in small}

            for dialect, (kind, code) in NO_SUCH_MODEL.items():
                cases: list[tuple[str | None, int]] = [("huge", 404), (None, 400)]
                for lost, status in cases:
                    asked = Conversation("lost", dialect, model=lost)
                    refused = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
                    assert refused.status == status
                    assert refused.headers["x-roost-error"] == ("model_not_found" if lost else "invalid_request")
                    told = json.loads(refused.body)
                    assert "big" in told["error"]["message"]
                    if lost:
                        assert (told["error"]["type"], told["error"].get("code")) == (kind, code)
                    assert (told.get("type") == "error") == (dialect is Dialect.MESSAGES)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_only_fleet_takes_turns_that_name_no_model(dialect: Dialect) -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        await roost.turn(Conversation("nameless", dialect, model=None))


async def test_a_fleet_that_takes_any_model_takes_what_nobody_else_serves() -> None:
    async with replicas(1, model="a") as named, replicas(1, model="b") as any_model:
        fleets = (
            Fleet(name="named", replicas=(named[0].url,), probe_interval_s=PROBE_INTERVAL_S),
            Fleet(name="any", models=("*",), replicas=(any_model[0].url,), probe_interval_s=PROBE_INTERVAL_S),
        )
        async with running(settings_for(fleets), [*named, *any_model]) as roost:
            assert (await roost.turn(Conversation("x", model="a"))).replica == named[0].id
            assert (await roost.turn(Conversation("x", model="whatever"))).replica == any_model[0].id
