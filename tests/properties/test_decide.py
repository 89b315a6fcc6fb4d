"""The invariants of the decision (design: placement), as properties over random fleets."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.decision import Placed, Reason, Refused
from router.domain.replica import Beliefs, Load, Replica, Standing
from router.domain.session import Branch, Residue
from router.domain.turn import Turn
from router.placement.cost import Tuning
from router.placement.decide import decide
from router.placement.policy import POLICIES
from tests.fleet_world import NOW_S, World, at, fleet, lineage, replica

FEW = settings(max_examples=60, deadline=None)

loads = st.builds(
    Load,
    in_flight=st.integers(0, 80),
    prefill_tokens=st.integers(0, 400_000),
    locked_tokens=st.integers(0, 900_000),
    admitted_tokens=st.integers(0, 5_000_000),
    crowd=st.floats(0, 40),
    crowd_at_s=st.just(NOW_S - 30),
)
beliefs = st.builds(
    Beliefs,
    prefill_rate=st.one_of(st.just(0.0), st.floats(500, 100_000)),
    prefill_weight=st.floats(0, 64),
    residency_factor=st.floats(0.05, 1),
    evicted_asked_share=st.floats(0, 1),
)


doubts = st.sampled_from([{}, {}, {"ejected": True}, {"probation": True}])
"""A replica in good standing, ejected, or on probation."""


@st.composite
def fleets(draw: st.DrawFn, least: int = 1, most: int = 8) -> list[Replica]:
    return [
        replica(
            number,
            load=draw(loads),
            beliefs=draw(beliefs),
            healthy=draw(st.booleans()),
            standing=draw(st.sampled_from(Standing)),
            **draw(doubts),
        )
        for number in range(draw(st.integers(least, most)))
    ]


def a_turn(prompt_tokens: int, *, fork: bool, shared_tokens: int = 0, turn_id: str = "t") -> Turn:
    return Turn(turn_id, "s", prompt_tokens, 440, shared_tokens, fork)


def resident_branch(home: str, tokens: int, mark: int = 0) -> Branch:
    return Branch(
        "b", "s", home=at(home), version=3, turns=3, tokens=tokens, text_bytes=tokens * 4,
        residues=(Residue(home, "life", tokens, mark),),
    )  # fmt: skip


@FEW
@given(fleets(), st.integers(1, 300_000), st.booleans(), st.sampled_from(sorted(POLICIES)), st.data())
def test_same_snapshot_same_answer_whatever_the_order_of_replicas(
    replicas: list[Replica], tokens: int, fork: bool, policy: str, data: st.DataObject
) -> None:
    """The decision is a pure function of its inputs: repeated it is equal, and the order of the list does not count."""
    shuffled = data.draw(st.permutations(replicas))
    branch = None if fork else resident_branch("r0", tokens)
    turn = a_turn(tokens, fork=fork, shared_tokens=0 if fork else tokens)

    def choose(order: list[Replica]) -> object:
        decision = decide(turn, lineage(branch), fleet(*order), policy, Tuning())
        return (decision.replica, decision.reason) if isinstance(decision, Placed) else "refused"

    assert choose(replicas) == choose(replicas)
    if policy != "round_robin":  # whose whole point is the order
        assert choose(shuffled) == choose(replicas)


@FEW
@given(fleets(), st.integers(1, 300_000), st.booleans(), st.sampled_from(sorted(POLICIES)))
def test_who_may_not_take_a_turn_never_gets_one(replicas: list[Replica], tokens: int, fork: bool, policy: str) -> None:
    """No turn reaches an unhealthy or draining replica, no new branch a cordoned one; refused only if nobody may."""
    branch = None if fork else resident_branch("r0", tokens)
    decision = decide(a_turn(tokens, fork=fork), lineage(branch), fleet(*replicas), policy, Tuning())
    allowed = {
        each.id
        for each in replicas
        if each.healthy
        and (each.standing is Standing.SERVING or (not fork and each.id == "r0" and each.standing is Standing.CORDONED))
    }
    if isinstance(decision, Refused):
        assert not allowed
    else:
        assert decision.replica in allowed


@FEW
@given(fleets(), st.integers(1, 300_000), st.booleans(), st.sampled_from(sorted(POLICIES)))
def test_a_doubtful_replica_gets_a_turn_only_where_nobody_better_may(
    replicas: list[Replica], tokens: int, fork: bool, policy: str
) -> None:
    """An ejected one only where all are, one on probation a second turn only where nobody else is left."""
    branch = None if fork else resident_branch("r0", tokens)
    decision = decide(a_turn(tokens, fork=fork), lineage(branch), fleet(*replicas), policy, Tuning())

    def doubt(each: Replica) -> int:
        return 2 if each.ejected else int(each.probation and each.load.in_flight > 0)

    allowed = {
        each.id: doubt(each)
        for each in replicas
        if each.healthy
        and (each.standing is Standing.SERVING or (not fork and each.id == "r0" and each.standing is Standing.CORDONED))
    }
    if isinstance(decision, Placed):
        assert allowed[decision.replica] == min(allowed.values())


@FEW
@given(st.integers(1, 200_000), st.sampled_from(sorted(POLICIES)), st.booleans(), st.booleans())
def test_a_branch_leaves_an_ejected_home_for_good_and_one_on_probation_for_a_turn(
    tokens: int, policy: str, ejected: bool, taken: bool
) -> None:
    """What fails turns has lost the branch; what merely has its one turn gets it back, with the KV it holds."""
    home = replica(0, ejected=ejected, probation=not ejected, load=Load(in_flight=int(taken)))
    turn = a_turn(tokens, fork=False, shared_tokens=tokens)
    known = resident_branch("r0", tokens)
    decision = decide(turn, lineage(known), fleet(home, replica(1, load=Load(in_flight=70))), policy, Tuning())
    assert isinstance(decision, Placed)
    if ejected:
        assert (decision.replica, decision.reason, decision.binding) == ("r1", Reason.HOME_GONE, at("r1"))
    elif taken:
        assert (decision.replica, decision.reason, decision.binding) == ("r1", Reason.SPILL, at("r0"))
    elif policy == "roost":
        assert (decision.replica, decision.reason) == ("r0", Reason.HOME)


@FEW
@given(st.integers(1, 200_000), st.booleans())
def test_a_stored_response_is_continued_by_its_holder_however_doubtful(tokens: int, ejected: bool) -> None:
    """The others would say there is no such response."""
    holder = replica(0, ejected=ejected, probation=not ejected, load=Load(in_flight=1))
    decision = decide(
        a_turn(tokens, fork=True), lineage(None), fleet(holder, replica(1)), "roost", Tuning(), only=at("r0")
    )
    assert isinstance(decision, Placed)
    assert (decision.replica, decision.reason) == ("r0", Reason.STORED)


@FEW
@given(st.integers(2, 8), loads, st.integers(1, 200_000), st.integers(1, 40))
def test_a_lone_branch_stays_while_replicas_are_alike(count: int, load: Load, start: int, turns: int) -> None:
    """However loaded the fleet is, as long as it is loaded alike a sequential branch never moves."""
    alike = replace(load, admitted_tokens=0, locked_tokens=0)
    world = World({f"r{number}": replica(number, load=alike) for number in range(count)})
    first = world.turn("b", start)
    for number in range(1, turns):
        assert world.turn("b", start + number * 700).replica == first.replica


@FEW
@given(st.integers(5_000, 200_000), st.integers(0, 60), st.integers(0, 300_000))
def test_a_branch_leaves_its_home_only_when_staying_is_dearer_by_the_hysteresis(
    tokens: int, in_flight: int, waiting: int
) -> None:
    """Against an idle rival a resident branch moves exactly when its home costs more than the move included."""
    busy = replica(0, load=Load(in_flight=in_flight, prefill_tokens=waiting))
    turn = a_turn(tokens + 500, fork=False, shared_tokens=tokens)
    decision = decide(turn, lineage(resident_branch("r0", tokens)), fleet(busy, replica(1)), "roost", Tuning())
    assert isinstance(decision, Placed)
    home, rival = sorted(decision.candidates, key=lambda cost: cost.replica)
    assert home.move_s == 0.0
    assert rival.move_s >= Tuning().move_floor_s
    stays = home.total_s <= rival.total_s + 0.001
    assert (decision.replica == "r0") == stays
    assert decision.reason is (Reason.HOME if stays else Reason.REBIND)


@FEW
@given(st.integers(2, 12), st.integers(1, 12), st.integers(20_000, 200_000), st.integers(0, 6))
def test_a_newcomer_moves_no_resident_branch_of_a_home_that_is_not_overloaded(
    count: int, each: int, tokens: int, in_flight: int
) -> None:
    """Adding a replica moves nobody whose home is not overloaded; the next new branches go to the newcomer."""
    each = min(each, 600_000 // tokens)  # beyond what a replica holds its branches are not resident
    world = World.of(count)
    for number in range(count * each):
        world.turn(f"b{number}", tokens)
    for name, here in world.replicas.items():
        world.replicas[name] = replace(here, load=replace(here.load, in_flight=in_flight))
    before = {name: branch.home for name, branch in world.branches.items()}
    world.replicas["new"] = replica(99, id="new", joined_at_s=world.now_s)
    for name, home in before.items():
        assert home is not None
        assert world.turn(name, tokens + 900).replica == home.replica
    assert world.turn("first", tokens).replica == "new"


@FEW
@given(st.integers(2, 6), st.integers(1, 6), st.integers(20, 60))
def test_a_newcomer_is_ramped_not_flooded(count: int, each: int, burst: int) -> None:
    """A burst of new sessions right after a join gives the newcomer its allowance and no more before its first turns
    have finished, once the others hold sessions too."""
    world = World.of(count)
    for number in range(count * each):
        world.turn(f"b{number}", 30_000)
    world.replicas["new"] = replica(99, id="new", joined_at_s=world.now_s)
    placed = [world.begin(f"n{number}", 30_000).replica for number in range(burst)]
    assert placed[0] == "new"
    assert placed.count("new") >= min(Tuning().ramp_turns, burst // (count + 1))
    assert placed.count("new") <= Tuning().ramp_turns + ceil(burst / (count + 1))


@FEW
@given(st.integers(1, 12), st.integers(1, 48), st.integers(100, 60_000))
def test_parallel_new_branches_spread_and_then_stay(count: int, forks: int, tokens: int) -> None:
    """k parallel branches over n equal idle replicas: none gets over ceil(k/n) + 1, and each stays where it went."""
    world = World.of(count)
    placed = {f"f{number}": world.begin(f"f{number}", tokens) for number in range(forks)}
    assert max(world.homes().values()) <= ceil(forks / count) + 1
    for name, each in placed.items():
        world.finish(name, each, tokens)
    for name, each in placed.items():
        assert world.turn(name, tokens + 800).replica == each.replica


@FEW
@given(st.integers(2, 8), st.integers(1, 24), st.integers(1, 1_000))
def test_forks_of_a_short_context_spread_as_new_branches_do(count: int, forks: int, shared: int) -> None:
    """What is shared is worth its prefill: next to nothing here, so the parent's home gets no more than its share."""
    world = World.of(count)
    home = world.turn("parent", shared).replica
    for number in range(forks):
        world.begin(f"f{number}", shared + 300, shared_with="parent", shared_tokens=shared)
    assert world.homes()[home] - 1 <= ceil(forks / count) + 1


@FEW
@given(st.integers(2, 8), st.integers(60_000, 300_000))
def test_a_fork_of_a_long_context_stays_with_its_kv(count: int, shared: int) -> None:
    """Seconds of prefill outweigh a few neighbours: first forks of a long context are served where it is resident."""
    world = World.of(count)
    home = world.turn("parent", shared).replica
    for number in range(2):
        placed = world.begin(f"f{number}", shared + 300, shared_with="parent", shared_tokens=shared)
        assert placed.replica == home
        assert placed.reason is Reason.FORK


@FEW
@given(st.integers(2, 6), st.integers(1_000, 200_000), st.integers(1_000, 20_000))
def test_a_compacted_history_goes_where_its_old_one_lived(count: int, tokens: int, head: int) -> None:
    """A new branch that begins as an idle one of its session did takes its place: that one is no crowd to it."""
    world = World.of(count)
    home = world.turn("before", tokens).replica
    parent = replace(world.branches["before"], session="s")
    turn = a_turn(head + 2_000, fork=True, shared_tokens=head)
    decision = decide(turn, lineage(None, parent=parent), world.snapshot(), "roost", Tuning())
    assert isinstance(decision, Placed)
    assert decision.replica == home
    busy = replace(parent, in_flight=1)
    elsewhere = decide(a_turn(300, fork=True), lineage(None, parent=busy), world.snapshot(), "roost", Tuning())
    assert isinstance(elsewhere, Placed)
    assert elsewhere.replica != home


@pytest.mark.parametrize(("sessions", "replicas"), [(250, 50), (7, 3), (64, 64), (1000, 50)])
def test_equal_new_sessions_on_equal_replicas_differ_by_at_most_one(sessions: int, replicas: int) -> None:
    """250 equal new sessions on 50 equal replicas: max - min <= 1."""
    world = World.of(replicas)
    for number in range(sessions):
        world.turn(f"s{number}", 30_000)
        world.now_s += 0.2
    counts = world.homes().values()
    assert max(counts) - min(counts) <= 1


@FEW
@given(st.integers(3, 6), st.integers(3, 24), st.integers(2_000, 100_000))
def test_a_drained_replicas_branches_rebind_once_each(count: int, branches: int, tokens: int) -> None:
    """Draining moves each of a replica's branches once, with the reason told, and nobody else."""
    world = World.of(count)
    for number in range(branches):
        world.turn(f"b{number}", tokens)
    drained = world.branches["b0"].home
    assert drained is not None
    here = world.replicas[drained.replica]
    world.replicas[drained.replica] = replace(here, standing=Standing.DRAINING)
    before = {name: branch.home for name, branch in world.branches.items()}
    moved = {}
    for name, home in before.items():
        placed = world.turn(name, tokens + 500)
        if home == drained:
            assert placed.reason is Reason.HOME_GONE
            moved[name] = placed.replica
        else:
            assert home is not None
            assert placed.replica == home.replica
    for name, home_now in moved.items():
        assert world.turn(name, tokens + 1_000).replica == home_now


@FEW
@given(st.integers(1_000, 400_000), st.integers(0, 5_000_000))
def test_evictable_kv_is_not_load(tokens: int, admitted: int) -> None:
    """A home that is full of others' evictable KV, but holds this branch's and runs nothing, keeps it."""
    full = replica(0, load=Load(admitted_tokens=admitted))
    turn = a_turn(tokens + 400, fork=False, shared_tokens=tokens)
    branch = resident_branch("r0", tokens, mark=admitted)
    decision = decide(turn, lineage(branch), fleet(full, replica(1), replica(2)), "roost", Tuning())
    assert isinstance(decision, Placed)
    assert decision.reason is Reason.HOME


@FEW
@given(fleets(least=2), st.integers(1, 200_000))
def test_a_restarted_home_is_gone(replicas: list[Replica], tokens: int) -> None:
    """A binding holds to the incarnation: after a restart nothing is resident and the branch is placed anew."""
    restarted = [replace(replicas[0], incarnation="next life"), *replicas[1:]]
    turn = a_turn(tokens, fork=False, shared_tokens=tokens)
    decision = decide(turn, lineage(resident_branch("r0", tokens)), fleet(*restarted), "roost", Tuning())
    if isinstance(decision, Placed):
        assert decision.reason is Reason.HOME_GONE
        assert decision.cached_tokens == 0
        assert all(cost.move_s == 0.0 for cost in decision.candidates)


@FEW
@given(st.integers(2, 8), st.integers(1, 100_000))
def test_a_full_home_spills_and_a_dead_one_rebinds(count: int, tokens: int) -> None:
    """A turn refused by its busy home is served elsewhere and keeps its binding; one whose home is gone moves."""
    world = World.of(count)
    home = world.turn("b", tokens).binding
    branch = world.branches["b"]
    turn = a_turn(tokens, fork=False, shared_tokens=tokens)
    spilled = decide(turn, lineage(branch), world.snapshot(), "roost", Tuning(), tried={home.replica: "busy"})
    assert isinstance(spilled, Placed)
    assert (spilled.reason, spilled.binding) == (Reason.SPILL, home)
    assert spilled.replica != home.replica
    moved = decide(turn, lineage(branch), world.snapshot(), "roost", Tuning(), tried={home.replica: "gone"})
    assert isinstance(moved, Placed)
    assert moved.reason is Reason.HOME_GONE
    assert moved.binding.replica == moved.replica


@FEW
@given(st.integers(2, 8), st.integers(1, 100_000))
def test_a_stored_response_is_continued_at_its_cordoned_holder(count: int, tokens: int) -> None:
    """A cordon keeps new branches out; the continuation of what is stored there can go nowhere else."""
    replicas = [replica(0, standing=Standing.CORDONED), *(replica(number) for number in range(1, count))]
    turn = a_turn(tokens, fork=True)
    decision = decide(turn, lineage(None), fleet(*replicas), "roost", Tuning(), only=at("r0"))
    assert isinstance(decision, Placed)
    assert (decision.replica, decision.reason) == ("r0", Reason.STORED)


@FEW
@given(st.integers(2, 8), st.integers(1, 200_000))
def test_a_replica_that_was_not_looked_at_yet_takes_its_own_branches_and_no_others(count: int, tokens: int) -> None:
    """A router that missed how a replica came (the store was away) must not take the homes there for gone."""
    unseen = replica(0, healthy=False, unseen=True)
    others = [replica(number) for number in range(1, count)]
    turn, known = a_turn(tokens, fork=False), lineage(resident_branch("r0", tokens))
    at_home = decide(turn, known, fleet(unseen, *others), "roost", Tuning())
    assert isinstance(at_home, Placed)
    assert (at_home.replica, at_home.reason) == ("r0", Reason.HOME)
    new = decide(a_turn(tokens, fork=True), lineage(None), fleet(unseen, *others), "roost", Tuning())
    assert isinstance(new, Placed)
    assert new.replica != "r0"
    assert isinstance(decide(a_turn(tokens, fork=True), lineage(None), fleet(unseen), "roost", Tuning()), Refused)
    draining = replace(unseen, standing=Standing.DRAINING)
    gone = decide(turn, known, fleet(draining, *others), "roost", Tuning())
    assert isinstance(gone, Placed)
    assert gone.replica != "r0"


@FEW
@given(fleets(), st.integers(1, 500_000), st.booleans())
def test_every_cost_is_finite_and_no_term_is_negative(replicas: list[Replica], tokens: int, fork: bool) -> None:
    """Seconds are seconds, whatever was believed."""
    branch = None if fork else resident_branch("r0", tokens)
    decision = decide(a_turn(tokens, fork=fork), lineage(branch), fleet(*replicas), "roost", Tuning())
    if isinstance(decision, Placed):
        for cost in decision.candidates:
            terms = (cost.wait_s, cost.prefill_s, cost.decode_s, cost.others_s, cost.eviction_s, cost.move_s)
            assert all(0 <= term < 1e9 for term in (*terms, cost.crowd_s, cost.ramp_s))
        assert decision.prefill_tokens + decision.cached_tokens == tokens
