"""What `roost simulate` says: of a seed that held, and of one that did not."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import typer

from simulations.faults import Kind
from simulations.simulate import Report, command, kinds_told, shrunk, simulate
from simulations.world import Scenario, scenario_of

__all__ = ["Asked", "as_plain", "broken", "collect_rarely", "numbers", "one", "quiet"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line, checked."""

    kinds: tuple[Kind, ...]
    replicas: int | None = None
    routers: int | None = None
    turns: int | None = None
    drop: frozenset[int] = frozenset()

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed."""
        return scenario_of(
            seed,
            kinds=self.kinds,
            replicas=self.replicas,
            routers=self.routers,
            turns=self.turns,
            drop=self.drop,
        )

    def options(self) -> list[str]:
        """As they were given."""
        named = {"replicas": self.replicas, "routers": self.routers, "turns": self.turns}
        given = [f"--{name} {value}" for name, value in named.items() if value is not None]
        told = kinds_told(self.kinds)
        return given if told == "all" else [*given, f"--faults {told}"]


def numbers(text: str) -> frozenset[int]:
    """0-2,5 as 0, 1, 2 and 5. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def quiet() -> None:
    """Nobody reads what simulated routers log."""
    logging.getLogger("roost").setLevel(logging.CRITICAL)


def collect_rarely() -> None:
    """As the router's own process does: a turn makes hundreds of small objects and few cycles (a fifth of the time)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def one(asked: Asked, seed: int, *, shrink: int, verbose: bool) -> Report:
    """Play one seed and tell what came of it."""
    report = simulate(asked.scenario(seed))
    if verbose:
        for number, fault in enumerate(report.scenario.faults):
            typer.echo(f"  fault {number}: {fault}")
    if report.failure is not None:
        broken(asked, report, shrink=shrink)
    else:
        _held(report)
    return report


def _held(report: Report) -> None:
    played = report.played
    assert played is not None
    tally = played.tally
    happened = ", ".join(f"{name} {count}" for name, count in played.happened.items()) or "none"
    ends = ", ".join(f"{name} {count}" for name, count in sorted(tally.by_end.items()))
    rate = tally.turns / report.wall_s if report.wall_s else 0.0
    cpu_rate = tally.turns / report.cpu_s if report.cpu_s else 0.0
    typer.echo(f"seed {report.scenario.seed}: {len(report.rules)} invariants held after each of {played.events} events")
    typer.echo(
        f"  {report.scenario.replicas} replicas, {report.scenario.routers} routers, {played.virtual_s:.0f} s simulated"
    )
    typer.echo(f"  {tally.turns} turns in {tally.requests} requests: {ends}; {tally.given_up} given up")
    typer.echo(f"  faults: {happened}")
    typer.echo(f"  {rate:.0f} turns per wall second, {cpu_rate:.0f} per CPU second")
    typer.echo(f"  digest {played.digest}")


def broken(asked: Asked, report: Report, *, shrink: int) -> None:
    """Tell what broke, and how to see it again."""
    failure = report.failure
    assert failure is not None
    typer.echo(f"seed {report.scenario.seed}: BROKEN at {failure.at_s:.6f} s\n  {failure.rule}: {failure.what}")
    typer.echo("  the events before it:")
    for line in failure.last:
        typer.echo(f"    {line}")
    typer.echo(f"  again: {command(report.scenario, asked.options(), asked.drop)}")
    if not shrink or not report.scenario.faults or asked.drop:
        return
    smaller, left_out = shrunk(report, shrink)
    typer.echo(f"  {len(smaller.scenario.faults)} of {len(report.scenario.faults)} faults are enough:")
    for fault in smaller.scenario.faults:
        typer.echo(f"    {fault}")
    typer.echo(f"  again, smaller: {command(report.scenario, asked.options(), left_out)}")


def as_plain(report: Report) -> dict[str, Any]:
    """For `--json`."""
    played, failure = report.played, report.failure
    return {
        "seed": report.scenario.seed,
        "replicas": report.scenario.replicas,
        "routers": report.scenario.routers,
        "invariants": list(report.rules),
        "held": failure is None,
        "turns": None if played is None else played.tally.turns,
        "requests": None if played is None else played.tally.requests,
        "ends": None if played is None else played.tally.by_end,
        "events": None if played is None else played.events,
        "virtual_s": None if played is None else played.virtual_s,
        "wall_s": report.wall_s,
        "cpu_s": report.cpu_s,
        "digest": None if played is None else played.digest,
        "faults": None if played is None else played.happened,
        "broken": None if failure is None else {"rule": failure.rule, "what": failure.what, "at_s": failure.at_s},
    }
