"""A fixed list of seeds, each a fleet with faults of its own, in which every invariant holds after every event.

`make sim-fuzz` draws others; one that fails is fixed, and comes here if no smaller test tells what it found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulations.faults import Kind
from simulations.simulate import command, simulate
from simulations.world import scenario_of

ROOT = Path(__file__).parents[2]

SEEDS = (4, 8, 9, 10, 12, 15, 16, 20, 22, 24, 52, 59, 119, 1017)
"""Between them they have every kind of fault."""
TURNS = 150
"""Of each; a second of one slow core."""


@pytest.mark.parametrize("seed", SEEDS)
def test_every_invariant_holds(seed: int) -> None:
    scenario = scenario_of(seed, turns=TURNS)
    report = simulate(scenario)
    assert report.failure is None, f"{report.failure}\n{command(scenario, [f'--turns {TURNS}'])}"


def test_the_seeds_have_every_kind_of_fault() -> None:
    """Else the list would promise more than it does."""
    kinds = {fault.kind for seed in SEEDS for fault in scenario_of(seed).faults if fault.at_s < 60.0}
    assert kinds == set(Kind)


def test_without_faults_every_turn_is_answered() -> None:
    """Nobody but clients that leave ends a turn early."""
    report = simulate(scenario_of(27, kinds=(), turns=TURNS))
    assert report.failure is None
    assert report.played is not None
    assert report.played.tally.by_end.keys() <= {"complete", "left"}


def test_real_requests_hold_the_same_rules() -> None:
    """Bodies as clients send them, read by the router's own `Identity`."""
    seed = next(seed for seed in range(100) if scenario_of(seed).real_requests)
    assert simulate(scenario_of(seed, turns=60)).failure is None


def _digest(seed: int, hash_seed: str) -> str:
    code = (
        "import sys; from simulations.simulate import simulate; from simulations.world import scenario_of; "
        f"report = simulate(scenario_of({seed}, turns=120)); print(report.played.digest, report.played.events)"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout.strip()


def test_one_seed_gives_one_run() -> None:
    """To the byte, in one process and in others, whatever their hashes."""
    scenario = scenario_of(22, turns=120)
    first, second = simulate(scenario).played, simulate(scenario).played
    assert first is not None
    assert second is not None
    assert first.digest == second.digest
    told = f"{first.digest} {first.events}"
    assert [_digest(22, "1"), _digest(22, "2")] == [told, told]


def test_other_seeds_give_other_runs() -> None:
    digests = set()
    for seed in (4, 8):
        played = simulate(scenario_of(seed, turns=30)).played
        assert played is not None
        digests.add(played.digest)
    assert len(digests) == 2
