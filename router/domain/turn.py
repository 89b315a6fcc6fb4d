"""A turn: one request of a branch, reduced to what the decision needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from router.domain.session import NO_CHAIN, Chain

__all__ = ["Dialect", "Facts", "Turn"]


class Dialect(StrEnum):
    """The API a path belongs to; decides how the prompt, the stream and the errors look."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was read from a request without changing it."""

    dialect: Dialect
    model: str | None
    stream: bool
    tenant: str
    session: str | None
    """Tenant-scoped session key, or None for a keyless client."""
    chain: Chain = NO_CHAIN
    """Every message boundary of the prompt, in order; the last is the prompt's end."""
    head: int = 0
    """How many leading boundaries belong to system messages (tools and system prompt)."""
    max_output_tokens: int | None = None
    refers_to: str | None = None
    """Id of a stored response this request asks for or continues; only its replica has it."""
    stores_response: bool = False
    steers_engine: bool = False
    """Whether the body names state of the engine that is not the turn's own: a session of it, or another host."""
    priority: int | None = None
    """The body's `priority`, which SGLang orders its own queue by: higher goes first."""
    parent: str | None = None
    """Session that a subagent with a session of its own says it works for, tenant-scoped as `session`."""
    session_source: str = "none"
    """Which header or field named the session; bounded by configuration, safe as a label."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to be placed. `prompt_tokens` is an estimate from text bytes until the engine has counted."""

    id: str
    session: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """Prompt tokens in common with `branch` (all known KV of it that this prompt can reuse)."""
    fork: bool = False
    """A new branch, with or without a parent; False: the next turn of its branch."""
    sequence: int = 0
    """This router's running number, for `round_robin`."""
