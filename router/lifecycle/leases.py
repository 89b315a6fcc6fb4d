"""Renewing what this router holds: leases of running turns are prolonged together, until each is settled.

A renewal says what is held, so a store that has lost a lease (it was away for longer than the lease's time, or came
back empty) counts it again: in-flight turns are true again with the next beat, or as soon as `renew` is called.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from router.domain.errors import StoreError
from router.ports import Lease, Store

__all__ = ["Leases"]

log = logging.getLogger("roost.leases")

BATCH: Final = 500
"""Leases renewed by one call, so that no call holds the store for long."""


class Leases:
    """The leases held by this process, by fleet."""

    def __init__(self, store: Store, ttl_s: float, renew_s: float) -> None:
        self._store = store
        self.ttl_s = ttl_s
        self._renew_s = renew_s
        self._held: dict[str, dict[str, Lease]] = {}

    def add(self, fleet: str, lease: Lease) -> None:
        """Hold a lease."""
        self._held.setdefault(fleet, {})[lease.id] = lease

    def progressed(self, fleet: str, lease: str) -> None:
        """Its first byte came: no renewal says any more that its tokens wait to be prefilled."""
        held = self._held.get(fleet, {})
        if lease in held:
            held[lease] = replace(held[lease], prefill_tokens=0)

    def discard(self, fleet: str, lease: str) -> None:
        """It is settled."""
        self._held.get(fleet, {}).pop(lease, None)

    @property
    def count(self) -> int:
        """How many are held."""
        return sum(map(len, self._held.values()))

    def branches(self, fleet: str) -> frozenset[str]:
        """Branches with a turn under way."""
        return frozenset(lease.branch for lease in self._held.get(fleet, {}).values())

    async def run(self) -> None:
        """Renew until cancelled. A store that is away is asked again at the next beat."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await self.renew()
            except StoreError as error:
                log.debug("leases not renewed: %s", error)

    async def renew(self) -> None:
        """Renew all that are held. Raises StoreError, once every fleet has been tried."""
        failure: StoreError | None = None
        for fleet in list(self._held):  # a fleet's first turn may come while another's are renewed
            try:
                await self.renew_of(fleet)
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    async def renew_of(self, fleet: str) -> None:
        """Renew those of one fleet. Raises StoreError."""
        held = self._held.get(fleet, {})
        names = list(held)
        for start in range(0, len(names), BATCH):
            # Looked up now, not when the first batch went out: what was settled since must not be taken again.
            batch = [held[name] for name in names[start : start + BATCH] if name in held]
            taken = await self._store.renew(fleet, batch, self.ttl_s)
            if taken:
                log.debug("%d leases of fleet %s were gone and are counted again", len(taken), fleet)
