"""What a replay measured: turns as they end, and the figures made of them. Pure.

`turns` are those that completed, `errors` those that did not. `hit_rate` is Σ cached / Σ prompt over the turns whose
server told its usage; `hit_rate_infinite` is of one infinite cache over the same turns, by what was sent. Servers may
leave out a cached count of zero (SGLang 0.5.23 does on /v1/messages), so a missing one is zero if any turn brought one;
if none did, there is no hit rate. `moves` are turns served elsewhere than their session's turn before.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from simulations.trace import Ref

__all__ = ["Figures", "Measured", "ReplicaFigures", "Spread", "TurnResult", "percentile", "spread"]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How one turn went. Times are wall seconds, `sent_s` since the replay began."""

    ref: Ref
    sent_s: float
    sent_tokens: int
    infinite_tokens: int
    """Of these, in one infinite cache."""
    duration_s: float
    ttft_s: float | None = None
    """Send to first output."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    replica: str | None = None
    error: str | None = None
    """A short name of what went wrong; None: the turn completed."""


class Spread(TypedDict):
    """A distribution in seconds."""

    p50: float
    p95: float
    p99: float
    mean: float
    count: int


class ReplicaFigures(TypedDict):
    """One replica's share."""

    turns: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None


class Figures(TypedDict):
    """What `--json` holds under these names."""

    turns: int
    errors: int
    errors_by: dict[str, int]
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    hit_rate_infinite: float | None
    ttft_s: Spread | None
    itl_s: Spread | None
    per_replica: dict[str, ReplicaFigures]
    moves: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of an ascending, non-empty sequence lies, interpolated linearly."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float]) -> Spread | None:
    """The distribution of these; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "p50": percentile(ordered, 0.50),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
        "mean": sum(ordered) / len(ordered),
        "count": len(ordered),
    }


class Measured:
    """Turns as they end."""

    def __init__(self) -> None:
        self.results: list[TurnResult] = []
        self._gaps_s = array("f")
        self._where: dict[str, str] = {}
        self.moves = 0
        self.errors = 0

    def add(self, result: TurnResult, gaps_s: Iterable[float] = ()) -> None:
        """A turn ended; `gaps_s` are the times between its output tokens."""
        self.results.append(result)
        if result.error is not None:
            self.errors += 1
            return
        self._gaps_s.extend(gaps_s)
        if result.replica is not None:
            branch = result.ref.session
            self.moves += self._where.get(branch, result.replica) != result.replica
            self._where[branch] = result.replica

    def figures(self) -> Figures:
        """All of it in numbers."""
        done = [each for each in self.results if each.error is None]
        told = [each for each in done if each.prompt_tokens is not None]
        says_cached = any(each.cached_tokens is not None for each in told)
        prompt, cached = _tokens(told)
        sent = sum(each.sent_tokens for each in told)
        replicas = sorted({each.replica for each in done if each.replica is not None})
        return {
            "turns": len(done),
            "errors": self.errors,
            "errors_by": dict(Counter(each.error for each in self.results if each.error is not None)),
            "prompt_tokens": prompt,
            "cached_tokens": cached if says_cached else None,
            "output_tokens": sum(each.output_tokens or 0 for each in told),
            "hit_rate": _rate(cached, prompt) if says_cached else None,
            "hit_rate_infinite": _rate(sum(each.infinite_tokens for each in told), sent),
            "ttft_s": spread(each.ttft_s for each in done if each.ttft_s is not None),
            "itl_s": spread(self._gaps_s),
            "per_replica": {
                name: _share([each for each in done if each.replica == name], says_cached) for name in replicas
            },
            "moves": self.moves,
        }


def _tokens(results: Iterable[TurnResult]) -> tuple[int, int]:
    prompt = cached = 0
    for each in results:
        prompt += each.prompt_tokens or 0
        cached += each.cached_tokens or 0
    return prompt, cached


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _share(results: Sequence[TurnResult], says_cached: bool) -> ReplicaFigures:
    prompt, cached = _tokens(results)
    return {
        "turns": len(results),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": _rate(cached, prompt) if says_cached else None,
    }
