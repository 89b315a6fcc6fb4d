"""Repairs replace one value's bytes, where SGLang would refuse it, and touch nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.repair import REPAIRS, member_span, repair
from router.domain.turn import Dialect

NAME = "anthropic_thinking_display"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=6), below, max_size=4),
    max_leaves=12,
)
THINKING = st.dictionaries(st.sampled_from(["type", "budget_tokens", "display", "x"]), JSON)
BODIES = st.fixed_dictionaries(
    {"messages": JSON}, optional={"thinking": JSON | THINKING, "display": JSON, "tools": JSON, "model": st.text()}
)
SPACES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", " :  ")])


def mended(body: bytes, dialect: Dialect = Dialect.MESSAGES) -> bytes | None:
    """The repaired body, or None where there was nothing to do."""
    after, names = repair((NAME,), dialect, body)
    assert names == ((NAME,) if after != body else ())
    return after if names else None


def test_the_value_that_claude_code_sends_is_replaced_and_every_other_byte_kept() -> None:
    before = (
        b'{ "model":"m",\n"thinking" : {"type":"adaptive", "display" :\t"updates" }, "big": 9007199254740993, "a":1.0}'
    )
    assert mended(before) == before.replace(b'"updates"', b'"summarized"')


@pytest.mark.parametrize("display", ["summarized", "omitted", None])
def test_what_the_engine_takes_is_left_alone(display: str | None) -> None:
    assert mended(json.dumps({"thinking": {"type": "enabled", "display": display}}).encode()) is None


@pytest.mark.parametrize("dialect", [each for each in Dialect if each is not Dialect.MESSAGES])
def test_other_dialects_are_left_alone(dialect: Dialect) -> None:
    assert mended(b'{"thinking":{"display":"updates"}}', dialect) is None


LOOK_ALIKES = [
    b'{"messages":[{"role":"user","content":"{\\"thinking\\":{\\"display\\":\\"updates\\"}}"}]}',
    b'{"messages":[{"thinking":{"display":"updates"}}]}',
    b'{"tools":[{"input_schema":{"properties":{"thinking":{"display":"updates"}}}}],"thinking":{"type":"disabled"}}',
    b'{"thinking":{"inner":{"display":"updates"}}}',
    b'{"thinking":["display","updates"]}',
    b'{"thinking":"display updates"}',
    b'{"x":{"thinking":{"display":"updates"}}}',
    b'{"Thinking":{"display":"updates"}}',
]


@pytest.mark.parametrize("body", LOOK_ALIKES)
def test_look_alikes_elsewhere_are_never_touched(body: bytes) -> None:
    assert mended(body) is None


@pytest.mark.parametrize("body", [body for body in LOOK_ALIKES if "thinking" not in json.loads(body)])
def test_a_look_alike_before_or_after_does_not_hide_the_real_one(body: bytes) -> None:
    real = b'"thinking":{"display":"updates"}'
    for joined in (body[:-1] + b"," + real + b"}", b"{" + real + b"," + body[1:]):
        after = mended(joined)
        assert after is not None
        assert json.loads(after) == {**json.loads(joined), "thinking": {"display": "summarized"}}
        assert len(after) == len(joined) + len("summarized") - len("updates")


@settings(deadline=None)
@given(BODIES, SPACES)
def test_only_the_one_value_ever_changes(body: dict[str, Any], spaces: tuple[str, str]) -> None:
    """And a second repair finds nothing to do."""
    raw = json.dumps(body, separators=spaces).encode()
    after = mended(raw)
    thinking = body.get("thinking")
    wrong = isinstance(thinking, dict) and thinking.get("display", None) not in (None, "summarized", "omitted")
    assert (after is not None) == wrong
    if after is not None:
        assert isinstance(thinking, dict)
        assert json.loads(after) == {**body, "thinking": {**thinking, "display": "summarized"}}
        old = json.dumps(thinking["display"], separators=spaces).encode()
        assert len(after) == len(raw) - len(old) + len(b'"summarized"')
        assert mended(after) is None


@settings(deadline=None)
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nonsense_is_left_alone(body: bytes) -> None:
    assert mended(b'{"thinking" "display"' + body) is None
    mended(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"thinking":{"display":"updates"},"thinking":{"display":"updates"}}',
        b'{"thinking":{"display":"a","display":"updates"}}',
        b'{"th\\u0069nking":{"display":"updates"}, "thinking":{"display":"x"}}',
        b'{"thinking":{"display":"\xff"}}',
        b'{"thinking":{"display":' + b"[" * 5000 + b"}}",
        b'{"thinking":' + b"[" * 100_000,
    ],
)
def test_what_cannot_be_told_apart_is_left_alone(body: bytes) -> None:
    assert mended(body) is None


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5), SPACES)
def test_a_members_span_is_its_value(body: dict[str, Any], spaces: tuple[str, str]) -> None:
    raw = b" \n" + json.dumps(body, separators=spaces).encode()
    for name, value in body.items():
        span = member_span(raw, name)
        assert span is not None
        assert json.loads(raw[slice(*span)]) == value
    assert member_span(raw, "not there") is None


def test_no_repair_is_made_unasked() -> None:
    body = b'{"thinking":{"display":"updates"}}'
    assert repair((), Dialect.MESSAGES, body) == (body, ())
    assert set(REPAIRS) == {NAME}
