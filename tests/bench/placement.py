"""What placing a turn costs: identify and decide for a 400 KB body and 50 replicas, and the two store round trips.

    python -m tests.bench.placement [--turns N] [--replicas N] [--body-bytes N] [--json FILE]

Baseline in the same run: `json.loads` of the same body, which any router that reads typed bodies pays at least.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import uvloop

from router.domain.decision import Placed
from router.domain.replica import Capacity, Fleet, Load, Profile, Replica
from router.domain.session import Binding
from router.domain.shared import Acquired, Claim, Settlement
from router.domain.turn import Dialect, Facts
from router.placement.cost import Tuning, rates_of
from router.placement.decide import decide, turn_of
from router.placement.identity import Identity, Rules
from router.placement.lineage import Lineage, ask_for, head_of, kept_tips, trace
from router.settings import Settings
from router.store.embedded import EmbeddedValkey
from router.store.redis import RedisStore

HEADERS = {b"authorization": b"Bearer sk-bench", b"modal-session-id": b"bench"}
WORDS = [
    "def",
    "return",
    "self",
    "await",
    "class",
    "raise",
    "value",
    "config",
    "router",
    "session",
    "stream",
    "token",
    "path",
    "file",
    "test",
    "build",
    "cache",
    "model",
]


def conversation(turns: int, body_bytes: int, rng: random.Random) -> list[bytes]:
    """Bodies of one growing conversation, the last about `body_bytes` long."""
    per_message = max(200, body_bytes // (2 * turns + 2))

    def text() -> str:
        words = [rng.choice(WORDS) for _ in range(per_message // 7)]
        return " ".join(words) + ' "quoted"\n'

    messages = [{"role": "system", "content": text()}]
    bodies = []
    for _ in range(turns):
        messages.append({"role": "user", "content": text()})
        bodies.append(json.dumps({"model": "m", "stream": True, "messages": messages}).encode())
        messages.append({"role": "assistant", "content": text()})
    return bodies


def fleet_of(count: int) -> Fleet:
    """Replicas under uneven load."""
    replicas = tuple(
        Replica(f"10.0.0.{n}:30000", f"http://10.0.0.{n}:30000", "life", Capacity(750_000),
                load=Load(n % 7, n * 500, n * 9_000, n * 40_000, n % 5, 1_000.0))
        for n in range(count)
    )  # fmt: skip
    return Fleet("bench", Profile(), replicas, 1_000.0)


def spread(samples: list[float]) -> dict[str, float]:
    """Microseconds at the median, p99 and maximum."""
    ordered = sorted(samples)
    at = [ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]]
    return dict(zip(("p50_us", "p99_us", "max_us"), (round(value * 1e6, 1) for value in at), strict=True))


def claim_for(facts: Facts, lineage: Lineage, replica: str, number: int) -> Claim:
    """A claim as the lifecycle makes it."""
    known = lineage.known
    return Claim(
        lease=f"lease-{number}", replica=replica, incarnation="life", prefill_tokens=0, locked_tokens=100_000,
        branch=lineage.branch, session=lineage.session, version=known.version if known is not None else None,
        home=Binding(replica, "life"), tip=lineage.tip, tips=kept_tips(lineage, 7), weight=1.0,
        text_bytes=lineage.tip.text_bytes if lineage.tip is not None else 0, crowd_half_life_s=300.0,
        head=head_of(facts),
    )  # fmt: skip


async def measure(turns: int, replicas: int, body_bytes: int) -> dict[str, dict[str, float]]:
    """All figures, microseconds."""
    rng = random.Random(1)
    identity = Identity(Rules(Settings().identity.session_headers, Settings().identity.session_fields))
    fleet = fleet_of(replicas)
    tuning = Tuning()
    samples: dict[str, list[float]] = {
        name: [] for name in ("json.loads", "identify", "decide", "both", "fetch", "acquire", "settle")
    }
    with EmbeddedValkey() as server:
        store = RedisStore(server.url, timeout_s=1.0)
        await store.open()
        number = 0
        for _ in range(max(1, turns // 40)):
            for body in conversation(40, body_bytes, rng):
                number += 1
                began = time.perf_counter()
                json.loads(body)
                samples["json.loads"].append(time.perf_counter() - began)
                began = time.perf_counter()
                facts = identity.facts(Dialect.CHAT, HEADERS, body)
                identified = time.perf_counter()
                view = await store.fetch("bench", ask_for(facts))
                fetched = time.perf_counter()
                lineage = trace(facts, view, f"turn-{number}")
                turn = turn_of(f"turn-{number}", facts, lineage, rates_of(fleet), tuning, number)
                placed = decide(turn, lineage, fleet, "roost", tuning)
                decided = time.perf_counter()
                assert isinstance(placed, Placed), placed
                acquired = await store.acquire("bench", claim_for(facts, lineage, placed.replica, number))
                held = time.perf_counter()
                assert isinstance(acquired, Acquired), acquired
                await store.settle(
                    "bench",
                    Settlement(f"lease-{number}", placed.replica, "life", lineage.branch, turn.prompt_tokens + 400,
                               turn.prompt_tokens, 900),
                )  # fmt: skip
                settled = time.perf_counter()
                for name, spent in (
                    ("identify", identified - began),
                    ("decide", decided - fetched),
                    ("both", identified - began + decided - fetched),
                    ("fetch", fetched - identified),
                    ("acquire", held - decided),
                    ("settle", settled - held),
                ):
                    samples[name].append(spent)
        await store.close()
    return {name: spread(values) for name, values in samples.items()}


def main() -> None:
    """Print the table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=800)
    parser.add_argument("--replicas", type=int, default=50)
    parser.add_argument("--body-bytes", type=int, default=400_000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures = uvloop.run(measure(asked.turns, asked.replicas, asked.body_bytes))
    baseline = figures["json.loads"]["p50_us"]
    out = sys.stdout
    out.write(f"bodies growing to {asked.body_bytes} bytes, {asked.replicas} replicas, {asked.turns} turns\n")
    out.write(f"{'':12}{'p50 us':>10}{'p99 us':>10}{'max us':>10}{'p50 / json.loads':>18}\n")
    for name, row in figures.items():
        ratio = row["p50_us"] / baseline
        out.write(f"{name:12}{row['p50_us']:>10}{row['p99_us']:>10}{row['max_us']:>10}{ratio:>18.2f}\n")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
