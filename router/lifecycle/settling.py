"""What a turn holds, and how it is given back: told, learned from, and released out of cancellation's reach.

A settlement that the store did not take is kept and repeated when it is back (`router.lifecycle.returning`): counts
have expired by then, but what the turn left and what was learned from it has not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from router.domain.errors import StoreError
from router.domain.outcome import Outcome
from router.domain.replica import Beliefs, Fleet
from router.domain.shared import Claim, Settlement
from router.domain.turn import Facts
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.leases import Leases
from router.lifecycle.recent import Record
from router.lifecycle.remembered import Remembered
from router.placement.cost import Rates
from router.placement.learn import learn
from router.placement.scope import response_key
from router.ports import Store
from router.telemetry.events import Observer, TurnFinished

__all__ = ["WAITING_TOKENS_MIN", "Held", "Settling"]

log = logging.getLogger("roost.turn")

WAITING_TOKENS_MIN: Final = 1024
"""Shorter prefills are not counted as waiting: they last milliseconds, and ending the wait costs a store call."""
UNTOLD_MAX: Final = 5_000
"""Settlements kept for a store that is away (1 KB each), the newest."""
REPEATED_AT_ONCE: Final = 16


@dataclass(slots=True)
class Held:
    """A place that a turn holds, and what was believed when it got it."""

    lease: str
    fleet: FleetRuntime
    snapshot: Fleet
    rates: Rates
    record: Record
    since_s: float
    """Monotonic time of the commit."""
    claim: Claim | None = None
    """What was asked of the store for it, or would have been."""


class Settling:
    """Gives back what turns hold; every call returns at once, `drained` waits for all that is under way."""

    def __init__(
        self, store: Store, leases: Leases, remembered: Remembered, observer: Observer, branch_ttl_s: float
    ) -> None:
        self._store = store
        self._leases = leases
        self._remembered = remembered
        self._observer = observer
        self._branch_ttl_s = branch_ttl_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._untold: dict[str, tuple[str, Settlement]] = {}
        """By lease: fleet and settlement, oldest first."""

    async def drained(self) -> None:
        """Wait until everything acquired is settled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def undo(self, fleet: str, claim: Claim) -> None:
        """Give back what a claim asked for whose call was cut short: it may have been carried out."""
        undone = Settlement(
            claim.lease, claim.replica, claim.incarnation, claim.branch, branch_ttl_s=self._branch_ttl_s
        )
        _ = self.tell(fleet, undone)

    def first_output(self, held: Held) -> None:
        """The turn's prefill is over."""
        if held.record.placed.prefill_tokens >= WAITING_TOKENS_MIN:
            # Where the call fails, the next renewal says the same.
            self._leases.progressed(held.fleet.name, held.lease)
            _ = self._task(self._progress(held.fleet.name, held.lease))

    def tell(self, fleet: str, settlement: Settlement) -> asyncio.Task[None]:
        """Settle out of cancellation's reach; kept where the store does not take it."""
        return self._task(self._tell(fleet, settlement))

    async def repeat(self, fleet: str) -> None:
        """Tell what the store did not take of a fleet. Raises StoreError."""
        while some := list(islice((told for told in self._untold.values() if told[0] == fleet), REPEATED_AT_ONCE)):
            await asyncio.gather(*(self._store.settle(fleet, settlement) for _, settlement in some))
            for told in some:
                if self._untold.get(told[1].lease) is told:
                    del self._untold[told[1].lease]

    def settle(self, held: Held, facts: Facts, outcome: Outcome) -> asyncio.Task[None]:
        """Tell what came true and give back what was held; the task that does it."""
        self._leases.discard(held.fleet.name, held.lease)  # first: whatever fails here, its lease expires
        record, placed = held.record, held.record.placed
        record.outcome = outcome
        usage = outcome.usage
        self._observer.emit(
            TurnFinished(
                turn=record.turn.id,
                fleet=held.fleet.name,
                replica=placed.replica,
                dialect=facts.dialect.value,
                policy=record.policy,
                reason=placed.reason,
                session=record.turn.session,
                session_source=facts.session_source,
                branch=record.lineage.branch,
                outcome=outcome,
                prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else record.turn.prompt_tokens,
                predicted_cached_tokens=placed.cached_tokens,
                place_s=record.place_s,
                attempt=record.attempt,
                blind=record.blind,
            )
        )
        settlement = self._settlement(held, facts, outcome)
        self._remembered.settled(held.fleet.name, settlement, counted=not record.blind)
        return self.tell(held.fleet.name, settlement)

    def _settlement(self, held: Held, facts: Facts, outcome: Outcome) -> Settlement:
        record, placed = held.record, held.record.placed
        replica = held.snapshot.get(placed.replica)
        beliefs: Beliefs | None = None
        # The claim moved the branch's text on; its tokens must follow even where the engine counted none.
        tokens, prompt_tokens, admitted = 0, record.turn.prompt_tokens, 0
        if replica is not None:
            text_bytes = record.lineage.tip.text_bytes if record.lineage.tip is not None else 0
            learned = learn(record.turn, text_bytes, placed, replica, held.rates, outcome)
            tokens, admitted = learned.tokens, learned.admitted_tokens
            # What a router without the store learned began from nothing: it must not replace what all have learned.
            beliefs = None if record.blind else learned.beliefs
            prompt_tokens = learned.prompt_tokens or prompt_tokens
        return Settlement(
            lease=held.lease,
            replica=placed.replica,
            incarnation=placed.incarnation,
            branch=self._remembered.name_of(record.lineage.branch),
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            admitted_tokens=admitted,
            beliefs=beliefs,
            response_id=_stored_as(facts, outcome),
            branch_ttl_s=self._branch_ttl_s,
        )

    def _task(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tell(self, fleet: str, settlement: Settlement) -> None:
        try:
            await self._store.settle(fleet, settlement)
        except StoreError as error:
            log.debug("not settled in the store yet: %s", error)
            self._untold.pop(settlement.lease, None)
            self._untold[settlement.lease] = (fleet, settlement)
            if len(self._untold) > UNTOLD_MAX:
                del self._untold[next(iter(self._untold))]
            self._remembered.owed.set()

    async def _progress(self, fleet: str, lease: str) -> None:
        try:
            await self._store.progress(fleet, lease)
        except StoreError as error:
            log.debug("a first byte not told to the store: %s", error)


def _stored_as(facts: Facts, outcome: Outcome) -> str | None:
    """What the store calls the response that the engine may have kept."""
    if outcome.response_id is None or not facts.stores_response:
        return None
    return response_key(facts.tenant, outcome.response_id)
