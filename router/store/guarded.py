"""A store that may go away, and that nobody waits for while it is.

Three states, and one log line for each change between them:

    well     calls pass
    away     it does not answer, or refuses: every call fails at once with `StoreUnavailable`
    foreign  it answers, but holds another version's keys, or something else where Roost keeps a key: as away

One failed call says little: a stalled event loop fails dozens at once. So a failure only raises a doubt: `CONFIRM_S`
later the store is tried (its schema and one reading of each fleet), and it is away where that fails too. A store that
hangs so costs the calls of its first `timeout_s` that long, and the others nothing. While it is away it is tried every
`RETRY_S`, more rarely where it comes and goes. Every `CHECK_S` it is tried though nothing failed: an empty store gets
its schema back, and another version's is seen, without waiting for traffic.

The trial reads and writes (`open` claims the schema), so a store that only refuses writes (a replica after a failover,
one that is out of memory) is away, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from router.domain.errors import StoreError, StoreForeign, StoreUnavailable
from router.ports import Acquired, Ask, Claim, Clock, Lease, Member, Membership, Settlement, Stale, Store, View

__all__ = ["Guarded"]

log = logging.getLogger("roost.store")

CONFIRM_S: Final = 0.025
"""Between a failed call and the trial that confirms it: enough for a stalled loop to read the answers it has missed."""
RETRY_S: Final = 0.2
RETRY_MAX_S: Final = 5.0
RELAPSE_S: Final = 10.0
"""A store that is away again sooner than this is tried half as often as before."""
CHECK_S: Final = 5.0

_T = TypeVar("_T")


class Guarded:
    """`Store` around a store; `run` must be going for it to change its state."""

    def __init__(self, inner: Store, clock: Clock, *, retry_s: float = RETRY_S, check_s: float = CHECK_S) -> None:
        self._inner = inner
        self._clock = clock
        self._first_retry_s = retry_s
        self.retry_s = retry_s
        """Between two trials while the store is away."""
        self._check_s = check_s
        self._why: StoreError | None = None
        """Why the store is not used; None while it is well."""
        self._since_s = 0.0
        self._back_at_s = float("-inf")
        self._doubt: StoreError | None = None
        self._doubted = asyncio.Event()
        self._fleets: dict[str, None] = {}
        self._odd: set[str] = set()
        """What was said of single keys that are not Roost's."""
        self._watchers: list[Callable[[bool], None]] = []

    @property
    def up(self) -> bool:
        """Whether calls pass."""
        return self._why is None

    def watch(self, watcher: Callable[[bool], None]) -> None:
        """Have `watcher` told now, and at every change, whether the store is up. It must not block."""
        self._watchers.append(watcher)
        watcher(self.up)

    async def run(self) -> None:
        """Watch over the store until cancelled."""
        while True:
            if self._why is None:
                await self._look()
            else:
                await asyncio.sleep(self.retry_s)
                why = await self._trial()
                if why is None:
                    self._come_back()
                elif isinstance(why, StoreForeign) is not isinstance(self._why, StoreForeign):
                    self._leave(why)

    async def _look(self) -> None:
        """Wait for a doubt, or for the next check, and settle it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._check_s):
                await self._doubted.wait()
        doubt, self._doubt = self._doubt, None
        self._doubted.clear()
        if doubt is None and await self._trial() is None:
            return
        await asyncio.sleep(CONFIRM_S)
        why = await self._trial()
        if why is not None:
            self._leave(why)
        elif isinstance(doubt, StoreForeign) and str(doubt) not in self._odd:
            self._odd.add(str(doubt))  # bounded: a key of the table for each fleet
            log.warning("the store is well but for one key, and turns that need it are placed without it: %s", doubt)

    async def _trial(self) -> StoreError | None:
        try:
            await self._inner.open()
            for fleet in list(self._fleets):
                await self._inner.fetch(fleet, Ask(session=None))
                await self._inner.members(fleet)
        except StoreError as error:
            return error
        return None

    def _leave(self, why: StoreError) -> None:
        if self._why is None:
            self._since_s = self._clock.monotonic_s()
            relapsed = self._since_s - self._back_at_s < RELAPSE_S
            self.retry_s = min(RETRY_MAX_S, 2 * self.retry_s) if relapsed else self._first_retry_s
        self._why = why
        if isinstance(why, StoreForeign):
            log.warning("the store is not this router's to use, turns are placed from memory until it is: %s", why)
        else:
            log.warning("the store is away, turns are placed from memory until it is back: %s", why)
        self._tell()

    def _come_back(self) -> None:
        self._why = None
        self._back_at_s = self._clock.monotonic_s()
        log.info("the store is back after %.1f s, and is told what it missed", self._back_at_s - self._since_s)
        self._tell()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher(self.up)

    async def _pass(self, fleet: str, call: Coroutine[Any, Any, _T]) -> _T:
        self._fleets.setdefault(fleet)
        if self._why is not None:
            call.close()
            raise StoreUnavailable(f"away: {self._why}")
        try:
            return await call
        except StoreError as error:
            if self._doubt is None:
                self._doubt = error
            self._doubted.set()
            raise

    # --- the store ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect for the first time. Raises `StoreForeign`, which a router must not start with; a store that does not
        answer is away.
        """
        try:
            await self._inner.open()
        except StoreUnavailable as error:
            self._leave(error)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._inner.close()

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """See `Store.fetch`."""
        return await self._pass(fleet, self._inner.fetch(fleet, ask))

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """See `Store.acquire`."""
        return await self._pass(fleet, self._inner.acquire(fleet, claim))

    async def progress(self, fleet: str, lease: str) -> None:
        """See `Store.progress`."""
        await self._pass(fleet, self._inner.progress(fleet, lease))

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """See `Store.settle`."""
        await self._pass(fleet, self._inner.settle(fleet, settlement))

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """See `Store.renew`."""
        return await self._pass(fleet, self._inner.renew(fleet, leases, lease_ttl_s))

    async def members(self, fleet: str) -> Membership:
        """See `Store.members`."""
        return await self._pass(fleet, self._inner.members(fleet))

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """See `Store.put_member`."""
        put = self._inner.put_member(fleet, member, only_if_absent=only_if_absent, expected=expected)
        return await self._pass(fleet, put)

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """See `Store.remove_member`."""
        return await self._pass(fleet, self._inner.remove_member(fleet, replica_id))

    async def put_report(self, fleet: str, replica_id: str, raw: bytes, ttl_s: float) -> None:
        """See `Store.put_report`."""
        await self._pass(fleet, self._inner.put_report(fleet, replica_id, raw, ttl_s))
