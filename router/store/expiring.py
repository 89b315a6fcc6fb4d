"""A dict whose entries expire, without a task that sweeps it."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

__all__ = ["Expiring"]

T = TypeVar("T")

_SWEPT_PER_WRITE = 4
_MARKS_MIN = 64


class Expiring(Generic[T]):
    """Values by key, each with the Unix second at which it is gone.

    Every write forgets a few entries whose time is up, so memory stays in proportion to what lives. The heap holds a
    key once for each time it was set anew: an entry that was prolonged goes back with its new time when its old one
    comes up. What was forgotten early leaves its mark in the heap, which is made anew when most of it is such marks.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, T]] = {}
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries held, expired ones included that no write has swept yet."""
        return len(self._values)

    def get(self, key: str, now_s: float) -> T | None:
        """The value, or None where there is none or its time is up."""
        found = self._values.get(key)
        return found[1] if found is not None and found[0] > now_s else None

    def put(self, key: str, value: T, now_s: float, ttl_s: float | None) -> None:
        """Set a value; None keeps the time that the entry has left."""
        old = self._values.get(key)
        if ttl_s is None:
            if old is not None:
                self._values[key] = (old[0], value)
            return
        if old is None:
            heapq.heappush(self._due, (now_s + ttl_s, key))
        self._values[key] = (now_s + ttl_s, value)
        self._sweep(now_s)

    def pop(self, key: str) -> None:
        """Forget a key."""
        self._values.pop(key, None)
        if len(self._due) > 2 * len(self._values) + _MARKS_MIN:
            self._due = [(due_s, key) for key, (due_s, _) in self._values.items()]
            heapq.heapify(self._due)

    def _sweep(self, now_s: float) -> None:
        for _ in range(_SWEPT_PER_WRITE):
            if not self._due or self._due[0][0] > now_s:
                return
            _, key = heapq.heappop(self._due)
            found = self._values.get(key)
            if found is None:
                continue
            if found[0] > now_s:
                heapq.heappush(self._due, (found[0], key))
            else:
                del self._values[key]
