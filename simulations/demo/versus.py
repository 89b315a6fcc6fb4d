"""The same cast under several policies, in virtual time: a process of its own, so that the live part is not disturbed.

`python -m simulations.demo.versus` reads a `Programme` as JSON from standard input and writes one JSON line per policy.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from simulations import profiles, workload
from simulations.clock import run
from simulations.demo.cast import THINK_MAX_S, Cast
from simulations.demo.programme import POLICIES, SESSION_HEADER, Compared, Programme
from simulations.demo.rehearsal import Rehearsal
from simulations.measure import Figures
from simulations.replay import Load, Replay, Wording

__all__ = ["compared", "main"]


def compared(policy: str, programme: Programme) -> Compared:
    """Play it."""
    figures, moves = run(_played(policy, programme))
    ttft = figures["ttft_s"]
    assert ttft is not None
    return Compared(
        policy=policy,
        turns=figures["turns"],
        errors=figures["errors"],
        hit_rate=figures["hit_rate"] or 0.0,
        hit_rate_infinite=figures["hit_rate_infinite"] or 0.0,
        ttft_p50_s=ttft["p50"],
        ttft_p99_s=ttft["p99"],
        ttft_mean_s=ttft["mean"],
        moves=moves,
    )


async def _played(policy: str, programme: Programme) -> tuple[Figures, int]:
    profile = profiles.load(programme.profile)
    cast = Cast(programme.seed)
    load = Load(
        sessions=programme.sessions,
        ramp_s=programme.ramp_s,
        think_max_s=THINK_MAX_S,
        duration_s=programme.duration_s,
        seed=programme.seed,
    )
    wording = Wording(
        model=profile.model, block_tokens=workload.BLOCK_TOKENS, global_blocks=True, session_header=SESSION_HEADER
    )
    async with Rehearsal(profile, policy, programme.seed, programme.replicas) as fleet, asyncio.TaskGroup() as group:
        loop = asyncio.get_running_loop()
        replay = Replay(fleet, load, wording)

        def spread() -> None:
            cast.ask_for_fan_out()
            replay.grow(1, 0.0)

        def join() -> None:
            group.create_task(fleet.join("newcomer"))
            replay.grow(programme.more_sessions, programme.more_ramp_s)

        loop.call_later(programme.fan_out_at_s, spread)
        loop.call_later(programme.join_at_s, join)
        await replay.run(cast)
    return replay.measured.figures(), fleet.moves


def main() -> None:
    """One line per policy, as each is done."""
    programme = msgspec.json.decode(sys.stdin.buffer.read(), type=Programme)
    for policy in POLICIES:
        sys.stdout.buffer.write(msgspec.json.encode(compared(policy, programme)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
