"""What the composition root does beyond wiring."""

from __future__ import annotations

import asyncio
import logging

import pytest

from router.main import _running
from router.store.memory import MemoryStore
from tests.fakes import FakeClock


async def test_a_router_one_of_whose_loops_fails_says_so_at_once_and_stops(caplog: pytest.LogCaptureFixture) -> None:
    """Going on it would never again probe a replica, or renew a lease."""
    stop, ended = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        raise LookupError("odd")

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def serve() -> None:
        async with _running(MemoryStore(FakeClock()), stop, fails(), goes_on()):
            async with asyncio.timeout(10):
                await stop.wait()
            assert "LookupError('odd')" in caplog.text
            assert not ended.is_set()

    with caplog.at_level(logging.CRITICAL), pytest.raises(LookupError, match="odd"):
        await serve()
    assert ended.is_set()


async def test_loops_that_are_told_to_end_stop_nothing() -> None:
    stop = asyncio.Event()
    async with _running(MemoryStore(FakeClock()), stop, asyncio.sleep(60)):
        await asyncio.sleep(0)
    assert not stop.is_set()
