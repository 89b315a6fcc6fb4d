"""Which branch a turn continues, or what it forks from.

A turn continues the branch of its deepest known boundary, if that branch is idle, or the boundary is its tip or the end
of this prompt (which is sent again); otherwise it is a fork: a new branch that shares a known prefix with its parent. A
boundary met in another session (of the same tenant: the chain is seeded with it) is a fork too, and where it is the end
of the prompt it stays the other's: the fork's tip is that boundary as its own session sees it (`own`), so that sessions
which begin with one and the same prompt each find their own branch again. Nothing known: a new branch. A branch that is
new to its session, but begins with the same tools and system prompt as one of its branches (a compacted history, a
subagent of the same kind), shares that head; keyless branches of a tenant share heads among them.

A branch's id follows from the end of its first prompt and its session, so that routers which cannot talk agree on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from xxhash import xxh3_128_hexdigest

from router.domain.session import Boundary, Branch
from router.domain.shared import Ask, View
from router.domain.turn import Facts
from router.placement.scope import record_key, response_key

__all__ = ["Lineage", "apart", "ask_for", "head_of", "heads_of", "kept_tips", "own", "thinned", "trace"]

NEWEST_TIPS: Final = 4
"""Tips kept without gaps; older ones thin out."""
OWN_BOUNDARIES: Final = 16
"""Deepest boundaries that are also looked for as the session's own: more than one turn adds."""
ASKED_MAX: Final = 96
"""Deepest boundaries that are looked for at all: some thirty turns back. Whoever rewinds further is met by the head."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a turn comes from."""

    branch: str
    session: str
    known: Branch | None
    """The record of the branch it continues; None for a new one."""
    parent: Branch | None
    """The branch whose KV it can reuse: `known` itself, or what it forks from, or the one with the same head."""
    shared_bytes: int
    """Prompt text in common with `parent`."""
    tip: Boundary | None
    """The end of this prompt, by which the next turn finds the branch."""
    side_tip: Boundary | None = None
    """Where the prompt's last message begins; see `_side_tip`."""
    keeps_tip: bool = True
    """False where no later turn will find the branch by `tip`: rivals hold it."""

    @property
    def fork(self) -> bool:
        """Whether the turn begins a branch."""
        return self.known is None


def heads_of(facts: Facts) -> str:
    """The record that remembers the heads of this turn's branch: its session's, or for keyless clients one per tenant,
    so that a history which a keyless client compacted or edited still finds the replica that holds its tools and system
    prompt. No tenant meets another's, whatever session it names.
    """
    return record_key(facts.tenant, facts.session) if facts.session is not None else f"keyless/{facts.tenant}"


def head_of(facts: Facts) -> str | None:
    """The boundary after the leading system messages."""
    return facts.chain.hashes[facts.head - 1] if 0 < facts.head <= len(facts.chain) else None


def ask_for(facts: Facts) -> Ask:
    """What to ask the store about a turn."""
    hashes = facts.chain.hashes
    deepest = list(reversed(hashes[-ASKED_MAX:]))
    if facts.session is not None:
        own_ones = [_own_hash(each, facts.session) for each in deepest[:OWN_BOUNDARIES]]
        paired = [each for pair in zip(own_ones, deepest, strict=False) for each in pair]
        deepest = paired + deepest[len(own_ones) :]
    refers_to = None if facts.refers_to is None else response_key(facts.tenant, facts.refers_to)
    return Ask(session=heads_of(facts), boundaries=tuple(deepest), head=head_of(facts), response_id=refers_to)


def own(boundary: Boundary, session: str) -> Boundary:
    """A boundary as one session's own: nobody else can meet it."""
    return Boundary(_own_hash(boundary.hash, session), boundary.text_bytes)


def _own_hash(boundary: str, session: str) -> str:
    return xxh3_128_hexdigest(f"{boundary}/{session}".encode())


def _met(facts: Facts, depth: int) -> tuple[Boundary, bool]:
    """The boundary at an index of `ask_for`'s boundaries, and whether it is the prompt's end."""
    pairs = min(OWN_BOUNDARIES, len(facts.chain)) if facts.session is not None else 0
    back = depth // 2 if depth < 2 * pairs else depth - pairs
    boundary = facts.chain[len(facts.chain) - 1 - back]
    if facts.session is not None and depth < 2 * pairs and depth % 2 == 0:
        boundary = own(boundary, facts.session)
    return boundary, back == 0


def trace(facts: Facts, view: View, turn: str) -> Lineage:
    """Continuation, fork or new branch. `turn` names branches of prompts without a chain."""
    tip = facts.chain[-1] if facts.chain else None
    known = view.branch
    if known is not None and view.depth is not None:
        met, again = _met(facts, view.depth)
        same_session = facts.session is None or facts.session == known.session
        at_tip = bool(known.tips) and known.tips[0].hash == met.hash
        if same_session and (known.in_flight == 0 or at_tip or again):
            tip = met if again else tip
            return Lineage(known.id, known.session, known, known, met.text_bytes, tip, _side_tip(facts))
        fork = _fork(facts, tip, turn, known, met.text_bytes)
        return replace(fork, tip=own(met, fork.session)) if again else fork
    if view.head_branch is not None:
        return _fork(facts, tip, turn, view.head_branch, facts.chain[facts.head - 1].text_bytes)
    return _fork(facts, tip, turn, None, 0)


def _side_tip(facts: Facts) -> Boundary | None:
    """Where the prompt's last message begins, as the session's own: a client that sends the turn again with another
    last message (many questions to one long context, an edited prompt) is met there.
    """
    if facts.session is None or len(facts.chain) - 2 < facts.head:
        return None
    return own(facts.chain[-2], facts.session)


def _fork(facts: Facts, tip: Boundary | None, turn: str, parent: Branch | None, shared_bytes: int) -> Lineage:
    root = tip.hash if tip is not None else turn
    session = facts.session or xxh3_128_hexdigest(f"anonymous/{facts.tenant}/{root}".encode())[:24]
    branch = xxh3_128_hexdigest(f"{session}/{root}".encode())
    return Lineage(branch, session, None, parent, shared_bytes, tip, _side_tip(facts))


def apart(lineage: Lineage, turn: str) -> Lineage:
    """The turn as the first of a branch of its own, named by the turn: no other can have claimed it or its tip."""
    branch = xxh3_128_hexdigest(f"{lineage.session}/{lineage.branch}/{turn}".encode())
    return replace(lineage, branch=branch, known=None, keeps_tip=False)


def kept_tips(lineage: Lineage, limit: int) -> tuple[Boundary, ...]:
    """The tips a branch keeps once the turn is placed: its end, its side tip, then the branch's older ones, the last
    few and ever sparser further back, so that a fork from far back still finds its branch and a long conversation
    keeps at most `limit`.
    """
    if not lineage.keeps_tip:
        return ()
    newest = [each for each in (lineage.tip, lineage.side_tip) if each is not None]
    hashes = {each.hash for each in newest}
    older = [] if lineage.known is None else [old for old in lineage.known.tips if old.hash not in hashes]
    return thinned([*newest, *older], limit)


def thinned(tips: list[Boundary], limit: int) -> tuple[Boundary, ...]:
    """At most `limit` of them: beyond the newest, the tip goes whose neighbours are closest relative to their distance
    from the newest in text.
    """
    newest = tips[0].text_bytes if tips else 0

    def gap(index: int) -> float:
        before, after = tips[index - 1].text_bytes, tips[index + 1].text_bytes
        return abs(before - after) / (1 + abs(newest - tips[index].text_bytes))

    while len(tips) > limit:
        inner = range(NEWEST_TIPS, len(tips) - 1)
        del tips[min(inner, key=gap) if inner else -1]
    return tuple(tips)
