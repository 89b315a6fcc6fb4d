"""What a claim that was made without the store becomes once the store is back.

The first writer wins: whatever the store knows of the very prompt end stands. A longer prompt is the newer one: where
the store knows an older end of the branch, the claim moves it on, as the turn's own claim would have done. But a home
that the branch has left meanwhile, since that takes no more turns, does not get it back.
"""

from __future__ import annotations

from dataclasses import replace

from router.domain.shared import Claim, View
from router.placement.lineage import thinned

__all__ = ["overdue"]


def overdue(claim: Claim, view: View, asked: tuple[str, ...], tips_max: int, *, leaves: bool = False) -> Claim | None:
    """The claim to make now, or None where the store needs none.

    `view` answers `asked`: the claim's ends, newest first, then boundaries before them, deepest first. `leaves`: the
    claim's home takes no more turns, and the one that the store knows does.
    """
    known = view.branch
    if known is None or view.depth is None:
        return replace(claim, version=None)
    met = asked[view.depth]
    if claim.tip is not None and met == claim.tip.hash:
        return None
    same_session = not claim.named or known.session == claim.session
    at_tip = bool(known.tips) and known.tips[0].hash == met
    if not same_session or (known.in_flight and not at_tip):
        return replace(claim, version=None)
    if known.text_bytes > claim.text_bytes:
        return None if known.id == claim.branch else replace(claim, version=None)
    ends = {tip.hash for tip in claim.tips}
    older = [tip for tip in known.tips if tip.hash not in ends]
    tips = thinned([*claim.tips, *older], tips_max)
    home = known.home if leaves and known.home is not None else claim.home
    return replace(claim, branch=known.id, version=known.version, tips=tips, home=home)
