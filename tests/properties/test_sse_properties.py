"""What holds for the readers of bodies whatever comes, however it is cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.turn import Dialect
from router.upstream.body import SLICE_BYTES, BodyReader, Reader
from router.upstream.sse import reader_for, stream_reader

EVENT_MAX = 300
WHOLE_MAX = 200

dialects = st.sampled_from(list(Dialect))
names = st.sampled_from(
    ["message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta", "error", "ping"]
    + [f"response.{x}" for x in ("created", "in_progress", "output_text.delta", "completed", "failed", "cancelled")]
    + ["", "x.delta"]
)
counts = st.one_of(st.integers(-1, 2**60), st.none(), st.booleans(), st.text(max_size=3))
count_keys = [
    "prompt_tokens",
    "completion_tokens",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "cache_read_input_tokens",
]
details = st.fixed_dictionaries({"cached_tokens": counts})
usages = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(count_keys, counts),
        **dict.fromkeys(["prompt_tokens_details", "input_tokens_details"], details),
    },
)
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(['"usage":{"prompt_tokens":6}', "data: [DONE]\n\n", "\r\n\r\n", '\\"}'])
)
finishes = st.sampled_from([None, "stop", {"type": "stop"}, {"type": "abort", "status_code": 503, "message": "x"}, 3])
errors = st.one_of(st.none(), st.text(max_size=9), st.fixed_dictionaries({"code": counts, "type": st.text(max_size=9)}))


def _payloads() -> st.SearchStrategy[Any]:
    choice = st.fixed_dictionaries(
        {"delta": st.fixed_dictionaries({"content": texts}), "finish_reason": finishes}, optional={"text": texts}
    )
    meta = st.tuples(usages, finishes).map(lambda pair: {**pair[0], "finish_reason": pair[1]})
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(names, counts),
            "choices": st.one_of(st.lists(choice, max_size=2), counts),
            "usage": st.one_of(usages, counts),
            "meta_info": st.one_of(meta, counts),
            "error": errors,
            "message": st.fixed_dictionaries({"usage": usages}),
            "response": st.one_of(
                st.fixed_dictionaries({"id": st.text(max_size=9), "usage": usages, "error": errors}), counts
            ),
            "sequence_number": counts,
            "text": texts,
        },
    )


payloads = _payloads()


@st.composite
def events(draw: st.DrawFn) -> str:
    payload = draw(payloads)
    spaces = draw(st.booleans())
    data = json.dumps(
        payload, separators=None if spaces else (",", ":"), indent=1 if draw(st.booleans()) and spaces else None
    )
    data = draw(st.sampled_from([data, data, data, "[DONE]", "nonsense", ""]))
    lines = [f"data:{draw(st.sampled_from(['', ' ']))}{line}" for line in data.split("\n")]
    name = draw(names)
    if name:
        lines.insert(0, f"event: {name}")
    lines += draw(st.lists(st.sampled_from([": comment", "id: 1", "retry", ""]), max_size=1))
    return "\n".join(lines) + draw(st.sampled_from(["\n\n", "\n\n", "\n\n\n", "\n"]))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    text = draw(st.sampled_from(["", "", "\ufeff"])) + "".join(draw(st.lists(events(), max_size=8)))
    ends = draw(st.sampled_from(["\n", "\n", "\r\n", "\r"]))
    data = text.replace("\n", ends).encode()
    return data + draw(st.binary(max_size=6))


wild = st.one_of(
    streams(),
    st.binary(max_size=400),
    st.lists(st.sampled_from([b"\n", b"\r", b"data:", b"x" * 99]), max_size=30).map(b"".join),
)


@st.composite
def cut(draw: st.DrawFn, bodies: st.SearchStrategy[bytes] = wild) -> tuple[bytes, list[bytes]]:
    """A body and the same in pieces, empty ones among them."""
    body = draw(bodies)
    at = sorted(draw(st.lists(st.integers(0, len(body)), max_size=12)))
    return body, [body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True)]


def seen(reader: Reader) -> dict[str, Any]:
    return {name: getattr(reader, name) for name in (*Reader.__slots__, "mid_event")}


def stream_of(dialect: Dialect) -> Reader:
    return stream_reader(dialect, EVENT_MAX)


def body_of(dialect: Dialect) -> Reader:
    return BodyReader(dialect, WHOLE_MAX)


@given(dialects, cut())
@settings(max_examples=400, deadline=None)
def test_any_chunking_of_a_stream_reads_the_same(dialect: Dialect, parts: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = parts
    one, many, single = stream_of(dialect), stream_of(dialect), stream_of(dialect)
    one.feed(whole)
    for piece in pieces:
        many.feed(piece)
        assert many.held_bytes <= EVENT_MAX + 2
    for index in range(len(whole)):
        single.feed(whole[index : index + 1])
    assert seen(many) == seen(one) == seen(single)


json_bodies = st.one_of(
    payloads.map(lambda payload: json.dumps(payload, separators=(",", ":")).encode()),
    st.lists(payloads, max_size=5).map(lambda items: json.dumps(items).encode()),
    st.tuples(payloads, st.text(max_size=300)).map(
        lambda pair: json.dumps({"id": "r", "output": pair[1], **pair[0]}).encode()
    ),
    st.lists(
        st.sampled_from([b'"usage"', b'"meta_info"', b":{", b'"prompt_tokens":3}', b"{", b'"us', b"x" * 50]),
        max_size=20,
    ).map(b"".join),
    st.binary(max_size=400),
)


@given(dialects, cut(json_bodies))
@settings(max_examples=300, deadline=None)
def test_any_chunking_of_a_reply_reads_the_same(dialect: Dialect, parts: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = parts
    one, many = body_of(dialect), body_of(dialect)
    one.feed(whole)
    for piece in pieces:
        many.feed(piece)
        assert many.held_bytes <= WHOLE_MAX + SLICE_BYTES + 16
    one.finish()
    many.finish()
    assert seen(many) == seen(one)


@given(
    dialects,
    st.sampled_from([b"text/event-stream", b"application/json", b"x"]),
    st.lists(st.binary(max_size=100), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_a_reader_raise(dialect: Dialect, content_type: bytes, chunks: list[bytes]) -> None:
    reader = reader_for(dialect, content_type)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    assert reader.body_bytes == sum(map(len, chunks))
    assert reader.usage.cached_tokens is None or reader.usage.cached_tokens >= 0


@given(dialects, st.text(max_size=60), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_no_text_changes_what_a_chat_chunk_means(dialect: Dialect, text: str, salt: int) -> None:
    """Whatever the model writes stands in a JSON string: it counts as output and as nothing else."""
    bait = (
        text
        + ['"usage":{"prompt_tokens":1}', "\n\ndata: [DONE]\n\n", '{"error":{"code":503}}', '"finish_reason":"stop"'][
            salt
        ]
    )
    for ascii_only in (True, False):
        delta = json.dumps({"choices": [{"delta": {"content": bait}, "finish_reason": None}]}, ensure_ascii=ascii_only)
        reader = stream_reader(Dialect.CHAT)
        reader.feed(b"data: " + delta.encode() + b"\n\n")
        assert (reader.output_events, reader.terminal, reader.error, reader.usage.prompt_tokens) == (
            1,
            False,
            None,
            None,
        )
