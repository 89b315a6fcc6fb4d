"""The built-in workload: coding-agent sessions drawn from published distributions, without end, the same for one seed.

Drawn from `simulations.workload_tables`: turns per session, length of tool loops, first prompts, new tokens per turn,
outputs, pauses. Further facts of the same 710 sessions:

- *Heads.* Tools and system prompt come first, 14.8k tokens at p50, 66 % of a first prompt at p50. In 773 sessions 367
  pairs of (tools, system) and 83 sizes of tools were seen. Here a session takes a new pair with probability 367/773,
  else that of an earlier session; a new pair takes new tools with probability 83/367.
- *Rewrites.* 1.9 % of turns lose more than a tenth of the previous prefix, 0.45 % shrink it by more than 40 %
  (compaction). Here the turns with the largest new parts are these: a twelfth of those after a human, one in a
  hundred after a tool. A rewrite keeps what its new part leaves of the prompt it makes; one in seven of them shrinks.
- *Resumed copies.* 44 sessions in 14 lineages replay the start of another: (44 - 14)/710 of sessions have a copy that
  goes on from one of its turns with a life of its own.

A declared overlay, beyond every trace in hand: `fan_out_share` of tool turns start subagents, 2 to 5 at once, which
the parent waits for. That real ones take 4 to 24 turns (p50 11) and begin with 9k to 12k tokens is from the same
traces; how many start is not.

Assumptions: a prompt that would pass `context_tokens` is compacted to a third; first prompts longer than four fifths
of it are drawn again; the split of a head into tools and system (12.3k and 2.5k tokens, each within a fifth).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from simulations.trace import Kind, Ref, Run, Session, Trace, Tree, Turn
from simulations.workload_tables import (
    FIRST_TOKENS,
    GAP_HUMAN_S,
    GAP_TOOL_S,
    LOOP_TURNS,
    NEW_HUMAN_TOKENS,
    NEW_TOOL_TOKENS,
    OUTPUT_TOKENS,
    SESSION_TURNS,
    Table,
)

__all__ = ["BLOCK_TOKENS", "Shape", "trace", "trees"]

BLOCK_TOKENS = 64
"""As SGLang replicas that serve agents are paged; ids are global."""

_NEW_PAIR = 367 / 773
_NEW_TOOLS = 83 / 367
_TOOLS_TOKENS = (9_900, 14_700)
_SYSTEM_TOKENS = (2_000, 3_000)
_REWRITE_HUMAN = 1 / 12
_REWRITE_TOOL = 1 / 100
_SHRINKS = 0.15
_COPIED = 30 / 710
_COMPACTED = 1 / 3
_AGENT_HEADS = 4
"""Kinds of subagents: they share tools and system prompt across sessions."""
_AGENT_HEAD_TOKENS = 8_700
_AGENT_FIRST_TOKENS = (9_000, 12_000)
_AGENT_TURNS = Table(((0, 4), (0.5, 11), (1, 24)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of the workload is a choice and no fact."""

    context_tokens: int = 262_144
    """Longest prompt and output together; Kimi K2's window."""
    fan_out_share: float = 0.0
    """Share of tool turns of a root that start subagents."""
    fan_out_agents: tuple[int, int] = (2, 5)
    """Fewest and most that start at once."""


def trees(seed: int, shape: Shape | None = None) -> Iterator[Tree]:
    """Trees without end."""
    drawn = _Drawn(random.Random(seed), shape or Shape())  # noqa: S311 (a workload needs no secrecy)
    number = 0
    while True:
        yield drawn.tree(f"s{number:05d}")
        number += 1


def trace(seed: int, count: int, shape: Shape | None = None) -> Trace:
    """The first `count` trees as a trace."""
    return Trace(
        tuple(islice(trees(seed, shape), count)),
        BLOCK_TOKENS,
        global_blocks=True,
        shared_clock=False,
        source="synthetic",
    )


@dataclass(frozen=True, slots=True)
class _Head:
    tools: Run
    system: Run

    @property
    def blocks(self) -> int:
        return self.tools.size + self.system.size


@dataclass(slots=True)
class _Chain:
    """A session while it is drawn."""

    id: str
    head_blocks: int
    turns: list[Turn]

    @property
    def tip(self) -> Turn:
        return self.turns[-1]

    def session(self, parent: Ref | None = None) -> Session:
        return Session(self.id, tuple(self.turns), parent, None, self.head_blocks * BLOCK_TOKENS)


class _Drawn:
    """The dice, and what sessions share."""

    def __init__(self, dice: random.Random, shape: Shape) -> None:
        self._dice = dice
        self._shape = shape
        self._next_block = 0
        self._heads: list[_Head] = []
        """One per root so far: a head in use is as likely to be met again as it is common."""
        self._agent_heads = [_Head(self._blocks(_AGENT_HEAD_TOKENS), Run(0, 0)) for _ in range(_AGENT_HEADS)]

    def tree(self, name: str) -> Tree:
        root = self._first(name, self._head(), self._first_tokens(), Kind.START, ())
        subagents: list[Session] = []
        self._go_on(root, round(self._draw(SESSION_TURNS)) - 1, subagents)
        sessions = [root.session(), *subagents]
        if self._dice.random() < _COPIED:
            sessions.append(self._copy(root))
        return Tree(tuple(sessions))

    def _draw(self, table: Table) -> float:
        return table.at(self._dice.random())

    def _blocks(self, tokens: float) -> Run:
        run = Run(self._next_block, max(round(tokens / BLOCK_TOKENS), 1))
        self._next_block += run.size
        return run

    def _head(self) -> _Head:
        if not self._heads or self._dice.random() < _NEW_PAIR:
            if not self._heads or self._dice.random() < _NEW_TOOLS:
                tools = self._blocks(self._dice.uniform(*_TOOLS_TOKENS))
            else:
                tools = self._dice.choice(self._heads).tools
            head = _Head(tools, self._blocks(self._dice.uniform(*_SYSTEM_TOKENS)))
        else:
            head = self._dice.choice(self._heads)
        self._heads.append(head)
        return head

    def _first_tokens(self) -> int:
        while (tokens := round(self._draw(FIRST_TOKENS))) > 0.8 * self._shape.context_tokens:
            pass
        return tokens

    def _first(self, name: str, head: _Head, tokens: int, kind: Kind, after: tuple[Ref, ...]) -> _Chain:
        tokens = max(tokens, (head.blocks + 1) * BLOCK_TOKENS)
        own = self._blocks((tokens // BLOCK_TOKENS - head.blocks) * BLOCK_TOKENS)
        add = tuple(run for run in (head.tools, head.system, own) if run.size)
        turn = Turn(0, kind, tokens, self._output(tokens), None, 0, add, after, 0.0)
        return _Chain(name, head.blocks, [turn])

    def _output(self, prompt_tokens: int) -> int:
        return max(min(round(self._draw(OUTPUT_TOKENS)), self._shape.context_tokens - prompt_tokens), 1)

    def _go_on(self, chain: _Chain, turns: int, subagents: list[Session] | None = None) -> None:
        """Draw further turns; where there is a list for them, tool turns may start subagents."""
        loop = round(self._draw(LOOP_TURNS)) - 1
        for _ in range(turns):
            by_tool = loop > 0
            loop = loop - 1 if by_tool else round(self._draw(LOOP_TURNS)) - 1
            waits = [Ref(chain.id, chain.tip.index)]
            if subagents is not None and by_tool and self._dice.random() < self._shape.fan_out_share:
                started = [
                    self._agent(chain, len(subagents) + n)
                    for n in range(self._dice.randint(*self._shape.fan_out_agents))
                ]
                waits += [Ref(each.id, len(each.turns) - 1) for each in started]
                subagents += started
            pause_s = self._draw(GAP_TOOL_S if by_tool else GAP_HUMAN_S)
            kind = Kind.TOOL if by_tool else Kind.HUMAN
            chain.turns.append(self._following(chain, Ref(chain.id, chain.tip.index), kind, tuple(waits), pause_s))

    def _following(
        self, chain: _Chain, base: Ref, kind: Kind, after: tuple[Ref, ...], pause_s: float, *, of: Turn | None = None
    ) -> Turn:
        """A turn on top of `base` (the chain's tip unless `of` is given)."""
        before = of or chain.tip
        whole = before.prompt_tokens // BLOCK_TOKENS
        luck = self._dice.random()
        human = kind is Kind.HUMAN
        new = round((NEW_HUMAN_TOKENS if human else NEW_TOOL_TOKENS).at(luck))
        keep, tokens = whole, whole * BLOCK_TOKENS + new
        if luck > 1 - (_REWRITE_HUMAN if human else _REWRITE_TOOL):
            share = self._dice.uniform(0.3, 0.6) if self._dice.random() < _SHRINKS else self._dice.uniform(0.95, 1.05)
            tokens = round(before.prompt_tokens * share)
            keep = (tokens - max(new, round(0.1 * tokens))) // BLOCK_TOKENS
        if tokens > self._shape.context_tokens - 1:
            tokens, keep = round(before.prompt_tokens * _COMPACTED), 0
        tokens = max(tokens, (chain.head_blocks + 1) * BLOCK_TOKENS)
        keep = min(max(keep, chain.head_blocks), whole, tokens // BLOCK_TOKENS)
        missing = tokens // BLOCK_TOKENS - keep
        add = (self._blocks(missing * BLOCK_TOKENS),) if missing else ()
        index = 0 if of is not None else before.index + 1
        return Turn(index, kind, tokens, self._output(tokens), base, keep, add, after, pause_s)

    def _agent(self, parent: _Chain, number: int) -> Session:
        spawned = Ref(parent.id, parent.tip.index)
        head = self._dice.choice(self._agent_heads)
        tokens = round(self._dice.uniform(*_AGENT_FIRST_TOKENS))
        agent = self._first(f"{parent.id}/a{number:03d}", head, tokens, Kind.SPAWN, (spawned,))
        for _ in range(round(self._draw(_AGENT_TURNS)) - 1):
            tip = Ref(agent.id, agent.tip.index)
            agent.turns.append(self._following(agent, tip, Kind.TOOL, (tip,), self._draw(GAP_TOOL_S)))
        return agent.session(spawned)

    def _copy(self, root: _Chain) -> Session:
        """A session that goes on from one of the root's turns."""
        origin = self._dice.choice(root.turns)
        ref = Ref(root.id, origin.index)
        copy = _Chain(f"{root.id}/copy", root.head_blocks, [])
        copy.turns.append(self._following(copy, ref, Kind.HUMAN, (ref,), self._draw(GAP_HUMAN_S), of=origin))
        self._go_on(copy, round(self._draw(SESSION_TURNS)) - 1)
        return copy.session(ref)
