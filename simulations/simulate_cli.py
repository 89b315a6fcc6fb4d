"""`roost simulate`: one seed of the simulated fleet, played and judged, or new ones for as long as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["simulate_app"]

simulate_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@simulate_app.command()
def simulate(
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    replicas: Annotated[int | None, typer.Option(min=1, help="Default: drawn.")] = None,
    routers: Annotated[int | None, typer.Option(min=1, max=8, help="Default: drawn.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Default: drawn.")] = None,
    faults: Annotated[str, typer.Option(metavar="all|none|NAME,...", help="Kinds of faults that may happen.")] = "all",
    drop: Annotated[str, typer.Option(metavar="N,N-M,...", help="Leave out faults by their number.")] = "",
    shrink: Annotated[int, typer.Option(min=0, help="Runs to spend on making a failing schedule smaller.")] = 40,
    fuzz_s: Annotated[
        float | None, typer.Option("--fuzz", metavar="SECONDS", help="Draw new seeds for so long, on every core.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Tell the schedule, and what the routers log.")] = False,
) -> None:
    """Play a fleet in virtual time, with faults, and check invariants after every event.

    The router's own lifecycle and placement run over the store in memory and replica models; nothing takes real time,
    and the same seed gives the same events to the byte. A failing seed tells what broke, the events before it, and the
    command that repeats it. Exit code 0: every rule held; 1: not so; 2: a wrong command.
    """
    from simulations import simulate_told as told
    from simulations.faults import kinds_of
    from simulations.fuzz import fuzz

    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="--json")
    try:
        kinds, dropped = kinds_of(faults), told.numbers(drop)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faults or --drop") from None
    if not verbose:
        told.quiet()
    told.collect_rarely()
    asked = told.Asked(kinds, replicas, routers, turns, dropped)
    if fuzz_s is not None:
        raise typer.Exit(fuzz(asked, seconds=fuzz_s, first_seed=seed, shrink=shrink))
    report = told.one(asked, seed, shrink=shrink, verbose=verbose)
    if json_file is not None:
        json_file.write_text(json.dumps(told.as_plain(report), indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report.failure is None else 1)
