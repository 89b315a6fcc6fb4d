"""The official SDKs as clients; run with the Python that has them: `python sdk_client.py URL MODEL KEY`. Prints JSON.

The packages are imported by name because the project's own environment does not have them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

openai: Any = importlib.import_module("openai")
anthropic: Any = importlib.import_module("anthropic")

Call = dict[str, Any]
_LIMITS = {"max_tokens": 8, "temperature": 0}


def _call(name: str, dialect: str, headers: Any, counts: tuple[int, int, int], events: Iterable[str] = ()) -> Call:
    prompt, cached, output = counts
    return {
        "call": name,
        "dialect": dialect,
        "session": headers["x-roost-session"],
        "replica": headers["x-roost-replica"],
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "events": list(dict.fromkeys(events)),
    }


def _openai_counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens


def _responses_counts(usage: Any) -> tuple[int, int, int]:
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


def _anthropic_counts(usage: Any) -> tuple[int, int, int]:
    cached = usage.cache_read_input_tokens or 0
    return usage.input_tokens + cached, cached, usage.output_tokens


def _chat(client: Any, model: str) -> Iterable[Call]:
    asked = {"model": model, "messages": [{"role": "user", "content": "chat by the SDK"}], **_LIMITS}
    raw = client.chat.completions.with_raw_response.create(**asked)
    yield _call("chat whole", "chat", raw.headers, _openai_counts(raw.parse().usage))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = client.chat.completions.with_raw_response.create(**asked, **options)
    chunks = list(raw.parse())
    yield _call("chat stream", "chat", raw.headers, _openai_counts(chunks[-1].usage), (c.object for c in chunks))


def _completions(client: Any, model: str) -> Iterable[Call]:
    asked = {"model": model, "prompt": "completions by the SDK", **_LIMITS}
    raw = client.completions.with_raw_response.create(**asked)
    yield _call("completions whole", "completions", raw.headers, _openai_counts(raw.parse().usage))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = client.completions.with_raw_response.create(**asked, **options)
    chunks = list(raw.parse())
    counts = _openai_counts(chunks[-1].usage)
    yield _call("completions stream", "completions", raw.headers, counts, (chunk.object for chunk in chunks))


def _responses(client: Any, model: str) -> Iterable[Call]:
    asked = {"model": model, "input": "responses by the SDK", "max_output_tokens": 8, "temperature": 0, "store": False}
    raw = client.responses.with_raw_response.create(**asked)
    yield _call("responses whole", "responses", raw.headers, _responses_counts(raw.parse().usage))
    raw = client.responses.with_raw_response.create(**asked, stream=True)
    events = list(raw.parse())
    counts = _responses_counts(events[-1].response.usage)
    yield _call("responses stream", "responses", raw.headers, counts, (event.type for event in events))


def _messages(client: Any, model: str) -> Iterable[Call]:
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "messages by the SDK"}],
        "max_tokens": _LIMITS["max_tokens"],
        "extra_body": {"temperature": _LIMITS["temperature"]},  # this SDK has no name for it any more
    }
    raw = client.messages.with_raw_response.create(**asked)
    yield _call("messages whole", "messages", raw.headers, _anthropic_counts(raw.parse().usage))
    with client.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        usage, headers = stream.get_final_message().usage, stream.response.headers
    yield _call("messages stream", "messages", headers, _anthropic_counts(usage), events)


def _refusals(openai_client: Any, anthropic_client: Any) -> Iterable[Call]:
    """An unknown model, as each SDK's own class of error."""
    model, messages = "no-such-model", [{"role": "user", "content": "hello"}]
    attempts: dict[str, Callable[[], Any]] = {
        "chat": lambda: openai_client.chat.completions.create(model=model, messages=messages),
        "completions": lambda: openai_client.completions.create(model=model, prompt="hello"),
        "responses": lambda: openai_client.responses.create(model=model, input="hello"),
        "messages": lambda: anthropic_client.messages.create(model=model, messages=messages, max_tokens=1),
    }
    for dialect, attempt in attempts.items():
        try:
            attempt()
        except (openai.NotFoundError, anthropic.NotFoundError) as error:
            yield {"refused": dialect, "module": type(error).__module__.partition(".")[0], "body": error.body}


def main(url: str, model: str, key: str) -> None:
    """Every dialect that has an SDK, whole and streamed."""
    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=90)
    anthropic_client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=90)
    calls: list[Call] = []
    for speak in (_chat, _completions, _responses):
        calls += speak(openai_client, model)
    calls += _messages(anthropic_client, model)
    told = {
        "calls": calls,
        "refusals": list(_refusals(openai_client, anthropic_client)),
        "openai_models": [each.id for each in openai_client.models.list()],
        "anthropic_models": [each.id for each in anthropic_client.models.list()],
        "count_tokens": anthropic_client.messages.count_tokens(
            model=model, messages=[{"role": "user", "content": "how many"}]
        ).input_tokens,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
