"""The published distributions the synthetic workload is drawn from, as quantile tables.

Source of all tables, unless one says otherwise: WEKA traces of Claude Code sessions
(github.com/callanjfox/kv-cache-tester at 94f6046, Apache-2.0), 710 sessions with 49,334 requests; quantiles p25, p50,
p75, p90, p99 over all of them. Its authors removed sessions of one request and the longest ones are missing, so upper
tails are biased low. TraceLab (github.com/uw-syfi/TraceLab, 357k rounds of other users and models) agrees: append p50
875 tokens, output p50 214, prefix p50 119k.

Between two known quantiles a table is linear in the logarithm. Its ends, q = 0 and q = 1, are not published: they are
assumptions, chosen so that the mean comes near the published one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = [
    "FIRST_TOKENS",
    "GAP_HUMAN_S",
    "GAP_TOOL_S",
    "LOOP_TURNS",
    "NEW_HUMAN_TOKENS",
    "NEW_TOOL_TOKENS",
    "OUTPUT_TOKENS",
    "SESSION_TURNS",
    "Table",
]


@dataclass(frozen=True, slots=True)
class Table:
    """A distribution over positive numbers, by quantiles."""

    points: tuple[tuple[float, float], ...]
    """(q, value), ascending, from q = 0 to q = 1."""
    _starts: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _pieces: tuple[tuple[float, float, float], ...] = field(init=False, repr=False, compare=False)
    """From each q to the next: q, the logarithm of the value there, and its slope."""

    def __post_init__(self) -> None:
        pieces = tuple(
            (q, math.log(value), (math.log(next_value) - math.log(value)) / (next_q - q))
            for (q, value), (next_q, next_value) in pairwise(self.points)
        )
        object.__setattr__(self, "_pieces", pieces)
        object.__setattr__(self, "_starts", tuple(q for q, _ in self.points))

    def at(self, q: float) -> float:
        """The value below which a share `q` of draws lies."""
        start, log, slope = self._pieces[bisect_right(self._starts, q, 1, len(self._pieces)) - 1]
        return math.exp(log + (q - start) * slope)


def _table(least: float, p25: float, p50: float, p75: float, p90: float, p99: float, most: float) -> Table:
    return Table(((0, least), (0.25, p25), (0.5, p50), (0.75, p75), (0.9, p90), (0.99, p99), (1, most)))


SESSION_TURNS = _table(2, 18, 45, 94, 155, 329, 1178)
"""Requests per session, mean 68.5; the most is the README's of kv-cache-tester."""
LOOP_TURNS = _table(1, 1, 2, 4, 17, 66, 80)
"""Requests per human message (the tool loop), mean 6.2."""
FIRST_TOKENS = _table(11_000, 18_600, 24_500, 104_000, 259_000, 708_000, 900_000)
"""Prompt of a session's first request, mean 91k: many are resumed. Longer than 900k was removed by the authors."""
NEW_TOOL_TOKENS = _table(60, 376, 720, 1_670, 3_791, 16_700, 40_000)
"""New prompt tokens of a turn after a tool, mean 1,823."""
NEW_HUMAN_TOKENS = _table(60, 368, 682, 1_956, 20_700, 222_000, 500_000)
"""New prompt tokens of a turn after a human, mean 11.5k: idle pauses and compactions renew much of the prompt."""
OUTPUT_TOKENS = _table(5, 137, 216, 426, 898, 3_686, 9_000)
"""Output of a turn, mean 440."""
GAP_TOOL_S = _table(1, 5, 8, 19, 66, 606, 1_500)
"""From a completion to the next turn after a tool, mean 42 s; permission prompts are in it."""
GAP_HUMAN_S = _table(5, 39, 131, 470, 1_917, 15_050, 18_000)
"""From a completion to the next human message, mean 956 s."""
