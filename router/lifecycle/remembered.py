"""What this router remembers of the branches it placed: for the time without the store, and for a store that forgot.

One entry a branch, its newest claim with its newest ends, oldest entries forgotten first. An entry is *written* while
the store has it. What was bound without the store is not, and after a flush nothing is; `router.lifecycle.returning`
writes it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from router.domain.session import Binding, Branch, Residue
from router.domain.shared import Ask, Claim, Settlement

__all__ = ["Entry", "Found", "Remembered"]

BRANCHES_MAX: Final = 10_000
"""Branches remembered: several times what a busy core has alive. 1.8 KB each, so 18 MB at most."""
TIPS_KEPT: Final = 4
"""Ends by which a branch is found here; the store keeps more."""
CHAINS_MAX: Final = 5_000
"""Branches bound without the store that also remember their prompt's boundaries (2.9 KB each)."""
CHAIN_KEPT: Final = 32
"""How many: some eight to sixteen messages, by which the store may know what this router did not."""
RESPONSES_MAX: Final = 5_000
RENAMED_MAX: Final = 5_000


@dataclass(slots=True)
class Entry:
    """One branch, as this router last bound it."""

    fleet: str
    claim: Claim
    bound_s: float
    """Monotonic time of that."""
    written: bool
    tokens: int = 0
    """Prompt tokens of its newest settled turn."""
    left: Residue | None = None
    """What that turn left, and where."""
    owed_tokens: int = 0
    """KV tokens that its turns have written and the store has not counted."""
    chain: tuple[str, ...] = ()
    """Boundaries before its ends, deepest first."""

    def branch(self) -> Branch:
        """The branch as a decision reads it; its version 0 says that the store does not know it."""
        claim = self.claim
        return Branch(
            id=claim.branch,
            session=claim.session,
            home=claim.home,
            tokens=self.tokens,
            text_bytes=claim.text_bytes,
            weight=claim.weight,
            live_tokens=claim.live_tokens,
            inherited_tokens=claim.inherited_tokens,
            tips=claim.tips,
            residues=() if self.left is None else (self.left,),
        )


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the index of the boundary by which it was found."""

    entry: Entry
    depth: int


class Remembered:
    """The newest branches of one process, all fleets."""

    def __init__(self, branches_max: int = BRANCHES_MAX) -> None:
        self._branches_max = branches_max
        self._entries: dict[str, Entry] = {}
        """By branch id, oldest first."""
        self._tips: dict[str, str] = {}
        """Boundary hash → branch id."""
        self._chains: dict[str, None] = {}
        """Branches whose entries have a chain, oldest first."""
        self._responses: dict[str, Binding] = {}
        self._renamed: dict[str, str] = {}
        self.owed = asyncio.Event()
        """The store may lack something: a branch, a settlement, or all."""
        self.doubted = False
        """Whether it may have lost what it was told."""

    def doubt(self) -> None:
        """The store may have lost what it was told."""
        self.doubted = True
        self.owed.set()

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, fleet: str, claim: Claim, bound_s: float, *, written: bool, chain: Sequence[str] = ()) -> None:
        """A branch was bound, in the store (`written`) or without it; `chain` are its prompt's boundaries."""
        if not claim.tips:
            return
        old = self._forget(claim.branch)
        if old is not None and claim.session_home is None:
            claim = replace(claim, session_home=old.claim.session_home)
        entry = Entry(fleet, replace(claim, tips=claim.tips[:TIPS_KEPT]), bound_s, written)
        if old is not None:
            entry.tokens, entry.left, entry.owed_tokens = old.tokens, old.left, old.owed_tokens
        self._entries[claim.branch] = entry
        for tip in entry.claim.tips:
            self._tips[tip.hash] = claim.branch
        if written:
            entry.owed_tokens = 0
        else:
            self._keep_chain(entry, chain)
            self.owed.set()
        if len(self._entries) > self._branches_max:
            self._forget(next(iter(self._entries)))

    def settled(self, fleet: str, settlement: Settlement, *, counted: bool) -> None:
        """A turn ended. `counted`: the store counts what it has written, or will."""
        it = settlement
        if it.response_id is not None:
            self._responses[it.response_id] = Binding(it.replica, it.incarnation)
            if len(self._responses) > RESPONSES_MAX:
                del self._responses[next(iter(self._responses))]
        entry = self._entries.get(it.branch)
        if entry is None or entry.fleet != fleet:
            return
        entry.tokens = it.prompt_tokens or entry.tokens
        if it.tokens > 0:
            entry.left = Residue(it.replica, it.incarnation, it.tokens, admitted_mark=0)
        if not counted:
            entry.owed_tokens += it.admitted_tokens

    def recall(self, fleet: str, ask: Ask) -> Found | None:
        """The branch of the deepest boundary that is remembered."""
        for depth, boundary in enumerate(ask.boundaries):
            entry = self._entries.get(self._tips.get(boundary, ""))
            if entry is not None and entry.fleet == fleet:
                return Found(entry, depth)
        return None

    def holder(self, response_id: str | None) -> Binding | None:
        """Who holds a stored response."""
        return None if response_id is None else self._responses.get(response_id)

    def current(self, entry: Entry) -> bool:
        """Whether no newer turn of the branch, and no later one of others, has taken its place."""
        return self._entries.get(entry.claim.branch) is entry

    def wrote(self, entry: Entry, branch: str) -> None:
        """The store has it now, under that id."""
        entry.written, entry.owed_tokens = True, 0
        if branch == entry.claim.branch or not self.current(entry):
            return
        self._renamed[entry.claim.branch] = branch
        if len(self._renamed) > RENAMED_MAX:
            del self._renamed[next(iter(self._renamed))]
        tokens, left = entry.tokens, entry.left
        self._forget(entry.claim.branch)
        self.note(entry.fleet, replace(entry.claim, branch=branch), entry.bound_s, written=True)
        self._entries[branch].tokens, self._entries[branch].left = tokens, left

    def name_of(self, branch: str) -> str:
        """The id by which the store knows a branch that was bound without it."""
        return self._renamed.get(branch, branch)

    def unwritten(self, fleet: str) -> list[Entry]:
        """What the store lacks, newest first."""
        return [entry for entry in self._newest_first(fleet) if not entry.written]

    def sample(self, fleet: str, count: int, since_s: float) -> list[Entry]:
        """Some of those that the store should have, bound since then, evenly from the newest to the oldest."""
        written = [entry for entry in self._newest_first(fleet) if entry.written and entry.bound_s >= since_s]
        return written[:: max(1, -(-len(written) // count))]

    def lost(self, fleet: str, since_s: float) -> None:
        """The store has forgotten what it was told since then."""
        for entry in self._newest_first(fleet):
            entry.written = entry.written and entry.bound_s < since_s
        self.owed.set()

    def _newest_first(self, fleet: str) -> Iterator[Entry]:
        return (entry for entry in reversed(self._entries.values()) if entry.fleet == fleet)

    def _keep_chain(self, entry: Entry, chain: Sequence[str]) -> None:
        ends = {tip.hash for tip in entry.claim.tips}
        entry.chain = tuple(each for each in chain if each not in ends)[:CHAIN_KEPT]
        self._chains[entry.claim.branch] = None
        if len(self._chains) > CHAINS_MAX:
            oldest = next(iter(self._chains))
            del self._chains[oldest]
            self._entries[oldest].chain = ()

    def _forget(self, branch: str) -> Entry | None:
        entry = self._entries.pop(branch, None)
        self._chains.pop(branch, None)
        for tip in entry.claim.tips if entry is not None else ():
            if self._tips.get(tip.hash) == branch:
                del self._tips[tip.hash]
        return entry
