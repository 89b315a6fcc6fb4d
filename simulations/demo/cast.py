"""Who plays: sessions of the synthetic workload, short enough for a story of a few minutes.

What differs from the workload as published, and why: a root ends after `ROOT_TURNS` turns, so that sessions end and new
ones begin while one watches; contexts stay below `CONTEXT_TOKENS` and pauses below `THINK_MAX_S`, so that a laptop can
play them; a share `FAN_OUT` of tool turns starts `AGENTS` subagents, an overlay that no published trace tells the rate
of. Prompts, growth, outputs, pauses and shared heads are drawn as `simulations.workload` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from simulations import workload
from simulations.trace import Kind, Tree

__all__ = ["CONTEXT_TOKENS", "ROOT_TURNS", "THINK_MAX_S", "Cast", "shortened", "starts_subagents"]

ROOT_TURNS: Final = 16
CONTEXT_TOKENS: Final = 98_304
THINK_MAX_S: Final = 20.0
FAN_OUT: Final = 0.03
AGENTS: Final = (4, 6)
_LOOK_AHEAD: Final = 200


class Cast:
    """Trees without end, the same for one seed; on demand, once, the next is one that starts subagents early."""

    def __init__(self, seed: int) -> None:
        shape = workload.Shape(context_tokens=CONTEXT_TOKENS, fan_out_share=FAN_OUT, fan_out_agents=AGENTS)
        self._drawn = workload.trees(seed, shape)
        self._waiting: deque[Tree] = deque()
        self._asked = False
        self._spreading = self._found()
        self.played: list[Tree] = []
        """All that were handed out, oldest first."""
        self.fan_out: Tree | None = None
        """The one that was asked for."""

    def ask_for_fan_out(self) -> None:
        """The next tree is to start subagents after its first turn."""
        self._asked = True

    def __iter__(self) -> Iterator[Tree]:
        return self

    def __next__(self) -> Tree:
        if self._asked:
            self._asked = False
            tree = self.fan_out = self._spreading
        else:
            tree = self._waiting.popleft() if self._waiting else self._draw()
        self.played.append(tree)
        return tree

    def _draw(self) -> Tree:
        return shortened(next(self._drawn), ROOT_TURNS)

    def _found(self) -> Tree:
        """The first tree of the stream that starts subagents after its first turn; those before it keep their turn."""
        for _ in range(_LOOK_AHEAD):
            tree = self._draw()
            if starts_subagents(tree) == 0:
                return tree
            self._waiting.append(tree)
        return max(self._waiting, key=lambda each: len(each.sessions))


def starts_subagents(tree: Tree) -> int | None:
    """The first turn of the root after which subagents start; None where none do."""
    started = (
        each.parent.turn for each in tree.sessions[1:] if each.parent is not None and each.turns[0].kind is Kind.SPAWN
    )
    return min(started, default=None)


def shortened(tree: Tree, root_turns: int) -> Tree:
    """The first turns of the root with the subagents these wait for; copies that go on from it are left out."""
    root = tree.sessions[0]
    kept = replace(root, turns=root.turns[:root_turns])
    awaited = {ref.session for turn in kept.turns for ref in turn.after}
    return Tree((kept, *(each for each in tree.sessions[1:] if each.id in awaited)))
