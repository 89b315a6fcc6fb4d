"""New seeds for as long as asked, one process a core; the first that fails ends it."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

import typer

from simulations.simulate import Report, simulate
from simulations.simulate_told import Asked, broken, collect_rarely, quiet

__all__ = ["fuzz"]

_SEEDS: Final = 1 << 31
_TELL_S: Final = 10.0
_RECYCLED: Final = 200
"""Seeds after which a process is replaced, so that a leak cannot pile up."""


def fuzz(asked: Asked, *, seconds: float, first_seed: int, shrink: int) -> int:
    """Draw seeds until the time is up. `first_seed` of 0: others each time. Returns the exit code."""
    until = time.monotonic() + seconds
    began, told = time.monotonic(), time.monotonic()
    count, turns, events = 0, 0, 0
    happened: Counter[str] = Counter()
    room, over = threading.Semaphore(os.cpu_count() or 1), threading.Event()
    work = ((asked, seed) for seed in _seeds(first_seed))
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), _begun, maxtasksperchild=_RECYCLED) as pool:
        for report in pool.imap_unordered(_played, _until(work, room, over, until)):
            room.release()
            if report.failure is not None:
                over.set()
                room.release()  # the pool's thread that hands out work may wait for room, and would hold up its end
                pool.terminate()
                typer.echo(f"{count} seeds held before this one")
                broken(asked, report, shrink=shrink)
                return 1
            count += 1
            if report.played is not None:
                turns, events = turns + report.played.tally.turns, events + report.played.events
                happened.update(report.played.happened)
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                typer.echo(f"  {count} seeds, {turns} turns, {told - began:.0f} s")
    typer.echo(f"{count} seeds held: {turns} turns, {events} events, {sum(happened.values())} faults")
    typer.echo("  " + ", ".join(f"{name} {number}" for name, number in sorted(happened.items())))
    return 0


def _begun() -> None:
    """What each process does first."""
    quiet()
    collect_rarely()


def _seeds(first: int) -> Iterator[int]:
    dice = random.Random(first or None)  # noqa: S311 (seeds need no secrecy)
    while True:
        yield dice.randrange(_SEEDS)


def _until(
    work: Iterator[tuple[Asked, int]], room: threading.Semaphore, over: threading.Event, until: float
) -> Iterator[tuple[Asked, int]]:
    """Hand out work, a little ahead of what is done, until the time is up or all is over."""
    for each in work:
        room.acquire()
        if over.is_set() or time.monotonic() >= until:
            return
        yield each


def _played(work: tuple[Asked, int]) -> Report:
    asked, seed = work
    return simulate(asked.scenario(seed))
