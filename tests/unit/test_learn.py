"""What is believed after a turn: robust steps towards what the engine said, and nothing where it said nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.decision import Placed, Reason
from router.domain.outcome import End, Outcome, Usage
from router.domain.replica import Beliefs, Capacity, Load, Profile, Replica
from router.domain.session import Binding
from router.domain.turn import Turn
from router.placement.cost import rates_of
from router.placement.learn import RATE_ALPHA, RATIO_ALPHA, WEIGHT_MAX, Learned, learn
from tests.fleet_world import fleet, replica

FEW = settings(max_examples=150, deadline=None)
TURN = Turn("t", "s", prompt_tokens=10_000, output_tokens=440)
PRIOR = Profile()
STEP = 1 + RATE_ALPHA  # a belief at most doubled is weighed at RATE_ALPHA


def placed(cached: int = 0, held_once: int = 0) -> Placed:
    here = Binding("r0", "life")
    return Placed("r0", "life", "http://r0", Reason.HOME, here, (), 10_000 - cached, cached, held_once)


def came(
    prompt: int | None = 10_000,
    cached: int | None = 0,
    output: int | None = 101,
    *,
    ttft_s: float | None = 0.5,
    decode_s: float = 2.0,
    end: End = End.COMPLETE,
    streamed: bool = True,
    events: int = 100,
) -> Outcome:
    return Outcome(
        end=end,
        status=200,
        usage=Usage(prompt, cached, output),
        ttft_s=ttft_s,
        duration_s=(ttft_s or 0.0) + decode_s,
        output_events=events,
        streamed=streamed,
    )


def after(outcome: Outcome, at: Placed | None = None, here: Replica | None = None, text_bytes: int = 40_000) -> Learned:
    here = here or replica(0)
    return learn(TURN, text_bytes, at or placed(), here, rates_of(fleet(here)), outcome)


def believed(outcome: Outcome, at: Placed | None = None, here: Replica | None = None) -> Beliefs:
    learned = after(outcome, at, here).beliefs
    assert learned is not None
    return learned


# --- what a turn left -------------------------------------------------------------------------------------------------


def test_a_turn_leaves_what_the_engine_counted() -> None:
    learned = after(came(prompt=10_000, cached=8_000, output=101))
    assert (learned.tokens, learned.prompt_tokens, learned.admitted_tokens) == (10_101, 10_000, 2_101)


def test_where_the_engine_counts_nothing_estimates_stand_in() -> None:
    learned = after(came(None, None, None, events=70), placed(cached=6_000))
    assert (learned.tokens, learned.prompt_tokens, learned.admitted_tokens) == (10_070, 10_000, 4_070)


@pytest.mark.parametrize(
    "outcome",
    [came(end=End.UNREACHED), came(end=End.UPSTREAM_ERROR), came(ttft_s=None, end=End.CLIENT_GONE)],
    ids=["unreached", "error", "left before any output"],
)
def test_a_turn_without_output_leaves_and_teaches_nothing(outcome: Outcome) -> None:
    assert after(outcome) == Learned(None, 0, 0, 0)


@pytest.mark.parametrize("nonsense", [came(prompt=2**33), came(output=2**33)], ids=["prompt", "output"])
def test_a_count_beyond_any_context_is_nonsense_and_taken_as_not_said(nonsense: Outcome) -> None:
    assert after(nonsense) == after(came(None, None, None))


def test_a_client_that_left_midway_left_its_kv_there() -> None:
    learned = after(came(None, None, None, end=End.CLIENT_GONE, events=7))
    assert learned.tokens == 10_007


def test_a_count_that_is_left_out_is_zero_where_the_replica_reports_its_cache() -> None:
    silent = came(cached=None)
    here = replica(0, reports_cache=True)
    assert believed(silent, placed(cached=8_000), here) == believed(came(cached=0), placed(cached=8_000))
    assert after(silent, placed(cached=8_000), here).admitted_tokens == 10_101


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_prefill_rate_moves_from_the_prior_towards_what_was_seen() -> None:
    """10,000 uncached tokens in 0.4 s, behind 2,000 others that were to be prefilled first: 30,000 tokens/s."""
    here = replica(0, load=Load(prefill_tokens=2_000))
    new = believed(came(ttft_s=0.4), here=here)
    assert new.prefill_rate == pytest.approx(20_000 + RATE_ALPHA * 10_000)
    assert new.prefill_weight == 1


def test_one_stalled_turn_moves_a_belief_little() -> None:
    here = replica(0, beliefs=Beliefs(prefill_rate=20_000, prefill_weight=9, token_time_s=0.02, token_weight=9))
    stalled = believed(came(ttft_s=600.0, decode_s=600.0), here=here)
    assert 20_000 / STEP < stalled.prefill_rate < 20_000
    assert 0.02 < stalled.token_time_s <= 0.02 * STEP
    instant = believed(came(ttft_s=1e-6, decode_s=1e-6), here=here)
    assert 20_000 < instant.prefill_rate <= 20_000 * STEP
    assert 0.02 / STEP < instant.token_time_s < 0.02


def test_repeated_turns_find_the_rate_and_the_token_time() -> None:
    """A replica four times as fast as its profile, with three turns beside this one."""
    here = replica(0, load=Load(in_flight=3))
    alone_s = 0.005
    together_s = alone_s * (1 + PRIOR.step_slope * 3)
    for _ in range(200):
        here = replace(here, beliefs=believed(came(ttft_s=0.125, decode_s=100 * together_s), here=here))
    assert here.beliefs.prefill_rate == pytest.approx(80_000, rel=0.01)
    assert here.beliefs.token_time_s == pytest.approx(alone_s, rel=0.01)
    assert here.beliefs.prefill_weight == here.beliefs.token_weight == WEIGHT_MAX


@pytest.mark.parametrize(
    ("outcome", "at"),
    [
        (came(cached=9_500), placed()),  # too little prefilled: fixed costs
        (came(cached=None), placed(cached=5_000)),  # how much was prefilled is a guess
        (came(streamed=False), placed()),  # the first byte is the last
        (came(ttft_s=0.0), placed()),
    ],
    ids=["short", "guess", "no stream", "no time"],
)
def test_no_prefill_rate_is_learned_without_facts(outcome: Outcome, at: Placed) -> None:
    assert believed(outcome, at).prefill_weight == 0


@pytest.mark.parametrize(
    "outcome",
    [came(output=15), came(end=End.CLIENT_GONE), came(end=End.UPSTREAM_BROKEN), came(streamed=False), came(decode_s=0)],
    ids=["short", "left", "broken", "no stream", "no time"],
)
def test_no_token_time_is_learned_without_facts(outcome: Outcome) -> None:
    assert believed(outcome).token_weight == 0


def test_turns_of_others_slow_a_stream_as_our_own_do() -> None:
    ours, others = replica(0, load=Load(in_flight=6)), replica(0, foreign_in_flight=6)
    assert believed(came(), here=ours).token_time_s == believed(came(), here=others).token_time_s


def test_tokens_per_byte_follow_what_the_engine_counted() -> None:
    assert believed(came(prompt=20_000)).tokens_per_byte == pytest.approx(0.25 + RATE_ALPHA * 0.25)
    for outcome, text_bytes in ((came(prompt=None), 40_000), (came(), 100)):
        beliefs = after(outcome, text_bytes=text_bytes).beliefs
        assert beliefs is not None
        assert beliefs.bytes_weight == 0


# --- residency and the price of eviction ------------------------------------------------------------------------------


def test_the_residency_factor_follows_what_was_found() -> None:
    """Half of what the branch had left is found, turn after turn: predictions come down to half."""
    here = replica(0)
    for _ in range(200):
        predicted = int(8_000 * here.beliefs.residency_factor)
        here = replace(here, beliefs=believed(came(cached=4_000), placed(cached=predicted), here))
    assert here.beliefs.residency_factor == pytest.approx(0.5, abs=0.01)
    for _ in range(200):
        predicted = int(8_000 * here.beliefs.residency_factor)
        here = replace(here, beliefs=believed(came(cached=8_000), placed(cached=predicted), here))
    assert here.beliefs.residency_factor == pytest.approx(1.0, abs=0.01)


def test_one_miss_moves_the_factor_by_its_share_only() -> None:
    assert believed(came(cached=0), placed(cached=8_000)).residency_factor == pytest.approx(1 - RATIO_ALPHA * 0.95)


@pytest.mark.parametrize(("cached", "predicted"), [(None, 8_000), (0, 500), (0, 0)])
def test_no_residency_is_learned_without_facts(cached: int | None, predicted: int) -> None:
    assert believed(came(cached=cached), placed(cached=predicted)).residency_factor == 1.0


def full(admitted: int) -> Replica:
    return replica(0, capacity=Capacity(100_000, 50_000), load=Load(admitted_tokens=admitted))


@pytest.mark.parametrize("admitted", [0, 50_000, 100_000])
def test_without_eviction_pressure_a_miss_is_no_reason_to_fear_evictions(admitted: int) -> None:
    """The device has never been full: what is missing was flushed, or never there."""
    assert believed(came(cached=0), placed(held_once=9_000), full(admitted)).evicted_asked_share == 0.5


def test_what_is_asked_for_again_after_its_eviction_raises_the_price() -> None:
    missed = believed(came(cached=0), placed(held_once=10_101), full(1_000_000)).evicted_asked_share
    found = believed(came(cached=9_000), placed(cached=9_000, held_once=9_000), full(1_000_000)).evicted_asked_share
    assert 0.5 < missed < 0.6
    assert 0.4 < found < 0.5
    here = full(1_000_000)
    for _ in range(100):
        here = replace(here, beliefs=believed(came(cached=0), placed(held_once=10_101), here))
    assert here.beliefs.evicted_asked_share > 0.95
    for _ in range(100):
        here = replace(here, beliefs=believed(came(cached=0), placed(), here))
    assert here.beliefs.evicted_asked_share < 0.05


# --- whatever comes ---------------------------------------------------------------------------------------------------

counts = st.one_of(st.none(), st.integers(0, 2**53))
seconds = st.floats(0, 1e7)
beliefs = st.builds(
    Beliefs,
    prefill_rate=st.one_of(st.just(0.0), st.floats(1e-3, 1e9)),
    prefill_weight=st.floats(0, WEIGHT_MAX),
    token_time_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)),
    token_weight=st.floats(0, WEIGHT_MAX),
    tokens_per_byte=st.one_of(st.just(0.0), st.floats(1e-6, 1e3)),
    bytes_weight=st.floats(0, WEIGHT_MAX),
    residency_factor=st.floats(0.05, 1),
    evicted_asked_share=st.floats(0, 1),
)
outcomes = st.builds(
    Outcome,
    end=st.sampled_from(End),
    usage=st.builds(Usage, counts, counts, counts),
    ttft_s=st.one_of(st.none(), seconds),
    duration_s=seconds,
    output_events=st.integers(0, 10**6),
    streamed=st.booleans(),
)
replicas = st.builds(
    lambda known, load, capacity, *, reports: replica(
        0, beliefs=known, load=load, capacity=capacity, reports_cache=reports
    ),
    beliefs,
    st.builds(Load, st.integers(0, 500), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 2**53)),
    st.builds(Capacity, st.integers(0, 10**7), st.integers(0, 10**7)),
    reports=st.booleans(),
)


@FEW
@given(replicas, st.lists(outcomes, min_size=1, max_size=5), st.integers(0, 10**6), st.integers(0, 10**7))
def test_beliefs_stay_finite_and_in_range_whatever_comes(
    here: Replica, outcomes: list[Outcome], cached: int, text_bytes: int
) -> None:
    for outcome in outcomes:
        learned = after(outcome, placed(cached=min(cached, 10_000), held_once=cached), here, text_bytes)
        assert 0 <= learned.admitted_tokens <= learned.tokens
        old, new = here.beliefs, learned.beliefs
        if new is None:
            continue
        values = (new.prefill_rate, new.token_time_s, new.tokens_per_byte)
        assert all(math.isfinite(value) and value >= 0 for value in values)
        for before, now in zip((old.prefill_rate, old.token_time_s, old.tokens_per_byte), values, strict=True):
            assert before == 0 or before / STEP <= now <= before * STEP * (1 + 1e-9)
        assert all(0 <= w <= WEIGHT_MAX for w in (new.prefill_weight, new.token_weight, new.bytes_weight))
        assert 0.05 - 1e-9 <= new.residency_factor <= 1
        assert 0 <= new.evicted_asked_share <= 1
        here = replace(here, beliefs=new)
