"""The simulated engine over real sockets, read by the very code that reads real SGLang."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.discovery.observation import Engine as Kind
from router.discovery.observation import Observation
from router.discovery.probe import Probe, open_session
from tests.integration.engine_rig import FAST, Client, engine
from tests.sglang.client import prose
from tests.sglang.dialects import CHAT, COMPLETIONS, DIALECTS, GENERATE, MESSAGES, RESPONSES, Dialect, events_of
from tests.sglang.servers import MODEL

PAGE = 16
SLOW = 0.02
"""A time scale at which a turn of many tokens outlasts any test."""
LONG = 4000

dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dialects
@streams
async def test_a_turn_in_every_dialect(dialect: Dialect, stream: bool) -> None:
    """Text that says what it is, as long as asked, with counts in the dialect's own places."""
    async with engine() as client:
        reply = await client.say(dialect, dialect.body("system", [], "hello", max_tokens=12, stream=stream))
    assert reply.text.startswith("[simulated] ")
    assert len(reply.text) == 12 * 4
    assert reply.output_tokens == 12
    assert reply.prompt_tokens is not None
    assert reply.prompt_tokens > 4
    assert reply.cached_tokens == 0
    assert reply.finish in {"length", "incomplete", "max_tokens"}


@dialects
async def test_a_stream_says_what_the_whole_reply_says(dialect: Dialect) -> None:
    """Same prompt, same seed: same words."""
    async with engine() as client:
        whole, streamed = [
            await client.say(dialect, dialect.body("system", [], "hello", max_tokens=90, stream=stream))
            for stream in (False, True)
        ]
    assert whole.text == streamed.text
    assert whole.output_tokens == streamed.output_tokens == 90


@dialects
async def test_a_growing_conversation_finds_all_but_its_last_page(dialect: Dialect) -> None:
    """Turn by turn: cached is the previous prompt and its answer, but for pages that they did not fill."""
    async with engine(seed=3) as client:
        history: list[Any] = []
        before = 0
        for turn in range(6):
            user = prose(f"turn {turn}", 300)
            body = dialect.body(prose("system", 900), history, user, max_tokens=20, stream=bool(turn % 2))
            reply = await client.say(dialect, body)
            assert reply.cached_tokens is not None
            assert reply.prompt_tokens is not None
            assert before - PAGE - 1 <= reply.cached_tokens < reply.prompt_tokens
            assert reply.cached_tokens % PAGE == 0
            before = reply.prompt_tokens + 20
            history.append((user, reply.said))


async def test_text_and_its_token_ids_are_the_same_prompt() -> None:
    """A text, what /tokenize says of it, and output ids appended to it: one prefix."""
    async with engine() as client:
        text = prose("text", 400)
        sampling = {"max_new_tokens": 40, "ignore_eos": True}
        first = (await client.post("/generate", {"text": text, "sampling_params": sampling})).json()
        ids = (await client.post("/tokenize", {"prompt": text})).json()
        assert ids["count"] == len(ids["tokens"]) == first["meta_info"]["prompt_tokens"] == 100
        assert (await client.post("/detokenize", {"tokens": ids["tokens"]})).json() == {"text": text}
        longer = [*ids["tokens"], *first["output_ids"], 1, 2, 3]
        second = (await client.post("/generate", {"input_ids": longer, "sampling_params": sampling})).json()
        assert second["meta_info"]["cached_tokens"] == 139 // PAGE * PAGE
        assert second["meta_info"]["cached_tokens_details"] == {"device": 128, "host": 0}


async def test_what_the_template_drops_does_not_count() -> None:
    """cache_control and metadata are no part of the prompt; tools are, and come first."""
    tool = {"name": "ls", "description": "lists", "input_schema": {"type": "object", "properties": {}}}
    base = MESSAGES.body(prose("s", 600), [], "hello", max_tokens=4, stream=False, tools=[tool])
    marked = [{"type": "text", "text": base["system"], "cache_control": {"type": "ephemeral"}}]
    async with engine() as client:
        first = await client.say(MESSAGES, base)
        same = await client.say(MESSAGES, {**base, "system": marked, "metadata": {"user_id": "u"}})
        assert same.prompt_tokens == first.prompt_tokens is not None
        assert same.cached_tokens == (first.prompt_tokens - 1) // PAGE * PAGE
        other = await client.say(MESSAGES, {**base, "tools": [{**tool, "name": "cat"}]})
        assert other.cached_tokens == PAGE
        none = await client.say(MESSAGES, {**base, "tool_choice": {"type": "none"}})
        assert none.prompt_tokens is not None
        assert none.prompt_tokens < first.prompt_tokens


async def test_namespaces_share_nothing() -> None:
    async with engine() as client:
        body = CHAT.body(prose("s", 600), [], "hello", max_tokens=4, stream=False)
        for salt, cached in (("a", False), ("a", True), ("b", False)):
            reply = await client.say(CHAT, {**body, "cache_salt": salt})
            assert bool(reply.cached_tokens) is cached


async def test_without_cache_report_only_native_and_responses_tell() -> None:
    """As SGLang without --enable-cache-report."""
    async with engine(cache_report=False) as client:
        system = prose("s", 600)
        native = GENERATE.body(system, [], "x", max_tokens=4, stream=True)
        await client.say(GENERATE, native)
        assert (await client.say(GENERATE, native)).cached_tokens
        chat = (await client.post(CHAT.path, CHAT.body(system, [], "x", max_tokens=4, stream=False))).json()
        message = await client.say(MESSAGES, MESSAGES.body(system, [], "x", max_tokens=4, stream=True))
        response = await client.say(RESPONSES, RESPONSES.body(system, [], "x", max_tokens=4, stream=True))
        assert chat["usage"]["prompt_tokens_details"] is None
        assert message.cached_tokens == 0
        assert response.cached_tokens


async def test_the_length_of_an_answer() -> None:
    """Natural where nothing cuts it, exact with ignore_eos, and as the simulation's own header wishes."""
    body = CHAT.body("s", [], "tell me", max_tokens=3000, stream=False)
    async with engine() as client:
        natural = await client.say(CHAT, {**body, "ignore_eos": False})
        exact = await client.say(CHAT, body)
        wished = await client.say(MESSAGES, MESSAGES.body("s", [], "x", max_tokens=50, stream=True), _wish(7))
    assert natural.output_tokens is not None
    assert natural.output_tokens < 3000
    assert (natural.finish, exact.finish, wished.finish) == ("stop", "length", "end_turn")
    assert (exact.output_tokens, wished.output_tokens) == (3000, 7)


def _wish(tokens: int) -> dict[str, str]:
    return {"x-simulate-output-tokens": str(tokens)}


async def _hold(client: Client) -> aiohttp.ClientResponse:
    """A stream that goes on, and has begun."""
    body = CHAT.body("s", [], "hold", max_tokens=LONG, stream=True)
    held = await client.http.post(client.engine.url + CHAT.path, json=body)
    await held.content.readany()
    return held


@dialects
@streams
async def test_a_full_queue_is_told_in_both_forms(dialect: Dialect, stream: bool) -> None:
    """HTTP 503 (400 in /v1/responses) without a stream; 200 and an error event within one."""
    async with engine(time_scale=SLOW, max_running=1, max_queued=1) as client:
        body = {"stream": True, "text": "waits", "sampling_params": {"max_new_tokens": 9}}
        running = asyncio.create_task(client.post("/generate", body))
        await client.until(running=1)
        waiting = asyncio.create_task(client.post("/generate", body))
        await client.until(running=1, waiting=1)
        got = await client.post(dialect.path, dialect.body("s", [], "full?", max_tokens=4, stream=stream))
        running.cancel()
        waiting.cancel()
    if stream:
        assert got.status == 200
        assert b"The request queue is full." in got.body
        if dialect is GENERATE:
            reason = events_of(got.body)[0][1]["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", 503)
        else:
            assert dialect.streamed([each for each in events_of(got.body) if each[1] != "[DONE]"]).errors
    elif dialect is RESPONSES:
        assert got.status == 400
        assert got.json()["error"]["message"] == "503: The request queue is full."
    else:
        assert got.status == 503


@dialects
@streams
async def test_a_client_that_leaves_ends_its_turn(dialect: Dialect, stream: bool) -> None:
    async with engine(time_scale=SLOW) as client:
        task = asyncio.create_task(
            client.post(dialect.path, dialect.body("s", [], "x", max_tokens=LONG, stream=stream))
        )
        await client.until(running=1)
        task.cancel()
        await client.until(running=0)
        assert client.engine.driver.snapshot().counters.aborted == 1


@dialects
async def test_clients_that_leave_a_fast_stream_are_no_error(
    dialect: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever they do: what is being written when the connection breaks is not worth a word in the log."""
    async with engine(time_scale=FAST) as client:
        asked = json.dumps(dialect.body("s", [], "x", max_tokens=LONG, stream=True)).encode()
        head = f"POST {dialect.path} HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\n"
        for chunks in range(12):
            reader, writer = await asyncio.open_connection(client.engine.host, client.engine.port)
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
            for _ in range(chunks):
                await reader.readline()
            writer.transport.abort()
        await client.until(running=0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_abort_by_prefix_ends_turns_with_what_they_said() -> None:
    async with engine(time_scale=1) as client:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": False}
        tasks = [asyncio.create_task(client.post("/generate", {**body, "rid": rid})) for rid in ("a-1", "a-2", "b")]
        await client.until(running=3)
        assert (await client.post("/abort_request", {"rid": "a-"})).status == 200
        for task in tasks[:2]:
            got = (await task).json()
            assert got["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(got["output_ids"]) == got["meta_info"]["completion_tokens"]
        await client.until(running=1)
        assert (await client.post("/abort_request", {"abort_all": True})).status == 200
        await tasks[2]


async def test_an_id_cannot_be_used_twice_at_once() -> None:
    async with engine(time_scale=SLOW) as client:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 4000}, "rid": "same"}
        task = asyncio.create_task(client.post("/generate", body))
        await client.until(running=1)
        got = await client.post("/generate", body)
        assert got.status == 400
        assert b"Duplicate" in got.body
        task.cancel()


@dialects
@streams
async def test_too_long_a_prompt(dialect: Dialect, stream: bool) -> None:
    """400 before the head where SGLang holds it back, an error event after it elsewhere."""
    async with engine() as client:
        body = dialect.body("s", [], prose("long", 40_000), max_tokens=4, stream=stream)
        got = await client.post(dialect.path, body)
    assert b"is longer than the model's context length (8192 tokens)." in got.body
    assert got.status == (200 if stream and dialect not in (CHAT, COMPLETIONS) else 400)


@dialects
@pytest.mark.parametrize("data", [b"{", b"[]", b"{}"], ids=["cut", "list", "empty"])
async def test_nonsense_is_a_400(dialect: Dialect, data: bytes) -> None:
    async with engine() as client:
        headers = {"content-type": "application/json"}
        async with client.http.post(client.engine.url + dialect.path, data=data, headers=headers) as response:
            assert response.status == 400
            assert "error" in await response.text()


async def test_refusals_of_one_dialect() -> None:
    async with engine() as client:
        display = MESSAGES.body(
            "s", [], "x", max_tokens=4, stream=True, thinking={"type": "adaptive", "display": "updates"}
        )
        assert (await client.post(MESSAGES.path, display)).status == 400
        unknown = {**RESPONSES.body("s", [], "x", max_tokens=4, stream=False), "model": "other"}
        assert (await client.post(RESPONSES.path, unknown)).status == 404
        echoed = await client.post(CHAT.path, {**CHAT.body("s", [], "x", max_tokens=4, stream=False), "model": "other"})
        assert echoed.json()["model"] == "other"
        item = {"model": MODEL, "input": [{"type": "local_shell_call"}]}
        assert (await client.post(RESPONSES.path, item)).status == 400


async def test_the_router_reads_it_as_sglang() -> None:
    """The probe finds all it looks for, and one incarnation through a life."""
    async with engine(profile="kimi-k2.6-b200-tp4") as client, open_session() as session:
        probe = Probe(session)
        first = await probe.observe(client.engine.url, None)
        await client.say(CHAT, CHAT.body("s", [], "x" * 9000, max_tokens=9, stream=True))
        seen = await probe.observe(client.engine.url, first)
    assert (seen.engine, seen.ready, seen.version, seen.problems) == (Kind.SGLANG, True, "0.5.23", ())
    assert (seen.models, seen.device_tokens, seen.host_tokens) == ((MODEL,), 756_992, 3_415_296)
    assert (seen.page_size, seen.context_length, seen.max_running) == (64, 262_144, 64)
    assert (seen.accept_length, seen.cache_report, seen.running) == (3.0, True, 0)
    assert seen.prefill_uncached_total
    assert seen.prefill_uncached_total > 2000
    assert seen.incarnation == first.incarnation is not None


async def test_the_metrics_are_sglangs() -> None:
    """They parse, and count what was done; a source of cached tokens appears with its first use."""
    async with engine() as client:
        body = CHAT.body(prose("s", 600), [], "x", max_tokens=9, stream=True)
        before = (await client.get("/metrics")).body.decode()
        replies = [await client.say(CHAT, body) for _ in range(2)]
        text = (await client.get("/metrics")).body.decode()
    assert "cached_tokens_total{" not in before
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(each.name, each.labels.get("cache_source")): each.value for f in families.values() for each in f.samples}
    assert values["sglang:prompt_tokens_total", None] == sum(reply.prompt_tokens or 0 for reply in replies)
    assert values["sglang:generation_tokens_total", None] == 18
    assert values["sglang:cached_tokens_total", "device"] == replies[1].cached_tokens
    assert values["sglang:time_to_first_token_seconds_count", None] == 2
    assert values["sglang:max_total_num_tokens", None] == 11_264
    for name in ("kv_available_tokens", "kv_evictable_tokens", "num_running_reqs", "num_queue_reqs", "page_size"):
        assert f"sglang:{name}" in families


async def test_the_rest_of_the_surface() -> None:
    async with engine() as client:
        for path in ("/", "/ready", "/health", "/health_generate", "/server_info", "/get_server_info", "/model_info"):
            assert (await client.get(path)).status == 200, path
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 8192
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        assert (await client.get("/v1/models/other")).status == 404
        text = (await client.get("/v1/loads?format=prometheus")).body.decode()
        assert 'sglang_num_running_reqs{dp_rank="0"} 0\n' in text
        counted = await client.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]})
        assert counted.json()["input_tokens"] > 4
        assert (await client.post("/flush_cache")).body.startswith(b"Cache flushed.")
        assert (await client.get("/nowhere")).json() == {"detail": "Not Found"}
        assert (await client.get("/v1/chat/completions")).status == 405
        async with client.http.head(client.engine.url + "/ready") as response:
            assert response.status == 405


async def test_a_flush_empties_the_cache_of_an_idle_engine_only() -> None:
    async with engine(time_scale=1) as client:
        body = CHAT.body(prose("s", 600), [], "x", max_tokens=2, stream=False)
        await client.say(CHAT, body)
        held = await _hold(client)
        assert (await client.post("/flush_cache")).status == 400
        assert (await client.say(CHAT, body)).cached_tokens
        held.close()
        await client.until(running=0)
        assert (await client.post("/flush_cache")).status == 200
        assert (await client.say(CHAT, body)).cached_tokens == 0


async def test_a_crash_breaks_what_runs_and_forgets_what_was_cached() -> None:
    """Connections break in mid-stream, nobody listens, and what comes back is another life."""
    async with engine(time_scale=1) as client, open_session() as session:
        probe = Probe(session)
        await client.say(CHAT, CHAT.body(prose("s", 600), [], "x", max_tokens=2, stream=False))
        before = await probe.observe(client.engine.url, None)
        held = await _hold(client)
        assert (await client.post("/simulate/crash", {"restart_after_s": 0.3})).status == 202
        with pytest.raises(aiohttp.ClientError):
            await held.read()
        seen: Observation = before
        async with asyncio.timeout(20):
            while not seen.ready or seen.incarnation == before.incarnation:
                seen = await probe.observe(client.engine.url, seen)
        assert seen.lives == before.lives + 1
        again = await client.say(CHAT, CHAT.body(prose("s", 600), [], "x", max_tokens=2, stream=False))
        assert again.cached_tokens == 0
