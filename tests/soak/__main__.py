"""`python -m tests.soak [--minutes M] [--seed N] [--json FILE]`: exits 0 only if nothing went against a rule."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulations.picture import require
from tests.soak.checks import Checks, Violations
from tests.soak.clients import Clients
from tests.soak.faults import Faults
from tests.soak.picture import draw
from tests.soak.stage import redis_server, stage


async def soak(minutes: float, replicas: int, sessions: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run it; the figures."""
    async with stage(folder, replicas, seed) as built:
        violations = Violations()
        faults = Faults(built, seed)
        clients = Clients(built, faults.ledger, seed + 1, violations.add)
        checks = Checks(built, faults.ledger, clients, violations.add)
        began_s = time.monotonic()
        looking = asyncio.create_task(checks.run(), name="checks")
        talking = asyncio.create_task(clients.run(sessions), name="clients")
        breaking = asyncio.create_task(faults.run(), name="faults")
        try:
            await _watched(minutes * 60, [looking, talking, breaking], clients, faults, violations)
            faults.stop()
            await breaking
            clients.stop()
            await talking
        finally:
            for task in (looking, talking, breaking):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await checks.finish()
        return _figures(time.monotonic() - began_s, seed, clients, faults, checks, violations)


async def _watched(
    seconds: float, tasks: Sequence[asyncio.Task[None]], clients: Clients, faults: Faults, violations: Violations
) -> None:
    """Let it run, and show how far it is. Returns early where a part of it failed."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("soak", total=seconds, told="")
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < seconds:
            told = (
                f"{clients.tally.turns} turns, {len(faults.ledger.faults)} faults, {len(violations.found)} violations"
            )
            progress.update(bar, completed=passed_s, told=told)
            done, _ = await asyncio.wait(tasks, timeout=1.0)
            if done:
                return


def _figures(
    seconds: float, seed: int, clients: Clients, faults: Faults, checks: Checks, violations: Violations
) -> dict[str, Any]:
    tally = clients.tally
    waits = sorted(tally.waits_s) or [0.0]
    rss = [sample.rss_bytes[0] for sample in checks.samples]
    quarter = max(1, len(rss) // 4)
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "turns": tally.turns,
        "turns_per_s": round(tally.turns / seconds, 1),
        "faults": dict(faults.ledger.counts()),
        "retries": dict(tally.retries.most_common()),
        "clients_left": tally.left,
        "streams_broken_by_faults": tally.broken,
        "reasons": dict(tally.reasons.most_common()),
        "cached_share": round(tally.cached_tokens / max(1, tally.prompt_tokens), 4),
        "first_byte_s": {
            "p50": round(waits[len(waits) // 2], 3),
            "p99": round(waits[int(len(waits) * 0.99)], 3),
            "max": round(waits[-1], 3),
        },
        "router_rss_mb": {
            "start": round(rss[0] / 1e6, 1),
            "second_quarter": round(statistics.median(rss[quarter : 2 * quarter] or rss) / 1e6, 1),
            "last_quarter": round(statistics.median(rss[-quarter:]) / 1e6, 1),
            "max": round(max(rss) / 1e6, 1),
        },
        "left_at_the_end": checks.left,
        "not_done": faults.ledger.skipped,
        "violations": [{"at_s": round(at_s, 2), "what": what} for at_s, what in violations.found],
        "fault_log": [
            {
                "kind": fault.kind,
                "target": fault.target,
                "from_s": round(fault.began_s - violations.began_s, 2),
                "to_s": None if fault.ended_s is None else round(fault.ended_s - violations.began_s, 2),
            }
            for fault in faults.ledger.faults
        ],
        "samples": [
            {
                "at_s": round(sample.at_s, 1),
                "open": sample.open_turns,
                "in_flight": sample.in_flight,
                "rss_mb": [round(size / 1e6, 1) for size in sample.rss_bytes],
                "files": list(sample.open_files),
                "turns": sample.turns,
                "keys": sample.keys,
                "store_mb": None if sample.store_bytes is None else round(sample.store_bytes / 1e6, 2),
            }
            for sample in checks.samples
        ],
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"soak, seed {figures['seed']}", show_header=False)
    for name in (
        "seconds",
        "turns",
        "turns_per_s",
        "retries",
        "reasons",
        "clients_left",
        "streams_broken_by_faults",
        "cached_share",
        "first_byte_s",
        "router_rss_mb",
        "left_at_the_end",
        "not_done",
    ):
        value = figures[name]
        told = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), told)
    table.add_section()
    for kind, count in figures["faults"].items():
        table.add_row(kind, str(count))
    console.print(table)
    for violation in figures["violations"][:40]:
        console.print(f"[red]violation[/red] at {violation['at_s']:.1f} s: {violation['what']}", highlight=False)


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long things go wrong")
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=24, help="conversations at once")
    parser.add_argument("--seed", type=int, default=None, help="of faults and clients; drawn by default")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write every figure and sample there")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="draw it (needs matplotlib)")
    parser.add_argument("--keep", type=Path, default=None, metavar="DIR", help="keep the logs of all processes there")
    asked = parser.parse_args()
    if redis_server() is None:
        sys.stderr.write("no redis-server and no valkey-server on PATH: apt-get install redis-server\n")
        return 2
    if asked.plot is not None:
        require()
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    console = Console()
    with tempfile.TemporaryDirectory(prefix="roost-soak-") as folder:
        try:
            figures = asyncio.run(soak(asked.minutes, asked.replicas, asked.sessions, seed, Path(folder)))
        finally:
            if asked.keep is not None:
                shutil.copytree(folder, asked.keep, dirs_exist_ok=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1))
    if asked.plot is not None:
        draw(asked.plot, figures)
    _show(figures, console)
    bad = len(figures["violations"])
    again = f"python -m tests.soak --minutes {asked.minutes:g} --sessions {asked.sessions} --seed {seed}"
    verdict = "nothing was lost" if not bad else f"{bad} violations; again: {again}"
    console.print(f"soak: {figures['turns']} turns, {sum(figures['faults'].values())} faults, {verdict}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
