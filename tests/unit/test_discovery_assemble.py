"""Putting rounds together: readiness, draining, new lives, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.discovery.assemble import Description, assemble, description_due, restart_sign, unreachable
from router.discovery.engine_json import Loads, ModelInfo, Models, ServerInfo
from router.discovery.engine_metrics import EngineMetrics
from router.discovery.observation import Engine, Failure, Observation, measured_prefill_rate

LOADS = Loads(
    understood=True,
    version="0.5.23",
    running=1,
    waiting=0,
    used_tokens=1360,
    waiting_uncached_tokens=0,
    device_tokens=20000,
    max_running=8,
    prefill_uncached_total=100_000,
    prefill_busy_us_total=5_000_000,
)


def described(incarnation: str | None = "A", **facts: object) -> Description:
    info = ServerInfo(understood=True, version="0.5.23", incarnation=incarnation, page_size=16, models=("tiny",))
    return Description(server_info=replace(info, **facts))  # type: ignore[arg-type] # facts vary by test


def first_round(ready: bool | None = True, loads: Loads = LOADS, incarnation: str | None = "A") -> Observation:
    return assemble(None, ready, loads, described(incarnation), describe_at_s=60.0)


def next_round(
    previous: Observation,
    ready: bool | None = True,
    loads: Loads = LOADS,
    description: Description | None = None,
) -> Observation:
    return assemble(previous, ready, loads, description, describe_at_s=60.0)


def test_a_ready_sglang_replica() -> None:
    observation = first_round()
    assert (observation.reachable, observation.ready, observation.draining) == (True, True, False)
    assert (observation.engine, observation.incarnation, observation.lives) == (Engine.SGLANG, "A", 0)
    assert (observation.device_tokens, observation.page_size, observation.models) == (20000, 16, ("tiny",))


def test_slow_facts_are_kept_between_descriptions_and_live_ones_renewed() -> None:
    observation = next_round(first_round(), loads=replace(LOADS, running=5))
    assert (observation.page_size, observation.incarnation, observation.running) == (16, "A", 5)


def test_a_count_that_is_no_longer_said_is_no_longer_known() -> None:
    observation = next_round(first_round(), loads=Loads(problems=("/v1/loads: timeout",)))
    assert (observation.running, observation.device_tokens) == (None, 20000)
    assert observation.problems == ("/v1/loads: timeout",)
    assert observation.engine is Engine.SGLANG


# --- readiness --------------------------------------------------------------------------------------------------------


def test_not_ready_before_ever_having_served_is_warming() -> None:
    warming = first_round(ready=False, loads=replace(LOADS, prefill_uncached_total=6))
    assert (warming.ready, warming.draining) == (False, False)


def test_not_ready_after_having_been_ready_in_this_life_is_draining_and_ready_again_ends_it() -> None:
    young = replace(LOADS, prefill_uncached_total=6)
    draining = next_round(first_round(loads=young), ready=False, loads=young)
    assert draining.draining
    assert not next_round(draining, ready=True, loads=young).draining


def test_a_router_that_first_meets_a_draining_replica_knows_it_by_what_it_has_prefilled() -> None:
    assert first_round(ready=False).draining


def test_a_new_life_that_warms_up_is_not_draining() -> None:
    warming = next_round(
        first_round(), ready=False, loads=replace(LOADS, prefill_uncached_total=0), description=described("B")
    )
    assert (warming.incarnation, warming.lives, warming.draining) == ("B", 1, False)


def test_what_is_not_sglang_is_not_said_to_be_ready() -> None:
    description = Description(models=Models(understood=True, models=("m",)))
    observation = assemble(None, True, Loads(), description, describe_at_s=60.0)
    assert (observation.engine, observation.ready, observation.reachable) == (Engine.OPENAI, None, True)


@pytest.mark.parametrize(
    ("description", "engine"),
    [
        (Description(), Engine.UNKNOWN),
        (Description(models=Models(understood=True)), Engine.OPENAI),
        (Description(models=Models(understood=True, sglang=True)), Engine.SGLANG),
        (Description(model_info=ModelInfo(understood=True)), Engine.SGLANG),
        (Description(server_info=ServerInfo(understood=True)), Engine.SGLANG),
        (Description(metrics=EngineMetrics(sglang=True)), Engine.SGLANG),
    ],
)
def test_which_engine(description: Description, engine: Engine) -> None:
    assert assemble(None, None, Loads(), description, describe_at_s=0.0).engine is engine


def test_an_engine_once_known_is_not_forgotten_when_nothing_answers_in_time() -> None:
    silent = Description(answered=False)
    assert next_round(first_round(), loads=Loads(), description=silent).engine is Engine.SGLANG


# --- lives ------------------------------------------------------------------------------------------------------------


def test_unreachable_keeps_what_was_known_but_not_what_only_a_living_engine_says() -> None:
    gone = unreachable(first_round(), Failure.TIMEOUT, ["/ready: timeout"])
    assert (gone.reachable, gone.failure, gone.ready, gone.running) == (False, Failure.TIMEOUT, None, None)
    assert (gone.incarnation, gone.device_tokens, gone.prefill_uncached_total) == ("A", 20000, 100_000)


def test_only_a_refused_connection_speaks_for_a_new_life() -> None:
    for failure in Failure:
        gone = unreachable(first_round(), failure, [])
        assert restart_sign(gone, LOADS) == (failure is Failure.REFUSED)
    refused_then_silent = unreachable(unreachable(first_round(), Failure.REFUSED, []), Failure.TIMEOUT, [])
    assert restart_sign(refused_then_silent, LOADS)


def test_a_counter_that_went_down_speaks_for_a_new_life_and_is_looked_into_at_once() -> None:
    previous = first_round()
    fell = replace(LOADS, prefill_uncached_total=99_999)
    assert restart_sign(previous, fell)
    assert description_due(previous, True, restarted=True, now_s=0.0)
    assert not restart_sign(previous, LOADS)
    assert not restart_sign(previous, replace(fell, dp_ranks=2)), "sums over different ranks are not comparable"


def test_the_same_incarnation_refutes_a_suspected_restart() -> None:
    gone = unreachable(first_round(), Failure.REFUSED, [])
    back = next_round(gone, description=described("A"))
    assert (back.incarnation, back.lives, back.was_ready, back.restart_suspected) == ("A", 0, True, False)


def test_a_restart_that_no_fact_names_is_counted_once() -> None:
    gone = unreachable(first_round(incarnation=None), Failure.REFUSED, [])
    back = next_round(gone, description=described(None))
    assert (back.incarnation, back.lives) == (None, 1)
    assert next_round(back, description=described(None)).lives == 1


def test_a_restart_whose_name_comes_a_round_later_is_counted_once() -> None:
    gone = unreachable(first_round(), Failure.REFUSED, [])
    unnamed = next_round(gone, description=Description(answered=False))
    assert (unnamed.incarnation, unnamed.lives) == (None, 1)
    named = next_round(unnamed, description=described("B"))
    assert (named.incarnation, named.lives) == ("B", 1)


def test_other_servers_are_told_apart_by_their_process_start() -> None:
    def at(start_s: float) -> Observation:
        description = Description(metrics=EngineMetrics(process_start_s=start_s))
        return assemble(None, None, Loads(), description, describe_at_s=0.0)

    assert at(1.5).incarnation == at(1.5).incarnation != at(2.5).incarnation


@pytest.mark.parametrize(
    ("ready", "was_ready", "now_s", "due"),
    [(True, True, 59.0, False), (True, True, 60.0, True), (True, False, 0.0, True), (False, False, 0.0, False)],
)
def test_when_the_slow_facts_are_due(ready: bool, was_ready: bool, now_s: float, due: bool) -> None:
    previous = replace(first_round(), was_ready=was_ready)
    assert description_due(previous, ready, restarted=False, now_s=now_s) == due
    assert description_due(None, ready, restarted=False, now_s=now_s)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_prefill_rate_is_tokens_over_busy_time() -> None:
    before = first_round()
    after = next_round(before, loads=replace(LOADS, prefill_uncached_total=120_000, prefill_busy_us_total=6_000_000))
    assert measured_prefill_rate(before, after) == 20_000.0


def test_no_prefill_rate_across_lives_or_without_work() -> None:
    before = first_round()
    assert measured_prefill_rate(before, next_round(before)) is None
    later = replace(LOADS, prefill_uncached_total=120_000, prefill_busy_us_total=6_000_000)
    assert measured_prefill_rate(before, next_round(before, loads=later, description=described("B"))) is None
    assert measured_prefill_rate(before, Observation()) is None
