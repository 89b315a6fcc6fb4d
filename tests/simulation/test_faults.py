"""Schedules of faults: drawn from a seed, made smaller by dropping, and repeated by a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations import simulate_told
from simulations.faults import Fault, Kind, drawn, kinds_of
from simulations.simulate import command, shrunk, simulate
from simulations.simulate_cli import simulate_app
from simulations.simulate_told import Asked, numbers
from simulations.world import scenario_of
from simulations.world.storage import SharedStore
from tests.simulation.test_checkers import CALM, faulty

REPLICAS = tuple(f"r{number}" for number in range(6))


def test_the_same_seed_draws_the_same_schedule() -> None:
    def faults(seed: int) -> tuple[Fault, ...]:
        return drawn(seed, tuple(Kind), replicas=REPLICAS, routers=("a", "b"), until_s=1000.0, mean_gap_s=5.0)

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_half_of_the_fleet_is_left_standing() -> None:
    """Else nothing could be asked of it."""
    out = {Kind.CRASH, Kind.HANG, Kind.REFUSE, Kind.FULL, Kind.DRAIN, Kind.CORDON}
    for seed in range(50):
        faults = drawn(seed, tuple(Kind), replicas=REPLICAS, routers=("a",), until_s=1000.0, mean_gap_s=3.0)
        for fault in faults:
            gone = {each.subject for each in faults if each.kind is Kind.DRAIN and each.at_s <= fault.at_s}
            gone |= {
                each.subject for each in faults if each.kind in out and each.at_s <= fault.at_s < each.at_s + each.for_s
            }
            assert len(gone) <= len(REPLICAS) // 2


def test_kinds_by_name() -> None:
    assert kinds_of("none") == ()
    assert kinds_of("crash, store_cut") == (Kind.CRASH, Kind.STORE_CUT)
    assert set(kinds_of("all")) == set(Kind)
    with pytest.raises(ValueError, match="crush"):
        kinds_of("crush")


def test_dropped_faults_leave_the_others_as_they_were() -> None:
    whole = scenario_of(22).faults
    fewer = scenario_of(22, drop=numbers("0-2,4")).faults
    assert fewer == (whole[3], *whole[5:])


def test_a_failing_schedule_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven faults the one that matters is left, and the command that repeats it names the others."""
    monkeypatch.setattr(SharedStore, "flush", lambda _: None)  # the world says it was emptied, and it was not
    others = [Fault(6.0 + number, Kind.RESET, "r0") for number in range(6)]
    report = simulate(faulty(*others[:4], Fault(12.0, Kind.STORE_FLUSH), *others[4:]))
    assert report.failure is not None
    smaller, left_out = shrunk(report, 30)
    assert [fault.kind for fault in smaller.scenario.faults] == [Kind.STORE_FLUSH]
    told = command(report.scenario, Asked(tuple(Kind)).options(), left_out)
    assert told == f"roost simulate --seed {CALM.seed} --drop 0-3,5-6"


def test_the_command_tells_and_writes_what_came_of_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 0 where every rule held."""
    for once_and_for_all in ("quiet", "collect_rarely"):  # of a process, and this one goes on with other tests
        monkeypatch.setattr(simulate_told, once_and_for_all, lambda: None)
    file = tmp_path / "out.json"
    done = CliRunner().invoke(
        simulate_app, ["--seed", "3", "--turns", "20", "--faults", "none", "--json", str(file)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["held"]
    assert written["turns"] == 20
    assert written["digest"] in done.output


def test_a_wrong_command_is_refused() -> None:
    assert CliRunner().invoke(simulate_app, ["--faults", "flood"]).exit_code == 2
