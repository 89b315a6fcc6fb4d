"""What a turn waits for its place while the store is well, hangs, refuses, and comes back: all in one run.

    python -m tests.bench.store_outage [--turns N] [--at-once N] [--json FILE]

A real router with the default `store.timeout_s`, a real redis-server and scripted replicas, all on this machine. Turns
flow without a pause while the store is stopped (SIGSTOP), goes on, is killed and is started again, so the first turns
of each phase are those that meet the change. `place` is the router's own measure (the request's last byte to the
commit, as in `roost_place_seconds`), `turn` the client's, from the first byte sent to the last byte read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from router.settings.model import Placement
from tests.integration.conversations import Conversation
from tests.integration.replicas import replicas
from tests.integration.roosts import Roost, running, settings_for, shared_store
from tests.integration.test_store_outage import Server, until_up

TIMEOUT_S = 0.05
"""The default of `store.timeout_s`."""

Figures = dict[str, dict[str, float]]


def spread(samples: list[float]) -> dict[str, float]:
    """Milliseconds at the median, p99 and maximum."""
    ordered = sorted(samples)
    at = {"p50_ms": ordered[len(ordered) // 2], "p99_ms": ordered[int(len(ordered) * 0.99)], "max_ms": ordered[-1]}
    return {name: round(value * 1e3, 2) for name, value in at.items()}


async def phase(roost: Roost, asked: list[Conversation], turns: int, begin: Callable[[], None]) -> dict[str, float]:
    """As many turns as asked for, each conversation's one after the other; `begin` happens when a tenth is through."""
    left, took = turns, list[float]()

    async def talk(conversation: Conversation) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            if left == turns - turns // 10:
                begin()
            conversation.said = conversation.said[:9]
            conversation.grow()
            began_s = time.perf_counter()
            await roost.turn(conversation)
            took.append(time.perf_counter() - began_s)

    await asyncio.gather(*map(talk, asked))
    decided = await roost.decisions(turns)
    place = spread([each["place_s"] for each in decided])
    blind = sum(each["blind"] for each in decided)
    return {**{f"place_{name}": value for name, value in place.items()}, **{
        f"turn_{name}": value for name, value in spread(took).items()
    }, "turns": len(decided), "blind": blind}  # fmt: skip


async def measure(turns: int, at_once: int) -> Figures:
    """All figures, milliseconds."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "s")
        server.start()
        try:
            async with replicas(4) as fleet:
                store = shared_store(server.url, timeout_s=TIMEOUT_S)
                settings = settings_for(fleet, store, placement=Placement(decisions_kept=turns))
                async with running(settings, fleet) as roost:
                    asked = [Conversation(f"bench {n}", header=("x-session-id", str(n))) for n in range(at_once)]
                    changes: list[tuple[str, Callable[[], None], bool]] = [
                        ("well", lambda: None, True),
                        ("stopped", lambda: server.signal(signal.SIGSTOP), False),
                        ("goes on", lambda: server.signal(signal.SIGCONT), True),
                        ("killed", server.kill, False),
                        ("restarted", server.start, True),
                    ]
                    for name, begin, up in changes:
                        figures[name] = await phase(roost, asked, turns, begin)
                        began_s = time.perf_counter()
                        await until_up(up, roost)
                        figures[name]["settled_after_s"] = round(time.perf_counter() - began_s, 2)
        finally:
            server.kill()
    return figures


def main() -> None:
    """Print the table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=1000, help="turns of each phase")
    parser.add_argument("--at-once", type=int, default=4, help="conversations at once")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures = uvloop.run(measure(asked.turns, asked.at_once))
    columns = ("place_p50_ms", "place_p99_ms", "place_max_ms", "turn_p50_ms", "turn_p99_ms", "turns", "blind")
    out = sys.stdout
    out.write(f"{asked.turns} turns a phase, {asked.at_once} at once, store.timeout_s {TIMEOUT_S}\n")
    out.write(f"{'store':12}" + "".join(f"{column:>14}" for column in columns) + "\n")
    for name, row in figures.items():
        out.write(f"{name:12}" + "".join(f"{row[column]:>14}" for column in columns) + "\n")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
