"""What is done for a store that is back, or that has forgotten what it was told.

While the store is away branches are bound without it, and turns end untold. Once it answers again, in this order:

1. *Has it lost all?* It is asked for the newest branches that it should know. Knows it none, it was flushed or
   restarted empty, and all that this router remembers is written anew.
2. Branches of running turns are written, then their leases are taken again: in-flight counts are true from here on.
3. Settlements that failed are repeated.
4. All other branches are written, newest first, a few at a time, so that nobody feels it.

A branch is written by the turn's own path: fetch, claim, settle, with the home given; `placement.catch_up` says where
the store knows better. Whatever fails stays owed and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from router.domain.errors import StoreError
from router.domain.session import Residue
from router.domain.shared import Ask, Claim, Settlement, Stale
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.leases import Leases
from router.lifecycle.remembered import Entry, Remembered
from router.lifecycle.settling import Settling
from router.placement.catch_up import overdue
from router.placement.filters import is_home
from router.ports import Store

__all__ = ["Returning"]

log = logging.getLogger("roost.store")

BATCH: Final = 8
"""Branches written at once."""
PAUSE_S: Final = 0.01
"""Between two batches: at most 800 branches a second, a few per cent of what a store and a core can do."""
AGAIN_S: Final = 0.25
"""Before what has failed is tried again."""
CHECK_S: Final = 5.0
"""Between questions whether the store has lost all, where nothing else raises it."""
SAMPLE: Final = 8


class Returning:
    """Tells the store what it missed."""

    def __init__(
        self,
        store: Store,
        leases: Leases,
        settling: Settling,
        remembered: Remembered,
        new_id: Callable[[], str],
        tips_max: int,
    ) -> None:
        self._store = store
        self._leases = leases
        self._settling = settling
        self._remembered = remembered
        self._new_id = new_id
        self._tips_max = tips_max

    async def run(self, fleets: Iterable[FleetRuntime]) -> None:
        """Until cancelled."""
        owed = self._remembered.owed
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await owed.wait()
            owing = owed.is_set()
            owed.clear()
            try:
                for fleet in fleets:
                    await self.catch_up(fleet, owing=owing)
            except StoreError as error:
                log.debug("the store is not told yet what it missed: %s", error)
                owed.set()
                await asyncio.sleep(AGAIN_S)

    async def catch_up(self, fleet: FleetRuntime, *, owing: bool = True) -> None:
        """All that one fleet owes; with `owing` False only where the store has lost everything. Raises StoreError."""
        lost = await self._has_lost_all(fleet)
        if lost:
            self._remembered.lost(fleet.name)
        elif not owing:
            return
        running = self._leases.branches(fleet.name)
        unwritten = self._remembered.unwritten(fleet.name)
        await self._write(fleet, [entry for entry in unwritten if entry.claim.branch in running])
        await self._leases.renew()
        await self._settling.repeat()
        await self._write(fleet, [entry for entry in unwritten if entry.claim.branch not in running])

    async def write(self, fleet: FleetRuntime, entry: Entry) -> None:
        """Write one branch, unless the store knows better or its home is gone. Raises StoreError."""
        claim = entry.claim
        asked = (*(tip.hash for tip in claim.tips), *entry.chain)
        view = await self._store.fetch(fleet.name, Ask(session=None, boundaries=asked))
        lives = any(is_home(replica, claim.home) for replica in fleet.snapshot(view).replicas)
        now = overdue(claim, view, asked, self._tips_max) if lives else None
        if now is not None:
            await self._claim(fleet.name, entry, now)
        self._remembered.wrote(entry, claim.branch if now is None else now.branch)

    async def _has_lost_all(self, fleet: FleetRuntime) -> bool:
        tips = tuple(tip.hash for entry in self._remembered.sample(fleet.name, SAMPLE) for tip in entry.claim.tips[:1])
        if not tips:
            return False
        return (await self._store.fetch(fleet.name, Ask(session=None, boundaries=tips))).branch is None

    async def _write(self, fleet: FleetRuntime, entries: list[Entry]) -> None:
        for start in range(0, len(entries), BATCH):
            batch = [entry for entry in entries[start : start + BATCH] if self._due(entry)]
            await asyncio.gather(*(self.write(fleet, entry) for entry in batch))
            await asyncio.sleep(PAUSE_S)

    def _due(self, entry: Entry) -> bool:
        """Whether it is still to be written: a turn may have come in between."""
        return not entry.written and self._remembered.current(entry)

    async def _claim(self, fleet: str, entry: Entry, now: Claim) -> None:
        """Bind the branch under a lease that counts no tokens and is given back at once."""
        home = now.home
        claim = replace(
            now,
            lease=self._new_id(),
            replica=home.replica,
            incarnation=home.incarnation,
            prefill_tokens=0,
            locked_tokens=0,
            observed_in_flight=None,
            lease_ttl_s=self._leases.ttl_s,
        )
        try:
            if isinstance(await self._store.acquire(fleet, claim), Stale):
                return  # another has written it just now: first come, first served
        except (StoreError, asyncio.CancelledError):
            self._settling.undo(fleet, claim)
            raise
        left = entry.left or Residue(home.replica, home.incarnation, 0, 0)
        settlement = Settlement(
            lease=claim.lease,
            replica=left.replica,
            incarnation=left.incarnation,
            branch=claim.branch,
            tokens=left.tokens,
            prompt_tokens=entry.tokens,
            admitted_tokens=entry.owed_tokens,
            branch_ttl_s=claim.branch_ttl_s,
        )
        await asyncio.shield(self._settling.tell(fleet, settlement))
