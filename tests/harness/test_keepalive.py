"""Whether the CLIs bear the comments with which `streams.keepalive_s` fills a silence."""

from __future__ import annotations

import pytest

from tests.harness import rules
from tests.harness.conftest import KEEPALIVE_S, SILENCE_S, Runs
from tests.harness.rig import HARNESSES, Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=[name for name in HARNESSES if name != "claude_tui"])
def run(request: pytest.FixtureRequest, runs: Runs) -> Run:
    name: str = request.param
    return runs.silent(name)


def test_the_comments_came(run: Run) -> None:
    """Two streams have as many more blank lines at the client than at the replica as fit into their silence."""
    sent = {each.request.sha256: len(each.response.events) for each in run.back}
    more = [len(each.response.events) - sent.get(each.request.sha256, 0) for each in run.front]
    assert sorted(more)[-2:] >= [SILENCE_S // KEEPALIVE_S - 2] * 2


def test_the_task_is_done_in_one_go(run: Run) -> None:
    """No turn is repeated, none ends early, and what the first one asked for was done and told in the next."""
    assert run.result.rc == 0
    assert rules.errors(run.front) == []
    asked = [each.request.sha256 for each in run.front if each.method == "POST"]
    assert len(set(asked)) == len(asked)
    assert len(asked) >= 2
