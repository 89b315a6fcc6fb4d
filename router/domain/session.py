"""Sessions and branches: chains of turns whose prompts extend one another, and where their KV is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Binding", "Boundary", "Branch", "Residue", "Session"]


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
