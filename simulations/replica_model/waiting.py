"""The waiting queue: first come, first served, or by priority first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from simulations.replica_model.seats import Seat

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Turns that wait, in the order in which they will be admitted. A retracted turn queues up again at the end."""

    def __init__(self, *, by_priority: bool, limit: int | None) -> None:
        self.by_priority = by_priority
        self._limit = limit
        self._order: list[tuple[int, int, Seat]] = []
        """A heap; turns that wait no more are skipped when they come up."""
        self._arrivals = 0
        self._waiting: dict[str, Seat] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._waiting.values())

    @property
    def full(self) -> bool:
        """Whether one more would be refused (--max-queued-requests)."""
        return self._limit is not None and len(self._waiting) >= self._limit

    def put(self, seat: Seat) -> None:
        """Queue a turn up, whether or not there is room."""
        seat.waiting = True
        self._arrivals += 1
        heappush(self._order, (-seat.request.priority if self.by_priority else 0, self._arrivals, seat))
        self._waiting[seat.request.rid] = seat

    def head(self) -> Seat:
        """The turn that is next; one must be waiting."""
        order = self._order
        while not order[0][2].waiting:
            heappop(order)
        return order[0][2]

    def take(self, seat: Seat) -> None:
        """Out of the queue."""
        del self._waiting[seat.request.rid]
        seat.waiting = False

    def displaceable(self, priority: int) -> Seat | None:
        """The turn that one of this priority pushes out of a full queue: the least and, of those, the latest.

        Source: managers/scheduler.py, `_abort_on_queued_limit`.
        """
        if not self.by_priority:
            return None
        least = max((entry for entry in self._order if entry[2].waiting), key=lambda entry: entry[:2])[2]
        return least if least.request.priority < priority else None
