"""The readers of response bodies. Streams are written as SGLang 0.5.23 writes them unless a test says otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.domain.outcome import Usage
from router.domain.turn import Dialect
from router.upstream.body import SLICE_BYTES, BodyReader, Reader
from router.upstream.event_stream import StreamReader
from router.upstream.sse import reader_for, stream_reader

EVERY_DIALECT = list(Dialect)


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: object, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + compact(value) + b"\n\n"


def read(dialect: Dialect, *chunks: bytes, event_max_bytes: int = 1 << 20) -> StreamReader:
    reader = stream_reader(dialect, event_max_bytes)
    for chunk in chunks:
        reader.feed(chunk)
    reader.finish()
    return reader


# --- streams as the engine writes them --------------------------------------------------------------------------------

CHAT_HEAD: dict[str, Any] = {"id": "6147", "object": "chat.completion.chunk", "created": 1795967097, "model": "m"}


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return event({**CHAT_HEAD, "choices": [choice]})


def chat_usage(cached: int | None = 242) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    usage = {"prompt_tokens": 243, "total_tokens": 246, "completion_tokens": 3, "prompt_tokens_details": details}
    return event({**CHAT_HEAD, "choices": [], "usage": {**usage, "reasoning_tokens": 0}})


DONE = b"data: [DONE]\n\n"
CHAT = [
    chat({"reasoning_content": None, "role": "assistant", "content": ""}),
    chat({"reasoning_content": "hm", "content": None}),
    chat({"reasoning_content": None, "content": "a"}),
    chat({"reasoning_content": None, "content": " b"}),
    chat({"reasoning_content": None}, "stop"),
    chat_usage(),
    DONE,
]


def completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return event(
        {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": None}
    )


COMPLETIONS = [
    completion("a"),
    completion("b"),
    completion("c", "length"),
    event(
        {"id": "1", "object": "text_completion", "choices": [], "usage": {"prompt_tokens": 18, "completion_tokens": 3}}
    ),
    DONE,
]
MESSAGES = [
    event(
        {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "content": [],
                "usage": {"input_tokens": 1, "output_tokens": 0, "cache_read_input_tokens": 242},
            },
        },
        "message_start",
    ),
    event(
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        "content_block_start",
    ),
    event(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "G"}}, "content_block_delta"
    ),
    event(
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "o"}}, "content_block_delta"
    ),
    event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
    event(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}, "message_delta"
    ),
    event({"type": "message_stop"}, "message_stop"),
]


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "output": [],
        "usage": None,
        "error": None,
        **fields,
    }


RESPONSES_USAGE = {
    "input_tokens": 243,
    "input_tokens_details": {"cached_tokens": 242},
    "output_tokens": 2,
    "total_tokens": 245,
}
RESPONSES = [
    event({"type": "response.created", "sequence_number": 0, "response": response("in_progress")}, "response.created"),
    event(
        {"type": "response.in_progress", "sequence_number": 1, "response": response("in_progress")},
        "response.in_progress",
    ),
    event(
        {"item": {"type": "message"}, "sequence_number": 2, "type": "response.output_item.added"},
        "response.output_item.added",
    ),
    event({"delta": "a", "sequence_number": 3, "type": "response.output_text.delta"}, "response.output_text.delta"),
    event({"delta": "b", "sequence_number": 4, "type": "response.output_text.delta"}, "response.output_text.delta"),
    event({"text": "ab", "sequence_number": 5, "type": "response.output_text.done"}, "response.output_text.done"),
    event(
        {"type": "response.completed", "sequence_number": 6, "response": response("completed", usage=RESPONSES_USAGE)},
        "response.completed",
    ),
]


def generated(text: str, tokens: int, finish: dict[str, Any] | None = None, **more: Any) -> bytes:
    meta = {"id": "f00", "finish_reason": finish, "prompt_tokens": 18, "completion_tokens": tokens, "cached_tokens": 17}
    return event({"text": text, "output_ids": list(range(tokens)), "meta_info": meta, **more})


GENERATE = [generated("a", 1), generated("ab", 2), generated("abc", 3, {"type": "length", "length": 3}), DONE]
STREAMS = {
    Dialect.CHAT: CHAT,
    Dialect.COMPLETIONS: COMPLETIONS,
    Dialect.MESSAGES: MESSAGES,
    Dialect.RESPONSES: RESPONSES,
    Dialect.GENERATE: GENERATE,
}


@pytest.mark.parametrize(
    ("dialect", "usage", "output_events"),
    [
        (Dialect.CHAT, Usage(243, 242, 3), 3),
        (Dialect.COMPLETIONS, Usage(18, None, 3), 3),
        (Dialect.MESSAGES, Usage(243, 242, 3), 2),
        (Dialect.RESPONSES, Usage(243, 242, 2), 2),
        (Dialect.GENERATE, Usage(18, 17, 3), 3),
    ],
)
def test_a_whole_stream_tells_usage_output_and_end(dialect: Dialect, usage: Usage, output_events: int) -> None:
    """`prompt_tokens` is the whole prompt in every dialect, though messages leaves the cached tokens out of its own."""
    reader = read(dialect, *STREAMS[dialect])
    assert reader.usage == usage
    assert reader.output_events == output_events
    assert reader.terminal
    assert reader.first_output
    assert reader.error is None
    assert reader.skipped_events == 0
    assert not reader.mid_event
    assert reader.body_bytes == sum(map(len, STREAMS[dialect]))


@pytest.mark.parametrize(
    ("dialect", "before"),
    [(Dialect.CHAT, 0), (Dialect.COMPLETIONS, 0), (Dialect.MESSAGES, 1), (Dialect.RESPONSES, 2), (Dialect.GENERATE, 0)],
)
def test_first_output_is_the_first_event_after_prefill(dialect: Dialect, before: int) -> None:
    """What SGLang sends at once, before any token (message_start, response.created), is no output."""
    reader = stream_reader(dialect)
    for chunk in STREAMS[dialect][:before]:
        reader.feed(chunk)
        assert not reader.first_output
    reader.feed(STREAMS[dialect][before])
    assert reader.first_output


@pytest.mark.parametrize("dialect", [d for d in Dialect if d is not Dialect.OTHER])
def test_a_stream_cut_before_its_last_event_is_not_terminal(dialect: Dialect) -> None:
    reader = read(dialect, *STREAMS[dialect][:-1], STREAMS[dialect][-1][:-1])
    assert not reader.terminal
    assert reader.mid_event


def test_counts_survive_a_stream_that_breaks_off() -> None:
    """Messages and generate tell the prompt's counts first; the output is then unknown, not the number at the start."""
    assert read(Dialect.MESSAGES, *MESSAGES[:3]).usage == Usage(243, 242, None)
    assert read(Dialect.GENERATE, *GENERATE[:2]).usage == Usage(18, 17, None)


def test_unreported_cache_is_unknown_not_zero() -> None:
    assert read(Dialect.CHAT, chat_usage(None)).usage == Usage(243, None, 3)
    assert read(Dialect.CHAT, chat_usage(0)).usage == Usage(243, 0, 3)
    start = event(
        {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}, "message_start"
    )
    assert read(Dialect.MESSAGES, start).usage == Usage(9, None, None)


def test_usage_in_every_chunk_ends_with_the_last() -> None:
    """`stream_options.continuous_usage_stats`: SGLang leaves the cached count out of completions until the end."""

    def chunk(output: int, cached: int | None) -> bytes:
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": 18, "completion_tokens": output, "prompt_tokens_details": details}
        return event({"choices": [{"index": 0, "text": "x", "finish_reason": None}], "usage": usage})

    reader = read(Dialect.COMPLETIONS, chunk(1, None), chunk(2, 7), chunk(3, None))
    assert reader.usage == Usage(18, 7, 3)
    assert reader.output_events == 3


def test_a_batch_of_generate_is_summed() -> None:
    ends = [generated("a", 3, {"type": "stop"}, index=i) for i in range(3)]
    reader = read(Dialect.GENERATE, generated("a", 1, index=0), *ends, DONE)
    assert reader.usage == Usage(54, 51, 9)


def test_anthropic_prompt_counts_cache_reads_and_writes() -> None:
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 100,
        "cache_read_input_tokens": 1000,
        "output_tokens": 1,
    }
    start = event({"type": "message_start", "message": {"usage": usage}}, "message_start")
    assert read(Dialect.MESSAGES, start).usage.prompt_tokens == 1110


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
def test_every_final_status_of_a_response_is_terminal(status: str) -> None:
    last = event(
        {"type": f"response.{status}", "response": response(status, usage=RESPONSES_USAGE)}, f"response.{status}"
    )
    reader = read(Dialect.RESPONSES, *RESPONSES[:-1], last)
    assert reader.terminal
    assert reader.usage == Usage(243, 242, 2)
    assert reader.error == ("internal" if status == "failed" else None)


def test_response_id_and_sequence_number_go_on() -> None:
    """The number a further event must carry is known at every point, though deltas are not decoded."""
    reader = stream_reader(Dialect.RESPONSES)
    for number, chunk in enumerate(RESPONSES):
        reader.feed(chunk)
        assert reader.next_sequence == number + 1
        assert reader.response_id == "resp_1"


def test_usage_values_of_the_wrong_kind_are_not_said() -> None:
    nonsense: object
    for nonsense in (-1, 1.5, "7", True, None, [], {}, 2**60):
        assert read(Dialect.CHAT, event({"usage": {"prompt_tokens": nonsense, "completion_tokens": 1}})).usage == Usage(
            None, None, 1
        )
    for nonsense in (1, "x", [], [{}], True):
        assert read(Dialect.CHAT, event({"usage": nonsense})).usage == Usage()


def test_cached_tokens_never_exceed_the_prompt() -> None:
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}
    assert read(Dialect.CHAT, event({"usage": usage})).usage == Usage(5, 5, None)


# --- errors inside a 200 ----------------------------------------------------------------------------------------------

FULL = "The request queue is full."
FULL_CHAT = json.dumps(
    {"error": {"object": "error", "message": FULL, "type": "SERVICE_UNAVAILABLE", "param": None, "code": 503}}
)
ZEROS = {"prompt_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}
FULL_STREAMS = {
    Dialect.CHAT: [f"data: {FULL_CHAT}\n\n".encode(), event({**CHAT_HEAD, "choices": [], "usage": ZEROS}), DONE],
    Dialect.COMPLETIONS: [f"data: {FULL_CHAT}\n\n".encode(), DONE],
    Dialect.MESSAGES: [
        event(
            {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}, "message_start"
        ),
        event({"type": "error", "error": {"type": "overloaded_error", "message": FULL}}, "error"),
        event({"type": "message_stop"}, "message_stop"),
    ],
    Dialect.RESPONSES: [
        *RESPONSES[:2],
        event(
            {
                "type": "response.failed",
                "response": response(
                    "failed",
                    usage={"input_tokens": 0, "output_tokens": 0},
                    error={"code": "server_error", "message": FULL},
                ),
            },
            "response.failed",
        ),
    ],
    Dialect.GENERATE: [
        event(
            {
                "text": "",
                "meta_info": {"id": "1", "finish_reason": {"type": "abort", "status_code": 503, "message": FULL}},
            }
        ),
        DONE,
    ],
}


@pytest.mark.parametrize("dialect", list(FULL_STREAMS))
def test_a_full_queue_is_an_error_without_output(dialect: Dialect) -> None:
    """SGLang refuses with a 200 and one event (--max-queued-requests); nothing of it may pass for output or counts."""
    reader = read(dialect, *FULL_STREAMS[dialect])
    assert (reader.error, reader.error_code) == ("overloaded", 503)
    assert not reader.first_output
    assert reader.output_events == 0
    assert reader.usage == Usage()
    assert reader.terminal


@pytest.mark.parametrize(
    ("dialect", "chunk", "error", "code"),
    [
        (
            Dialect.CHAT,
            event({"error": {"message": "x", "type": "BadRequestError", "code": 400}}),
            "invalid_request",
            400,
        ),
        (Dialect.CHAT, event({"error": "boom"}), "internal", None),
        (Dialect.CHAT, event({"error": {"message": "x", "type": "REQUEST_TIMEOUT", "code": "408"}}), "timeout", 408),
        (Dialect.OTHER, event({"error": {"code": "rate_limit_exceeded"}}), "rate_limited", 429),
        (
            Dialect.MESSAGES,
            event({"type": "error", "error": {"type": "api_error", "message": "x"}}, "error"),
            "internal",
            500,
        ),
        (Dialect.MESSAGES, event({"type": "error", "error": {"type": "new_error"}}, "error"), "internal", None),
        (Dialect.MESSAGES, b"event: error\ndata: not json\n\n", "internal", None),
        (Dialect.RESPONSES, event({"type": "error", "code": "server_error", "message": "x"}, "error"), "internal", 500),
        (
            Dialect.RESPONSES,
            event({"type": "error", "error": {"type": "invalid_request_error"}}, "error"),
            "invalid_request",
            400,
        ),
        (
            Dialect.GENERATE,
            event({"error": {"message": "x", "type": "invalid_request_error", "code": 400}}),
            "invalid_request",
            400,
        ),
    ],
)
def test_error_events_are_named(dialect: Dialect, chunk: bytes, error: str, code: int | None) -> None:
    reader = read(dialect, chunk)
    assert (reader.error, reader.error_code) == (error, code)
    assert not reader.first_output


def test_an_abort_somebody_asked_for_is_no_error() -> None:
    """Without a status code SGLang means a wanted abort (/abort_request)."""
    reader = read(Dialect.GENERATE, generated("ab", 2, {"type": "abort", "message": "x", "status_code": None}))
    assert reader.error is None
    assert reader.usage == Usage(18, 17, 2)


# --- framing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", list(STREAMS))
@pytest.mark.parametrize("ends", [b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_line_ends_of_all_three_kinds(dialect: Dialect, ends: bytes, size: int) -> None:
    whole = b"".join(STREAMS[dialect])
    expected = read(dialect, whole)
    stream = whole.replace(b"\n", ends)
    reader = read(dialect, *(stream[i : i + size] for i in range(0, len(stream), size)))
    assert (reader.usage, reader.output_events, reader.terminal) == (expected.usage, expected.output_events, True)


def test_byte_order_mark_comments_ids_and_missing_spaces() -> None:
    stream = (
        b'\xef\xbb\xbf: hello\n\n:\nid: 7\nretry: 10\ndata:{"choices":[{"delta":{"content":"x"}}]}\n\ndata:[DONE]\n\n'
    )
    reader = read(Dialect.CHAT, stream)
    assert reader.output_events == 1
    assert reader.terminal


def test_data_over_several_lines_is_one_event() -> None:
    reader = read(Dialect.CHAT, b'data: {"usage":\ndata: {"prompt_tokens":\ndata: 7}}\n\n')
    assert reader.usage.prompt_tokens == 7


def test_keep_alives_are_nothing() -> None:
    for dialect in EVERY_DIALECT:
        reader = read(dialect, b": ping\n\n", b"\n\n", b"event: ping\n\n", b'event: ping\ndata: {"type": "ping"}\n\n')
        assert not reader.first_output
        assert (reader.output_events, reader.skipped_events, reader.mid_event) == (0, 0, False)


def test_events_without_names_are_known_by_their_type() -> None:
    """Some gateways drop `event:` lines."""
    for dialect in (Dialect.MESSAGES, Dialect.RESPONSES):
        bare = [chunk.partition(b"\n")[2] for chunk in STREAMS[dialect]]
        one, other = read(dialect, *bare), read(dialect, *STREAMS[dialect])
        assert (one.usage, one.output_events, one.terminal) == (other.usage, other.output_events, other.terminal)


def test_spaced_json_reads_the_same() -> None:
    """Python's json.dumps puts spaces after colons and commas; SGLang does so for errors."""
    spaced = [chunk.replace(b'":', b'": ').replace(b',"', b', "') for chunk in CHAT]
    one, other = read(Dialect.CHAT, *spaced), read(Dialect.CHAT, *CHAT)
    assert (one.usage, one.output_events, one.terminal) == (other.usage, other.output_events, other.terminal)


def test_an_event_too_long_is_skipped_and_reading_goes_on() -> None:
    long = chat({"content": "x" * 5000})
    for chunks in ([long], [long[:2500], long[2500:]], [long[i : i + 1] for i in range(len(long))]):
        reader = stream_reader(Dialect.CHAT, 4096)
        for chunk in [chat({"content": "a"}), *chunks, chat_usage(), DONE]:
            reader.feed(chunk)
            assert reader.held_bytes <= 4098
        assert reader.skipped_events == 1
        assert (reader.usage, reader.output_events, reader.terminal) == (Usage(243, 242, 3), 1, True)


def test_inside_an_event_is_told() -> None:
    reader = stream_reader(Dialect.CHAT)
    inside = [reader.mid_event]
    for chunk in (CHAT[0], CHAT[1][:30], CHAT[1][30:], b"data: {}\n", b"\n", b"\n"):
        reader.feed(chunk)
        inside.append(reader.mid_event)
    assert inside == [False, False, True, False, True, False, False]


# --- what must not fool it --------------------------------------------------------------------------------------------

BAIT = 'data: [DONE]\n\nevent: error\ndata: {"error":{"code":503}}\n\n"usage":{"prompt_tokens":666,"input_tokens":666}'


@pytest.mark.parametrize(
    "dialect", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES, Dialect.RESPONSES, Dialect.GENERATE]
)
@pytest.mark.parametrize(
    "bait", [BAIT, json.dumps(BAIT), json.dumps({"usage": {"prompt_tokens": 666}}), '\\"usage":{"']
)
def test_protocol_words_in_the_text_mean_nothing(dialect: Dialect, bait: str) -> None:
    chunk = {
        Dialect.CHAT: chat({"reasoning_content": None, "content": bait}),
        Dialect.COMPLETIONS: completion(bait),
        Dialect.MESSAGES: event({"type": "content_block_delta", "delta": {"text": bait}}, "content_block_delta"),
        Dialect.RESPONSES: event({"delta": bait, "type": "response.output_text.delta"}, "response.output_text.delta"),
        Dialect.GENERATE: generated(bait, 2),
    }[dialect]
    before = read(dialect, *STREAMS[dialect][:3])
    reader = read(dialect, *STREAMS[dialect][:3], chunk)
    assert reader.output_events == before.output_events + 1
    assert (reader.usage, reader.terminal, reader.error) == (before.usage, False, None)


def test_nonsense_is_counted_and_reading_goes_on() -> None:
    reader = read(
        Dialect.CHAT, b"data: nonsense\n\n", b'data: {"choices": 3}\n\n', b"data: " + b"[" * 100_000 + b"\n\n", *CHAT
    )
    assert reader.skipped_events == 3
    assert reader.usage == Usage(243, 242, 3)


# --- replies that are no stream ---------------------------------------------------------------------------------------


def reply(dialect: Dialect, body: object, *, size: int = 1000) -> BodyReader:
    data = body if isinstance(body, bytes) else compact(body)
    reader = BodyReader(dialect)
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        assert reader.held_bytes <= 33 << 10
    ended = [reader.terminal]
    reader.finish()
    assert [*ended, reader.terminal] == [False, True]
    return reader


def bodies(filler: str) -> list[tuple[Dialect, object, Usage]]:
    openai = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    meta = {
        "id": "1",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 20,
        "completion_tokens": 3,
        "cached_tokens": 16,
    }
    tools = [{"type": "function", "parameters": {"properties": {"usage": {"type": "object", "description": filler}}}}]
    return [
        (
            Dialect.CHAT,
            {
                "id": "1",
                "choices": [{"message": {"content": filler}}],
                "usage": openai,
                "metadata": {"weight_version": "v"},
            },
            Usage(20, 16, 3),
        ),
        (Dialect.COMPLETIONS, {"id": "1", "choices": [{"text": filler}], "usage": openai}, Usage(20, 16, 3)),
        (Dialect.OTHER, {"data": [{"embedding": filler}], "usage": {"prompt_tokens": 20}}, Usage(20, None, None)),
        (
            Dialect.MESSAGES,
            {
                "id": "msg_1",
                "content": [
                    {"type": "tool_use", "input": {"usage": {"input_tokens": 666, "output_tokens": 1}, "x": filler}}
                ],
                "usage": {"input_tokens": 4, "output_tokens": 3, "cache_read_input_tokens": 16},
            },
            Usage(20, 16, 3),
        ),
        (
            Dialect.RESPONSES,
            {
                "id": "resp_1",
                "output": [filler],
                "usage": {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 3},
                "tools": tools,
                "instructions": filler,
                "metadata": {"usage": {"input_tokens": 666, "output_tokens": 666}},
            },
            Usage(20, 16, 3),
        ),
        (Dialect.GENERATE, {"text": filler, "output_ids": [1], "meta_info": meta}, Usage(20, 16, 3)),
        (Dialect.GENERATE, [{"text": filler, "meta_info": meta}] * 3, Usage(60, 48, 9)),
    ]


@pytest.mark.parametrize("length", [10, 40_000, 200_000])
@pytest.mark.parametrize("size", [997, 16_384, 1 << 20])
def test_usage_is_found_wherever_it_stands(length: int, size: int) -> None:
    """In a reply of any length, before or after the text, and not where a tool or a text has the same words."""
    for dialect, body, usage in bodies(BAIT * (length // len(BAIT) + 1)):
        reader = reply(dialect, body, size=size)
        assert reader.usage == usage, dialect
        assert reader.first_output
        assert reader.response_id == ("resp_1" if dialect is Dialect.RESPONSES else None)


@pytest.mark.parametrize(
    ("dialect", "body", "error", "code"),
    [
        (
            Dialect.CHAT,
            {"object": "error", "message": FULL, "type": "503", "param": None, "code": 503},
            "overloaded",
            503,
        ),
        (
            Dialect.CHAT,
            {"error": {"message": "x", "type": "invalid_request_error", "code": "y"}},
            "invalid_request",
            400,
        ),
        (Dialect.MESSAGES, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "overloaded", 503),
        (
            Dialect.RESPONSES,
            {"error": {"message": f"503: {FULL}", "type": "invalid_request_error", "code": 400}},
            "overloaded",
            503,
        ),
        (Dialect.GENERATE, {"error": {"message": "x"}}, "internal", None),
    ],
)
def test_errors_in_replies_are_named(dialect: Dialect, body: object, error: str, code: int | None) -> None:
    reader = reply(dialect, body)
    assert (reader.error, reader.error_code) == (error, code)


@pytest.mark.parametrize(
    "body", [b"", b"Internal Server Error", b"[]", b"[1]", b"{", b"[" * 50_000, b"\xff" * 50_000, b"3"]
)
def test_replies_that_are_nonsense_say_nothing(body: bytes) -> None:
    for dialect in EVERY_DIALECT:
        assert reply(dialect, body).usage == Usage()


def test_a_usage_object_longer_than_the_slice_is_left_alone() -> None:
    body = {"x": "y" * 40_000, "usage": {"pad": "z" * SLICE_BYTES, "prompt_tokens": 1}}
    assert reply(Dialect.CHAT, body).usage == Usage()


# --- which reader -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "encoding", "kind"),
    [
        (b"text/event-stream; charset=utf-8", None, StreamReader),
        (b"Text/Event-Stream", b"identity", StreamReader),
        (b"application/json", None, BodyReader),
        (b"application/problem+json;charset=utf-8", b"", BodyReader),
        (b"application/json", b"gzip", Reader),
        (b"text/event-stream", b"br", Reader),
        (b"text/plain", None, Reader),
        (b"", None, Reader),
        (None, None, Reader),
    ],
)
def test_the_reader_follows_the_headers(content_type: bytes | None, encoding: bytes | None, kind: type[Reader]) -> None:
    reader = reader_for(Dialect.CHAT, content_type, encoding)
    assert isinstance(reader, kind)
    assert kind is not Reader or type(reader) is Reader


def test_a_body_of_no_known_form_is_counted() -> None:
    reader = reader_for(Dialect.CHAT, b"image/png")
    reader.feed(b"")
    assert not reader.first_output
    reader.feed(b"12345")
    reader.finish()
    assert (reader.body_bytes, reader.first_output, reader.terminal, reader.held_bytes) == (5, True, True, 0)
