"""The turns of a replica: what the model keeps of each, and the running batch as a few sums.

The running batch is never walked for a decode step. All a step needs are sums that grow linearly with the step count,
so a turn adds its share when it joins and takes it away when it leaves. Token rates are whole thousandths of a token
per step, which keeps the sums exact: nothing drifts, and the same run gives the same events on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from simulations.replica_model.prefix_cache import Node
from simulations.replica_model.values import Request

__all__ = ["RunningBatch", "Seat"]

MILLI = 1000


class Seat:
    """One turn inside the model, from submission to its end."""

    __slots__ = (
        "aborted",
        "allowed",
        "base",
        "device_tokens",
        "filled",
        "finish_step",
        "held_pages",
        "host_tokens",
        "join_step",
        "loaded_tokens",
        "output_tokens",
        "rate",
        "request",
        "retractions",
        "started",
        "target",
        "tip",
        "told",
        "waiting",
    )

    def __init__(self, request: Request, room: int, rate: int) -> None:
        """`room`: tokens that fit beside the prompt; neither output nor `max_tokens` is more."""
        self.request = request
        self.output_tokens = max(1, min(request.output_tokens, room))
        """What it will say."""
        self.allowed = max(self.output_tokens, min(request.max_tokens, room))
        """What it might say, as admission sees it."""
        self.rate = rate
        """Thousandths of a token per decode step."""
        self.base = 0
        """Tokens said when it last left or joined the batch."""
        self.target = request.prompt_tokens
        """Tokens to have in KV before it can decode: the prompt, after a retraction also what it had said."""
        self.filled = 0
        """Tokens in KV, cached ones included."""
        self.tip: Node | None = None
        """Where its pinned prefix ends."""
        self.held_pages = 0
        """Pages it owns beyond the tip while it prefills; in the running batch the batch counts them."""
        self.device_tokens = 0
        self.host_tokens = 0
        self.loaded_tokens = 0
        """From the host tier, when it was last admitted."""
        self.join_step = 0
        self.finish_step = 0
        self.retractions = 0
        self.told = 0
        """Tokens that `progress` has reported."""
        self.started = False
        self.waiting = True
        self.aborted = False

    def said(self, step: int) -> int:
        """Tokens said after that decode step, while in the running batch."""
        return min(self.output_tokens, self.base + self.rate * (step - self.join_step) // MILLI)

    def kv_tokens(self, step: int) -> int:
        """Tokens in KV after that decode step; the last token said is not yet."""
        return self.filled + self.said(step) - self.base


class RunningBatch:
    """Turns that decode together, and the step count they share."""

    def __init__(self, page_tokens: int) -> None:
        self.step = 0
        self.seats: dict[str, Seat] = {}
        self.rate = 0
        """Sum of the turns' rates."""
        self.reserve_cap = 0
        """Sum of the turns' clipped `max_tokens`."""
        self._page_tokens = page_tokens
        self._lengths = 0
        self._own = 0
        self._finish: list[tuple[int, int, Seat]] = []
        self._joined = 0

    def __len__(self) -> int:
        return len(self.seats)

    def join(self, seat: Seat, reserve: int) -> None:
        """A turn that has its prompt in KV and its first (or, after a retraction, next) token out."""
        step = self.step
        seat.join_step = step
        left = seat.output_tokens - seat.base
        seat.finish_step = step - (-left * MILLI // seat.rate)
        self._joined += 1
        heappush(self._finish, (seat.finish_step, self._joined, seat))
        self.seats[seat.request.rid] = seat
        self._add(seat, 1, reserve)

    def leave(self, seat: Seat, reserve: int) -> None:
        """Out of the batch; what it said counts up to now."""
        del self.seats[seat.request.rid]
        self._add(seat, -1, reserve)
        said = seat.said(self.step)
        seat.filled += said - seat.base
        seat.base = said
        seat.finish_step = -1

    def done(self) -> Iterable[Seat]:
        """Turns that have said all by now, first finished first, each once; the caller lets them `leave`."""
        heap = self._finish
        while heap and heap[0][0] <= self.step:
            due, _, seat = heappop(heap)
            if seat.finish_step == due:
                yield seat

    def next_finish(self) -> int:
        """The step at which the next turn has said all; the batch must not be empty."""
        heap = self._finish
        while heap[0][2].finish_step != heap[0][0]:
            heappop(heap)
        return heap[0][0]

    def length_tokens(self, steps: int = 0) -> float:
        """Sum of the turns' lengths in KV, `steps` from now."""
        return (self._lengths + self.rate * (self.step + steps)) / MILLI

    def held_pages(self, steps: int = 0) -> int:
        """Pages that the turns own beyond their pinned prefixes, `steps` from now; an upper bound by a page a turn."""
        own = (self._own + self.rate * (self.step + steps)) // MILLI
        return -(-own // self._page_tokens) + len(self.seats)

    def _add(self, seat: Seat, sign: int, reserve: int) -> None:
        assert seat.tip is not None
        at_zero = seat.filled * MILLI - seat.rate * seat.join_step
        self._lengths += sign * at_zero
        self._own += sign * (at_zero - seat.tip.end * self._page_tokens * MILLI)
        self.rate += sign * seat.rate
        self.reserve_cap += sign * reserve
