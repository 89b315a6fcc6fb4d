"""What clients ask: turns of a tree as the facts a router reads and the work a replica does.

Facts are built straight from the tree, since parsing megabytes of JSON would be most of a run; `Wording.REAL` builds
the real bodies and has the router's `Identity` read them. Either way a message boundary ends the head (tools and
system prompt), each assistant message and each message of a user or a tool, and a prompt shares the boundaries of the
one it extends as far as it extends it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Final

from xxhash import xxh3_128_hexdigest

from router.domain.session import Chain
from router.domain.turn import Dialect, Facts
from router.placement.identity import Identity, Rules
from simulations.engine import asked, tokens
from simulations.prompt import BlockTexts, TreePrompts
from simulations.prompt_blocks import TreeBlocks
from simulations.prompt_dialects import body
from simulations.replica_model import ReplicaProfile, Request, keys_of_bytes
from simulations.trace import Ref, Tree, Turn
from simulations.workload import BLOCK_TOKENS

__all__ = ["Asking", "Built", "Conversation", "Real", "burst_context", "forked"]

_TOKEN_BYTES: Final = 4
_HEADER: Final = "x-session-id"


@dataclass(frozen=True, slots=True)
class Asking:
    """One turn: what the router is told, and what a replica will do for it."""

    facts: Facts
    pages: array[int]
    prompt_tokens: int
    output_tokens: int

    def job(self, request: str) -> Request:
        """The work, under a request's name; "!" ends it, for an abort names turns by the beginning of their ids."""
        return Request(f"{request}!", self.pages, self.prompt_tokens, self.output_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tree and whose it is."""

    tree: Tree
    tenant: str
    named: bool
    """Whether its client names sessions."""


class Built:
    """Facts without bytes."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self._of = conversation
        self._model = model
        self._blocks = TreeBlocks(conversation.tree, BLOCK_TOKENS, global_blocks=True)
        self._chains: dict[Ref, Chain] = {}

    def asking(self, ref: Ref) -> Asking:
        """The turn."""
        turn = self._blocks.turn(ref)
        chain = self._chain(ref)
        tenant, root = self._of.tenant, self._of.tree.id
        session = xxh3_128_hexdigest(f"{tenant}/{root}".encode())[:24] if self._of.named else None
        facts = Facts(
            dialect=Dialect.CHAT,
            model=self._model,
            stream=True,
            tenant=tenant,
            session=session,
            chain=chain,
            head=1,
            max_output_tokens=turn.output_tokens,
            session_source=_HEADER if session is not None else "none",
        )
        return Asking(facts, self._pages(ref, turn), turn.prompt_tokens, turn.output_tokens)

    def _pages(self, ref: Ref, turn: Turn) -> array[int]:
        """Of prompt and output: a block's id stands for all before it. What is said is part of the next prompt."""
        pages = array("Q")
        for span in self._blocks.spans(self._following(ref, turn) or ref):
            pages.extend(range(span.first, span.first + span.size))
        return pages

    def _following(self, ref: Ref, turn: Turn) -> Ref | None:
        session = next(each for each in self._of.tree.sessions if each.id == ref.session)
        after = session.turns[ref.turn + 1] if ref.turn + 1 < len(session.turns) else None
        whole = turn.prompt_tokens // BLOCK_TOKENS
        return (
            Ref(ref.session, ref.turn + 1) if after is not None and after.base == ref and after.keep == whole else None
        )

    def _chain(self, ref: Ref) -> Chain:
        found = self._chains.get(ref)
        if found is None:
            found = self._chains[ref] = self._made(ref, self._blocks.turn(ref))
        return found

    def _made(self, ref: Ref, turn: Turn) -> Chain:
        """The boundaries of the base as far as they are shared, then an assistant message and the new one."""
        end = turn.prompt_tokens * _TOKEN_BYTES
        new = "+".join(f"{run.first}-{run.size}" for run in turn.add) or f"{ref.session}#{ref.turn}"
        if turn.base is None:
            runs = turn.add
            head_blocks = self._blocks.head_blocks(ref.session)
            head = "/".join(str(run.first) for run in runs[: max(len(runs) - 1, 1)])
            start = xxh3_128_hexdigest(f"{self._of.tenant}/{self._model}/{head}".encode())
            first = min(head_blocks * BLOCK_TOKENS * _TOKEN_BYTES, end)
            return Chain((start, _link(start, new)), (first, end))
        base = self._chain(turn.base)
        shared = self._blocks.shared_tokens(ref) * _TOKEN_BYTES
        kept = sum(size <= shared for size in base.sizes)
        hashes, sizes = list(base.hashes[:kept]), list(base.sizes[:kept])
        before = hashes[-1] if hashes else xxh3_128_hexdigest(f"{self._of.tenant}/{self._model}".encode())
        if kept == len(base):
            said = min(sizes[-1] + self._blocks.turn(turn.base).output_tokens * _TOKEN_BYTES, end - 1)
            before = _link(before, f"said {turn.base.session} {turn.base.turn}")
            hashes.append(before)
            sizes.append(max(said, sizes[-1]))
        hashes.append(_link(before, f"{new} {turn.prompt_tokens}"))
        sizes.append(end)
        return Chain(hashes, sizes)


def _link(before: str, message: str) -> str:
    return xxh3_128_hexdigest(f"{before}/{message}".encode())


class Real:
    """Real bodies, read by the router's own code and by the simulated engine's."""

    def __init__(
        self, conversation: Conversation, profile: ReplicaProfile, texts: BlockTexts, identity: Identity
    ) -> None:
        self._of = conversation
        self._profile = profile
        self._identity = identity
        self._prompts = TreePrompts(conversation.tree, BLOCK_TOKENS, global_blocks=True, texts=texts)

    def asking(self, ref: Ref) -> Asking:
        """The turn."""
        prompt = self._prompts.prompt(ref)
        raw = body(Dialect.CHAT, prompt, self._profile.model, ignore_eos=True)
        headers = {b"x-api-key": self._of.tenant.encode()}
        if self._of.named:
            headers[_HEADER.encode()] = self._of.tree.id.encode()
        facts = self._identity.facts(Dialect.CHAT, headers, raw)
        wanted = asked.read(asked.CHAT, asked.decoded(raw), self._profile.model)
        output = wanted.max_tokens or 1
        said = tokens.said(0, wanted.prompt, output)
        page_bytes = self._profile.page_tokens * tokens.TOKEN_BYTES
        pages = keys_of_bytes(wanted.prompt + said, page_bytes, wanted.namespace)
        return Asking(facts, pages, wanted.prompt_tokens, output)

    @staticmethod
    def identity() -> Identity:
        """A reader of requests, as a router has one."""
        return Identity(Rules((_HEADER,), ()))


def burst_context(model: str, name: str, first: int, blocks: int) -> Asking:
    """The first turn of a session whose context many will fork at once; its pages are numbered from `first`."""
    size = blocks * BLOCK_TOKENS * 4
    chain = Chain((_link(name, "head"), _link(name, "tip")), (size // 2, size))
    facts = Facts(
        Dialect.CHAT,
        model,
        stream=True,
        tenant="tenant0",
        session=f"{name}-session",
        chain=chain,
        head=1,
        max_output_tokens=64,
    )
    return Asking(facts, array("Q", range(first, first + blocks)), blocks * BLOCK_TOKENS, 64)


def forked(asking: Asking, first: int, number: int) -> Asking:
    """A turn that begins with the whole of another and goes on in its own way."""
    chain = asking.facts.chain
    size = chain.sizes[-1] + 16 * BLOCK_TOKENS * 4
    tip = _link(chain.hashes[-1], f"fork {number}")
    pages = asking.pages[:]
    pages.extend(range(first, first + 16))
    facts = replace(asking.facts, chain=Chain((*chain.hashes, tip), (*chain.sizes, size)))
    return Asking(facts, pages, asking.prompt_tokens + 16 * BLOCK_TOKENS, 64)
