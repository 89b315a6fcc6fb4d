"""Prompts whose token prefixes are real bytes.

Every block has a text of its own: words of three letters and a space, four bytes a token, drawn from a hash of the
block's name. Two prompts that share blocks therefore share exactly these bytes at their start, and two that do not part
at the first block that differs. Another `seed` gives other texts, so that a second run finds nothing of the first in a
cache.

A prompt is told as messages whose boundaries follow the conversation: the head is the system message, the first turn
adds a user message, each later one what the assistant said (as long as the earlier turn's output) and what a tool or
the human answered. What was said stays word for word, so the messages of a turn begin with those of the turn it
extends. Where a trace takes back a few blocks, the message they were in changes in place; a compacted history begins
anew behind what it keeps.

`token_scale` shrinks everything alike: a block of 64 tokens is sent as round(64 · scale), at least one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from simulations.prompt_blocks import Span, TreeBlocks
from simulations.trace import Kind, Ref, Tree

__all__ = ["BYTES_PER_TOKEN", "BlockTexts", "Message", "Prompt", "Role", "TreePrompts"]

BYTES_PER_TOKEN: Final = 4
_CACHE_BYTES: Final = 16 << 20
_WORDS: Final = (  # noqa: SIM905 (128 quoted words are no better)
    "the and you for not are but all out get was can had her his one our day now new use two way may any who did "
    "its say she him how has see own too old big put try ask run let end set far few lot man men boy car job law "
    "war air art bad bed bit box bus buy cup cut dog eat eye fit fly fun gas guy hit hot ice key kid leg lie low "
    "map mix net odd oil pay per pop raw red row sad sea sit six sky son sun tax tea ten tie top toy van via win "
    "won yes yet add ago aid aim arm bag ban bar bat bay bet bid bin bow bug cap cat"
).split()
_TOKENS: Final = [f"{word} " for word in _WORDS] * 2
"""A token for every value of a byte."""
_EMPTY: Final = "ok "
"""Said where a trace leaves nothing to say: no API takes an empty message."""


class Role(StrEnum):
    """Who says a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Message(NamedTuple):
    """One message of a prompt."""

    role: Role
    text: str
    calls_tool: bool
    """An assistant's message that a tool's answers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a turn sends. Tokens and blocks are as sent, after scaling."""

    ref: Ref
    messages: tuple[Message, ...]
    text: str
    """The same without message boundaries."""
    tokens: int
    output_tokens: int
    """What is asked for; at least one."""
    spans: tuple[Span, ...]
    """Its whole blocks."""
    block_tokens: int
    base: Ref | None
    shared_tokens: int
    """Tokens it has in common with its base."""


class BlockTexts:
    """Texts of blocks, the recently used ones kept."""

    def __init__(self, seed: int, block_tokens: int) -> None:
        self._seed = seed
        self.block_tokens = block_tokens
        self.text = lru_cache(maxsize=max(_CACHE_BYTES // (BYTES_PER_TOKEN * block_tokens), 64))(self._text)

    def _text(self, space: str, number: int) -> str:
        name = f"{self._seed}/{space}/{number}".encode()
        return "".join([_TOKENS[byte] for byte in hashlib.shake_128(name).digest(self.block_tokens)])


@dataclass(frozen=True, slots=True)
class _Said:
    """A message by its place in the prompt's text, and the one before it; prompts share what they have in common."""

    before: _Said | None
    role: Role
    start: int
    end: int
    calls_tool: bool = False


class TreePrompts:
    """The prompts of one tree, each built from the one it extends."""

    def __init__(self, tree: Tree, block_tokens: int, *, global_blocks: bool, texts: BlockTexts) -> None:
        self._blocks = TreeBlocks(tree, block_tokens, global_blocks=global_blocks)
        self._texts = texts
        self._trace_block_tokens = block_tokens
        self._said: dict[Ref, _Said] = {}

    def prompt(self, ref: Ref) -> Prompt:
        """The prompt of a turn, in time proportional to its length."""
        turn = self._blocks.turn(ref)
        tokens = self._sent(turn.prompt_tokens)
        spans = self._blocks.spans(ref)
        text = self._whole(ref, spans, tokens)
        messages: list[Message] = []
        said: _Said | None = self._layout(ref)
        while said is not None:
            part = text[said.start * BYTES_PER_TOKEN : said.end * BYTES_PER_TOKEN]
            messages.append(Message(said.role, part or _EMPTY, said.calls_tool))
            said = said.before
        return Prompt(
            ref=ref,
            messages=tuple(reversed(messages)),
            text=text or _EMPTY,
            tokens=tokens,
            output_tokens=max(self._sent(turn.output_tokens), 1),
            spans=spans,
            block_tokens=self._texts.block_tokens,
            base=turn.base,
            shared_tokens=self._sent(self._blocks.shared_tokens(ref)),
        )

    def _sent(self, tokens: int) -> int:
        return tokens * self._texts.block_tokens // self._trace_block_tokens

    def _whole(self, ref: Ref, spans: tuple[Span, ...], tokens: int) -> str:
        text = self._texts.text
        parts = [text(space, number) for space, first, count in spans for number in range(first, first + count)]
        missing = tokens - len(parts) * self._texts.block_tokens
        if missing:
            parts.append(text(*self._blocks.tail(ref))[: missing * BYTES_PER_TOKEN])
        return "".join(parts)

    def _layout(self, ref: Ref) -> _Said:
        missing = []
        at: Ref | None = ref
        while at is not None and at not in self._said:
            missing.append(at)
            at = self._blocks.turn(at).base
        for each in reversed(missing):
            self._said[each] = self._extended(each)
        return self._said[ref]

    def _extended(self, ref: Ref) -> _Said:
        """The messages of a turn: those of its base as far as they are shared, then what is new."""
        turn = self._blocks.turn(ref)
        end = self._sent(turn.prompt_tokens)
        if turn.base is None:
            head = min(self._blocks.head_blocks(ref.session) * self._texts.block_tokens, end)
            system = _Said(None, Role.SYSTEM, 0, head) if head else None
            return _Said(system, Role.USER, head, end)
        said = _kept(self._said[turn.base], self._sent(self._blocks.shared_tokens(ref)), end)
        at = 0 if said is None else said.end
        if said is None or said.role is Role.SYSTEM:
            return _Said(said, Role.USER, at, end)
        by_tool = turn.kind is Kind.TOOL
        if said.role is not Role.ASSISTANT:
            if at == end and said is not self._said[turn.base]:
                return said
            spoken = min(self._sent(self._blocks.turn(turn.base).output_tokens), max(end - at - 1, 0))
            said = _Said(said, Role.ASSISTANT, at, at + spoken, by_tool)
        return _Said(said, Role.TOOL if said.calls_tool else Role.USER, said.end, end)


def _kept(said: _Said, shared: int, end: int) -> _Said | None:
    """The messages whose text is shared; one shared in part keeps its place and, where there is enough, its size."""
    at: _Said | None = said
    while at is not None and at.end > shared:
        if at.start < shared:
            return _Said(at.before, at.role, at.start, min(at.end, end), at.calls_tool)
        at = at.before
    return at
