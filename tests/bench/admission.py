"""What admission is worth: more agents than a fleet's KV holds, with and without it, in virtual time.

    python -m tests.bench.admission [--sessions N] [--limits 0,1,1.2] [--duration S] [--think S] [--json FILE]

The router's own lifecycle before replica models (`simulations.demo.rehearsal`); agents come one after another over
half the time, their number is then constant, and a refused one comes back after Retry-After. TTFT is from commit, so
that it shows what the fleet does; what agents waited before stands beside it. One seed always gives the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from router.domain.outcome import End
from router.placement.cost import Tuning
from router.telemetry.events import Event, TurnFinished, TurnWaited
from simulations import profiles, workload
from simulations.clock import run
from simulations.demo.cast import shortened
from simulations.demo.programme import SESSION_HEADER
from simulations.demo.rehearsal import Rehearsal
from simulations.measure import percentile
from simulations.replay import Load, Replay, Wording
from simulations.trace import Tree

PROFILE: Final = "kimi-k2.6-b200-tp4"
REPLICAS: Final = 4


@dataclass
class Seen:
    """What the router told."""

    finished: list[TurnFinished] = field(default_factory=list)
    waited: list[TurnWaited] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """Keep what is over."""
        if isinstance(event, TurnFinished):
            self.finished.append(event)
        elif isinstance(event, TurnWaited):
            self.waited.append(event)


async def played(given: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One run."""
    seen = Seen()
    profile = profiles.load(PROFILE, device_tokens=given.device_tokens, host_tokens=given.host_tokens)
    load = Load(
        sessions=given.sessions,
        ramp_s=given.duration / 2,
        think_max_s=given.think,
        seed=given.seed,
    )
    wording = Wording(
        model=profile.model, block_tokens=workload.BLOCK_TOKENS, global_blocks=True, session_header=SESSION_HEADER
    )
    tuning = Tuning(live_half_life_s=given.half_life)
    fleet = Rehearsal(profile, "roost", given.seed, REPLICAS, admission=limit, tuning=tuning, observer=seen)
    async with fleet:
        replay = Replay(fleet, load, wording)
        task = asyncio.create_task(replay.run(trees(given)))
        await asyncio.sleep(given.duration / 2)
        before = {event.turn for event in seen.finished}
        await asyncio.sleep(given.duration / 2)
        done = [event for event in seen.finished if event.outcome.end is End.COMPLETE]
        waited = [event.waited_s for event in seen.waited]
        refused = sum(not event.admitted for event in seen.waited)
        assert not task.done(), "the agents go on as long as they are watched"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    done = [event for event in done if event.turn not in before]
    return {"limit": limit, **figures(done, given.duration / 2), "waited": spread(waited), "refused": refused}


def trees(given: argparse.Namespace) -> Iterator[Tree]:
    """Agents that end, so that the contexts of those who run are as long with few of them as with many."""
    shape = workload.Shape(context_tokens=given.context)
    return (shortened(tree, given.turns) for tree in workload.trees(given.seed, shape))


def figures(done: Sequence[TurnFinished], duration_s: float) -> dict[str, Any]:
    """Of the turns that completed in time; the second half is after everybody has come."""
    ttft = [event.outcome.ttft_s for event in done if event.outcome.ttft_s is not None]
    prompt = sum(event.outcome.usage.prompt_tokens or 0 for event in done)
    return {
        "turns_per_s": len(done) / duration_s,
        "output_per_s": sum(event.outcome.usage.output_tokens or 0 for event in done) / duration_s,
        "hit_rate": sum(event.outcome.usage.cached_tokens or 0 for event in done) / max(1, prompt),
        "sessions": len({event.session for event in done}),
        "ttft": spread(ttft),
        "turn_s": spread([event.outcome.duration_s for event in done]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "count": 0}
    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99), "count": len(ordered)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--limits", default="0,1,1.2", help="shares of the KV room, 0: no admission")
    parser.add_argument("--duration", type=float, default=1200.0, help="virtual seconds")
    parser.add_argument("--think", type=float, default=60.0, help="longest pause of an agent, seconds")
    parser.add_argument("--turns", type=int, default=32, help="turns of an agent")
    parser.add_argument("--context", type=int, default=131_072, help="longest context, tokens")
    parser.add_argument("--device-tokens", type=int, default=profiles.load(PROFILE).device_tokens)
    parser.add_argument("--host-tokens", type=int, default=0)
    parser.add_argument("--half-life", type=float, default=Tuning().live_half_life_s)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    rows = []
    head = (
        "limit  turns/s  output/s  hit rate  sessions  TTFT mean   p50     p99    turn mean  waited mean  p99  refused"
    )
    sys.stdout.write(head + "\n")
    for limit in map(float, given.limits.split(",")):
        row = run(played(given, limit))
        rows.append(row)
        sys.stdout.write(
            f"{limit:5.2f}  {row['turns_per_s']:7.2f}  {row['output_per_s']:8.0f}  {row['hit_rate']:8.3f}  "
            f"{row['sessions']:8d}  {row['ttft']['mean']:9.2f}  {row['ttft']['p50']:5.2f}  {row['ttft']['p99']:6.1f}  "
            f"{row['turn_s']['mean']:9.1f}  {row['waited']['mean']:11.1f}  {row['waited']['p99']:3.0f}  "
            f"{row['refused']:7d}\n"
        )
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
