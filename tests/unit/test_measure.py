"""What is counted, and how: rates, spreads, moves, the infinite cache, the order of turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.measure import Measured, TurnResult, percentile, spread
from simulations.measure_cache import InfiniteCache, _Intervals
from simulations.prompt import Prompt
from simulations.prompt_blocks import Span
from simulations.replay_order import Order
from simulations.trace import Kind, Ref, Session, Tree, Turn


def result(branch: str, number: int = 0, **told: object) -> TurnResult:
    facts: dict[str, object] = {"sent_s": 0.0, "sent_tokens": 100, "infinite_tokens": 0, "duration_s": 1.0, **told}
    return TurnResult(Ref(branch, number), **facts)  # type: ignore[arg-type]


def test_nothing_measured_is_no_figure() -> None:
    figures = Measured().figures()
    assert (figures["turns"], figures["errors"], figures["moves"], figures["per_replica"]) == (0, 0, 0, {})
    assert figures["hit_rate"] is None
    assert figures["hit_rate_infinite"] is None
    assert figures["ttft_s"] is None
    assert figures["itl_s"] is None


def test_rates_are_sums_over_sums_of_the_turns_that_told() -> None:
    """A turn without usage counts as a turn and in no rate; one that failed counts as an error only."""
    measured = Measured()
    measured.add(result("a", prompt_tokens=100, cached_tokens=0, output_tokens=7, ttft_s=1.0), [0.1, 0.3])
    measured.add(result("b", prompt_tokens=300, cached_tokens=240, infinite_tokens=90, ttft_s=3.0))
    measured.add(result("c", infinite_tokens=100))
    measured.add(result("d", prompt_tokens=500, cached_tokens=500, error="status_503", ttft_s=9.0), [5.0])
    figures = measured.figures()
    assert (figures["turns"], figures["errors"], figures["errors_by"]) == (3, 1, {"status_503": 1})
    assert figures["hit_rate"] == 240 / 400
    assert figures["hit_rate_infinite"] == 90 / 200
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["output_tokens"]) == (400, 240, 7)
    assert figures["ttft_s"] is not None
    assert (figures["ttft_s"]["p50"], figures["ttft_s"]["mean"], figures["ttft_s"]["count"]) == (2.0, 2.0, 2)
    assert figures["itl_s"] is not None
    assert figures["itl_s"]["p50"] == pytest.approx(0.2)


def test_a_cached_count_left_out_is_zero_where_others_are_told() -> None:
    """SGLang leaves a zero out on /v1/messages; a server that never tells has no hit rate."""
    measured = Measured()
    measured.add(result("a", prompt_tokens=100))
    assert measured.figures()["hit_rate"] is None
    assert measured.figures()["cached_tokens"] is None
    measured.add(result("a", prompt_tokens=100, cached_tokens=50))
    assert measured.figures()["hit_rate"] == 0.25


def test_moves_are_turns_served_elsewhere_than_the_turn_before() -> None:
    """Per session; errors and turns without a replica's name move nobody."""
    measured = Measured()
    for branch, replica in (("a", "x"), ("b", "y"), ("a", "x"), ("a", "y"), ("a", None), ("a", "y"), ("a", "x")):
        measured.add(result(branch, replica=replica))
    measured.add(result("b", replica="x", error="broken"))
    assert measured.figures()["moves"] == 2


def test_replicas_have_their_own_shares() -> None:
    measured = Measured()
    measured.add(result("a", replica="x", prompt_tokens=100, cached_tokens=90))
    measured.add(result("b", replica="y", prompt_tokens=50, cached_tokens=0))
    measured.add(result("a", replica="x", prompt_tokens=100, cached_tokens=70))
    shares = measured.figures()["per_replica"]
    assert shares["x"] == {"turns": 2, "prompt_tokens": 200, "cached_tokens": 160, "hit_rate": 0.8}
    assert shares["y"]["hit_rate"] == 0.0


def test_percentiles_are_interpolated() -> None:
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([0.0, 10.0], 0.5) == 5.0
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 0.95) == pytest.approx(3.8)
    assert spread([]) is None
    assert spread([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 2.9, "p99": pytest.approx(2.98), "mean": 2.0, "count": 3}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=20), st.integers(0, 50))
def test_intervals_are_a_set_of_numbers(added: list[tuple[int, int]], asked: int) -> None:
    """However they overlap, they hold what a set would, and stay disjoint."""
    intervals, numbers = _Intervals(), set[int]()
    for start, size in added:
        intervals.add(start, start + size)
        numbers |= set(range(start, start + size))
    run = next(n for n in range(100) if asked + n not in numbers)
    assert intervals.run_from(asked) == run
    assert sum(e - s for s, e in zip(intervals.starts, intervals.ends, strict=True)) == len(numbers)
    assert all(e < s for e, s in zip(intervals.ends, intervals.starts[1:], strict=False))


def prompt(number: int, tokens: int, *spans: Span, base: int | None = None, shared: int = 0) -> Prompt:
    return Prompt(
        ref=Ref("a", number),
        messages=(),
        text="",
        tokens=tokens,
        output_tokens=1,
        spans=spans,
        block_tokens=10,
        base=None if base is None else Ref("a", base),
        shared_tokens=shared,
    )


def test_an_infinite_cache_hits_what_was_sent_up_to_the_first_new_block() -> None:
    cache = InfiniteCache()
    assert cache.send(prompt(0, 57, Span("s", 1, 5))) == 0
    assert cache.send(prompt(1, 75, Span("s", 1, 7), base=0, shared=57)) == 57
    assert cache.send(prompt(2, 60, Span("s", 1, 3), Span("s", 90, 1), Span("s", 5, 2))) == 30
    assert cache.send(prompt(3, 50, Span("t", 1, 5))) == 0
    assert cache.send(prompt(4, 50, Span("t", 1, 5))) == 50


def test_a_base_that_was_never_sent_gives_nothing() -> None:
    assert InfiniteCache().send(prompt(5, 75, Span("s", 1, 7), base=4, shared=57)) == 0


def turn(index: int, *after: Ref, think_s: float | None = None, at_s: float | None = None) -> Turn:
    return Turn(index, Kind.TOOL, 10, 1, None, 0, (), after, think_s, at_s)


def test_turns_go_when_all_they_wait_for_is_complete() -> None:
    """A parent's turn after a fan-out waits for itself and for both subagents."""
    root = Session("a", (turn(0), turn(1, Ref("a", 0), Ref("b", 1), Ref("c", 0)), turn(2, Ref("a", 1))))
    left = Session("b", (turn(0, Ref("a", 0)), turn(1, Ref("b", 0))), Ref("a", 0))
    right = Session("c", (turn(0, Ref("a", 0)),), Ref("a", 0))
    order = Order(Tree((root, left, right)))
    assert order.begin() == [Ref("a", 0)]
    assert order.complete(Ref("a", 0)) == [Ref("b", 0), Ref("c", 0)]
    assert order.complete(Ref("c", 0)) == []
    assert order.complete(Ref("b", 0)) == [Ref("b", 1)]
    assert order.complete(Ref("b", 1)) == [Ref("a", 1)]
    assert order.complete(Ref("a", 1)) == [Ref("a", 2)]
    assert order.complete(Ref("a", 2)) == []


def test_who_waits_for_turns_that_are_not_there_does_not_wait_for_them() -> None:
    root = Session("a", (turn(0), turn(1, Ref("a", 0), Ref("gone", 3))))
    order = Order(Tree((root,)))
    assert order.begin() == [Ref("a", 0)]
    assert order.complete(Ref("a", 0)) == [Ref("a", 1)]


def test_pauses_are_think_times_or_where_nothing_is_awaited_the_recorded_time() -> None:
    root = Session("a", (turn(0, at_s=100.0), turn(1, Ref("a", 0), think_s=4.0, at_s=130.0), turn(2, at_s=107.0)))
    order = Order(Tree((root,)))
    assert order.begin() == [Ref("a", 0), Ref("a", 2)]
    assert [order.pause_s(Ref("a", number)) for number in range(3)] == [0.0, 4.0, 7.0]
