"""What a client does when a replica fails is the same through Roost as without it.

Roost's own retries are off here, so that the client sees what the replica does.
"""

from __future__ import annotations

import pytest

from tests.harness import rules
from tests.harness.conftest import Runs
from tests.harness.rig import HARNESSES, Run

pytestmark = pytest.mark.timeout(300)

# The pauses are the clients' own timers, some with jitter, on a busy machine.
_TOLERANCE_S = 1.5


@pytest.fixture(params=[name for name in HARNESSES if name != "claude_tui"])
def pair(request: pytest.FixtureRequest, runs: Runs) -> tuple[Run, Run]:
    name: str = request.param
    return runs.faulty(name)


def test_every_fault_was_met(pair: tuple[Run, Run]) -> None:
    """Without the router the client meets each of the five faults, so that the comparison means something."""
    outcomes = [each.outcome for each in rules.attempts(pair[0].front)]
    assert {"429", "503", "broken", "unfinished", "whole"} <= set(outcomes)
    assert outcomes.count("broken") == 2


def test_attempts_and_pauses_are_the_same(pair: tuple[Run, Run]) -> None:
    """As many attempts, with the same outcomes and the same pauses between them."""
    direct, through = (rules.attempts(run.front) for run in pair)
    assert rules.retries_differ(direct, through, _TOLERANCE_S) == []


def test_the_client_ends_the_same(pair: tuple[Run, Run]) -> None:
    """The same exit status, and the task done or not done in the same way."""
    direct, through = pair
    assert through.result.rc == direct.result.rc
    done = [rules.broken_orders(run.harness.done[:1], run.printed) for run in pair]
    assert done[1] == done[0]
