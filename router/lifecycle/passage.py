"""Requests that are no turns: models, token counts, embeddings, stored responses, the engine's own paths.

They pass to one healthy replica, the one with the fewest of them under way from here; what names a stored response goes
to the replica that holds it. They take no lease: they hold no KV that a later turn would miss. Like turns they are
given up at a replica that is lost; but not what acts on an engine, which may answer no probe while it loads weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from router.contract import REASON_HEADER, REPLICA_HEADER
from router.domain.decision import Reason
from router.domain.errors import NotPlaced, UpstreamBroken, UpstreamUnreachable
from router.domain.session import Binding
from router.domain.shared import Ask, Member
from router.lifecycle.fleet import FleetRuntime
from router.placement.scope import response_key
from router.ports import Downstream, Exchange, ForwardRequest, Store, Upstream

__all__ = ["Passages"]

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Passages:
    """Passes requests on."""

    def __init__(self, store: Store, upstream: Upstream, retries: int) -> None:
        self._store = store
        self._upstream = upstream
        self._retries = retries
        self._under_way: Counter[str] = Counter()

    async def holder(
        self, fleets: Sequence[FleetRuntime], tenant: str, response_id: str
    ) -> tuple[FleetRuntime, Binding] | None:
        """The fleet and replica that hold a stored response of this tenant (its scope); None where none is known to.

        Raises StoreError.
        """
        asked = Ask(session=None, response_id=response_key(tenant, response_id))
        for fleet in fleets:
            view = await self._store.fetch(fleet.name, asked)
            if view.response_replica is not None:
                return fleet, view.response_replica
        return None

    async def serve(
        self,
        fleet: FleetRuntime,
        forward: ForwardRequest,
        down: Downstream,
        holder: Binding | None = None,
        *,
        steers: bool = False,
    ) -> None:
        """Pass one request to one replica. `steers`: it acts on the engine. Raises NotPlaced and UpstreamError."""
        tried: set[str] = set()
        while True:
            member = self._choose(fleet, tried, holder)
            holds = holder is not None and holder.replica == member.id
            self._under_way[member.id] += 1
            try:
                # A response's holder alone has it: the others would say there is no such response.
                retry = len(tried) < self._retries and not holds and len(self._candidates(fleet, tried)) > 1
                exchange = await self._send(fleet, member, forward, retry=retry, steers=steers)
                if exchange is None:
                    tried.add(member.id)
                    continue
                forward.forget_body()  # it was answered: nobody else is asked
                reason = Reason.STORED if holds else Reason.PASS
                async with _waiting(fleet, member, steers=steers):
                    await relay(exchange, member.id, reason, down)
                return
            finally:
                self._under_way[member.id] -= 1
                if not self._under_way[member.id]:
                    del self._under_way[member.id]  # replicas that come and go leave nothing

    async def broadcast(self, asked: Sequence[tuple[FleetRuntime, ForwardRequest]], down: Downstream) -> None:
        """Send to every healthy replica, as its fleet is to be asked, and relay one answer: a good one if there is
        any.
        """
        members = [
            (member, forward) for fleet, forward in asked for member in fleet.members if fleet.healthy(member.id)
        ]
        if not members:
            raise NotPlaced("no replica is ready")
        exchanges: list[tuple[str, Exchange]] = []

        async def ask(member: Member, forward: ForwardRequest) -> None:
            exchanges.append((member.id, await self._upstream.send(member.url, forward)))

        try:
            failures = await asyncio.gather(*(ask(*each) for each in members), return_exceptions=True)
            if not exchanges:
                raise next(failure for failure in failures if failure is not None)
            exchanges.sort(key=lambda each: each[1].head.status >= 400)
            for _, other in exchanges[1:]:
                other.abort()
            chosen, exchange = exchanges[0]
            await relay(exchange, chosen, Reason.PASS, down)
        finally:
            for _, each in exchanges:
                each.abort()

    def _choose(self, fleet: FleetRuntime, tried: set[str], holder: Binding | None) -> Member:
        members = self._candidates(fleet, tried)
        if holder is not None:
            members = [member for member in fleet.members if member.id == holder.replica] or members
        if not members:
            raise NotPlaced(f"no replica of fleet {fleet.name} is ready")
        return min(members, key=lambda member: self._under_way[member.id])

    def _candidates(self, fleet: FleetRuntime, tried: set[str]) -> list[Member]:
        return [member for member in fleet.usable() if member.id not in tried]

    async def _send(
        self, fleet: FleetRuntime, member: Member, forward: ForwardRequest, *, retry: bool, steers: bool
    ) -> Exchange | None:
        """The exchange, or None where another replica may be tried."""
        try:
            async with _waiting(fleet, member, steers=steers):
                return await self._upstream.send(member.url, forward)
        except UpstreamUnreachable as error:
            fleet.watch.unreachable(member.id, error)
            if not retry:
                raise
        except UpstreamBroken as error:
            if not retry or error.answered or forward.method not in SAFE_METHODS:
                raise
        return None


def _waiting(fleet: FleetRuntime, member: Member, *, steers: bool) -> AbstractAsyncContextManager[None]:
    return nullcontext() if steers else fleet.watch.waiting(member.id)


async def relay(exchange: Exchange, replica: str, reason: Reason, down: Downstream) -> None:
    """Bytes through, with the headers that say where they came from."""
    try:
        extra = ((REPLICA_HEADER.encode(), replica.encode()), (REASON_HEADER.encode(), reason.value.encode()))
        down.start(exchange.head, extra)
        down.bind(exchange)
        await exchange.relay(down.write)
        down.end()
    finally:
        exchange.abort()
