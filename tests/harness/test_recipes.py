"""The real CLIs do their whole task through Roost before three mocks, recipes unchanged but for the base URL."""

from __future__ import annotations

import pytest

from tests.harness import rules
from tests.harness.conftest import Runs
from tests.harness.rig import HARNESSES, Run
from tests.harness.wire import End

# A run takes up to a minute on two cores, and the first test of each harness makes it.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=list(HARNESSES))
def run(request: pytest.FixtureRequest, runs: Runs) -> Run:
    name: str = request.param
    return runs.whole(name)


@pytest.fixture(params=["codex", "claude", "kimicode"])
def compacted(request: pytest.FixtureRequest, runs: Runs) -> Run:
    """A run in which the harness compacts its context on the way."""
    name: str = request.param
    return runs.compacted(name)


def test_the_task_is_done(run: Run) -> None:
    """The recipe ends well and prints what it prints when the task is done; the model gave its last word as often."""
    assert run.result.rc == 0
    assert rules.broken_orders(run.harness.done, run.printed) == []
    assert sum(turn.last_word for turn in run.turns) >= run.harness.finished_turns


def test_no_error_in_between(run: Run) -> None:
    """Every model request gets a 200 that is whole, or that the client leaves after its last event."""
    assert rules.errors(run.front) == []


def test_bodies_are_equal_at_both_ends(run: Run) -> None:
    """Every body is the same, by SHA-256, at the client and at the replica; none is lost or doubled."""
    assert rules.unequal_bodies(run.front, run.back) == []


def test_a_branch_stays_on_one_replica(run: Run) -> None:
    """Every turn of a branch is served by one replica: the main one, resumed and compacted too, and each subagent's."""
    turns = rules.labelled(run.harness.name, run.turns)
    assert any(turn.kind == "main" for turn in turns)
    assert rules.moves(turns) == {}


def test_subagents_that_run_at_once_are_spread(run: Run) -> None:
    """Subagents whose first turns overlap are on different replicas, with three of them and the main branch waiting."""
    at_once, together = rules.crowded_subagents(rules.labelled(run.harness.name, run.turns))
    assert at_once >= 1, "no two subagents ran at once, so the rule was not tried"
    assert together == []


@pytest.mark.parametrize("name", ["codex", "opencode", "kimicode", "qwen"])
def test_the_harness_own_ids_are_enough(name: str, runs: Runs) -> None:
    """Without the header that the recipes configure: by the harness's own ids, or none at all (Qwen Code)."""
    run = runs.unnamed(name)
    assert rules.errors(run.front) == []
    turns = rules.labelled(name, run.turns)
    assert rules.moves(turns) == {}
    assert rules.crowded_subagents(turns)[1] == []


def test_compaction_stays_too(compacted: Run) -> None:
    """The request that compacts a context goes where the branch is; what follows is a new branch and stays too.

    (Codex compacts without its tools, which is another prompt from the start: that request may go anywhere.)
    """
    # Codex may end with its subagents still running, and so leave their answers.
    assert [each for each in compacted.front if each.status not in (None, 200) or each.end is End.BROKEN] == []
    assert rules.unequal_bodies(compacted.front, compacted.back) == []
    turns = rules.labelled(compacted.harness.name, compacted.turns)
    assert sum(turn.kind == "main" for turn in turns) >= 3
    assert rules.moves(turns) == {}


@pytest.mark.parametrize("name", ["claude", "kimicode"])
def test_a_compacted_context_goes_on_where_it_was(name: str, runs: Runs) -> None:
    """Tools and system prompt are still cached there, and the old branch's place is free.

    (When Codex goes on, a subagent is in its prefill at home, so another replica may well be cheaper.)
    """
    run = runs.compacted(name)
    mains = [turn for turn in rules.labelled(name, run.turns) if turn.kind == "main"]
    assert len(mains) >= 3
    assert len({turn.mock for turn in mains}) == 1
