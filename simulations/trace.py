"""Traces: recorded or drawn conversations, as values.

A *trace* is a list of *trees*; a tree is a session of a client and the sessions (subagents, resumed copies) that grew
out of it; a session is one chain of turns, which the router calls a branch. A turn says which earlier completions it
waits for, how long its client then thinks, and what its prompt consists of: the first `keep` blocks of an earlier
prompt, and then `add`. A block is `block_tokens` tokens; its id stands for its content and all that comes before it, as
prefix-cache hashes do, so equal ids mean a common prefix. A prompt's last tokens that fill no block have no id.

Blocks are kept as runs of consecutive ids, so a trace costs a few hundred bytes a turn whatever its prompts weigh.

`read` takes lines, `simulations.trace_files.load` takes a file. Formats: `simulations.trace_formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Fit", "Kind", "Ref", "Run", "Session", "Trace", "TraceError", "Tree", "Turn", "fit", "length"]


class TraceError(Exception):
    """A trace that cannot be read; the text names the line."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text if line is None else f"line {line}: {text}")
        self.line = line


class Kind(StrEnum):
    """What made the client send a turn."""

    START = "start"
    TOOL = "tool"
    HUMAN = "human"
    SPAWN = "spawn"
    OTHER = "other"


class Ref(NamedTuple):
    """A turn, by the session it belongs to and its number in it."""

    session: str
    turn: int


class Run(NamedTuple):
    """`size` blocks with consecutive ids."""

    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    index: int
    kind: Kind
    prompt_tokens: int
    output_tokens: int
    base: Ref | None
    """The earlier turn whose first `keep` blocks this prompt begins with; None: everything is in `add`."""
    keep: int
    add: tuple[Run, ...]
    after: tuple[Ref, ...]
    """Completions to wait for; none: free to overlap with whatever runs."""
    think_s: float | None
    """From the last of these completions to the send."""
    at_s: float | None = None
    """When it was sent, on the trace's clock."""


@dataclass(frozen=True, slots=True)
class Session:
    """One chain of turns."""

    id: str
    turns: Sequence[Turn]
    """Values, all of them; the built-in workload's are drawn when they are first looked at."""
    parent: Ref | None = None
    """The turn after whose completion it began; None for the root of a tree."""
    head: str | None = None
    """Names a prefix that sessions of different trees share (tools and system prompt)."""
    head_tokens: int = 0
    stepwise: bool = False
    """Each turn waits for the one before it, the first for `parent`: nobody need look at it earlier."""

    @property
    def peak_tokens(self) -> int:
        """The most that one turn's prompt and output take together."""
        return max((turn.prompt_tokens + turn.output_tokens for turn in self.turns), default=0)


@dataclass(frozen=True, slots=True)
class Tree:
    """A root session and all that grew out of it, the root first, parents before children."""

    sessions: tuple[Session, ...]

    @property
    def id(self) -> str:
        """The root's id."""
        return self.sessions[0].id

    @property
    def turn_count(self) -> int:
        """Turns of all its sessions."""
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace."""

    trees: tuple[Tree, ...]
    block_tokens: int
    global_blocks: bool
    """Whether block ids mean the same in every tree; otherwise only inside one."""
    shared_clock: bool
    """Whether all `at_s` are on one clock; otherwise each tree has its own."""
    source: str = ""
    licence: str = ""

    @property
    def turn_count(self) -> int:
        """Turns of all trees."""
        return sum(tree.turn_count for tree in self.trees)


def length(runs: Iterable[Run]) -> int:
    """How many blocks these are."""
    return sum(run.size for run in runs)


@dataclass(frozen=True, slots=True)
class Fit:
    """Trees that fit a context, and what it took: trees left out, trees that end early, turns lost to both."""

    trees: tuple[Tree, ...]
    dropped: int = 0
    cut: int = 0
    turns_lost: int = 0


def fit(trees: Iterable[Tree], context_tokens: int, *, cut: bool) -> Fit:
    """The trees whose every turn fits `context_tokens`; with `cut`, those that do not end before their first such turn.

    A session whose parent's turn is gone goes with it, and nobody waits for turns that are gone.
    """
    kept: list[Tree] = []
    dropped = shortened = lost = 0
    for tree in trees:
        if all(session.peak_tokens <= context_tokens for session in tree.sessions):
            kept.append(tree)
            continue
        shorter = _cut(tree, context_tokens) if cut else None
        lost += tree.turn_count - (shorter.turn_count if shorter is not None else 0)
        if shorter is None:
            dropped += 1
        else:
            shortened += 1
            kept.append(shorter)
    return Fit(tuple(kept), dropped, shortened, lost)


def _cut(tree: Tree, context_tokens: int) -> Tree | None:
    """The tree up to each session's first turn that does not fit; None where its root has none that does."""
    left: dict[str, int] = {}
    for session in tree.sessions:
        parent = session.parent
        if parent is not None and parent.turn >= left.get(parent.session, 0):
            continue
        fitting = 0
        for turn in session.turns:
            gone = turn.base is not None and turn.base.session != session.id and not _stands(turn.base, left)
            if gone or turn.prompt_tokens + turn.output_tokens > context_tokens:
                break
            fitting += 1
        if fitting:
            left[session.id] = fitting
    if tree.id not in left:
        return None
    sessions = []
    for session in tree.sessions:
        if session.id in left:
            turns = (
                replace(turn, after=tuple(ref for ref in turn.after if _stands(ref, left)))
                for turn in session.turns[: left[session.id]]
            )
            sessions.append(replace(session, turns=tuple(turns)))
    return Tree(tuple(sessions))


def _stands(ref: Ref, left: dict[str, int]) -> bool:
    return ref.turn < left.get(ref.session, 0)
