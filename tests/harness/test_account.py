"""What Roost says of a run, in answers, metrics, decisions and logs, is what the taps saw, and gives nothing away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import rules
from tests.harness.conftest import Runs
from tests.harness.rig import HARNESSES, Run
from tests.harness.stage import BACK_PORTS
from tests.harness.wire import Exchange

pytestmark = pytest.mark.timeout(300)

_PROMPTS = ("MAINTASK", "SUBAGENT-")
_ID_HEADERS = ("modal-session-id", "session-id", "thread-id", "x-claude-code-session-id", "x-session-id")


@pytest.fixture(params=list(HARNESSES))
def run(request: pytest.FixtureRequest, runs: Runs) -> Run:
    if runs.rig.router:
        pytest.skip("another router keeps other accounts")
    name: str = request.param
    return runs.whole(name)


def posts(exchanges: list[Exchange]) -> list[Exchange]:
    return [each for each in exchanges if each.method == "POST"]


def decisions(run: Run) -> list[dict[str, Any]]:
    """Newest first."""
    found: list[dict[str, Any]] = json.loads(run.result.admin["/admin/decisions"])["decisions"]
    return found


def samples(run: Run, metric: str) -> Iterator[tuple[str, float]]:
    """Labels and value of each sample of a metric."""
    for line in run.result.admin["/metrics"].splitlines():
        if line.startswith(metric + "{"):
            labels, value = line.removeprefix(metric).rsplit(" ", 1)
            yield labels, float(value)


def test_every_turn_is_settled_as_complete(run: Run) -> None:
    """As many turns as the client sent, all complete and none in flight, in metrics and decisions alike."""
    count = len(posts(run.front))
    turns = list(samples(run, "roost_turns_total"))
    assert [labels for labels, _ in turns if 'end="complete"' not in labels] == []
    assert sum(value for _, value in turns) == count
    assert [each["came_true"]["end"] for each in decisions(run)] == ["complete"] * count
    assert [labels for labels, value in samples(run, "roost_in_flight") if value] == []


def test_leaving_after_the_last_event_is_a_success(runs: Runs) -> None:
    """Codex closes after `response.completed`, before the body's end: a complete turn, with its usage."""
    if runs.rig.router:
        pytest.skip("another router keeps other accounts")
    run = runs.whole("codex")
    left = [each for each in posts(run.front) if each.client_left_s is not None]
    assert left, "Codex left no answer early, so the rule was not tried"
    assert all(each.response.terminal for each in left)
    came_true = [each["came_true"] for each in decisions(run)]
    assert {each["end"] for each in came_true} == {"complete"}
    assert all(each["output_tokens"] for each in came_true)


def test_answers_say_where_a_turn_went(run: Run) -> None:
    """`x-roost-replica` names the replica whose tap saw the request, and there is a reason."""
    went = {each.request.sha256: BACK_PORTS[int(each.tap.removeprefix("mock")) - 1] for each in posts(run.back)}
    for each in posts(run.front):
        assert each.response_headers["x-roost-replica"].endswith(f":{went[each.request.sha256]}")
        assert each.response_headers["x-roost-reason"]


def test_one_session_is_one_session(run: Run) -> None:
    """All turns of a run, subagents and a resume in a new process included, are one session to Roost."""
    named = {each.response_headers.get("x-roost-session") for each in posts(run.front)}
    mains = {turn.branch for turn in rules.labelled(run.harness.name, run.turns) if turn.kind == "main"}
    assert len(mains) == 1
    assert len(named) == 1


def test_nothing_private_is_said(run: Run) -> None:
    """No prompt and no id of the client is in the log or in anything the admin port says."""
    said = run.router_log + "".join(run.result.admin.values())
    ids = {turn.headers[name] for turn in run.turns for name in _ID_HEADERS if name in turn.headers}
    ids |= {turn.body["prompt_cache_key"] for turn in run.turns if "prompt_cache_key" in turn.body}
    assert [text for text in (*_PROMPTS, *ids) if text in said] == []


def test_one_line_a_turn(run: Run) -> None:
    """The log has one structured line for each turn."""
    lines = [json.loads(line) for line in run.router_log.splitlines()]
    assert sum(line["logger"] == "roost.turns" for line in lines) == len(posts(run.front))


def test_shutdown_is_clean(run: Run) -> None:
    """SIGTERM ends Roost with status 0."""
    assert run.result.router_rc == 0
