"""What one cache that never forgets would have held: the most that any placement could reach.

A block's id stands for all that comes before it, so a prompt's hit is its leading blocks that were sent before, in
whatever prompt. Spaces hold intervals of block numbers, so that a session of a thousand turns costs a handful.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from simulations.prompt import Prompt
from simulations.prompt_blocks import Span
from simulations.trace import Ref

__all__ = ["InfiniteCache"]


class _Intervals:
    """A set of whole numbers as disjoint, sorted half-open intervals."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def run_from(self, number: int) -> int:
        """How many consecutive numbers from `number` on are in the set."""
        at = bisect_right(self.starts, number) - 1
        return max(self.ends[at] - number, 0) if at >= 0 else 0

    def add(self, start: int, end: int) -> None:
        low = bisect_left(self.ends, start)
        high = bisect_right(self.starts, end)
        if low < high:
            start = min(start, self.starts[low])
            end = max(end, self.ends[high - 1])
        self.starts[low:high] = [start]
        self.ends[low:high] = [end]


class InfiniteCache:
    """One infinite prefix cache, told of prompts in the order they are sent."""

    def __init__(self) -> None:
        self._spaces: dict[str, _Intervals] = {}
        self._sent: set[Ref] = set()

    def send(self, prompt: Prompt) -> int:
        """Tokens of the prompt that were sent before; from now on all of it was.

        A prompt that begins with the whole of its base also shares the base's last tokens, which fill no block.
        """
        hit = self._leading(prompt.spans) * prompt.block_tokens
        if prompt.base is not None and prompt.base in self._sent:
            hit = max(hit, prompt.shared_tokens)
        for space, first, count in prompt.spans:
            self._spaces.setdefault(space, _Intervals()).add(first, first + count)
        self._sent.add(prompt.ref)
        return min(hit, prompt.tokens)

    def _leading(self, spans: Iterable[Span]) -> int:
        blocks = 0
        for space, first, count in spans:
            known = self._spaces.get(space)
            hit = min(known.run_from(first), count) if known is not None else 0
            blocks += hit
            if hit < count:
                break
        return blocks
