"""What a claim that was made without the store becomes: the first writer wins, and a longer prompt is the newer one."""

from __future__ import annotations

from dataclasses import replace

from router.domain.session import Binding, Boundary, Branch
from router.domain.shared import Claim, View
from router.placement.catch_up import overdue
from tests.contracts.worlds import boundary, claim

OLD, TIP, NEXT, SIDE = boundary(1, 100), boundary(2, 200), boundary(3, 300), boundary(4, 190)
HOME = Binding("r1", "i1")
BLIND = claim("l1", "mine", TIP, SIDE, text_bytes=200, named=True)
ASKED = (TIP.hash, SIDE.hash, OLD.hash)


def told(claim_: Claim, known: Branch | None, met: Boundary | None = None) -> Claim | None:
    depth = None if met is None else ASKED.index(met.hash)
    return overdue(claim_, View(0.0, 1, {}, {}, {}, branch=known, depth=depth), ASKED, tips_max=4)


def known(branch: str = "theirs", *tips: Boundary, **changes: object) -> Branch:
    made = Branch(branch, "s1", Binding("r2", "i1"), version=7, text_bytes=tips[0].text_bytes, tips=tips)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_the_store_does_not_know_is_bound_as_it_was() -> None:
    now = told(replace(BLIND, version=3), None)
    assert now == replace(BLIND, version=None)


def test_whoever_wrote_this_prompts_end_wrote_first() -> None:
    assert told(BLIND, known("mine", TIP), TIP) is None
    assert told(BLIND, known("theirs", NEXT, TIP), TIP) is None


def test_the_branch_of_an_older_end_moves_on_and_keeps_its_older_ends() -> None:
    now = told(BLIND, known("theirs", OLD, boundary(9, 50)), OLD)
    assert now is not None
    assert (now.branch, now.version, now.home) == ("theirs", 7, HOME)
    assert now.tips == (TIP, SIDE, OLD, boundary(9, 50))
    many = [boundary(20 + n, 90 - n) for n in range(8)]
    now = told(BLIND, known("theirs", OLD, *many), OLD)
    assert now is not None
    assert len(now.tips) == 4


def test_a_busy_branch_is_moved_on_only_from_its_newest_end() -> None:
    now = told(BLIND, known("theirs", OLD, in_flight=1), OLD)
    assert now is not None
    assert now.branch == "theirs"
    forked = told(BLIND, known("theirs", boundary(8, 150), OLD, in_flight=1), OLD)
    assert forked is not None
    assert (forked.branch, forked.version) == ("mine", None)


def test_another_sessions_branch_is_left_alone_and_a_keyless_one_is_its_own() -> None:
    forked = told(BLIND, known("theirs", OLD, session="another"), OLD)
    assert forked is not None
    assert (forked.branch, forked.version) == ("mine", None)
    keyless = told(replace(BLIND, named=False), known("theirs", OLD, session="another"), OLD)
    assert keyless is not None
    assert keyless.branch == "theirs"


def test_a_branch_that_has_gone_further_is_not_moved_back() -> None:
    """Ours is nothing to the same branch, and a branch of its own beside another."""
    assert told(BLIND, known("mine", NEXT, OLD), OLD) is None
    beside = told(BLIND, known("theirs", NEXT, OLD), OLD)
    assert beside is not None
    assert (beside.branch, beside.version) == ("mine", None)


def test_a_home_that_takes_no_more_turns_is_not_given_back_to_a_branch_that_has_left_it() -> None:
    """Another router moved the branch away from a draining replica, of whose drain this one had not heard (seed
    1667682106): what it holds moves on, where it lives does not.
    """
    view = View(0.0, 1, {}, {}, {}, branch=known("theirs", OLD), depth=ASKED.index(OLD.hash))
    stays, moved = (overdue(BLIND, view, ASKED, tips_max=4, leaves=leaves) for leaves in (True, False))
    assert stays is not None
    assert moved is not None
    assert stays.home == Binding("r2", "i1")
    assert moved == replace(stays, home=BLIND.home)
