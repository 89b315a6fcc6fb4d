"""Comments in silent streams: between events only, never after the end, and only where silence was long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from router.domain.turn import Dialect
from router.lifecycle.heartbeat import COMMENT, Heartbeat
from router.upstream.body import BodyReader, Reader
from router.upstream.sse import reader_for, stream_reader
from tests.integration.replicas import DIALECTS, events


@dataclass
class Timer:
    at_s: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Loop:
    """Time that the test moves."""

    now_s: float = 100.0
    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(at_s, call))
        return self.timers[-1]

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return self.call_at(self.now_s + delay_s, call)

    def pass_(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := sorted((each for each in self.timers if each.at_s <= end_s), key=lambda each: each.at_s):
            self.timers.remove(due[0])
            self.now_s = due[0].at_s
            if not due[0].cancelled:
                due[0].call()
        self.now_s = end_s


@dataclass
class Down:
    started: bool = True
    wrote: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.wrote.append(data)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: made)
    return made


def begun(reader: Reader, down: Down) -> Heartbeat:
    return Heartbeat(down, reader, 10.0)  # type: ignore[arg-type]  # writes are all it needs


def test_each_silence_gets_one_comment_per_interval(loop: Loop) -> None:
    """Counted from the last byte, whichever that was."""
    down, reader = Down(), stream_reader(Dialect.CHAT)
    beat = begun(reader, down)
    loop.pass_(9)
    beat.wrote()
    loop.pass_(9.9)
    assert down.wrote == []
    loop.pass_(0.2)
    assert down.wrote == [COMMENT]
    loop.pass_(20)
    assert down.wrote == [COMMENT] * 3
    beat.stop()
    loop.pass_(100)
    assert down.wrote == [COMMENT] * 3


def test_nothing_comes_before_the_head(loop: Loop) -> None:
    down = Down(started=False)
    begun(stream_reader(Dialect.CHAT), down)
    loop.pass_(50)
    assert down.wrote == []


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_only_a_boundary_between_events_takes_a_comment(dialect: Dialect, line_end: bytes) -> None:
    """At every byte of a stream: true exactly where whole events have come and the last has not."""
    told = [event.replace(b"\n", line_end) for event in events(dialect, "resp_1", 10, ["a", "b"])]
    ends = {sum(map(len, told[:count])) for count in range(len(told))}
    stream = b"".join(told)
    for cut in range(len(stream) + 1):
        reader = stream_reader(dialect)
        reader.feed(stream[:cut])
        assert reader.between_events == (cut in ends), stream[max(0, cut - 20) : cut]
        piecewise = stream_reader(dialect)
        for byte in stream[:cut]:
            piecewise.feed(bytes([byte]))
        assert piecewise.between_events == reader.between_events


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_is_an_end(dialect: Dialect) -> None:
    reader = stream_reader(dialect)
    name = b"event: error\n" if dialect in (Dialect.MESSAGES, Dialect.RESPONSES) else b""
    reader.feed(name + b'data: {"error":{"message":"no","code":500}}\n\n')
    assert not reader.between_events


def test_what_is_no_event_stream_takes_none() -> None:
    """JSON, compressed streams, anything else."""
    assert not BodyReader(Dialect.CHAT).between_events
    for headers in ((b"application/json", None), (b"text/event-stream", b"gzip"), (b"text/html", None)):
        assert not reader_for(Dialect.CHAT, *headers).between_events
