"""Renewing what this router holds: leases of running turns are prolonged together, until each is settled."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from router.domain.errors import StoreError
from router.ports import Store

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
        self._held: dict[str, set[str]] = {}

    def add(self, fleet: str, lease: str) -> None:
        """Hold a lease."""
        self._held.setdefault(fleet, set()).add(lease)

    def discard(self, fleet: str, lease: str) -> None:
        """It is settled."""
        self._held.get(fleet, set()).discard(lease)

    @property
    def count(self) -> int:
        """How many are held."""
        return sum(map(len, self._held.values()))

    async def run(self) -> None:
        """Renew until cancelled. A store that is away is asked again at the next beat."""
        while True:
            await asyncio.sleep(self._renew_s)
            for fleet, leases in list(self._held.items()):  # a fleet's first turn may come while one is renewed
                await self._renew(fleet, list(leases))

    async def _renew(self, fleet: str, leases: list[str]) -> None:
        try:
            for start in range(0, len(leases), BATCH):
                gone = await self._store.renew(fleet, leases[start : start + BATCH], self.ttl_s)
                lost = self._held[fleet].intersection(gone)  # without those settled meanwhile
                if lost:
                    log.warning("%d leases of fleet %s had expired before they were renewed", len(lost), fleet)
        except StoreError as error:
            log.debug("leases of fleet %s not renewed: %s", fleet, error)
