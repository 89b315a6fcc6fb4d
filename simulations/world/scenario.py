"""A scenario: everything about a run that is not the code under test, as one frozen value made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from simulations import faults
from simulations.faults import Fault, Kind

__all__ = ["Scenario", "scenario_of"]

ROUTERS: Final = "abcdefgh"
_MIN_FAULTLESS_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who is there, what they do, and what goes wrong."""

    seed: int
    replicas: int = 6
    routers: int = 2
    turns: int = 300
    """Turns after which nobody begins another."""
    seats: int = 16
    """Sessions open at a time."""
    duration_s: float = 900.0
    """Virtual seconds after which nobody begins a turn."""
    longest_s: float = 4000.0
    """Virtual seconds after that by which every turn must have ended: three tries at ten minutes each, and more."""
    profile: str = "kimi-k2.6-b200-tp4"
    speed: float = 1.0
    """How much faster than its profile a replica is."""
    device_tokens: int | None = None
    """KV room of a replica; None: the profile's."""
    max_queued: int | None = None
    tenants: int = 2
    fan_out: float = 0.05
    """Share of tool turns that start subagents."""
    keyless: float = 0.2
    """Share of sessions whose clients name none."""
    leaving: float = 0.06
    """Share of requests whose client vanishes at some moment."""
    hasty: float = 0.3
    """Share of clients that close right after the terminal event, as Codex does."""
    bursts: int = 0
    """Times at which one session begins many equal branches at once."""
    context_tokens: int = 98_304
    think_max_s: float = 20.0
    real_requests: bool = False
    """Whether clients send real bodies, read by the router's own `Identity`."""
    answers_travel: bool = True
    """Whether a store's answers take time too; without, a run is cheaper."""
    policy: str = "roost"
    admission: float = 0.0
    """Live tokens per token of KV room up to which new sessions are let in at once; 0: no limit."""
    faults: tuple[Fault, ...] = ()


def scenario_of(
    seed: int,
    *,
    kinds: tuple[Kind, ...] = tuple(Kind),
    replicas: int | None = None,
    routers: int | None = None,
    turns: int | None = None,
    drop: frozenset[int] = frozenset(),
) -> Scenario:
    """The scenario of a seed. `drop`: numbers of faults to leave out; the rest of the schedule stays as it is."""
    dice = random.Random(f"scenario/{seed}")  # noqa: S311 (a scenario needs no secrecy)
    drawn = Scenario(
        seed=seed,
        replicas=dice.choice((2, 3, 4, 6, 8)),
        routers=dice.choice((1, 2, 2, 3)),
        turns=dice.choice((150, 300, 500)),
        seats=dice.choice((4, 12, 24, 40)),
        profile=dice.choice(("kimi-k2.6-b200-tp4", "small-h100")),
        device_tokens=dice.choice((None, 262_144)),
        max_queued=dice.choice((None, 1, 4)),
        tenants=dice.choice((1, 2, 3)),
        fan_out=dice.choice((0.0, 0.05, 0.2)),
        keyless=dice.choice((0.0, 0.2, 1.0)),
        leaving=dice.choice((0.0, 0.06, 0.3)),
        hasty=dice.choice((0.0, 0.3, 1.0)),
        bursts=dice.choice((0, 1, 2)),
        think_max_s=dice.choice((2.0, 20.0)),
        real_requests=dice.random() < 0.1,
        admission=dice.choice((0.0, 0.0, 1.0)),
    )
    drawn = replace(
        drawn,
        replicas=replicas or drawn.replicas,
        routers=routers or drawn.routers,
        turns=turns or drawn.turns,
        seats=max(drawn.seats, 4 * replicas) if replicas else drawn.seats,
    )
    if drawn.real_requests:
        drawn = replace(drawn, turns=min(drawn.turns, 150), context_tokens=32_768)
    schedule = faults.drawn(
        seed,
        kinds,
        replicas=tuple(f"r{number}" for number in range(drawn.replicas)),
        routers=tuple(ROUTERS[: drawn.routers]),
        until_s=drawn.duration_s,
        mean_gap_s=dice.choice((5.0, 15.0, 40.0)),
    )
    return replace(drawn, faults=tuple(fault for number, fault in enumerate(schedule) if number not in drop))
