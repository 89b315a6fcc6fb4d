"""A cluster: every key has a slot, every slot a node.

All keys of a fleet share one slot (`router.store.keys`), so a call goes to one node. Which one, the nodes say; a call
that meets the wrong one is sent on (MOVED, ASK), which costs it a round trip and no more. The map of slots is asked for
in the background: when nothing is known yet, after a MOVED, and after a call that failed. Of the nodes asked the one
counts that knows the highest epoch, so one that was cut off loses against one that saw the failover.

While a slot is being moved key by key, a script that names keys of both halves is told TRYAGAIN; it is, within the
call's time. That a script begins and then finds a key gone is possible only there; it fails as an unavailable store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import hiredis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from router.domain.errors import StoreUnavailable
from router.store.address import Address, Command
from router.store.survey import survey
from router.store.wire import CONNECT_TIMEOUT_S, STALL_S, Wire, fixed

__all__ = ["Cluster"]

REDIRECTS_MAX: Final = 3
"""How often a call is sent on: a slot that moved is one, a slot that moved and moves again two."""

TRYAGAIN_S: Final = 0.005
"""Between tries while a slot's keys are on two nodes."""

REFRESH_S: Final = 0.1
"""Between two looks at the map, at least."""

ASKED_MAX: Final = 6
"""Nodes asked for the map at once."""


@dataclass(frozen=True, slots=True)
class _Map:
    """What one node knows."""

    rank: tuple[bool, int]
    """Whether it says that all is well, and the epoch it knows."""
    ranges: list[tuple[int, int, str, int]]
    """First and last slot, host and port."""
    others: list[tuple[str, int]]
    """Replicas, who may be asked too."""


class Cluster:
    """`Topology` of nodes that share the slots. `data` says how to speak with them, its host means nothing."""

    def __init__(self, seeds: list[tuple[str, int]], data: Address) -> None:
        self.label = f"cluster {','.join(f'{host}:{port}' for host, port in seeds)}"
        self._data = data
        self._seeds = seeds
        self._asked_next = list(seeds)
        self._owners: list[Wire | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._wires: dict[tuple[str, int], Wire] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at_s = float("-inf")
        self._trouble = "its slots are not known yet"

    async def call(self, key: bytes, command: Command, due: float) -> Any:
        """See `Topology.call`."""
        loop, slot = asyncio.get_running_loop(), key_slot(key)
        wire, asking, hops = self._owners[slot] or await self._owner(slot, due), False, 0
        while True:
            try:
                return await wire.call(command, due, asking=asking)
            except StoreUnavailable:
                self._refresh_soon()
                raise
            except hiredis.ReplyError as error:
                word, *rest = str(error).split(" ")
                if word == "TRYAGAIN" and loop.time() + TRYAGAIN_S < due:
                    await asyncio.sleep(TRYAGAIN_S)
                    wire, asking, hops = self._owners[slot] or wire, False, 0
                elif word in {"MOVED", "ASK"} and hops < REDIRECTS_MAX:
                    hops += 1
                    wire, asking = self._sent_on(rest[-1], wire), word == "ASK"
                    if not asking:
                        self._owners[slot] = wire
                        self._refresh_soon()
                else:
                    if word == "CLUSTERDOWN":
                        self._refresh_soon()
                    raise

    async def close(self) -> None:
        """See `Topology.close`."""
        refreshing, self._refreshing = self._refreshing, None
        if refreshing is not None:
            refreshing.cancel()
            await asyncio.wait([refreshing])
        for wire in self._wires.values():
            await wire.close()

    def _sent_on(self, place: str, sender: Wire) -> Wire:
        """The wire to where a redirection points; without a host it means that of the node that sent it."""
        host, _, port = place.rpartition(":")
        if not host:
            host = next((known[0] for known, wire in self._wires.items() if wire is sender), self._seeds[0][0])
        return self._wire(host, int(port))

    def _wire(self, host: str, port: int) -> Wire:
        wire = self._wires.get((host, port))
        if wire is None:
            address = self._data.at(host, port)
            wire = self._wires[host, port] = Wire(f"{address.label} of {self.label}", fixed(address))
        return wire

    async def _owner(self, slot: int, due: float) -> Wire:
        """Who has a slot that nobody was known to have."""
        self._refresh_soon()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing], timeout=max(0.0, due - asyncio.get_running_loop().time()))
        wire = self._owners[slot]
        if wire is None:
            raise StoreUnavailable(f"store {self.label}: {self._trouble}")
        return wire

    def _refresh_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._refreshing is None and loop.time() >= self._refreshed_at_s + REFRESH_S:
            self._refreshing = loop.create_task(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        if self._refreshing is task:
            self._refreshing = None
            self._refreshed_at_s = asyncio.get_running_loop().time()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._trouble = str(error)

    async def _refresh(self) -> None:
        asked, later = self._asked_next[:ASKED_MAX], self._asked_next[ASKED_MAX:]
        self._asked_next = later + asked
        maps, failures = await survey([self._ask(host, port) for host, port in asked])
        if not maps:
            raise StoreUnavailable(f"no node tells the slots: {'; '.join(map(str, failures))}")
        self._take(max(maps, key=lambda each: each.rank))

    def _take(self, found: _Map) -> None:
        owners: list[Wire | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, host, port in found.ranges:
            owners[first : last + 1] = [self._wire(host, port)] * (last + 1 - first)
        self._owners = owners
        self._trouble = "no node serves the slot"
        masters = dict.fromkeys((host, port) for _, _, host, port in found.ranges)
        self._asked_next = list(dict.fromkeys([*masters, *found.others, *self._seeds]))
        if len(self._wires) > len(masters):  # what left may still answer calls under way
            asyncio.get_running_loop().call_later(STALL_S, self._let_go)

    def _let_go(self) -> None:
        used = {wire for wire in self._owners if wire is not None}
        for place, wire in list(self._wires.items()):
            if wire not in used:
                del self._wires[place]
                wire.lose("its node has no slots any more")

    async def _ask(self, host: str, port: int) -> _Map:
        """What a node knows, by a connection of its own: store calls on theirs have less time."""
        address = self._data.at(host, port)
        wire = Wire(address.label, fixed(address))
        due = asyncio.get_running_loop().time() + CONNECT_TIMEOUT_S
        try:
            info, slots = [await wire.call(("CLUSTER", about), due) for about in ("INFO", "SLOTS")]
        except hiredis.ReplyError as error:
            raise StoreUnavailable(f"{address.label} refused: {error}") from error
        finally:
            await wire.close()
        try:
            return _read(host, info, slots)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise StoreUnavailable(f"{address.label} does not answer like a node: {error}") from error


def _read(asked_host: str, info: bytes, slots: list[Any]) -> _Map:
    """What CLUSTER INFO and CLUSTER SLOTS said. A node that does not know its own host means where it was asked."""
    facts = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
    ranges, others = [], []
    for first, last, *nodes in slots:
        places = [(node[0].decode() if node[0] not in (None, b"", b"?") else asked_host, node[1]) for node in nodes]
        ranges.append((int(first), int(last), *places[0]))
        others += places[1:]
    if not ranges:
        raise ValueError("it knows of no slots (has the cluster been formed?)")
    rank = (facts.get(b"cluster_state") == b"ok", int(facts.get(b"cluster_current_epoch", 0)))
    return _Map(rank, ranges, others)
