"""What is done for a store that is back, or that has forgotten what it was told.

While the store is away branches are bound without it, and turns end untold. Once it answers again, in this order:

1. *Has it lost anything?* It is asked for some of the branches that it should know. After an absence, or where a turn
   found its branch forgotten, one whose newest end it does not know is enough: it was flushed, restarted empty or from
   an older copy, and all that this router remembers is told it anew (with the shares of crowd that are left of it).
   Where nothing raises the doubt it must not know half of them at all.
2. Branches of running turns are written, then their leases are taken again: in-flight counts are true from here on.
3. Settlements that failed are repeated.
4. All other branches are written, newest first, a few at a time, so that nobody feels it.

A branch is written by the turn's own path: fetch, claim, settle, with the home given; `placement.catch_up` says where
the store knows better. Whatever fails stays owed and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from router.domain.errors import StoreError
from router.domain.replica import Replica
from router.domain.session import Binding, Residue
from router.domain.shared import Ask, Claim, Settlement, Stale
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.leases import Leases
from router.lifecycle.remembered import Entry, Remembered
from router.lifecycle.settling import Settling
from router.placement.catch_up import overdue
from router.placement.cost import decay
from router.placement.filters import is_home, takes_its_own
from router.ports import Clock, Store

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
LOSS_S: Final = 60.0
"""Between two losses: a store that evicts branches would else be told them all the time."""


class Returning:
    """Tells the store what it missed."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        leases: Leases,
        settling: Settling,
        remembered: Remembered,
        new_id: Callable[[], str],
        tips_max: int,
        branch_ttl_s: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._branch_ttl_s = branch_ttl_s
        self._lost_s: dict[str, float] = {}
        self._leases = leases
        self._settling = settling
        self._remembered = remembered
        self._new_id = new_id
        self._tips_max = tips_max
        self._at_work = False

    @property
    def owes(self) -> bool:
        """Whether there is anything to tell the store, as far as is known."""
        return self._at_work or self._remembered.owed.is_set()

    async def run(self, fleets: Iterable[FleetRuntime]) -> None:
        """Until cancelled."""
        owed = self._remembered.owed
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await owed.wait()
            self._at_work = owing = owed.is_set()
            doubted = self._remembered.doubted
            self._remembered.doubted = False
            owed.clear()
            failed = False
            for fleet in fleets:
                try:
                    await self.catch_up(fleet, owing=owing, doubted=doubted)
                except StoreError as error:  # perhaps of this fleet's keys alone
                    log.debug("the store is not told yet what it missed of fleet %s: %s", fleet.name, error)
                    failed = True
            if failed:
                self._remembered.doubted |= doubted
                owed.set()
                await asyncio.sleep(AGAIN_S)
            self._at_work = False

    def returned(self) -> None:
        """The store is back from an absence."""
        self._lost_s.clear()
        self._remembered.doubt()

    async def catch_up(self, fleet: FleetRuntime, *, owing: bool, doubted: bool) -> None:
        """All that is owed for one fleet; nothing to do where `owing` is False and nothing was lost. Raises
        StoreError.
        """
        if not await self._has_lost(fleet.name, doubted=doubted) and not owing:
            return
        running = self._leases.branches(fleet.name)
        unwritten = self._remembered.unwritten(fleet.name)
        await self._write(fleet, [entry for entry in unwritten if entry.claim.branch in running])
        await self._leases.renew_of(fleet.name)
        await self._settling.repeat(fleet.name)
        await self._write(fleet, [entry for entry in unwritten if entry.claim.branch not in running])

    async def write(self, fleet: FleetRuntime, entry: Entry) -> None:
        """Write one branch, unless the store knows better or its home is gone. Raises StoreError."""
        claim = entry.claim
        asked = (*(tip.hash for tip in claim.tips), *entry.chain)
        view = await self._store.fetch(fleet.name, Ask(claim.heads_of or claim.session, boundaries=asked))
        if view.membership_version != fleet.version:  # what became of homes meanwhile
            await fleet.refresh()
        replicas = fleet.snapshot(view).replicas
        bound = view.session.home if view.session is not None else None
        if any(is_home(replica, bound) for replica in replicas):
            claim = replace(claim, session_home=None)  # the first binding stands
        lives = any(is_home(replica, claim.home) for replica in replicas)
        left = not _keeps(claim.home, replicas) and view.branch is not None and _keeps(view.branch.home, replicas)
        now = overdue(claim, view, asked, self._tips_max, leaves=left) if lives else None
        if now is not None:
            await self._claim(fleet.name, entry, now)
        self._remembered.wrote(entry, claim.branch if now is None else now.branch)

    async def _has_lost(self, fleet: str, *, doubted: bool) -> bool:
        """Whether the store has lost what it was told; then all of it is owed."""
        now_s = self._clock.monotonic_s()
        since_s = now_s - self._branch_ttl_s  # what is older may have expired there
        if now_s - self._lost_s.get(fleet, -LOSS_S) < LOSS_S:
            return False
        sample = self._remembered.sample(fleet, SAMPLE, since_s)
        # Other routers may have gone on with a branch and thinned its older ends out.
        ends = [entry.claim.tips[:1] if doubted else entry.claim.tips for entry in sample]
        asked = (Ask(session=None, boundaries=tuple(tip.hash for tip in tips)) for tips in ends)
        views = await asyncio.gather(*(self._store.fetch(fleet, ask) for ask in asked))
        unknown = sum(view.branch is None for view in views)
        if not unknown or (not doubted and 2 * unknown < len(views)):
            return False
        self._lost_s[fleet] = now_s
        self._remembered.lost(fleet, since_s)
        return True

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
        since_s = self._clock.monotonic_s() - entry.bound_s
        claim = replace(
            now,
            weight=decay(now.weight, since_s, now.crowd_half_life_s),
            live_tokens=int(decay(now.live_tokens, since_s, now.live_half_life_s)),
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


def _keeps(home: Binding | None, replicas: Sequence[Replica]) -> bool:
    """Whether a home goes on taking its own turns, as far as this router sees."""
    return any(takes_its_own(replica, home) and not replica.ejected for replica in replicas)
