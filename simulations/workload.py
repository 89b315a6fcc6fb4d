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
from collections.abc import Callable, Iterator
from itertools import islice

from simulations.trace import Kind, Ref, Run, Session, Trace, Tree
from simulations.workload_tables import LOOP_TURNS, SESSION_TURNS, Table
from simulations.workload_turns import BLOCK_TOKENS, DrawnTurns, Head, Shape, Step

__all__ = ["BLOCK_TOKENS", "Shape", "trace", "trees"]

_NEW_PAIR = 367 / 773
_NEW_TOOLS = 83 / 367
_TOOLS_TOKENS = (9_900, 14_700)
_SYSTEM_TOKENS = (2_000, 3_000)
_COPIED = 30 / 710
_AGENT_HEADS = 4
"""Kinds of subagents: they share tools and system prompt across sessions."""
_AGENT_HEAD_TOKENS = 8_700
_AGENT_FIRST_TOKENS = (9_000, 12_000)
_HEADS_FROM = 1 << 60
"""The first block of the heads, beyond those of all sessions."""
_BLOCKS_APART = 1 << 24
"""From one session's first block to the next one's; a session of 1178 turns that all renew 256k tokens has fewer."""
_AGENT_TURNS = Table(((0, 4), (0.5, 11), (1, 24)))


def trees(seed: int, shape: Shape | None = None) -> Iterator[Tree]:
    """Trees without end. Their turns are drawn when they are first looked at, and are the same in whatever order."""
    drawn = _Drawn(seed, shape or Shape())
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


class _Drawn:
    """What sessions share, and of each tree what must be known before a turn of it is: who is in it, how many turns
    each has, and who waits for whom.
    """

    def __init__(self, seed: int, shape: Shape) -> None:
        self._seed = seed
        self._shape = shape
        self._dice = random.Random(seed)  # noqa: S311 (a workload needs no secrecy)
        self._sessions = 0
        self._next_block = _HEADS_FROM
        self._heads: list[Head] = []
        """One per root so far: a head in use is as likely to be met again as it is common."""
        self._agent_heads = [Head(self._blocks(_AGENT_HEAD_TOKENS), Run(0, 0)) for _ in range(_AGENT_HEADS)]

    def tree(self, name: str) -> Tree:
        head, dice = self._new_head(), self._dice
        subagents: list[Session] = []
        steps = [Step(Kind.START, ())]
        self._go_on(name, steps, _drawn_count(dice, SESSION_TURNS) - 1, subagents)
        turns = self._turns(name, head, len(steps), steps.__getitem__)
        sessions = [_session(name, turns, head, None), *subagents]
        if dice.random() < _COPIED:
            sessions.append(self._copy(name, turns, head))
        return Tree(tuple(sessions))

    def _turns(
        self,
        name: str,
        head: Head,
        count: int,
        step: Callable[[int], Step],
        first_tokens: tuple[float, float] | None = None,
        origin: tuple[Ref, DrawnTurns] | None = None,
    ) -> DrawnTurns:
        first_block = self._sessions * _BLOCKS_APART
        self._sessions += 1
        seed = f"{self._seed}/{name}"
        return DrawnTurns(seed, self._shape, name, head, count, step, first_block, first_tokens, origin)

    def _blocks(self, tokens: float) -> Run:
        run = Run(self._next_block, max(round(tokens / BLOCK_TOKENS), 1))
        self._next_block += run.size
        return run

    def _new_head(self) -> Head:
        dice = self._dice
        if not self._heads or dice.random() < _NEW_PAIR:
            if not self._heads or dice.random() < _NEW_TOOLS:
                tools = self._blocks(dice.uniform(*_TOOLS_TOKENS))
            else:
                tools = dice.choice(self._heads).tools
            head = Head(tools, self._blocks(dice.uniform(*_SYSTEM_TOKENS)))
        else:
            head = dice.choice(self._heads)
        self._heads.append(head)
        return head

    def _go_on(self, name: str, steps: list[Step], turns: int, subagents: list[Session] | None = None) -> None:
        """Add further steps; where there is a list for them, tool turns may start subagents."""
        dice, shape = self._dice, self._shape
        loop = _drawn_count(dice, LOOP_TURNS) - 1
        for _ in range(turns):
            by_tool = loop > 0
            loop = loop - 1 if by_tool else _drawn_count(dice, LOOP_TURNS) - 1
            tip = Ref(name, len(steps) - 1)
            waits = [tip]
            if subagents is not None and by_tool and dice.random() < shape.fan_out_share:
                for _ in range(dice.randint(*shape.fan_out_agents)):
                    agent = self._agent(f"{name}/a{len(subagents):03d}", tip)
                    waits.append(Ref(agent.id, len(agent.turns) - 1))
                    subagents.append(agent)
            steps.append(Step(Kind.TOOL if by_tool else Kind.HUMAN, tuple(waits)))

    def _agent(self, name: str, spawned: Ref) -> Session:
        head = self._dice.choice(self._agent_heads)

        def step(number: int) -> Step:
            return Step(Kind.TOOL, (Ref(name, number - 1),)) if number else Step(Kind.SPAWN, (spawned,))

        turns = self._turns(name, head, _drawn_count(self._dice, _AGENT_TURNS), step, _AGENT_FIRST_TOKENS)
        return _session(name, turns, head, spawned)

    def _copy(self, root: str, turns: DrawnTurns, head: Head) -> Session:
        """A session that goes on from one of the root's turns."""
        name, ref = f"{root}/copy", Ref(root, self._dice.randrange(len(turns)))
        steps = [Step(Kind.HUMAN, (ref,))]
        self._go_on(name, steps, _drawn_count(self._dice, SESSION_TURNS) - 1)
        return _session(name, self._turns(name, head, len(steps), steps.__getitem__, origin=(ref, turns)), head, ref)


def _session(name: str, turns: DrawnTurns, head: Head, parent: Ref | None) -> Session:
    return Session(name, turns, parent, None, head.blocks * BLOCK_TOKENS, stepwise=True)


def _drawn_count(dice: random.Random, table: Table) -> int:
    return round(table.at(dice.random()))
