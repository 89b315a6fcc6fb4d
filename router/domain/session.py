"""Sessions and branches: chains of turns whose prompts extend one another, and where their KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

__all__ = ["NO_CHAIN", "Binding", "Boundary", "Branch", "Chain", "Residue", "Session"]


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a branch (or, for `session_sticky`, a session) lives: a replica in one life of its engine."""

    replica: str
    incarnation: str


class Boundary(NamedTuple):
    """A point in a prompt where a message ends: the chained hash up to it and how many bytes of prompt text lie before
    it.
    """

    hash: str
    """32 hex digits of the chained xxh3_128."""
    text_bytes: int


class Chain(Sequence[Boundary]):
    """The boundaries of one prompt, in order.

    Two tuples of plain values rather than one of objects: hundreds of boundaries a turn would otherwise be most of what
    the garbage collector walks.
    """

    __slots__ = ("hashes", "sizes")

    def __init__(self, hashes: Sequence[str] = (), sizes: Sequence[int] = ()) -> None:
        """Boundary hashes and the text bytes before each."""
        self.hashes = tuple(hashes)
        self.sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self.hashes)

    @overload
    def __getitem__(self, at: int) -> Boundary: ...

    @overload
    def __getitem__(self, at: slice) -> Chain: ...

    def __getitem__(self, at: int | slice) -> Boundary | Chain:
        if isinstance(at, slice):
            return Chain(self.hashes[at], self.sizes[at])
        return Boundary(self.hashes[at], self.sizes[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.hashes == other.hashes and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.hashes)

    def __repr__(self) -> str:
        return f"Chain({list(self)!r})"


NO_CHAIN = Chain()


@dataclass(frozen=True, slots=True)
class Residue:
    """What a branch left on one replica incarnation when it was last served there."""

    replica: str
    incarnation: str
    tokens: int
    """Prompt and output tokens of the branch that were in its KV cache then."""
    admitted_mark: int
    """The replica's `admitted_tokens` at that moment."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A chain of turns. `tips` are the boundaries by which a later turn finds it, newest first."""

    id: str
    session: str
    home: Binding | None = None
    version: int = 0
    """Counts commits; a commit made on an older version is refused as stale."""
    turns: int = 0
    in_flight: int = 0
    tokens: int = 0
    """Prompt tokens of the newest settled turn, as reported by the engine or estimated."""
    text_bytes: int = 0
    """Prompt text bytes of the newest committed turn."""
    weight: float = 0.0
    """Its share in its home's `Load.crowd` at `active_at_s`."""
    active_at_s: float = 0.0
    live_tokens: int = 0
    """Its share in its home's `Load.live_tokens` at `active_at_s`."""
    inherited_tokens: int = 0
    """Tokens its prompts begin with that the branch it forked from counts at the same home."""
    tips: tuple[Boundary, ...] = ()
    residues: tuple[Residue, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation of an agent harness, as its header names it."""

    id: str
    """Tenant-scoped hash; the raw id is never stored."""
    home: Binding | None = None
    heads: tuple[tuple[str, str], ...] = field(default=())
    """(boundary hash after the leading system messages, branch id): lets a compacted history find its old home."""
