"""Leases: what they add, and that it is taken back once, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from router.domain.replica import Beliefs, Load
from router.domain.session import Binding
from router.ports import Acquired, Stale
from tests.contracts.worlds import FLEET, START_S, Fleet, World, boundary, claim, lease, settlement

B1, B2, B3 = boundary(1), boundary(2), boundary(3)


async def test_an_empty_fleet_knows_nothing(fleet: Fleet) -> None:
    view = await fleet.look(B1, session="s1", head=B2.hash, response_id="resp_1")
    assert view.now_s == START_S
    assert view.membership_version == 0
    assert not view.loads
    assert not view.incarnations
    assert not view.beliefs
    found = (view.branch, view.depth, view.head_branch, view.session, view.response_replica)
    assert found == (None, None, None, None, None)


async def test_a_lease_adds_what_it_says_and_settling_takes_it_back(fleet: Fleet) -> None:
    assert await fleet.win(claim("l1", "b1", B1)) == Acquired(version=1, admitted_tokens=0)
    view = await fleet.look(B1)
    assert view.loads == {"r1": Load(1, 100, 120, 0, crowd=2.0, crowd_at_s=START_S)}
    assert view.incarnations == {"r1": "i1"}
    assert view.branch is not None
    assert view.branch.in_flight == 1

    await fleet.settle(settlement(admitted_tokens=90))
    view = await fleet.look(B1)
    assert view.loads == {"r1": Load(0, 0, 0, 90, crowd=2.0, crowd_at_s=START_S)}
    assert view.branch is not None
    assert view.branch.in_flight == 0


async def test_settling_twice_changes_no_count(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2))
    for _ in range(3):
        await fleet.settle(settlement("l1", "b1", admitted_tokens=90))
    view = await fleet.look(B1)
    assert (view.loads["r1"].in_flight, view.loads["r1"].admitted_tokens) == (1, 90)
    assert view.loads["r1"].prefill_tokens == 100


async def test_settling_a_lease_nobody_took_counts_nothing(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.settle(settlement("unknown", "b1", admitted_tokens=90))
    load = (await fleet.look()).loads["r1"]
    assert (load.in_flight, load.admitted_tokens, load.locked_tokens) == (1, 0, 120)


async def test_progress_frees_the_waiting_prefill_once(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2, prefill_tokens=7))
    for _ in range(2):
        await fleet.world.store.progress(FLEET, "l1")
    await fleet.world.store.progress(FLEET, "unknown")
    load = (await fleet.look()).loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (2, 7, 240)
    await fleet.settle(settlement("l1", "b1"))
    assert (await fleet.look()).loads["r1"].prefill_tokens == 7


async def test_an_expired_lease_gives_back_exactly_what_it_added(fleet: Fleet) -> None:
    """Counts of the branch included; a lease that was renewed, or has time left, stays."""
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2, prefill_tokens=7, locked_tokens=9))
    await fleet.win(claim("l3", "b3", B3, prefill_tokens=5, locked_tokens=6, lease_ttl_s=60.0))
    await fleet.world.store.progress(FLEET, "l1")
    await fleet.world.advance(9.0)
    assert await fleet.renew(lease("l2", "b2", prefill_tokens=7, locked_tokens=9)) == []
    assert (await fleet.look()).loads["r1"].in_flight == 3

    await fleet.world.advance(1.0)
    view = await fleet.look(B1)
    assert view.branch is not None
    assert view.branch.in_flight == 0
    load = view.loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (2, 12, 15)

    await fleet.world.advance(1000.0)
    load = (await fleet.look()).loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (0, 0, 0)


async def test_settling_an_expired_lease_counts_nothing_but_is_believed(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2, lease_ttl_s=60.0))
    await fleet.world.advance(10.0)
    await fleet.look()
    beliefs = Beliefs(prefill_rate=123.0)
    await fleet.settle(
        settlement(tokens=500, prompt_tokens=450, admitted_tokens=90, beliefs=beliefs, response_id="resp_1")
    )
    view = await fleet.look(B1, response_id="resp_1")
    assert (view.loads["r1"].in_flight, view.loads["r1"].admitted_tokens) == (1, 0)
    assert view.beliefs == {"r1": beliefs}
    assert view.branch is not None
    assert (view.branch.tokens, view.branch.residues[0].tokens) == (450, 500)
    assert view.response_replica == Binding("r1", "i1")


async def test_a_late_lease_can_still_be_renewed_until_it_is_given_back(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.world.advance(11.0)
    assert await fleet.renew(lease("l1")) == []
    view = await fleet.look(B1)
    assert view.branch is not None
    assert (view.loads["r1"].in_flight, view.branch.in_flight) == (1, 1)
    assert await fleet.renew() == []


async def test_a_lease_that_was_given_back_is_taken_again_with_all_it_counts(fleet: Fleet) -> None:
    """A router that could not renew for long, but whose turn runs on, has its counts back by the next renewal."""
    await fleet.win(claim("l1", "b1", B1))
    await fleet.world.advance(11.0)
    before = await fleet.look(B1)
    assert before.loads["r1"].in_flight == 0
    assert await fleet.renew(lease("l1", "b1")) == ["l1"]
    assert await fleet.renew(lease("l1", "b1")) == []
    view = await fleet.look(B1)
    load = view.loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (1, 100, 120)
    assert load.crowd == before.loads["r1"].crowd
    assert view.branch is not None
    assert (view.branch.in_flight, view.branch.version) == (1, 1)
    for _ in range(2):
        await fleet.settle(settlement("l1", "b1", admitted_tokens=90))
    view = await fleet.look(B1)
    load = view.loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens, load.admitted_tokens) == (0, 0, 0, 90)
    assert view.branch is not None
    assert view.branch.in_flight == 0


async def test_a_lease_that_was_taken_again_expires_like_any_other(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.world.advance(11.0)
    await fleet.look()
    await fleet.renew(lease("l1", "b1"))
    await fleet.world.advance(9.0)
    assert (await fleet.look()).loads["r1"].in_flight == 1
    await fleet.world.advance(1.0)
    view = await fleet.look(B1)
    assert view.branch is not None
    assert (view.loads["r1"].in_flight, view.loads["r1"].locked_tokens, view.branch.in_flight) == (0, 0, 0)


async def test_an_empty_store_counts_the_leases_it_is_told(fleet: Fleet) -> None:
    """After a flush no load entry and no branch is there: a life begins, and the branch, once written, has lost no
    turn that it never counted.
    """
    held = [lease("l1", "b1"), lease("l2", "b2", prefill_tokens=0), lease("l3", "b3", replica="r2", incarnation="i9")]
    assert await fleet.renew(*held) == ["l1", "l2", "l3"]
    view = await fleet.look()
    assert view.incarnations == {"r1": "i1", "r2": "i9"}
    at = view.loads["r1"]
    assert (at.in_flight, at.prefill_tokens, at.locked_tokens, at.admitted_tokens, at.crowd) == (2, 100, 240, 0, 0.0)
    await fleet.win(claim("l9", "b1", B1))
    await fleet.settle(settlement("l1", "b1"))
    view = await fleet.look(B1)
    assert view.branch is not None
    assert (view.loads["r1"].in_flight, view.branch.in_flight) == (2, 1)


async def test_prefill_that_was_given_back_does_not_wait_again(fleet: Fleet) -> None:
    """A renewal that says so also mends a `progress` that was lost; one that does not takes nothing back."""
    await fleet.win(claim("l1", "b1", B1))
    await fleet.renew(lease("l1", "b1"))
    assert (await fleet.look()).loads["r1"].prefill_tokens == 100
    for _ in range(2):
        await fleet.renew(lease("l1", "b1", prefill_tokens=0))
        assert (await fleet.look()).loads["r1"].prefill_tokens == 0
    await fleet.renew(lease("l1", "b1"))
    assert (await fleet.look()).loads["r1"].prefill_tokens == 0
    await fleet.world.advance(11.0)
    await fleet.look()
    await fleet.renew(lease("l1", "b1", prefill_tokens=0))
    load = (await fleet.look()).loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (1, 0, 120)


async def test_a_lease_of_another_life_is_not_taken_again(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2, incarnation="i2", home=Binding("r1", "i2"), lease_ttl_s=60.0))
    await fleet.world.advance(11.0)
    await fleet.look()
    assert await fleet.renew(lease("l1", "b1"), lease("l3", "b2", incarnation="i2")) == ["l3"]
    view = await fleet.look(B1)
    assert view.branch is not None
    assert (view.loads["r1"].in_flight, view.branch.in_flight) == (2, 0)


async def test_a_lease_id_is_taken_once(fleet: Fleet) -> None:
    """Also not for another branch; after it was settled it is free again."""
    await fleet.win(claim("l1", "b1", B1))
    assert await fleet.acquire(claim("l1", "b1", B2, version=1)) == Stale("branch")
    assert await fleet.acquire(claim("l1", "b2", B2)) == Stale("branch")
    view = await fleet.look(B2)
    assert view.branch is None
    assert view.loads["r1"].in_flight == 1
    await fleet.settle(settlement("l1", "b1"))
    await fleet.win(claim("l1", "b2", B2))


@pytest.mark.parametrize(("observed", "slack", "stale"), [(0, 0, True), (0, 1, False), (1, 0, False), (None, 0, False)])
async def test_more_turns_than_the_decision_saw_are_stale(
    fleet: Fleet, observed: int | None, slack: int, stale: bool
) -> None:
    await fleet.win(claim("l1", "b1", B1))
    got = await fleet.acquire(claim("l2", "b2", B2, observed_in_flight=observed, slack=slack))
    assert got == Stale("load") if stale else isinstance(got, Acquired)
    view = await fleet.look(B2)
    assert view.loads["r1"].in_flight == (1 if stale else 2)
    assert (view.branch is None) == stale


async def test_a_new_incarnation_begins_at_zero(fleet: Fleet) -> None:
    """Its turns are not compared with those of the old life; what is settled or expires of that touches it no more."""
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b2", B2))
    await fleet.settle(settlement("l1", "b1", tokens=50, admitted_tokens=90, beliefs=Beliefs(prefill_rate=1.0)))
    reborn = claim("l3", "b3", B3, incarnation="i2", home=Binding("r1", "i2"), observed_in_flight=0, lease_ttl_s=60.0)
    assert await fleet.win(reborn) == Acquired(1, 0)
    expected = Load(1, 100, 120, 0, crowd=2.0, crowd_at_s=START_S)
    view = await fleet.look()
    assert view.loads == {"r1": expected}
    assert view.incarnations == {"r1": "i2"}

    late = settlement("l2", "b2", tokens=70, prompt_tokens=60, admitted_tokens=90, beliefs=Beliefs(prefill_rate=2.0))
    await fleet.settle(late)
    view = await fleet.look(B2)
    assert view.loads == {"r1": expected}
    assert view.beliefs == {"r1": Beliefs(prefill_rate=1.0)}
    assert view.branch is not None
    assert (view.branch.in_flight, view.branch.tokens, view.branch.residues) == (0, 60, ())


async def test_a_lease_of_a_removed_member_counts_not_against_the_same_incarnation_come_back(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.world.store.remove_member(FLEET, "r1")
    assert not (await fleet.look()).loads
    await fleet.win(claim("l2", "b2", B2, lease_ttl_s=60.0))
    await fleet.world.store.progress(FLEET, "l1")
    await fleet.settle(settlement("l1", "b1"))
    load = (await fleet.look()).loads["r1"]
    assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (1, 100, 120)


async def test_settling_after_the_member_is_gone_brings_nothing_of_it_back(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.world.store.remove_member(FLEET, "r1")
    await fleet.settle(settlement(tokens=50, admitted_tokens=90, beliefs=Beliefs(prefill_rate=1.0)))
    view = await fleet.look(B1)
    assert not view.loads
    assert not view.beliefs
    assert view.branch is not None
    assert (view.branch.in_flight, view.branch.residues) == (0, ())


async def test_five_hundred_expired_leases_are_given_back_at_once_and_the_rest_next_time(fleet: Fleet) -> None:
    """So a dead router's leases never hold up the store for long."""
    for number in range(520):
        await fleet.win(claim(f"l{number:03}", f"b{number}"))
    await fleet.world.advance(10.0)
    assert (await fleet.look()).loads["r1"].in_flight == 20
    assert (await fleet.look()).loads["r1"].in_flight == 0


async def test_the_crowd_is_the_decayed_weight_of_the_branches_at_home(fleet: Fleet) -> None:
    """A branch takes its old share away when it comes again or moves, decayed as the crowd itself is."""
    await fleet.win(claim("l1", "b1", B1, weight=2.0))
    await fleet.win(claim("l2", "b2", B2, weight=1.0, replica="r2", home=Binding("r2", "i1")))
    await fleet.world.advance(60.0)
    await fleet.win(claim("l3", "b3", B3, weight=4.0))
    assert (await fleet.look()).loads["r1"].crowd == pytest.approx(5.0)

    moved = claim("l4", "b1", boundary(4), B1, version=1, weight=3.0, replica="r2", home=Binding("r2", "i1"))
    await fleet.win(moved)
    loads = (await fleet.look()).loads
    assert loads["r1"].crowd == pytest.approx(4.0)
    assert loads["r2"].crowd == pytest.approx(3.5)
    assert loads["r2"].crowd_at_s == fleet.world.clock.time_s


async def test_a_spilled_turn_weighs_on_its_home_not_where_it_runs(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await fleet.win(claim("l2", "b1", B2, B1, version=1, replica="r2", weight=5.0))
    loads = (await fleet.look()).loads
    assert (loads["r1"].in_flight, loads["r1"].crowd) == (1, 5.0)
    assert (loads["r2"].in_flight, loads["r2"].crowd) == (1, 0.0)


async def test_live_tokens_are_the_decayed_shares_of_the_branches_at_home(fleet: Fleet) -> None:
    """As the crowd, with a half-life of its own: what the last turn of each said, and it moves with the branch."""
    await fleet.win(claim("l1", "b1", B1, live_tokens=1_000, inherited_tokens=300))
    await fleet.world.advance(30.0)
    await fleet.win(claim("l2", "b2", B2, live_tokens=200))
    load = (await fleet.look()).loads["r1"]
    assert load.live_tokens == pytest.approx(700.0)
    assert load.crowd_at_s == fleet.world.clock.time_s
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert (branch.live_tokens, branch.inherited_tokens) == (1_000, 300)

    await fleet.win(claim("l3", "b1", B1, version=1, live_tokens=1_500, inherited_tokens=300))
    assert (await fleet.look()).loads["r1"].live_tokens == pytest.approx(1_700.0)

    moved = {"replica": "r2", "home": Binding("r2", "i1")}
    await fleet.win(claim("l4", "b1", B1, version=2, live_tokens=1_800, **moved))
    loads = (await fleet.look()).loads
    assert loads["r1"].live_tokens == pytest.approx(200.0)
    assert loads["r2"].live_tokens == 1_800.0
    branch = (await fleet.look(B1)).branch
    assert branch is not None
    assert (branch.live_tokens, branch.inherited_tokens) == (1_800, 0)


async def test_live_tokens_of_another_life_are_left_alone_and_none_is_negative(fleet: Fleet) -> None:
    await fleet.win(claim("l1", "b1", B1, live_tokens=1_000))
    await fleet.win(claim("l2", "b2", B2, incarnation="i2", home=Binding("r1", "i2"), live_tokens=10))
    assert (await fleet.look()).loads["r1"].live_tokens == 10.0
    await fleet.win(claim("l3", "b1", B1, version=1, replica="r2", home=Binding("r2", "i1"), live_tokens=1_000))
    loads = (await fleet.look()).loads
    assert (loads["r1"].live_tokens, loads["r2"].live_tokens) == (10.0, 1_000.0)


async def test_the_crowd_of_another_life_is_left_alone(fleet: Fleet) -> None:
    """Neither does a share leave it that was never in it, nor does one come to a home that has restarted."""
    await fleet.win(claim("l1", "b1", B1, weight=2.0))
    await fleet.win(claim("l2", "b2", B2, weight=1.0, incarnation="i2", home=Binding("r1", "i2")))
    elsewhere = claim("l3", "b1", B3, version=1, weight=9.0, replica="r2")
    await fleet.win(elsewhere)
    loads = (await fleet.look()).loads
    assert (loads["r1"].crowd, loads["r2"].crowd) == (1.0, 0.0)


async def test_of_many_that_race_for_one_tip_one_wins(fleet: Fleet) -> None:
    got = await asyncio.gather(*[fleet.acquire(claim(f"l{n}", f"b{n}", B1)) for n in range(20)])
    assert sum(isinstance(each, Acquired) for each in got) == 1
    assert {each.why for each in got if isinstance(each, Stale)} == {"tip"}
    assert (await fleet.look()).loads["r1"].in_flight == 1


async def test_of_many_that_race_for_one_branch_one_wins(fleet: Fleet) -> None:
    await fleet.win(claim("l0", "b1", B1))
    asked = [claim(f"l{n}", "b1", boundary(10 + n), B1, version=1) for n in range(1, 20)]
    got = await asyncio.gather(*map(fleet.acquire, asked))
    assert sum(isinstance(each, Acquired) for each in got) == 1
    assert (await fleet.look()).loads["r1"].in_flight == 2


async def test_fleets_know_nothing_of_each_other(fleet: Fleet, world: World) -> None:
    await fleet.win(claim("l1", "b1", B1))
    for other in ("m2", "m}", "ü/ä 1"):
        assert isinstance(await world.store.acquire(other, claim("l1", "b1", B1)), Acquired)
    assert (await fleet.look()).loads["r1"].in_flight == 1
