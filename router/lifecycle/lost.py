"""Turns that wait at a replica, so that they can be told when it is lost.

A host that vanishes says nothing: its connections stay open until the kernel's own probes notice, a minute later, and
for ever if the host merely stands still. Meanwhile other signs have told that nothing more will come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.domain.errors import UpstreamBroken

__all__ = ["Waiters"]


class Waiters:
    """What waits for a replica's bytes, by replica."""

    def __init__(self) -> None:
        # Dicts for their order: a set's depends on addresses, and a run in virtual time could not be repeated.
        self._by_replica: dict[str, dict[asyncio.Timeout, None]] = {}

    @asynccontextmanager
    async def waiting(self, replica: str) -> AsyncIterator[None]:
        """The body waits for bytes of `replica`. Raises UpstreamBroken, as if nothing had been answered, once
        `give_up` is called.
        """
        patience = asyncio.timeout(None)
        here = self._by_replica.setdefault(replica, {})
        try:
            async with patience:
                here[patience] = None
                try:
                    yield
                finally:
                    here.pop(patience, None)
        except TimeoutError:
            if not patience.expired():
                raise
            raise UpstreamBroken("no sign of life from the replica any more", answered=False) from None
        finally:
            if not here and self._by_replica.get(replica) is here:
                del self._by_replica[replica]

    def give_up(self, replica: str) -> int:
        """End the waiting there; returns how many waited."""
        waiting = self._by_replica.pop(replica, {})
        now_s = asyncio.get_running_loop().time()
        for patience in waiting:
            patience.reschedule(now_s)
        return len(waiting)
