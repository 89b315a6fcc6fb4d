"""The turns of one session of the built-in workload, drawn from `simulations.workload_tables` as far as somebody looks.

See `simulations.workload`, which says what of them is a fact, and whose they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from simulations.trace import Kind, Ref, Run, Turn
from simulations.workload_tables import (
    FIRST_TOKENS,
    GAP_HUMAN_S,
    GAP_TOOL_S,
    NEW_HUMAN_TOKENS,
    NEW_TOOL_TOKENS,
    OUTPUT_TOKENS,
)

__all__ = ["BLOCK_TOKENS", "DrawnTurns", "Head", "Shape", "Step"]

BLOCK_TOKENS = 64
"""As SGLang replicas that serve agents are paged; ids are global."""

_REWRITE_HUMAN = 1 / 12
_REWRITE_TOOL = 1 / 100
_SHRINKS = 0.15
_COMPACTED = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of the workload is a choice and no fact."""

    context_tokens: int = 262_144
    """Longest prompt and output together; Kimi K2's window."""
    fan_out_share: float = 0.0
    """Share of tool turns of a root that start subagents."""
    fan_out_agents: tuple[int, int] = (2, 5)
    """Fewest and most that start at once."""


@dataclass(frozen=True, slots=True)
class Head:
    """What sessions have in common: tools, and a system prompt."""

    tools: Run
    system: Run

    @property
    def blocks(self) -> int:
        """How many it has."""
        return self.tools.size + self.system.size


class Step(NamedTuple):
    """What of a turn is known before it is drawn."""

    kind: Kind
    after: tuple[Ref, ...]


class DrawnTurns(Sequence[Turn]):
    """The turns of one session, drawn one after the other as far as somebody looks, from dice of their own.

    A session numbers its blocks from `first_block`, so that what is drawn elsewhere moves none of them.
    """

    def __init__(
        self,
        seed: str,
        shape: Shape,
        name: str,
        head: Head,
        count: int,
        step: Callable[[int], Step],
        first_block: int,
        first_tokens: tuple[float, float] | None = None,
        origin: tuple[Ref, DrawnTurns] | None = None,
    ) -> None:
        """`step`: what is known of each of the `count` turns. `first_tokens`: bounds of the first prompt, where it is
        not drawn from the table. `origin`: the turn that it goes on from, and the session that has it; else it begins
        with `head`.
        """
        self._seed = seed
        self._shape = shape
        self._name = name
        self._head = head
        self._count = count
        self._step = step
        self._next_block = first_block
        self._first_bounds = first_tokens
        self._origin = origin
        self._turns: list[Turn] = []
        self._dice: random.Random | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Turn: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Turn, ...]: ...

    def __getitem__(self, index: int | slice) -> Turn | tuple[Turn, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        while len(self._turns) <= index:
            self._turns.append(self._next())
        return self._turns[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _next(self) -> Turn:
        dice = self._dice
        if dice is None:
            dice = self._dice = random.Random(self._seed)  # noqa: S311 (a workload needs no secrecy)
        number = len(self._turns)
        step = self._step(number)
        if number:
            return self._following(dice, step, Ref(self._name, number - 1), self._turns[-1])
        if self._origin is not None:
            ref, turns = self._origin
            return self._following(dice, step, ref, turns[ref.turn])
        return self._first(dice, step)

    def _blocks(self, blocks: int) -> Run:
        run = Run(self._next_block, blocks)
        self._next_block += blocks
        return run

    def _first(self, dice: random.Random, step: Step) -> Turn:
        head = self._head
        if self._first_bounds is not None:
            tokens = round(dice.uniform(*self._first_bounds))
        else:
            while (tokens := round(FIRST_TOKENS.at(dice.random()))) > 0.8 * self._shape.context_tokens:
                pass
        tokens = max(tokens, (head.blocks + 1) * BLOCK_TOKENS)
        own = self._blocks(tokens // BLOCK_TOKENS - head.blocks)
        add = tuple(run for run in (head.tools, head.system, own) if run.size)
        return Turn(0, step.kind, tokens, self._output(dice, tokens), None, 0, add, step.after, 0.0)

    def _output(self, dice: random.Random, prompt_tokens: int) -> int:
        return max(min(round(OUTPUT_TOKENS.at(dice.random())), self._shape.context_tokens - prompt_tokens), 1)

    def _following(self, dice: random.Random, step: Step, base: Ref, before: Turn) -> Turn:
        """A turn on top of `before`, which `base` names."""
        human, head_blocks = step.kind is Kind.HUMAN, self._head.blocks
        pause_s = (GAP_HUMAN_S if human else GAP_TOOL_S).at(dice.random())
        whole = before.prompt_tokens // BLOCK_TOKENS
        luck = dice.random()
        new = round((NEW_HUMAN_TOKENS if human else NEW_TOOL_TOKENS).at(luck))
        keep, tokens = whole, whole * BLOCK_TOKENS + new
        if luck > 1 - (_REWRITE_HUMAN if human else _REWRITE_TOOL):
            share = dice.uniform(0.3, 0.6) if dice.random() < _SHRINKS else dice.uniform(0.95, 1.05)
            tokens = round(before.prompt_tokens * share)
            keep = (tokens - max(new, round(0.1 * tokens))) // BLOCK_TOKENS
        if tokens > self._shape.context_tokens - 1:
            tokens, keep = round(before.prompt_tokens * _COMPACTED), 0
        tokens = max(tokens, (head_blocks + 1) * BLOCK_TOKENS)
        keep = min(max(keep, head_blocks), whole, tokens // BLOCK_TOKENS)
        missing = tokens // BLOCK_TOKENS - keep
        add = (self._blocks(missing),) if missing else ()
        index, output = len(self._turns), self._output(dice, tokens)
        return Turn(index, step.kind, tokens, output, base, keep, add, step.after, pause_s)
