"""Which blocks each prompt of a tree consists of, with names that hold across trees.

A block is named by a *space* and a number. Ids of a trace with global blocks live in one space; those of other traces
in one space per tree, except the blocks of a session's head (tools and system prompt): sessions of different trees
that name the same head share its blocks, numbered by place.

A prompt's last tokens fill no block and have no id. They are the start of the block that the session's next prompt
puts there, where that prompt continues this one: what was said before stays word for word in front of what follows.
Otherwise they are text of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from simulations.trace import Ref, Run, Session, Tree, Turn

__all__ = ["Span", "TreeBlocks", "joined"]

_GLOBAL: Final = "trace"


class Span(NamedTuple):
    """`size` blocks of a space, numbered from `first`."""

    space: str
    first: int
    size: int


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same blocks in as few spans as their order allows."""
    merged: list[Span] = []
    for span in spans:
        if not span.size:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.space == span.space and last.first + last.size == span.first:
            merged[-1] = Span(last.space, last.first, last.size + span.size)
        else:
            merged.append(span)
    return tuple(merged)


def _first(spans: Iterable[Span], blocks: int) -> Iterator[Span]:
    for space, first, count in spans:
        if blocks <= 0:
            return
        yield Span(space, first, min(count, blocks))
        blocks -= count


class TreeBlocks:
    """The blocks of one tree's prompts, worked out once each and kept."""

    def __init__(self, tree: Tree, block_tokens: int, *, global_blocks: bool) -> None:
        self._sessions = {session.id: session for session in tree.sessions}
        self._block_tokens = block_tokens
        self._space = _GLOBAL if global_blocks else f"tree/{tree.id}"
        self._own = f"own/{tree.id}"
        self._heads: list[tuple[int, int, Span]] = []
        """Ids [first, end) of this tree that stand for blocks of a head."""
        self._spans: dict[Ref, tuple[Span, ...]] = {}
        if not global_blocks:
            for session in tree.sessions:
                self._enter_head(session)

    def turn(self, ref: Ref) -> Turn:
        """The turn itself."""
        return self._sessions[ref.session].turns[ref.turn]

    def head_blocks(self, session: str) -> int:
        """Whole blocks of the session's head, at most those of its first prompt."""
        tokens = min(self._sessions[session].head_tokens, self._sessions[session].turns[0].prompt_tokens)
        return tokens // self._block_tokens

    def spans(self, ref: Ref) -> tuple[Span, ...]:
        """All whole blocks of the prompt, in order."""
        missing = []
        at: Ref | None = ref
        while at is not None and at not in self._spans:
            missing.append(at)
            at = self.turn(at).base
        for each in reversed(missing):
            self._spans[each] = self._made(each)
        return self._spans[ref]

    def tail(self, ref: Ref) -> tuple[str, int]:
        """The block whose first tokens are the prompt's last, those that fill no block."""
        following = self._continuation(ref)
        if following is None:
            return f"{self._own}/{ref.session}/tail", ref.turn
        space, first, _ = next(self._translated(following.add[0]))
        return space, first

    def shared_tokens(self, ref: Ref) -> int:
        """Tokens at the start of the prompt that are those of its base; 0 without one."""
        turn = self.turn(ref)
        if turn.base is None:
            return 0
        base = self.turn(turn.base)
        if self._continuation(turn.base) is turn:
            return min(base.prompt_tokens, turn.prompt_tokens)
        return min(turn.keep * self._block_tokens, base.prompt_tokens // self._block_tokens * self._block_tokens)

    def _continuation(self, ref: Ref) -> Turn | None:
        """The session's next turn, if its prompt begins with the whole of this one."""
        turns = self._sessions[ref.session].turns
        following = turns[ref.turn + 1] if ref.turn + 1 < len(turns) else None
        if following is None or following.base != ref or not following.add:
            return None
        whole = turns[ref.turn].prompt_tokens // self._block_tokens
        return following if following.keep == whole else None

    def _made(self, ref: Ref) -> tuple[Span, ...]:
        turn = self.turn(ref)
        whole = turn.prompt_tokens // self._block_tokens
        before = self._spans[turn.base] if turn.base is not None else ()
        found = [*_first(before, turn.keep)]
        for run in turn.add:
            found.extend(self._translated(run))
        blocks = sum(span.size for span in found)
        if blocks < whole:  # the trace has no ids for the rest: nobody shares it
            found.append(Span(f"{self._own}/{ref.session}", ref.turn << 32, whole - blocks))
        return joined(_first(found, whole))

    def _translated(self, run: Run) -> Iterator[Span]:
        first, end = run.first, run.first + run.size
        for start, stop, span in self._heads:
            if stop <= first or start >= end:
                continue
            if first < start:
                yield Span(self._space, first, start - first)
                first = start
            taken = min(stop, end) - first
            yield Span(span.space, span.first + first - start, taken)
            first += taken
        if first < end:
            yield Span(self._space, first, end - first)

    def _enter_head(self, session: Session) -> None:
        """Give the ids of a session's head, as far as they have no place in an earlier one, their place in the head."""
        if session.head is None or not session.turns or session.turns[0].base is not None:
            return
        place, left = 0, self.head_blocks(session.id)
        found: list[tuple[int, int, Span]] = []
        for run in session.turns[0].add:
            taken = min(run.size, left)
            for span in self._translated(Run(run.first, taken)):
                if span.space == self._space:
                    head = Span(f"head/{session.head}", place, span.size)
                    found.append((span.first, span.first + span.size, head))
                place += span.size
            left -= taken
        self._heads = sorted([*self._heads, *found])
