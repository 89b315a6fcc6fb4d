"""One seed: played under every checker, told as a report, and made smaller where it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulations.checkers import Checker, all_checkers
from simulations.clock import NothingLeft, run
from simulations.faults import Fault, Kind
from simulations.seen import Breach
from simulations.world import Scenario, World
from simulations.world.play import Played

__all__ = ["Failure", "Report", "command", "kinds_told", "shrunk", "simulate"]


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke."""

    rule: str
    what: str
    at_s: float
    last: tuple[str, ...]
    """The events before it."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a seed."""

    scenario: Scenario
    rules: tuple[str, ...]
    cpu_s: float
    wall_s: float
    played: Played | None
    """None where it failed."""
    failure: Failure | None


def simulate(
    scenario: Scenario,
    *,
    checkers: Callable[[], Sequence[Checker]] = all_checkers,
    make: Callable[[Scenario, Sequence[Checker]], World] = World,
) -> Report:
    """Play a scenario to its end, or to the first breach. `make`: for tests of the checkers."""
    watching = checkers()
    worlds: list[World] = []

    async def main() -> Played:
        worlds.append(make(scenario, watching))
        return await worlds[0].play()

    began = os.times()
    played: Played | None = None
    failure: Failure | None = None
    try:
        played = run(main())
    except Breach as breach:
        failure = _failure(worlds[0], breach)
    except NothingLeft as error:
        failure = _failure(worlds[0], Breach("every turn ends", str(error)))
    ended = os.times()
    rules = tuple(checker.rule for checker in watching if checker.rule)
    return Report(scenario, rules, ended.user - began.user, ended.elapsed - began.elapsed, played, failure)


def _failure(world: World, breach: Breach) -> Failure:
    return Failure(breach.rule, breach.what, world.seen.at_s, tuple(world.seen.last()))


def shrunk(report: Report, tries: int) -> tuple[Report, frozenset[int]]:
    """The same failure with fewer faults, after at most so many runs; and the numbers of those that are left out.

    Drops halves, then quarters, and so on down to single faults, as long as the same rule still breaks.
    """
    failure = report.failure
    assert failure is not None
    schedule = report.scenario.faults
    kept = [number for number, fault in enumerate(schedule) if fault.at_s <= failure.at_s]
    best, size = report, max(len(kept) // 2, 1)
    while tries and kept:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            tries -= 1
            again = simulate(replace(report.scenario, faults=_chosen(schedule, fewer)))
            if again.failure is not None and again.failure.rule == failure.rule:
                best, kept = again, fewer
                break
            if not tries:
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
    return best, frozenset(range(len(schedule))) - frozenset(kept)


def _chosen(schedule: Sequence[Fault], numbers: Sequence[int]) -> tuple[Fault, ...]:
    return tuple(schedule[number] for number in numbers)


def command(scenario: Scenario, given: Sequence[str], drop: frozenset[int] = frozenset()) -> str:
    """What repeats a run."""
    options = [f"roost simulate --seed {scenario.seed}", *given]
    if drop:
        options.append(f"--drop {_ranges(sorted(drop))}")
    return " ".join(options)


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 as 0-2,5."""
    told: list[list[int]] = []
    for number in numbers:
        if told and told[-1][1] + 1 == number:
            told[-1][1] = number
        else:
            told.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in told)


def kinds_told(kinds: Sequence[Kind]) -> str:
    """As `--faults` takes them."""
    if set(kinds) == set(Kind):
        return "all"
    return ",".join(kinds) if kinds else "none"
