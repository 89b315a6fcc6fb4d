"""The replica model by example: who runs when, what is cached, how long it takes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from simulations import profiles
from simulations.replica_model import (
    Aborted,
    Event,
    Finished,
    FirstToken,
    Refused,
    ReplicaModel,
    ReplicaProfile,
    Request,
    Retracted,
    Started,
    faster,
    keys_of_bytes,
    keys_of_ids,
)
from simulations.replica_model.timing import prefill_s, span_s, steps_until

PAGE = 10
PROFILE = ReplicaProfile(
    name="plain",
    model="m",
    page_tokens=PAGE,
    device_tokens=1000,
    context_tokens=10_000,
    max_running=4,
    chunk_tokens=100,
    prefill_tokens_per_s=100.0,
    prefill_depth_tokens=1e12,
    prefill_base_s=0.0,
    decode_base_s=0.1,
    decode_per_sequence_s=0.0,
    decode_per_kv_token_s=0.0,
)
"""Ten milliseconds a prompt token, a tenth of a second a step, whatever else."""


def request(rid: str, prompt: int, output: int = 1, *, story: str = "", **more: int) -> Request:
    """Prompts of one story extend one another; without a story, nobody else's."""
    pages = keys_of_bytes(f"{(story or rid):>8}".encode() * (prompt + output), 8 * PAGE)
    more.setdefault("max_tokens", output)
    return Request(rid, pages[: (prompt + output) // PAGE], prompt, output, **more)


def run(model: ReplicaModel) -> list[Event]:
    """All that happens until nothing does."""
    found = []
    while (at_s := model.next_event_s()) < float("inf"):
        found += model.advance(at_s)
    return found


def finished(events: list[Event]) -> dict[str, Finished]:
    return {event.rid: event for event in events if isinstance(event, Finished)}


def test_a_lone_turn_takes_its_prefill_and_its_steps() -> None:
    model = ReplicaModel(PROFILE)
    model.submit(1.0, request("a", 50, 11))
    started, first, end = run(model)
    assert started == Started("a", 1.0, 0, 0)
    assert isinstance(first, FirstToken)
    assert first.at_s == pytest.approx(1.5)
    assert isinstance(end, Finished)
    assert end.at_s == pytest.approx(2.5)
    assert end.output_tokens == 11


def test_a_turn_finds_the_pages_of_the_one_before_and_of_its_answer() -> None:
    """All whole pages of prompt and output but the last token; the prompt's own last token is always computed."""
    model = ReplicaModel(PROFILE)
    model.submit(0, request("a", 50, 11, story="s"))
    run(model)
    model.submit(10, request("b", 95, 1, story="s"))
    assert finished(run(model))["b"].device_tokens == 60
    model.submit(20, request("c", 90, 1, story="s"))
    assert finished(run(model))["c"].device_tokens == 80


def test_what_has_no_key_is_not_kept() -> None:
    model = ReplicaModel(PROFILE)
    for at_s, rid in enumerate("ab"):
        model.submit(10 * at_s, replace(request(rid, 50, 1, story="s"), pages=request(rid, 30, story="s").pages))
        run(model)
    assert model.snapshot(99).counters.cached_device_tokens == 30
    assert model.snapshot(99).evictable_tokens == 30


def test_first_come_first_served_and_a_long_prompt_goes_in_chunks() -> None:
    """A later short prompt waits for the long one's chunks to leave room in a pass."""
    model = ReplicaModel(PROFILE)
    model.submit(0, request("long", 250))
    model.submit(0, request("short", 10))
    events = run(model)
    firsts = {event.rid: event.at_s for event in events if isinstance(event, FirstToken)}
    assert firsts == {"long": pytest.approx(2.6), "short": pytest.approx(2.6)}


def test_prefill_stalls_decode_unless_steps_are_owed() -> None:
    """Waiting prompts go first; --prefill-decode-interval gives the running turns steps between."""
    said = {}
    for owed in (0, 3):
        model = ReplicaModel(replace(PROFILE, decode_steps_between_prefills=owed))
        model.submit(0, request("a", 10, 100))
        model.submit(0.5, request("b", 300))
        events: list[Event] = []
        while FirstToken not in {type(event) for event in events if event.rid == "b"}:
            events += model.advance(model.next_event_s())
        said[owed] = dict(model.progress(events[-1].at_s))["a"]
    assert said[3] == said[0] + 6


def test_a_full_batch_makes_others_wait_and_a_full_queue_refuses() -> None:
    model = ReplicaModel(replace(PROFILE, max_running=1, max_queued=1))
    for rid in "abc":
        model.submit(0, request(rid, 10, 5))
    events = run(model)
    assert [event.rid for event in events if isinstance(event, Started)] == ["a", "b"]
    assert Refused("c", 0, "queue_full") in events
    assert finished(events).keys() == {"a", "b"}


def test_a_higher_priority_goes_first_and_displaces_the_least_of_a_full_queue() -> None:
    model = ReplicaModel(replace(PROFILE, max_running=1, max_queued=2, priority_scheduling=True))
    for rid, priority in (("run", 0), ("low", 1), ("mid", 2), ("high", 3), ("least", 0)):
        model.submit(0, request(rid, 10, 5, priority=priority))
    events = run(model)
    assert [event for event in events if isinstance(event, Refused)] == [
        Refused("low", 0, "displaced"),
        Refused("least", 0, "queue_full"),
    ]
    assert [event.rid for event in events if isinstance(event, Started)] == ["run", "high", "mid"]


def test_a_prompt_that_can_never_fit_is_refused_and_an_output_is_cut_to_what_fits() -> None:
    model = ReplicaModel(PROFILE)
    model.submit(0, request("huge", 995))
    model.submit(0, request("long", 900, 500))
    events = run(model)
    assert Refused("huge", 0, "too_long") in events
    assert finished(events)["long"].output_tokens == 90


def test_the_least_recently_used_goes_first() -> None:
    model = ReplicaModel(PROFILE)
    for at_s, rid in enumerate(("old", "new", "old again")):
        model.submit(10 * at_s, request(rid, 350, story=rid[:3]))
        run(model)
    model.submit(100, request("big", 400))
    run(model)
    found = {}
    for at_s, story in enumerate(("old", "new")):
        model.submit(200 + 10 * at_s, request(f"{story} asks", 350, story=story))
        found[story] = finished(run(model))[f"{story} asks"].device_tokens
    assert found["old"] == 340
    assert found["new"] < 340


def test_pages_of_a_running_turn_are_not_evicted() -> None:
    model = ReplicaModel(PROFILE)
    model.submit(0, request("runs", 400, 300, story="s", max_tokens=300))
    model.advance(10)
    model.submit(10, request("other", 250, max_tokens=1))
    model.submit(11, request("third", 200, max_tokens=1))
    model.advance(20)
    model.submit(20, request("fork", 400, story="s", max_tokens=1))
    assert finished(run(model))["fork"].device_tokens == 390


def test_what_leaves_the_device_comes_back_from_the_host() -> None:
    """Written through, loaded in its own time, counted as host."""
    model = ReplicaModel(replace(PROFILE, host_tokens=5000, host_load_tokens_per_s=100.0))
    for at_s, story in enumerate(("s", "t", "u")):
        model.submit(20 * at_s, request(f"1{story}", 500, story=story))
        run(model)
    model.submit(100, request("2", 511, story="s"))
    events = run(model)
    end = finished(events)["2"]
    assert (end.device_tokens, end.host_tokens) == (0, 500)
    assert end.at_s == pytest.approx(105.0)
    counters = model.snapshot(200).counters
    assert counters.loaded_tokens == 500
    assert counters.backed_up_tokens == 1510


def test_a_full_host_keeps_what_was_used_last() -> None:
    model = ReplicaModel(replace(PROFILE, host_tokens=600))
    for at_s, story in enumerate(("s", "t", "u")):
        model.submit(20 * at_s, request(f"1{story}", 500, story=story))
        run(model)
    model.submit(100, request("again", 500, story="s"))
    end = finished(run(model))["again"]
    assert end.host_tokens + end.device_tokens == 0


def test_the_turn_that_has_said_least_is_retracted_and_loses_nothing() -> None:
    """After a long quiet time two turns are let in on the hope that they stop early; they do not."""
    model = ReplicaModel(PROFILE)
    model.submit(0, request("quiet", 10, 700, max_tokens=700))
    run(model)
    model.submit(100, request("a", 300, 400, max_tokens=400))
    model.submit(106, request("b", 200, 400, max_tokens=400))
    events = run(model)
    assert [event.rid for event in events if isinstance(event, Retracted)] == ["b"]
    ends = finished(events)
    assert (ends["a"].output_tokens, ends["b"].output_tokens) == (400, 400)
    assert ends["b"].retractions == 1
    assert model.snapshot(1e9).counters.retractions == 1


def test_aborted_turns_end_with_what_they_had_said() -> None:
    """Waiting ones at once, running ones with their step; ids match by their beginning."""
    model = ReplicaModel(replace(PROFILE, max_running=1))
    for rid in ("x-1", "x-2", "y"):
        model.submit(0, request(rid, 10, 50))
    model.advance(1.0)
    assert model.abort(1.05, "x-") == 2
    events = run(model)
    waiting, running = (event for event in events if isinstance(event, Aborted))
    assert waiting == Aborted("x-2", 1.05, 0)
    assert (running.rid, running.output_tokens) == ("x-1", 11)
    assert running.at_s == pytest.approx(1.1)
    assert finished(events).keys() == {"y"}


def test_speculation_brings_several_tokens_a_step() -> None:
    model = ReplicaModel(replace(PROFILE, accept_length=2.5))
    model.submit(0, request("a", 10, 11))
    assert finished(run(model))["a"].at_s == pytest.approx(0.1 + 4 * 0.1)


def test_turns_differ_by_seed_and_id_alone() -> None:
    profile = replace(PROFILE, accept_length=3.0, accept_spread=0.5)
    times = {}
    for seed in (1, 2):
        for rid in ("a", "b"):
            model = ReplicaModel(profile, seed)
            model.submit(0, request(rid, 10, 300))
            times[seed, rid] = finished(run(model))[rid].at_s
    assert len(set(times.values())) == 4


def test_a_flush_empties_an_idle_replica_only() -> None:
    model = ReplicaModel(PROFILE)
    model.submit(0, request("a", 50, 5))
    assert not model.flush(0.1)
    run(model)
    assert model.snapshot(9).evictable_tokens == 50
    assert model.flush(9)
    assert model.snapshot(9).free_tokens == PROFILE.device_tokens


def test_closed_forms_agree_with_step_by_step_sums() -> None:
    step_s, growth_s = 0.012, 0.0003
    total = 0.0
    for steps in range(50):
        assert span_s(step_s, growth_s, steps) == pytest.approx(total)
        assert steps_until(step_s, growth_s, total + 1e-9) == steps
        assert steps_until(step_s, growth_s, total + step_s / 2) == steps
        total += step_s + growth_s * steps
    profile = replace(PROFILE, prefill_depth_tokens=1000.0)
    single = sum(prefill_s(profile, 1, depth) for depth in range(200, 700))
    assert prefill_s(profile, 500, 200) == pytest.approx(single)


def test_faster_is_the_same_life_in_less_time() -> None:
    base = replace(PROFILE, prefill_base_s=0.02, decode_per_sequence_s=0.01, decode_per_kv_token_s=1e-5)
    ends = []
    for factor in (1, 8):
        model = ReplicaModel(faster(base, factor))
        for index, rid in enumerate("abc"):
            model.submit(index / factor, request(rid, 70, 30))
        ends.append({rid: end.at_s * factor for rid, end in finished(run(model)).items()})
    assert ends[1] == pytest.approx(ends[0])


def test_page_keys_are_chained() -> None:
    """Equal up to where the tokens are, and different ever after."""
    one, other = keys_of_ids([1, 2, 3, 4, 5, 6, 7], 2), keys_of_ids([1, 2, 3, 9, 5, 6], 2)
    assert len(one) == 3
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]
    assert keys_of_ids([1, 2], 2, seed=1) != keys_of_ids([1, 2], 2)
    assert keys_of_ids([1, 2, 3], 2) == keys_of_bytes(array("I", [1, 2, 3]).tobytes(), 8)


@pytest.mark.parametrize("name", profiles.names())
def test_every_figure_of_a_profile_has_a_source(name: str) -> None:
    profile = profiles.load(name)
    sources = profiles.sources(name)
    assert {"device_tokens", "prefill_tokens_per_s", "decode_base_s", "page_tokens"} <= sources.keys()
    model = ReplicaModel(profile)
    model.submit(0, Request("a", (), 1000, 100))
    end = finished(run(model))["a"]
    assert 0 < end.at_s < 60


def test_unknown_and_contradictory_profiles_are_refused() -> None:
    with pytest.raises(profiles.UnknownProfile, match="cpu-tiny"):
        profiles.load("nothing")
    with pytest.raises(ValueError, match="whole pages"):
        profiles.load("cpu-tiny", device_tokens=10_001)
