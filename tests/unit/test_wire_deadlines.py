"""The connection's one timer under a clock that the test moves: which silence counts, and that reads move no timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from router.domain.errors import UpstreamSilent
from router.upstream.connection import Connection, LiveExchange, UpstreamLimits

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = UpstreamLimits(head_s=100.0, idle_s=10.0, keepalive_s=4.0)


class _Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.live = at, call, True

    def cancel(self) -> None:
        self.live = False


class _Loop:
    """As much of a loop as a connection uses, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[_Timer] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[[], None]) -> _Timer:
        self.timers.append(_Timer(at, call))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.live and timer.at <= end]:
            timer = min(due, key=lambda timer: timer.at)
            timer.live = False
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = end


class _Transport:
    def __init__(self) -> None:
        self.closed = False
        self.reading = True

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class _Bench:
    def __init__(self) -> None:
        self.loop = _Loop()
        self.transport = _Transport()
        self.idle: list[Connection] = []
        self.connection = Connection(cast("Any", self.loop), LIMITS, self.idle.append, lambda connection: None)
        self.connection.connection_made(cast("Any", self.transport))

    async def asking(self) -> asyncio.Task[LiveExchange]:
        task = asyncio.create_task(self.connection.request("POST", b"", b""))
        await asyncio.sleep(0)
        return task

    async def relaying(self) -> tuple[LiveExchange, asyncio.Task[None]]:
        asking = await self.asking()
        self.connection.data_received(HEAD)
        exchange = await asking
        task = asyncio.create_task(exchange.relay(lambda data: None))
        await asyncio.sleep(0)
        return exchange, task


async def test_the_head_has_its_own_time() -> None:
    """No head within `head_s` of the request, bytes of one or not."""
    bench = _Bench()
    asking = await bench.asking()
    bench.loop.advance(60.0)
    bench.connection.data_received(HEAD[:20])
    bench.loop.advance(39.9)
    assert not bench.transport.is_closing()
    bench.loop.advance(0.2)
    assert bench.transport.is_closing()
    with pytest.raises(UpstreamSilent, match="head"):
        await asking


async def test_each_read_starts_the_idle_time_anew() -> None:
    """A stream may last for ever while no gap reaches `idle_s`; and its reads set no timer each."""
    bench = _Bench()
    _, relay = await bench.relaying()
    for _ in range(1000):
        bench.loop.advance(9.9)
        bench.connection.data_received(b"1\r\nx\r\n")
    for _ in range(1000):
        bench.loop.advance(0.01)
        bench.connection.data_received(b"1\r\nx\r\n")
    timers = len(bench.loop.timers)
    assert timers < 1010
    bench.loop.advance(9.9)
    assert not bench.transport.is_closing()
    bench.loop.advance(0.2)
    assert bench.transport.is_closing()
    with pytest.raises(UpstreamSilent, match="byte"):
        await relay


async def test_a_pause_stops_the_idle_time() -> None:
    """While reading is held back the replica cannot be silent; afterwards it has the whole time again."""
    bench = _Bench()
    exchange, relay = await bench.relaying()
    bench.loop.advance(9.0)
    exchange.pause()
    bench.loop.advance(5000.0)
    assert not bench.transport.is_closing()
    exchange.resume()
    assert bench.transport.is_reading()
    bench.loop.advance(9.9)
    assert not bench.transport.is_closing()
    bench.loop.advance(0.2)
    with pytest.raises(UpstreamSilent):
        await relay


async def test_an_idle_connection_expires() -> None:
    """After a clean end the connection serves again for `keepalive_s`, then it is closed."""
    bench = _Bench()
    _, relay = await bench.relaying()
    bench.connection.data_received(b"0\r\n\r\n")
    await relay
    assert bench.idle == [bench.connection]
    bench.loop.advance(3.9)
    usable = [bench.connection.usable]
    bench.loop.now += 0.2
    usable.append(bench.connection.usable)
    assert usable == [True, False], "expired, though its timer has not fired yet"
    bench.loop.advance(0.0)
    assert bench.transport.is_closing()


async def test_an_exchange_that_ends_while_paused_leaves_a_connection_that_reads() -> None:
    """A pooled connection must see when the replica closes it."""
    bench = _Bench()
    exchange, relay = await bench.relaying()
    exchange.pause()
    assert not bench.transport.is_reading()
    bench.connection.data_received(b"0\r\n\r\n")
    await relay
    assert bench.transport.is_reading()
    exchange.pause()
    assert bench.transport.is_reading(), "an ended exchange has no power over its former connection"


async def test_what_outruns_the_relay_is_kept_and_held_back() -> None:
    """Payload that comes before `relay` is kept; the second read of it pauses the transport until the relay begins."""
    bench = _Bench()
    asking = await bench.asking()
    bench.connection.data_received(HEAD + b"1\r\na\r\n")
    exchange = await asking
    assert bench.transport.is_reading()
    bench.connection.data_received(b"1\r\nb\r\n")
    assert not bench.transport.is_reading()
    bench.loop.advance(5000.0)
    got: list[bytes] = []
    relay = asyncio.create_task(exchange.relay(got.append))
    await asyncio.sleep(0)
    assert bench.transport.is_reading()
    assert got == [b"ab"]
    bench.connection.data_received(b"1\r\nc\r\n0\r\n\r\n")
    await relay
    assert got == [b"ab", b"c"]
