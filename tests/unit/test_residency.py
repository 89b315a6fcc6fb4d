"""What a replica is believed to hold of a branch: less the more it has written since, never more than is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.replica import Beliefs, Capacity, Load, Replica
from router.domain.session import Residue
from router.placement.residency import NOTHING, pushed_out, residency
from tests.fleet_world import replica

FEW = settings(max_examples=200, deadline=None)

replicas = st.builds(
    lambda capacity, load, factor: replica(0, capacity=capacity, load=load, beliefs=Beliefs(residency_factor=factor)),
    st.builds(Capacity, st.integers(0, 2_000_000), st.integers(0, 4_000_000)),
    st.builds(
        Load, locked_tokens=st.integers(0, 2_500_000), admitted_tokens=st.integers(0, 10_000_000), in_flight=st.just(0)
    ),
    st.floats(0.05, 1),
)


def left(tokens: int, mark: int, *, at: str = "r0", incarnation: str = "life") -> tuple[Residue, ...]:
    return (Residue(at, incarnation, tokens, mark),)


def admitting(here: Replica, admitted: int) -> Replica:
    return replace(here, load=replace(here.load, admitted_tokens=admitted))


@FEW
@given(replicas, st.integers(0, 1_000_000), st.integers(0, 10_000_000), st.integers(0, 1_000_000))
def test_never_more_than_was_left_or_is_shared_and_never_negative(
    here: Replica, tokens: int, mark: int, shared: int
) -> None:
    held = residency(left(tokens, mark), here, shared)
    assert held.device_tokens >= 0
    assert held.host_tokens >= 0
    assert held.device_tokens + held.host_tokens <= min(tokens, shared)
    assert held.device_tokens <= here.capacity.device_tokens
    assert held.device_tokens + held.host_tokens <= here.capacity.device_tokens + here.capacity.host_tokens


@FEW
@given(
    replicas,
    st.integers(0, 1_000_000),
    st.integers(0, 1_000_000),
    st.integers(0, 5_000_000),
    st.lists(st.integers(0, 500_000), max_size=20),
)
def test_what_is_held_only_shrinks_as_the_replica_writes_on(
    here: Replica, tokens: int, shared: int, mark: int, writes: list[int]
) -> None:
    before = residency(left(tokens, mark), admitting(here, mark), shared)
    at = mark
    for written in writes:
        at += written
        now = residency(left(tokens, mark), admitting(here, at), shared)
        assert now.device_tokens <= before.device_tokens
        assert now.device_tokens + now.host_tokens <= before.device_tokens + before.host_tokens
        before = now


@FEW
@given(replicas, st.integers(0, 1_000_000))
def test_another_life_or_another_replica_holds_nothing(here: Replica, tokens: int) -> None:
    assert residency(left(tokens, 0, incarnation="an earlier life"), here, tokens) == NOTHING
    assert residency(left(tokens, 0, at="r1"), here, tokens) == NOTHING
    assert residency((), here, tokens) == NOTHING


@pytest.mark.parametrize(
    ("written", "device", "host"),
    [
        (0, 60_000, 0),
        (40_000, 60_000, 0),  # exactly fits beside it
        (70_000, 30_000, 30_000),  # half of it has moved down
        (80_000, 20_000, 40_000),
        (100_000, 0, 50_000),
        (130_000, 0, 20_000),
        (150_000, 0, 0),
    ],
)
def test_kv_moves_from_device_to_host_to_nowhere(written: int, device: int, host: int) -> None:
    here = replica(0, capacity=Capacity(100_000, 50_000), load=Load(admitted_tokens=1_000_000 + written))
    held = residency(left(60_000, 1_000_000), here, 60_000)
    assert (held.device_tokens, held.host_tokens) == (device, host)


def test_what_running_turns_lock_is_no_room() -> None:
    here = replica(0, capacity=Capacity(100_000), load=Load(locked_tokens=70_000))
    assert residency(left(60_000, 0), here, 60_000).device_tokens == 30_000


def test_a_counter_that_stands_before_the_mark_has_written_nothing_since() -> None:
    here = replica(0, capacity=Capacity(100_000), load=Load(admitted_tokens=5))
    assert residency(left(60_000, 999), here, 60_000).device_tokens == 60_000


def test_predictions_are_corrected_by_what_was_found_before() -> None:
    here = replica(0, beliefs=Beliefs(residency_factor=0.5))
    assert residency(left(60_000, 0), here, 80_000).device_tokens == 30_000


@FEW
@given(replicas, st.integers(0, 1_000_000))
def test_nothing_is_pushed_out_while_there_is_room(here: Replica, new: int) -> None:
    room = here.capacity.device_tokens + here.capacity.host_tokens - here.load.admitted_tokens
    out = pushed_out(here, new)
    assert 0 <= out <= new
    assert (out == 0) == (new == 0 or room >= new)
    assert pushed_out(here, new + 1) >= out
