"""The invariants of admission, as properties over random fleets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.domain.replica import Capacity, Fleet, Replica, Standing
from router.domain.session import NO_CHAIN, Binding, Branch, Session
from router.domain.shared import View
from router.domain.turn import Dialect, Facts, Turn
from router.placement.admission import (
    Occupancy,
    admits,
    begins_session,
    live_share,
    need_of,
    occupancy,
    retry_after_s,
)
from router.placement.cost import Tuning
from router.placement.lineage import Lineage
from tests.fleet_world import NOW_S, at, fleet, lineage, replica
from tests.properties.test_decide import fleets

FEW = settings(max_examples=100, deadline=None)
TUNING = Tuning()

limits = st.floats(0.05, 4.0)
needs = st.integers(0, 2_000_000)
seen = st.builds(Occupancy, live_tokens=st.floats(0, 5_000_000), room_tokens=st.integers(0, 4_000_000))


def living(tokens: float, number: int = 0, **changes: object) -> Replica:
    """A replica whose branches want so many tokens kept."""
    plain = replica(number, **changes)
    return replace(plain, load=replace(plain.load, live_tokens=tokens, crowd_at_s=NOW_S))


def asked(facts: Facts, came: Lineage, *, session: Session | None = None, branch: Branch | None = None) -> bool:
    view = View(NOW_S, 0, {}, {}, {}, branch=branch, depth=None if branch is None else 0, session=session)
    return begins_session(facts, came, view)


def facts(session: str | None = "s") -> Facts:
    return Facts(Dialect.CHAT, "m", stream=True, tenant="t", session=session, chain=NO_CHAIN)


# --- who is asked at all ----------------------------------------------------------------------------------------------


@given(known=st.booleans(), record=st.booleans(), session=st.sampled_from([None, "s"]))
def test_a_known_branch_is_never_asked_to_wait(known: bool, record: bool, session: str | None) -> None:
    branch = Branch("b", "s")
    came = lineage(branch if known else None)
    asks = asked(facts(session), came, session=Session("s") if record else None, branch=branch if known else None)
    if known:
        assert not asks


def test_a_session_that_is_remembered_is_known_whatever_its_prompt() -> None:
    """So are its subagents, and its compacted histories."""
    assert not asked(facts(), lineage(None), session=Session("s"))
    assert asked(facts(), lineage(None))


def test_a_fork_of_its_own_sessions_branch_is_known_and_one_of_anothers_is_a_new_session() -> None:
    mine, others = Branch("b", "s"), Branch("b", "other")
    assert not asked(facts(), lineage(None, parent=mine), branch=mine)
    assert asked(facts(), lineage(None, parent=others), branch=others)


def test_a_keyless_prompt_is_known_by_what_it_shares_beyond_the_head() -> None:
    """The record and the head branch of keyless clients are their tenant's: they say nothing of one conversation."""
    parent = Branch("b", "any")
    assert not asked(facts(None), lineage(None, parent=parent), session=Session("keyless/t"), branch=parent)
    assert asked(facts(None), lineage(None, parent=parent), session=Session("keyless/t"))


def test_what_continues_a_stored_response_is_known() -> None:
    view = View(NOW_S, 0, {}, {}, {}, response_replica=Binding("r0", "life"))
    assert not begins_session(facts(), lineage(None), view)


# --- who gets in ------------------------------------------------------------------------------------------------------


@given(need=needs, room=st.integers(0, 4_000_000), limit=limits)
def test_where_nothing_lives_any_prompt_is_admitted(need: int, room: int, limit: float) -> None:
    """Also one that is larger than everything: else it would wait for ever."""
    assert admits(need, Occupancy(0.0, room), limit)


@given(need=needs, now=seen, limit=limits, more=st.floats(0, 1_000_000))
def test_more_live_tokens_never_let_in_whom_fewer_keep_out(
    need: int, now: Occupancy, limit: float, more: float
) -> None:
    if admits(need, replace(now, live_tokens=now.live_tokens + more), limit):
        assert admits(need, now, limit)


@given(need=needs, now=seen, limit=limits, less=st.integers(0, 2_000_000))
def test_a_smaller_prompt_gets_in_wherever_a_larger_one_does(
    need: int, now: Occupancy, limit: float, less: int
) -> None:
    if admits(need, now, limit):
        assert admits(max(0, need - less), now, limit)


@given(need=st.integers(1, 2_000_000), now=seen, limit=limits)
def test_beyond_the_limit_nobody_gets_in_and_zero_is_no_limit(need: int, now: Occupancy, limit: float) -> None:
    assume(now.room_tokens > 0)
    if now.live_tokens > limit * now.room_tokens:
        assert not admits(need, now, limit)
    assert admits(need, now, 0.0)


@given(prompt=st.integers(1, 1_000_000), shared=st.integers(0, 1_000_000))
def test_what_a_session_brings_is_what_it_does_not_share(prompt: int, shared: int) -> None:
    assert need_of(Turn("t", "s", prompt, 440, shared, fork=True)) == max(0, prompt - shared)


# --- how full a fleet is ----------------------------------------------------------------------------------------------


@FEW
@given(replicas=fleets(), tokens=st.floats(0, 1_000_000), number=st.integers(0, 7))
def test_occupancy_is_a_function_of_the_snapshot_and_grows_with_live_tokens(
    replicas: list[Replica], tokens: float, number: int
) -> None:
    before = occupancy(fleet(*replicas), TUNING)
    assert occupancy(fleet(*replicas), TUNING) == before
    chosen = replicas[number % len(replicas)]
    more = replace(chosen, load=replace(chosen.load, live_tokens=chosen.load.live_tokens + tokens))
    after = occupancy(fleet(*(more if each is chosen else each for each in replicas)), TUNING)
    assert after.live_tokens >= before.live_tokens
    assert after.room_tokens == before.room_tokens


def test_live_tokens_halve_with_the_time_since_they_were_counted() -> None:
    now = fleet(living(1_000.0))
    later = Fleet(now.name, now.profile, now.replicas, NOW_S + TUNING.live_half_life_s)
    assert occupancy(now, TUNING) == Occupancy(1_000.0, 750_000, idle=True)
    assert occupancy(later, TUNING) == Occupancy(500.0, 750_000, idle=True)


def test_host_memory_is_room_too() -> None:
    here = living(0.0, capacity=Capacity(100, 900))
    assert occupancy(fleet(here), TUNING).room_tokens == 1_000


def test_branches_of_a_replica_that_goes_ask_for_room_and_those_of_a_cordoned_one_have_theirs() -> None:
    serving = living(100.0, 0)
    for gone in (living(50.0, 1, healthy=False), living(50.0, 1, standing=Standing.DRAINING)):
        assert occupancy(fleet(serving, gone), TUNING) == Occupancy(150.0, 750_000, idle=True)
    assert occupancy(fleet(serving, living(50.0, 1, standing=Standing.CORDONED)), TUNING) == Occupancy(
        100.0, 750_000, idle=True
    )


# --- what a branch counts ---------------------------------------------------------------------------------------------


def test_a_replica_that_is_out_offers_no_room_and_its_branches_ask_for_some() -> None:
    room = living(0).capacity.device_tokens
    seen = occupancy(fleet(living(100_000), replace(living(50_000, 1), ejected=True)), TUNING)
    assert seen == Occupancy(150_000, room + living(0).capacity.host_tokens, idle=True)


@given(agents=st.integers(1, 8), head=st.integers(0, 30_000), own=st.integers(1, 10_000))
def test_subagents_at_one_replica_count_what_they_share_once(agents: int, head: int, own: int) -> None:
    """Each begins with the head that the one before it brought."""
    total, parent = 0, None
    for number in range(agents):
        turn = Turn("t", "s", head + own, 440, head if parent is not None else 0, fork=True)
        share, inherited = live_share(turn, lineage(None, parent=parent), at("r0"), named=True)
        parent = Branch(f"b{number}", "s", home=at("r0"), live_tokens=share, inherited_tokens=inherited)
        total += share
    assert total == head + agents * own


def test_a_fork_elsewhere_counts_all_of_its_prompt() -> None:
    parent = Branch("b", "s", home=at("r0"))
    assert live_share(
        Turn("t", "s", 1_000, 440, 700, fork=True), lineage(None, parent=parent), at("r1"), named=True
    ) == (1_000, 0)


def test_a_branch_keeps_what_it_inherited_until_it_moves() -> None:
    known = Branch("b", "s", home=at("r0"), inherited_tokens=700)
    turn = Turn("t", "s", 1_500, 440, 1_000)
    assert live_share(turn, lineage(known), at("r0"), named=True) == (800, 700)
    assert live_share(turn, lineage(known), at("r1"), named=True) == (1_500, 0)


def test_an_unnamed_conversation_counts_in_full_from_its_second_turn_on() -> None:
    """A flood of prompts that nobody follows up must not keep sessions out for minutes."""
    first = Turn("t", "s", 8_000, 440, fork=True)
    assert live_share(first, lineage(None), at("r0"), named=False) == (1_000, 0)
    assert live_share(first, lineage(None), at("r0"), named=True) == (8_000, 0)
    second = Turn("t", "s", 9_000, 440, 8_000)
    assert live_share(second, lineage(Branch("b", "s", home=at("r0"))), at("r0"), named=False) == (9_000, 0)


@given(need=needs, now=seen, limit=limits)
def test_where_nothing_runs_nobody_waits(need: int, now: Occupancy, limit: float) -> None:
    assert admits(need, replace(now, idle=True), limit)


def test_a_fleet_is_idle_while_neither_leases_nor_engines_tell_of_a_turn() -> None:
    assert occupancy(fleet(living(9e6)), TUNING).idle
    busy = living(0, 1)
    assert not occupancy(fleet(living(0), replace(busy, load=replace(busy.load, in_flight=1))), TUNING).idle
    assert not occupancy(fleet(living(0), replace(busy, foreign_in_flight=1)), TUNING).idle


# --- when to come back ------------------------------------------------------------------------------------------------


@given(turn=st.text(max_size=30), pressure=st.floats(0, 2), more=st.floats(0, 2))
def test_retry_after_grows_with_the_queue_and_stays_within_what_clients_heed(
    turn: str, pressure: float, more: float
) -> None:
    """SDKs ignore one of more than 60 s; the same turn is always told the same."""
    first, later = retry_after_s(turn, pressure), retry_after_s(turn, pressure + more)
    assert 1 <= first <= later <= 60
    assert retry_after_s(turn, pressure) == first


def test_clients_refused_together_do_not_come_back_together() -> None:
    told = sorted(retry_after_s(f"turn {number}", 1.0) for number in range(100))
    assert told[0] < 20
    assert told[-1] > 40
    assert max(later - earlier for earlier, later in pairwise(told)) < 3
