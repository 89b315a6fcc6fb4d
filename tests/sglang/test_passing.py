"""What Roost passes on, repairs, and answers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.client import Conversation, new_client
from tests.sglang.conftest import StartRoost
from tests.sglang.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES, Dialect
from tests.sglang.front import Roost
from tests.sglang.servers import Pair, Server

_TOO_LONG_BYTES = 20_000
"""More than the tiny model's context of 8,192 tokens."""


@pytest.fixture(scope="module")
def servers(pair: Pair) -> tuple[Server, Server]:
    """Both servers."""
    return pair.ensure()


@pytest.fixture(scope="module")
def roost(servers: tuple[Server, Server], start_roost: StartRoost) -> Iterator[Roost]:
    """One Roost for the module, without repairs."""
    with start_roost(servers) as roost:
        yield roost


def _thinking(display: str) -> dict[str, Any]:
    _, body = Conversation.new("thinking", MESSAGES, 200).next_body(50, stream=False)
    return {**body, "thinking": {"type": "adaptive", "display": display}}


async def test_the_engine_refuses_interactive_claude_codes_thinking(roost: Roost) -> None:
    """Without the repair nothing is changed: `thinking.display: "updates"` gets the engine's own 400."""
    async with new_client() as http, http.post(f"{roost.url}/v1/messages", json=_thinking("updates")) as answer:
        assert answer.status == 400
        assert "thinking.display" in await answer.text()
        assert "x-roost-repaired" not in answer.headers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_repair_lets_interactive_claude_codes_thinking_pass(
    servers: tuple[Server, Server], start_roost: StartRoost, tmp_path: Path, stream: bool
) -> None:
    """With the named repair it is served, a header says so, and what needs no repair has none."""
    config = tmp_path / "roost.yaml"
    fleet = {"name": "tiny", "replicas": [server.url for server in servers], "repairs": ["anthropic_thinking_display"]}
    config.write_text(json.dumps({"fleets": [fleet]}))  # YAML 1.2 contains JSON
    with start_roost((), "--config", str(config)) as mending:
        async with new_client() as http:
            bodies = [{**_thinking(display), "stream": stream} for display in ("updates", "summarized")]
            headers = []
            for body in bodies:
                async with http.post(f"{mending.url}/v1/messages?beta=true", json=body) as answer:
                    assert answer.status == 200
                    assert b"thinking" in await answer.read()
                    headers.append(answer.headers)
    assert headers[0]["x-roost-repaired"] == "anthropic_thinking_display"
    assert "x-roost-repaired" not in headers[1]


async def test_models_lists_the_served_name(roost: Roost, servers: tuple[Server, Server]) -> None:
    """The union of what the replicas say."""
    async with new_client() as http, http.get(f"{roost.url}/v1/models") as answer:
        models = (await answer.json())["data"]
    assert [(model["id"], model["object"]) for model in models] == [("tiny", "model")]
    assert models[0]["max_model_len"] == 8192


@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.name != "generate"], ids=lambda dialect: dialect.name)
async def test_an_unknown_model_is_404_in_the_dialect(roost: Roost, dialect: Dialect) -> None:
    """It is Roost's own word: the engine would have answered with any model (/generate names none)."""
    _, body = Conversation.new("unknown", dialect, 100).next_body(50, stream=False)
    body["model"] = "no-such-model"
    async with new_client() as http, http.post(roost.url + dialect.path, json=body) as answer:
        assert (answer.status, answer.headers["x-roost-error"]) == (404, "model_not_found")
        error = await answer.json()
    if dialect is MESSAGES:
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    else:
        assert error["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_the_engines_own_errors_pass_byte_by_byte(
    roost: Roost, servers: tuple[Server, Server], dialect: Dialect
) -> None:
    """A prompt beyond the context is refused with the very bytes that a client without Roost gets."""
    _, body = Conversation.new("too long", dialect, _TOO_LONG_BYTES).next_body(50, stream=False)
    async with new_client() as http:
        said = []
        for url in (servers[0].url, roost.url):
            async with http.post(url + dialect.path, json=body) as answer:
                said.append((answer.status, answer.headers["content-type"], await answer.read()))
    assert said[0][0] == 400
    assert said[1] == said[0]


async def test_a_stored_response_is_read_and_continued_where_it_is(
    roost: Roost, servers: tuple[Server, Server]
) -> None:
    """Only the replica that made a stored response has it: reading it and `previous_response_id` go there."""
    made: dict[str, str] = {}
    async with new_client() as http:
        for number in range(4):
            conversation = Conversation.new(f"stored {number}", RESPONSES, 200)
            answer = await conversation.turn(http, roost.url, 50, stream=False, store=True)
            assert answer.reply.response_id is not None
            made[answer.reply.response_id] = answer.replica
        assert set(made.values()) == {server.id for server in servers}
        roost.decisions()  # waits until all are settled
        for response_id, holder in made.items():
            async with http.get(f"{roost.url}/v1/responses/{response_id}") as got:
                assert (got.status, (await got.json())["id"]) == (200, response_id)
                assert (got.headers["x-roost-replica"], got.headers["x-roost-reason"]) == (holder, "stored")
            body = {"model": "tiny", "input": "go on", "max_output_tokens": 4, "previous_response_id": response_id}
            async with http.post(f"{roost.url}/v1/responses", json={**body, "store": False}) as got:
                assert got.status == 200, await got.text()
                assert (got.headers["x-roost-replica"], got.headers["x-roost-reason"]) == (holder, "stored")
        async with http.get(f"{roost.url}/v1/responses/resp_unknown") as got:
            assert got.status == 404


async def test_paths_of_the_engine_pass(roost: Roost) -> None:
    """What Roost does not know goes to a replica and comes back as it said it, with a header that names the replica."""
    async with new_client() as http:
        async with http.post(f"{roost.url}/tokenize", json={"model": "tiny", "prompt": "hello there"}) as answer:
            assert answer.status == 200
            assert (await answer.json())["tokens"]
            assert answer.headers["x-roost-reason"] == "pass"
        _, body = Conversation.new("counted", MESSAGES, 200).next_body(50, stream=False)
        async with http.post(f"{roost.url}/v1/messages/count_tokens", json=body) as answer:
            assert (await answer.json())["input_tokens"] > 100
        async with http.get(f"{roost.url}/no/such/path") as answer:
            assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
        async with http.post(
            f"{roost.url}{CHAT.path}", data=b"[]", headers={"content-type": "application/json"}
        ) as answer:
            assert answer.status == 400
