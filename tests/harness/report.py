"""The figures of a session: a table to read and JSON to keep. Neither holds a prompt or an id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.harness import rules
from tests.harness.rig import Run

__all__ = ["Figures", "figures", "table", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessFigures:
    """One run through the router."""

    harness: str
    exchanges: int
    branches: int
    moved: int
    """Branches that were on more than one replica."""
    at_once: int
    """Pairs of subagents that began at the same time."""
    together: int
    """Of those, pairs on one replica."""
    errors: int
    unequal_bodies: int
    early_closes: int
    """Exchanges that the client left before the response was whole."""
    wall_s: float
    rc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryFigures:
    """Attempts without and with the router: outcome, and seconds to the next."""

    harness: str
    direct: list[tuple[str, float | None]]
    through: list[tuple[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Everything that was run."""

    through: dict[str, list[HarnessFigures]]
    """By kind of run."""
    retries: list[RetryFigures]


def figures(through: Mapping[str, Mapping[str, Run]], faulty: Mapping[str, tuple[Run, Run]]) -> Figures:
    """The figures of these runs, by harness."""
    return Figures(
        through={kind: [_of(name, run) for name, run in runs.items()] for kind, runs in through.items()},
        retries=[
            RetryFigures(harness=name, direct=_attempts(direct), through=_attempts(through))
            for name, (direct, through) in faulty.items()
        ],
    )


def _of(name: str, run: Run) -> HarnessFigures:
    turns = rules.labelled(name, run.turns)
    at_once, together = rules.crowded_subagents(turns)
    return HarnessFigures(
        harness=name,
        exchanges=len(run.front),
        branches=len({turn.branch for turn in turns if turn.kind != "side"}),
        moved=len(rules.moves(turns)),
        at_once=at_once,
        together=len(together),
        errors=len(rules.errors(run.front)),
        unequal_bodies=len(rules.unequal_bodies(run.front, run.back)),
        early_closes=sum(each.client_left_s is not None for each in run.front),
        wall_s=round(run.result.wall_s, 1),
        rc=run.result.rc,
    )


def _attempts(run: Run) -> list[tuple[str, float | None]]:
    return [
        (each.outcome, None if each.pause_s is None else round(each.pause_s, 1)) for each in rules.attempts(run.front)
    ]


def table(found: Figures) -> Iterator[str]:
    """Lines to print."""
    names = (
        "exchanges",
        "branches",
        "moved",
        "at_once",
        "together",
        "errors",
        "unequal_bodies",
        "early_closes",
        "wall_s",
    )
    for title, rows in found.through.items():
        if rows:
            yield f"{title:16}" + "".join(f"{name:>15}" for name in names)
            for row in rows:
                yield f"{row.harness:16}" + "".join(f"{getattr(row, name):>15}" for name in names)
    for retry in found.retries:
        yield f"retries of {retry.harness}: outcome (seconds to the next attempt)"
        for side, attempts in (("direct", retry.direct), ("through", retry.through)):
            yield f"  {side:8}" + "  ".join(f"{what} ({'end' if s is None else s})" for what, s in attempts)


def write(found: Figures, file: Path) -> None:
    """The same as JSON."""
    file.write_text(json.dumps(asdict(found), indent=1) + "\n")
