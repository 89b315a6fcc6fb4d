"""Prompts of the simulated engine: what extends what, in each dialect; and no request is so odd that it breaks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.engine import tokens
from simulations.engine.asked import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, read
from simulations.engine.prompts import Fault

TOOL = {"name": "ls", "description": "lists", "parameters": {"type": "object"}}


def prompt(path: str, body: dict[str, Any]) -> bytes:
    return read(path, {"model": "m", "max_tokens": 9, **body}, "m").prompt


CHAT_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "said"},
    {"role": "user", "content": [{"type": "text", "text": "look"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "files"},
    {"role": "user", "content": "thanks"},
]
MESSAGES_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "said"}]},
    {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "ls", "input": {"a": 1}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "files"}]},
            {"type": "text", "text": "thanks"},
        ],
    },
]
RESPONSES_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"a":1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "files"},
    {"role": "user", "content": "thanks"},
]
MESSAGES_TOOL = {"name": "ls", "description": "lists", "input_schema": TOOL["parameters"]}
DIALECTS: dict[str, tuple[list[dict[str, Any]], str, dict[str, Any]]] = {
    CHAT: (CHAT_TURNS, "messages", {"type": "function", "function": TOOL}),
    MESSAGES: (MESSAGES_TURNS, "messages", MESSAGES_TOOL),
    RESPONSES: (RESPONSES_TURNS, "input", {"type": "function", **TOOL}),
}
"""Turns of one conversation, the field they go into, and its one tool."""


def conversation(path: str, count: int) -> bytes:
    """The prompt of the first `count` items."""
    turns, name, tool = DIALECTS[path]
    return prompt(path, {name: turns[:count], "tools": [tool]})


@pytest.mark.parametrize("path", DIALECTS)
def test_each_turn_extends_the_one_before_and_its_answer(path: str) -> None:
    """A prompt and what was answered are the beginning of the next prompt, byte for byte."""
    first, third, last = (conversation(path, count) for count in (1, 3, 99))
    assert third.startswith(first + b"said<|im_end|>")
    opening = b"<|im_assistant|>assistant<|im_middle|>"
    assert third.endswith(opening)
    assert last.startswith(third)
    assert b"## Return of c1\nfiles<|im_end|><|im_user|>user<|im_middle|>thanks" in last


def test_the_dialects_agree_on_one_conversation() -> None:
    """The same conversation is the same prompt, whichever API it comes through: one cache."""
    assert len({conversation(path, 99) for path in DIALECTS}) == 1


def test_an_answer_is_four_plain_bytes_a_token() -> None:
    for count in (1, 2, 3, 4, 50, 30_000):
        text = tokens.said(7, b"prompt", count)
        assert len(text) == 4 * count
        assert text.isascii()
        assert text.startswith(b"[simulated] "[: 4 * count])
        assert not set(text) & set(b'"\\\n')
        assert tokens.bytes_of_ids(tokens.ids(text)) == text
    assert tokens.said(7, b"prompt", 50) != tokens.said(8, b"prompt", 50) != tokens.said(8, b"other", 50)
    assert tokens.count(b"12345") == 2


_KEYS = (
    *("model", "messages", "input", "prompt", "text", "role", "content", "type", "tools", "tool_choice", "function"),
    *(
        "name",
        "tool_calls",
        "arguments",
        "system",
        "thinking",
        "input_ids",
        "sampling_params",
        "stream_options",
        "summary",
    ),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4) | st.just("user"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.sampled_from([CHAT, COMPLETIONS, MESSAGES, RESPONSES, GENERATE]),
    st.dictionaries(st.sampled_from(_KEYS), values, max_size=6),
)
@settings(max_examples=400, deadline=None)
def test_whatever_is_asked_is_read_or_refused(path: str, body: dict[str, Any]) -> None:
    """Nothing but a prompt or a fault comes out."""
    with suppress(Fault):
        asked = read(path, {"model": "m", "max_tokens": 9, **body}, "m")
        assert asked.prompt
        assert asked.max_tokens is None or asked.max_tokens > 0
