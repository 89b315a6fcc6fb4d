"""All five dialects through Roost, whole and streamed, read by the official SDKs and by the tests' own client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.client import Conversation, new_client
from tests.sglang.conftest import StartRoost, sglang_python
from tests.sglang.dialects import DIALECTS, Dialect
from tests.sglang.front import Roost
from tests.sglang.servers import MODEL, PAGE_TOKENS, Pair

_SDK_CLIENT = Path(__file__).with_name("sdk_client.py")
_EVENTS = {
    "chat stream": {"chat.completion.chunk"},
    "completions stream": {"text_completion"},
    "responses stream": {
        "response.created",
        "response.in_progress",
        "response.output_item.done",
        "response.incomplete",
    },
    "messages stream": {"message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop"},
}


@pytest.fixture(scope="module")
def roost(pair: Pair, start_roost: StartRoost) -> Iterator[Roost]:
    """One Roost for the module; each test speaks of something else."""
    with start_roost(pair.ensure()) as roost:
        yield roost


@pytest.fixture(scope="module")
def told(roost: Roost) -> dict[str, Any]:
    """What the official SDKs understood."""
    command = [str(sglang_python()), "-I", str(_SDK_CLIENT), roost.url, MODEL, "sk-made-up"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_official_sdks_read_every_dialect(told: dict[str, Any], roost: Roost) -> None:
    """Each SDK parses what comes through Roost, and Roost's record of the turn has the usage that the SDK saw."""
    calls = {call["call"]: call for call in told["calls"]}
    assert set(calls) == {
        f"{name} {form}" for name in ("chat", "completions", "responses", "messages") for form in ("whole", "stream")
    }
    for name, call in calls.items():
        assert _EVENTS.get(name, set()) <= set(call["events"]), name
        assert call["prompt_tokens"] > 0
        assert call["output_tokens"] > 0
        records = [
            [true["prompt_tokens"], true["cached_tokens"] or 0, true["output_tokens"]]
            for decision in roost.decisions(call["session"])
            if (decision["dialect"], decision["replica"]) == (call["dialect"], call["replica"])
            and (true := decision["came_true"])["end"] == "complete"
        ]
        assert [call["prompt_tokens"], call["cached_tokens"], call["output_tokens"]] in records, name


def test_the_second_call_of_each_sdk_finds_the_first_ones_cache(told: dict[str, Any]) -> None:
    """The same prompt again, in the other form, goes to the same replica and finds its full pages."""
    calls = {call["call"]: call for call in told["calls"]}
    for dialect in ("chat", "completions", "responses", "messages"):
        first, second = calls[f"{dialect} whole"], calls[f"{dialect} stream"]
        assert second["replica"] == first["replica"]
        assert second["cached_tokens"] >= second["prompt_tokens"] - PAGE_TOKENS


def test_an_unknown_model_is_not_found_in_the_words_of_each_sdk(told: dict[str, Any]) -> None:
    """404 with the error's own fields where each SDK looks for them."""
    refusals = {refusal["refused"]: refusal for refusal in told["refusals"]}
    assert set(refusals) == {"chat", "completions", "responses", "messages"}
    for dialect, refusal in refusals.items():
        if dialect == "messages":
            assert refusal["module"] == "anthropic"
            assert refusal["body"]["error"]["type"] == "not_found_error"
        else:
            assert refusal["module"] == "openai"
            assert refusal["body"]["code"] == "model_not_found"


def test_models_and_token_counts_for_both_sdks(told: dict[str, Any]) -> None:
    """`/v1/models` lists the served name to either SDK; `count_tokens` is answered by a replica."""
    assert told["openai_models"] == told["anthropic_models"] == [MODEL]
    assert told["count_tokens"] > 0


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
async def test_a_turn_whole_and_the_next_streamed(roost: Roost, dialect: Dialect) -> None:
    """Both forms end well, the second is at home in the first one's cache, and the records have both usages."""
    conversation = Conversation.new(f"forms of {dialect.name}", dialect, system_bytes=1500)
    async with new_client() as http:
        first = await conversation.turn(http, roost.url, 100, stream=False)
        second = await conversation.turn(http, roost.url, 100, stream=True)
    assert (first.status, second.status) == (200, 200)
    assert second.reply.ended
    assert (second.replica, second.reason) == (first.replica, "home")
    assert second.reply.cached_tokens is not None
    assert first.reply.prompt_tokens is not None
    assert second.reply.cached_tokens >= first.reply.prompt_tokens - PAGE_TOKENS
    for answer, decision in zip((first, second), roost.decisions(first.session), strict=True):
        true, reply = decision["came_true"], answer.reply
        assert (true["end"], decision["dialect"]) == ("complete", dialect.name)
        assert (true["prompt_tokens"], true["output_tokens"]) == (reply.prompt_tokens, reply.output_tokens)
        assert (true["cached_tokens"] or 0) == reply.cached_tokens
        assert true["ttft_s"] <= true["duration_s"]
