"""Metrics: one event, counted once, in labels that cannot grow without bound."""

from __future__ import annotations

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from router.domain.decision import Reason
from router.domain.outcome import End, Outcome, Usage
from router.telemetry.events import FleetSeen, TurnFinished, TurnRefused, TurnStarted, TurnWaited, TurnWaiting
from router.telemetry.metrics import Metrics

DONE = TurnFinished(
    turn="t",
    fleet="f",
    replica="r",
    dialect="chat",
    policy="roost",
    reason=Reason.HOME,
    session="s" * 24,
    session_source="x-session-id",
    branch="b" * 32,
    outcome=Outcome(End.COMPLETE, 200, Usage(100, 90, 7), ttft_s=0.2, duration_s=1.5, streamed=True),
    prompt_tokens=100,
    predicted_cached_tokens=80,
    place_s=0.002,
    attempt=1,
    blind=False,
)


def read(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_turn_is_in_flight_from_its_start_to_its_end() -> None:
    metrics = Metrics()
    key = ("roost_in_flight", (("replica", "r"),))
    for count in (1, 2):
        metrics.emit(TurnStarted("t", "f", "r"))
        assert read(metrics)[key] == count
    for count in (1, 0):
        metrics.emit(DONE)
        assert read(metrics)[key] == count


def test_a_finished_turn_is_counted_once_everywhere() -> None:
    metrics = Metrics()
    metrics.emit(TurnStarted("t", "f", "r"))
    metrics.emit(DONE)
    found = read(metrics)
    labels = (("dialect", "chat"), ("end", "complete"), ("fleet", "f"), ("reason", "home"), ("replica", "r"))
    here = (("fleet", "f"), ("replica", "r"))
    assert found["roost_turns_total", labels] == 1
    assert found["roost_prompt_tokens_total", here] == 100
    assert found["roost_cached_tokens_total", here] == 90
    assert found["roost_predicted_cached_tokens_total", here] == 80
    assert found["roost_output_tokens_total", here] == 7
    assert found["roost_turn_ttft_seconds_count", (("fleet", "f"),)] == 1
    assert found["roost_turn_duration_seconds_sum", (("fleet", "f"),)] == 1.5
    assert found["roost_turns_by_session_source_total", (("source", "x-session-id"),)] == 1
    assert not [name for name, _ in found if name == "roost_retries_total"]


def test_what_the_engine_did_not_say_is_not_counted() -> None:
    """No usage: no tokens, and no prediction to compare with them; no first output: no time to it."""
    metrics = Metrics()
    silent = dataclasses.replace(DONE, outcome=Outcome(End.CLIENT_GONE, 200), attempt=2, blind=True)
    metrics.emit(TurnStarted("t", "f", "r"))
    metrics.emit(silent)
    found = read(metrics)
    assert not [name for name, _ in found if "tokens_total" in name]
    assert not [name for name, _ in found if name.startswith("roost_turn_ttft_seconds_")]
    assert found["roost_retries_total", (("fleet", "f"),)] == 1
    assert found["roost_blind_turns_total", (("fleet", "f"),)] == 1


def test_a_refusal_is_counted_by_dialect_and_code() -> None:
    metrics = Metrics()
    metrics.emit(TurnRefused("", "messages", "invalid_request"))
    key = ("roost_requests_refused_total", (("code", "invalid_request"), ("dialect", "messages")))
    assert read(metrics)[key] == 1


def test_who_waits_is_counted_until_it_waits_no_more() -> None:
    metrics = Metrics()
    metrics.emit(TurnWaiting("t1", "f"))
    metrics.emit(TurnWaiting("t2", "f"))
    waiting = ("roost_waiting", (("fleet", "f"),))
    assert read(metrics)[waiting] == 2
    metrics.emit(TurnWaited("t1", "f", 3.0, admitted=True))
    metrics.emit(TurnWaited("t2", "f", 30.0, admitted=False))
    metrics.emit(FleetSeen("f", 0.25))
    found = read(metrics)
    assert found[waiting] == 0
    assert found["roost_wait_seconds_sum", (("fleet", "f"), ("result", "admitted"))] == 3.0
    assert found["roost_wait_seconds_sum", (("fleet", "f"), ("result", "not_admitted"))] == 30.0
    assert found["roost_kv_live_share", (("fleet", "f"),)] == 0.25


def test_the_store_is_up_or_not() -> None:
    metrics = Metrics()
    for up in (True, False, True):
        metrics.store(up)
        assert read(metrics)["roost_store_up", ()] == float(up)


def test_no_label_tells_of_a_session_branch_or_turn() -> None:
    metrics = Metrics()
    metrics.emit(TurnStarted("t", "f", "r"))
    metrics.emit(DONE)
    text = metrics.render().decode()
    assert "sss" not in text
    assert "bbb" not in text


def test_every_family_says_what_it_is() -> None:
    metrics = Metrics()
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert families
    assert all(family.name.startswith("roost_") and family.documentation for family in families)


def test_two_processes_metrics_are_apart() -> None:
    one, two = Metrics(), Metrics()
    one.emit(TurnStarted("t", "f", "r"))
    assert ("roost_in_flight", (("replica", "r"),)) not in read(two)
