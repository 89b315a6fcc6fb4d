"""A group of one master and its replicas, watched by Sentinels.

Who the master is, all Sentinels are asked at once, before every connection; the answer of the highest configuration
epoch counts, so a Sentinel that was cut off and knows only an older master loses against one that saw the failover. A
server that does not call itself a master (ROLE) is not accepted.

A connection that stands is not proof: the old master may hang, or live on where only this router and a minority of the
Sentinels see it. So the Sentinels are asked again every `WATCH_S`, and every `TROUBLED_S` while the master does not
answer; when another is master the connection is given up, before the old one can answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final

import hiredis

from router.domain.errors import StoreUnavailable
from router.store.address import Address, Command
from router.store.survey import survey
from router.store.wire import Wire, fixed

__all__ = ["Sentinels"]

log = logging.getLogger("roost.store")

ASK_TIMEOUT_S: Final = 0.5
"""What a Sentinel may take to answer. Not the time of a store call: no turn waits for it."""

WATCH_S: Final = 1.0
"""Between looks at who is master while it answers."""

TROUBLED_S: Final = 0.1
"""The same while it does not."""


@dataclass(frozen=True, slots=True)
class _Master:
    epoch: int
    host: str
    port: int


class Sentinels:
    """`Topology` of a master that moves. `data` says how to speak with the servers, its host means nothing."""

    def __init__(self, sentinels: list[Address], master: str, data: Address) -> None:
        self.label = f"{master} of Sentinels {','.join(each.label for each in sentinels)}"
        self._name = master
        self._data = data
        self._sentinels = [Wire(f"Sentinel {each.label}", fixed(each)) for each in sentinels]
        self._wire = Wire(self.label, self._locate, master_only=True)
        self._master: _Master | None = None
        self._watching: asyncio.Task[None] | None = None

    def call(self, key: bytes, command: Command, due: float) -> Awaitable[Any]:  # noqa: ARG002 (one server has all)
        """See `Topology.call`."""
        return self._wire.call(command, due)

    async def close(self) -> None:
        """See `Topology.close`."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        for wire in (self._wire, *self._sentinels):
            await wire.close()

    async def _locate(self) -> Address:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._turn_to(await self._find())
        assert self._master is not None
        return self._data.at(self._master.host, self._master.port)

    def _turn_to(self, found: _Master) -> None:
        before, self._master = self._master, found
        if before is not None and (before.host, before.port) != (found.host, found.port):
            log.info("the store's master %s is now %s:%d", self._name, found.host, found.port)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S if self._wire.answers else TROUBLED_S)
            with contextlib.suppress(StoreUnavailable):
                found, known = await self._find(), self._master
                # An older epoch: of a Sentinel that is cut off, while those that know better do not answer just now.
                if known is not None and found.epoch >= known.epoch and found != known:
                    self._turn_to(found)
                    if (known.host, known.port) != (found.host, found.port):
                        self._wire.lose("its server is no longer the master")

    async def _find(self) -> _Master:
        answers, failures = await survey([self._ask(wire) for wire in self._sentinels])
        known = [answer for answer in answers if answer is not None]
        if known:
            return max(known, key=lambda each: each.epoch)
        if answers:
            raise StoreUnavailable(f"store {self.label}: the Sentinels know no master named {self._name!r}")
        raise StoreUnavailable(f"store {self.label}: no Sentinel answers: {'; '.join(map(str, failures))}")

    async def _ask(self, sentinel: Wire) -> _Master | None:
        due = asyncio.get_running_loop().time() + ASK_TIMEOUT_S
        try:
            # Two, on one connection: only the first knows a failover's outcome before its end, only the second epochs.
            place, about = await asyncio.gather(
                sentinel.call(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name), due),
                sentinel.call(("SENTINEL", "MASTER", self._name), due),
            )
        except hiredis.ReplyError as error:
            if "No such master" in str(error):
                return None
            raise StoreUnavailable(f"store {sentinel.label} refused: {error}") from error
        if place is None:
            return None
        try:
            facts = dict(zip(about[::2], about[1::2], strict=True))
            return _Master(int(facts.get(b"config-epoch", 0)), place[0].decode(), int(place[1]))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StoreUnavailable(f"store {sentinel.label} does not answer like one: {error}") from error
