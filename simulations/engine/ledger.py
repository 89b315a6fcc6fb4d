"""What an engine has to remember for its metrics: requests by path, and distributions of what turns took."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from simulations.engine.voice import Outcome

__all__ = ["Histogram", "Ledger"]

# SGLang 0.5.23's default buckets (observability/metrics_collector.py).
_TTFT = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E = (*_TTFT, 600, 1200, 1800, 2400)
_ITL = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100),
    *(0.200, 0.400, 0.600, 0.800, 1.000, 2.000, 4.000, 6.000, 8.000),
)


class Histogram:
    """A distribution in buckets; `counts` has one more than `bounds`, for what is above them all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class Ledger:
    """Sums since the engine started."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By path and method."""
    responses: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """By path, method and status."""
    prompt_tokens: Counter[bool] = field(default_factory=Counter)
    """Of turns that have ended well, by whether they streamed."""
    output_tokens: Counter[bool] = field(default_factory=Counter)
    turns: int = 0
    ttft_s: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(_E2E))
    queue_s: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    itl_s: Histogram = field(default_factory=lambda: Histogram(_ITL))

    def ended(self, outcome: Outcome, *, stream: bool) -> None:
        """A turn ended well. Its mean time between tokens counts for each of them."""
        self.turns += 1
        self.prompt_tokens[stream] += outcome.prompted.prompt_tokens
        self.output_tokens[stream] += outcome.output_tokens
        queued_s, first_s, end_s = outcome.times_s
        self.queue_s.observe(queued_s)
        self.ttft_s.observe(first_s)
        self.e2e_s.observe(end_s)
        later = outcome.output_tokens - 1
        if later > 0:
            self.itl_s.observe((end_s - first_s) / later, later)
