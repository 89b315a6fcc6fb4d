"""Branches, boundaries, sessions and stored responses: how a turn finds what it continues."""

from __future__ import annotations

from router.domain.session import Binding, Branch, Residue, Session
from router.ports import Stale
from tests.contracts.worlds import START_S, Fleet, boundary, claim, settlement

B1, B2, B3, B4 = boundary(1, 10), boundary(2, 20), boundary(3, 30), boundary(4, 40)


async def test_the_deepest_known_boundary_names_the_branch(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2))
    view = await fleet.look(B4, B3, B2, B1, session="s1", head=B1.hash)
    assert (view.depth, view.branch and view.branch.id) == (2, "b2")
    assert view.head_branch is None


async def test_a_boundary_far_up_a_long_prompt_is_found(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", boundary(7)))
    view = await fleet.look(*[boundary(1000 + n) for n in range(3000)], boundary(7))
    assert view.depth == 3000


async def test_a_branch_is_read_as_it_was_written(fleet: Fleet) -> None:
    """Ids of any shape: hexadecimal ones are packed, others are not."""
    names = [("b-1", "sess/ö", "http://10.0.0.1:30000", ""), ("ab" * 16, "0" * 32, "ff", "AB" * 8)]
    for number, (branch, session, replica, incarnation) in enumerate(names):
        home = Binding(replica, incarnation)
        tip = boundary(50 + number, 2**31)
        asked = claim(
            f"l{number}", branch, tip, replica=replica, incarnation=incarnation, session=session, home=home, weight=0.3
        )
        await fleet.win(asked)
        assert (await fleet.look(tip)).branch == Branch(
            id=branch,
            session=session,
            home=home,
            version=1,
            turns=1,
            in_flight=1,
            text_bytes=400,
            weight=0.3,
            active_at_s=START_S,
            tips=(tip,),
        )


async def test_a_turn_on_an_older_version_is_stale_and_changes_nothing(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    before = await fleet.look(B1)
    for version in (0, 2, 7):
        assert await fleet.acquire(claim("l2", "b1", B2, B1, version=version)) == Stale("branch")
    assert await fleet.acquire(claim("l2", "unknown", B2, version=1)) == Stale("branch")
    assert await fleet.acquire(claim("l2", "b1", B2)) == Stale("branch")
    assert await fleet.look(B1) == before


async def test_a_new_branch_at_a_known_tip_is_stale(fleet: Fleet) -> None:
    """Whether or not the branch exists too: the tip is the reason that is told."""
    await fleet.win(claim("l1", "b1", B1))
    assert await fleet.acquire(claim("l2", "b2", B1)) == Stale("tip")
    assert await fleet.acquire(claim("l2", "b1", B1)) == Stale("tip")


async def test_a_next_turn_moves_the_tip_and_forgets_what_is_given_up(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    assert (await fleet.win(claim("l2", "b1", B2, B1, version=1))).version == 2
    assert (await fleet.win(claim("l3", "b1", B3, B2, version=2, text_bytes=900, weight=7.0))).version == 3
    assert (await fleet.look(B1)).branch is None
    branch = (await fleet.look(B2)).branch
    assert branch is not None
    assert (branch.tips, branch.turns, branch.in_flight) == ((B3, B2), 3, 3)
    assert (branch.text_bytes, branch.weight) == (900, 7.0)


async def test_a_boundary_that_has_become_another_branchs_is_not_forgotten(fleet: Fleet) -> None:
    """b2 arrives by its own version at the tip b1 has; b1 then gives that up, and b2 keeps it."""
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2))
    await fleet.win(claim("l3", "b2", B1, B2, version=1))
    await fleet.win(claim("l4", "b1", B3, version=1))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.id == "b2"


async def test_an_older_tip_that_another_branch_has_is_left_to_it(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2, B1))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.id == "b1"


async def test_a_branch_is_forgotten_after_its_time_and_its_boundaries_are_unknown(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, branch_ttl_s=100.0))
    await fleet.win(claim("l2", "b2", B2, branch_ttl_s=300.0))
    await fleet.world.advance(60.0)
    await fleet.settle(settlement("l2", "b2", branch_ttl_s=300.0))
    await fleet.world.advance(40.0)
    view = await fleet.look(B1, B2)
    assert (view.depth, view.branch and view.branch.id) == (1, "b2")
    await fleet.win(claim("l3", "b1", B1))


async def test_a_boundary_outliving_its_branch_counts_as_unknown(fleet: Fleet) -> None:
    """Settling with a shorter time shortens the branch's; the boundary is free for another branch then."""
    await fleet.win(claim("l1", "b1", B2, B1, branch_ttl_s=300.0))
    await fleet.settle(settlement("l1", "b1", branch_ttl_s=10.0))
    await fleet.world.advance(10.0)
    assert (await fleet.look(B2, B1)).branch is None
    await fleet.win(claim("l2", "b2", B2, B1))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.id == "b2"


async def test_an_expired_lease_does_not_prolong_its_branch(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, branch_ttl_s=100.0))
    await fleet.world.advance(50.0)
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.in_flight == 0
    await fleet.world.advance(50.0)
    assert (await fleet.look(B1)).branch is None


async def test_residues_say_what_was_left_where_newest_first(fleet: Fleet) -> None:
    """Four at most; one per replica, the newest incarnation's; the mark is the counter after the turn."""
    await fleet.win(claim("l0", "b1", B1))
    await fleet.settle(settlement("l0", "b1", tokens=10, admitted_tokens=10, prompt_tokens=8))
    await fleet.win(claim("l1", "b1", B1, version=1))
    await fleet.settle(settlement("l1", "b1", tokens=30, admitted_tokens=20))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.tokens == 8
    assert branch.residues == (Residue("r1", "i1", 30, 30),)

    for number in range(2, 6):
        where = {"replica": f"r{number}", "incarnation": "i1"}
        await fleet.win(claim(f"l{number}", "b1", B1, version=number, **where))
        await fleet.settle(settlement(f"l{number}", "b1", tokens=number, admitted_tokens=number, **where))
    await fleet.win(claim("l6", "b1", B1, version=6, replica="r4", incarnation="i2"))
    await fleet.settle(settlement("l6", "b1", replica="r4", incarnation="i2", tokens=99, admitted_tokens=1))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert branch.residues == (
        Residue("r4", "i2", 99, 1),
        Residue("r5", "i1", 5, 5),
        Residue("r3", "i1", 3, 3),
        Residue("r2", "i1", 2, 2),
    )


async def test_a_turn_that_left_nothing_leaves_earlier_residues(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.settle(settlement("l1", "b1", tokens=10, admitted_tokens=10, prompt_tokens=9))
    await fleet.win(claim("l2", "b1", B2, B1, version=1))
    await fleet.settle(settlement("l2", "b1"))
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert (branch.tokens, branch.residues) == (9, (Residue("r1", "i1", 10, 10),))


async def test_settling_a_forgotten_branch_does_not_bring_it_back(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, branch_ttl_s=5.0))
    await fleet.world.advance(6.0)
    await fleet.settle(settlement("l1", "b1", tokens=10))
    assert (await fleet.look(B1)).branch is None
    assert (await fleet.look()).loads["r1"].in_flight == 0


async def test_a_rewritten_history_finds_its_branch_by_the_head(fleet: Fleet) -> None:
    """The session remembers which branch began with which head; the newest branch with a head counts."""
    await fleet.win(claim("l1", "b1", B1, head=B3.hash))
    await fleet.win(claim("l2", "b2", B2, head=B4.hash))
    view = await fleet.look(boundary(9), session="s1", head=B3.hash)
    assert (view.branch, view.depth) == (None, None)
    assert view.head_branch is not None
    assert view.head_branch.id == "b1"
    assert view.session == Session("s1", None, ((B4.hash, "b2"), (B3.hash, "b1")))
    assert (await fleet.look(boundary(9), session="other", head=B3.hash)).head_branch is None
    assert (await fleet.look(boundary(9), session="s1", head=boundary(8).hash)).head_branch is None
    assert (await fleet.look(boundary(9), session="s1")).head_branch is None

    await fleet.win(claim("l3", "b3", boundary(5), head=B3.hash))
    head_branch = (await fleet.look(session="s1", head=B3.hash)).head_branch
    assert head_branch is not None
    assert head_branch.id == "b3"


async def test_a_head_whose_branch_is_forgotten_is_none(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, head=B3.hash, branch_ttl_s=100.0))
    await fleet.settle(settlement("l1", "b1", branch_ttl_s=10.0))
    await fleet.world.advance(10.0)
    view = await fleet.look(session="s1", head=B3.hash)
    assert view.session is not None
    assert view.head_branch is None


async def test_heads_may_be_remembered_by_another_session_than_the_branchs_own(fleet: Fleet) -> None:
    """Keyless conversations share one record of heads, while each branch keeps a session of its own."""
    await fleet.win(claim("l1", "b1", B1, head=B3.hash, heads_of="shared"))
    view = await fleet.look(boundary(9), session="shared", head=B3.hash)
    assert view.head_branch is not None
    assert (view.head_branch.id, view.head_branch.session) == ("b1", "s1")
    assert (await fleet.look(boundary(9), session="s1", head=B3.hash)).session is None


async def test_a_session_keeps_its_eight_newest_heads(fleet: Fleet) -> None:
    for number in range(10):
        await fleet.win(claim(f"l{number}", f"b{number}", boundary(100 + number), head=boundary(number).hash))
    session = (await fleet.look(session="s1")).session
    assert session is not None
    assert [branch for _, branch in session.heads] == [f"b{number}" for number in range(9, 1, -1)]


async def test_a_session_policy_binds_the_session_too(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, session_home=Binding("r1", "i1")))
    assert (await fleet.look(session="s1")).session == Session("s1", Binding("r1", "i1"))
    await fleet.win(claim("l2", "b2", B2, head=B3.hash))
    assert (await fleet.look(session="s1")).session == Session("s1", Binding("r1", "i1"), ((B3.hash, "b2"),))
    await fleet.win(claim("l3", "b3", B3, session_home=Binding("r1", "i2")))
    assert (await fleet.look(session="s1")).session == Session("s1", Binding("r1", "i2"), ((B3.hash, "b2"),))


async def test_a_named_session_is_remembered_without_head_or_home(fleet: Fleet) -> None:
    """So that a subagent whose prompt shares nothing with it is known to be of a session that lives."""
    await fleet.win(claim("l1", "b1", B1))
    assert (await fleet.look(session="s1")).session is None
    await fleet.win(claim("l2", "b2", B2, named=True))
    assert (await fleet.look(session="s1")).session == Session("s1")


async def test_a_session_lives_as_long_as_turns_come(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, head=B3.hash, branch_ttl_s=100.0))
    await fleet.world.advance(60.0)
    await fleet.win(claim("l2", "b1", B2, version=1, branch_ttl_s=100.0))
    await fleet.world.advance(60.0)
    assert (await fleet.look(session="s1")).session is not None
    await fleet.world.advance(40.0)
    assert (await fleet.look(session="s1")).session is None


async def test_a_stored_response_is_remembered_with_its_replica(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.settle(settlement(response_id="resp_1", branch_ttl_s=100.0))
    assert (await fleet.look(response_id="resp_1")).response_replica == Binding("r1", "i1")
    assert (await fleet.look(response_id="resp_2")).response_replica is None
    await fleet.world.advance(100.0)
    assert (await fleet.look(response_id="resp_1")).response_replica is None


async def test_a_turn_without_a_chain_has_a_branch_that_nothing_finds(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1"))
    assert await fleet.acquire(claim("l2", "b1")) == Stale("branch")
    await fleet.win(claim("l2", "b1", version=1))
