"""What clients are told of errors: shapes, statuses, and nothing that is not theirs to know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api import errors as wire
from router.api.errors import error_frame, render
from router.domain import errors as domain
from router.domain.errors import (
    HeadersTooLarge,
    MalformedRequest,
    NotPlaced,
    RequestTooLarge,
    RoostError,
    StoreUnavailable,
    UnknownModel,
    UpstreamBroken,
    UpstreamSilent,
    UpstreamUnreachable,
)
from router.domain.turn import Dialect
from router.upstream.sse import stream_reader

SECRET = "http://10.0.0.7:30000 said: <prompt>"
EVERY_ERROR = [
    RoostError(SECRET),
    MalformedRequest("messages: not a list"),
    domain.UnknownKey("that API key is not known here"),
    domain.NotAllowed("this key may not ask that"),
    UnknownModel("no fleet serves the model 'x'"),
    domain.UnknownResponse("no such response"),
    domain.OverLimit("5 turns are under way already", retry_after_s=2.2),
    RequestTooLarge("the body exceeds 64 MiB"),
    HeadersTooLarge("the headers exceed 64 KiB"),
    domain.TooSlow("the body stopped coming"),
    domain.ExpectationFailed("Expect: only 100-continue can be met"),
    domain.Unsupported("WebSocket is not spoken here"),
    domain.UnsupportedVersion("HTTP/1.1 is spoken here"),
    NotPlaced("all replicas are draining", retry_after_s=2.2),
    domain.RouterBusy("too many requests are being read", retry_after_s=2.2),
    domain.UpstreamError(SECRET),
    UpstreamUnreachable(SECRET),
    UpstreamBroken(SECRET),
    UpstreamSilent(SECRET),
    StoreUnavailable(SECRET),
    domain.StoreForeign(SECRET),
]
EVERY = [(error, dialect) for error in EVERY_ERROR for dialect in Dialect]
OPENAI = (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.OTHER)


def subclasses(kind: type[RoostError]) -> set[type[RoostError]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_error_of_the_tree_is_in_the_table() -> None:
    """A new error must be given its words; only the root falls back to 'internal error'."""
    codes = {kind.code for kind in subclasses(RoostError) if kind.__module__ == domain.__name__}
    assert codes - {RoostError.code} == set(wire._NAMES)


@pytest.mark.parametrize(("error", "dialect"), EVERY)
def test_status_header_and_shape_are_the_dialects(error: RoostError, dialect: Dialect) -> None:
    told = render(error, dialect)
    headers = dict(told.headers)
    assert told.status == error.status
    assert headers["x-roost-error"] == error.code
    assert headers["content-type"] == "application/json"
    body: Any = json.loads(told.body)
    if dialect is Dialect.MESSAGES:
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    elif dialect is Dialect.GENERATE:
        assert set(body["error"]) == {"message", "type", "code"}
        assert body["error"]["code"] == error.status
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == error.code
    assert body["error"]["message"]


@pytest.mark.parametrize(("error", "dialect"), EVERY)
def test_nothing_of_the_inside_gets_out(error: RoostError, dialect: Dialect) -> None:
    """An upstream's or the store's own words go to the log; the client learns at most which replica it was."""
    told = render(error, dialect, replica="r-7").body + error_frame(error, dialect, mid_event=True, replica="r-7")
    assert b"10.0.0.7" not in told
    assert b"<prompt>" not in told
    assert isinstance(error, domain.UpstreamError) == (b"replica r-7" in told)


def test_requests_at_fault_are_told_why() -> None:
    assert b"messages: not a list" in render(EVERY_ERROR[1], Dialect.CHAT).body


def test_a_message_is_short_and_printable() -> None:
    told: Any = json.loads(render(MalformedRequest("\x1b[31m\n" + "x" * 9000), Dialect.CHAT).body)
    assert len(told["error"]["message"]) <= 500
    assert told["error"]["message"].isprintable()
    assert json.loads(render(MalformedRequest(""), Dialect.CHAT).body)["error"]["message"] == "invalid request"


@pytest.mark.parametrize("dialect", list(Dialect))
def test_retry_after_is_whole_seconds_where_waiting_helps(dialect: Dialect) -> None:
    waits = {error.code: dict(render(error, dialect).headers).get("retry-after") for error in EVERY_ERROR}
    assert {code: wait for code, wait in waits.items() if wait is not None} == {
        "rate_limit_exceeded": "3",
        "no_replica": "3",
        "router_busy": "3",
        "store_unavailable": "1",
    }
    assert ("retry-after", "1") in render(NotPlaced("x", retry_after_s=0.0), dialect).headers


def test_an_unknown_model_is_said_as_openai_and_anthropic_say_it() -> None:
    openai: Any = json.loads(render(UnknownModel("no"), Dialect.CHAT).body)["error"]
    assert (openai["type"], openai["param"], openai["code"]) == ("invalid_request_error", "model", "model_not_found")
    anthropic: Any = json.loads(render(UnknownModel("no"), Dialect.MESSAGES).body)["error"]
    assert anthropic["type"] == "not_found_error"


@pytest.mark.parametrize(("error", "dialect"), EVERY)
def test_no_name_that_ends_an_agents_retries(error: RoostError, dialect: Dialect) -> None:
    told = render(error, dialect).body + error_frame(error, dialect, mid_event=False)
    assert b"overloaded" not in told
    assert b"quota" not in told


BEGUN = {
    Dialect.MESSAGES: b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
    Dialect.RESPONSES: b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
    Dialect.GENERATE: b'data: {"text":"a","meta_info":{"finish_reason":null}}\n\n',
}
CHAT_BEGUN = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("cut", [0, 1, 2, 9, 30])
def test_a_frame_reads_as_an_error_wherever_the_stream_broke(dialect: Dialect, cut: int) -> None:
    """Seen with the project's own reader: an error, and never the dialect's sign of a complete answer."""
    begun = BEGUN.get(dialect, CHAT_BEGUN)
    reader = stream_reader(dialect)
    reader.feed(begun)
    reader.feed(begun[:cut])
    frame = error_frame(UpstreamBroken("x"), dialect, mid_event=reader.mid_event, replica="r-7")
    reader.feed(frame)
    assert reader.error == "internal"
    assert reader.terminal == (dialect is Dialect.RESPONSES)
    assert not reader.mid_event
    assert b"[DONE]" not in frame
    assert b"message_stop" not in frame
    assert frame.startswith(b"\n\n") == (cut > 0)


def test_a_failed_response_continues_its_stream() -> None:
    frame = error_frame(
        UpstreamBroken("x"), Dialect.RESPONSES, mid_event=False, response_id="resp_1", sequence_number=5
    )
    name, data = frame.split(b"\n", 1)
    event: Any = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: response.failed"
    assert (event["type"], event["sequence_number"]) == ("response.failed", 5)
    assert (event["response"]["id"], event["response"]["status"]) == ("resp_1", "failed")
    assert event["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("dialect", OPENAI)
def test_a_frame_without_what_is_not_known(dialect: Dialect) -> None:
    frame = error_frame(UpstreamSilent("x"), dialect, mid_event=False)
    event: Any = json.loads(frame[frame.index(b"{") :])
    assert "sequence_number" not in event
    assert "id" not in event.get("response", {})
    assert b"the replica sent nothing for too long" in frame
