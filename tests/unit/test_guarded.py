"""The look-out before the store: nobody waits for one that is away, and the log says each change once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from router.domain.errors import StoreError, StoreForeign, StoreUnavailable
from router.domain.shared import Ask, Member, Settlement, View
from router.store.guarded import Guarded
from router.store.memory import MemoryStore
from tests.fakes import FakeClock

FLEET = "f"
AWAY = StoreUnavailable("no answer within 50 ms")
FOREIGN = StoreForeign("schema says 9")


class Inner(MemoryStore):
    """Fails as it is told; counts what arrives."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.fails: StoreError | None = None
        self.fails_once: list[StoreError] = []
        self.spoilt: StoreError | None = None
        """Fails what no trial looks at."""
        self.opens_with: StoreError | None = None
        self.opened = 0
        self.fetched = 0
        self.closed = False

    async def open(self) -> None:
        self.opened += 1
        await asyncio.sleep(0)
        for error in (self.opens_with, self.fails):
            if error is not None:
                raise error

    async def close(self) -> None:
        self.closed = True

    async def fetch(self, fleet: str, ask: Ask) -> View:
        self.fetched += 1
        await asyncio.sleep(0)
        if self.fails_once:
            raise self.fails_once.pop(0)
        if self.fails is not None:
            raise self.fails
        return await super().fetch(fleet, ask)

    async def progress(self, fleet: str, lease: str) -> None:
        if self.spoilt is not None:
            raise self.spoilt


class Guard:
    """A guarded store, what its watchers were told, and what it logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture, check_s: float = 60.0) -> None:
        self.inner, self.clock = Inner(), FakeClock()
        self.store = Guarded(self.inner, self.clock, retry_s=0.001, check_s=check_s)
        self.told: list[bool] = []
        self.changed = asyncio.Event()
        self.store.watch(self._tell)
        self._caplog = caplog

    def _tell(self, up: bool) -> None:
        self.told.append(up)
        self.changed.set()

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.levelno >= logging.INFO]

    async def ask(self) -> bool:
        """Whether a call passes."""
        try:
            await self.store.fetch(FLEET, Ask(None))
        except StoreUnavailable:
            return False
        return True

    async def until(self, up: bool) -> None:
        async with asyncio.timeout(10):
            while self.store.up is not up:
                self.changed.clear()
                await self.changed.wait()

    async def trials(self, count: int) -> None:
        """Until so many more trials have begun."""
        goal = self.inner.opened + count
        await reached(lambda: self.inner.opened >= goal)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.store.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()


async def reached(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 (the store tells nobody of its trials)
            await asyncio.sleep(0)


@pytest.fixture
def guard(caplog: pytest.LogCaptureFixture) -> Guard:
    caplog.set_level(logging.DEBUG, "roost.store")
    return Guard(caplog)


async def test_a_store_that_goes_and_comes_back_is_said_once_each(guard: Guard) -> None:
    async with guard.running():
        assert await guard.ask()
        guard.inner.fails = AWAY
        assert not await guard.ask()
        await guard.until(False)
        asked = guard.inner.fetched
        for _ in range(50):
            assert not await guard.ask()
        assert guard.inner.fetched == asked, "a call went out to a store that is away"
        await guard.trials(3)
        guard.clock.at_s += 12.25
        guard.inner.fails = None
        await guard.until(True)
        assert await guard.ask()
    assert guard.told == [True, False, True]
    away, back = guard.lines
    assert "away" in away
    assert "no answer within 50 ms" in away
    assert "back after 12.2 s" in back


async def test_calls_that_fail_together_are_one_doubt_and_a_passing_trial_ends_it(guard: Guard) -> None:
    """A stalled loop times out dozens of calls at once; the store was never away."""
    async with guard.running():
        assert await guard.ask()
        guard.inner.fails_once = [AWAY] * 40
        got = await asyncio.gather(*(guard.ask() for _ in range(40)))
        assert not any(got)
        await guard.trials(1)
        assert await guard.ask()
        assert guard.store.up
    assert guard.lines == []
    assert guard.told == [True]


async def test_another_versions_keys_are_said_in_their_own_words(guard: Guard) -> None:
    """They may appear while the store is in use, or in the one that comes back; each change has one line."""
    async with guard.running():
        assert await guard.ask()
        guard.inner.fails = AWAY
        await guard.ask()
        await guard.until(False)
        guard.inner.fails, guard.inner.opens_with = None, FOREIGN
        await reached(lambda: len(guard.lines) == 2)
        await guard.trials(3)
        assert not await guard.ask()
        guard.inner.opens_with, guard.inner.fails = None, AWAY
        await reached(lambda: len(guard.lines) == 3)
        guard.inner.fails = None
        await guard.until(True)
    away, foreign, again, back = guard.lines
    assert "schema says 9" in foreign
    assert "not this router's to use" in foreign
    assert "is away" in away
    assert "is away" in again
    assert "is back" in back


async def test_without_traffic_the_schema_is_looked_at_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """So an idle router sees another version's keys, and gives a flushed store its schema back."""
    caplog.set_level(logging.INFO, "roost.store")
    guard = Guard(caplog, check_s=0.001)
    async with guard.running():
        await guard.trials(2)
        assert guard.store.up
        guard.inner.opens_with = FOREIGN
        await guard.until(False)
    assert len(guard.lines) == 1


async def test_a_single_key_that_is_not_roosts_does_not_take_the_store_away(guard: Guard) -> None:
    """It is said once; the turns that need it fail, and go on without the store."""
    async with guard.running():
        assert await guard.ask()
        for _ in range(3):
            guard.inner.spoilt = StoreForeign("held holds a string")
            with pytest.raises(StoreForeign):
                await guard.store.progress(FLEET, "l")
            await guard.trials(1)
            assert await guard.ask()
        await reached(lambda: len(guard.lines) == 1)
    assert "held holds a string" in guard.lines[0]


async def test_a_store_that_comes_and_goes_is_tried_more_rarely(guard: Guard) -> None:
    async with guard.running():
        retries = []
        for _ in range(4):
            assert await guard.ask()
            guard.inner.fails = AWAY
            await guard.ask()
            await guard.until(False)
            retries.append(guard.store.retry_s)
            guard.inner.fails = None
            await guard.until(True)
            guard.clock.at_s += 1.0
        assert retries == [0.001, 0.002, 0.004, 0.008]
        guard.clock.at_s += 60.0
        guard.inner.fails = AWAY
        await guard.ask()
        await guard.until(False)
        assert guard.store.retry_s == 0.001


async def test_a_router_may_start_without_the_store_but_not_on_another_versions_keys(guard: Guard) -> None:
    guard.inner.opens_with = AWAY
    await guard.store.open()
    assert guard.told == [True, False]
    assert len(guard.lines) == 1
    assert not await guard.ask()
    assert guard.inner.fetched == 0
    async with guard.running():
        guard.inner.opens_with = None
        await guard.until(True)
    fresh = Inner()
    fresh.opens_with = FOREIGN
    with pytest.raises(StoreForeign):
        await Guarded(fresh, FakeClock()).open()


async def test_every_call_passes_and_fails_at_once_while_it_is_away(guard: Guard) -> None:
    store, member = guard.store, Member("r", "http://r", "admin")
    assert await store.put_member(FLEET, member)
    assert (await store.members(FLEET)).members == (member,)
    await store.put_report(FLEET, "r", b"", 1.0)
    await store.settle(FLEET, Settlement("l", "r", "i", "b"))
    await store.progress(FLEET, "l")
    assert await store.renew(FLEET, [], 1.0) == []
    assert await store.remove_member(FLEET, "r")
    guard.inner.opens_with = AWAY
    await store.open()
    for call in (
        store.put_member(FLEET, member),
        store.members(FLEET),
        store.put_report(FLEET, "r", b"", 1.0),
        store.settle(FLEET, Settlement("l", "r", "i", "b")),
        store.progress(FLEET, "l"),
        store.renew(FLEET, [], 1.0),
        store.remove_member(FLEET, "r"),
    ):
        with pytest.raises(StoreUnavailable, match="away: no answer"):
            await call
    await store.close()
    assert guard.inner.closed
