"""The cost of one choice, in seconds.

For a turn with p prompt tokens and expected output o at replica r with b turns in flight:

    wait      tokens still to prefill ahead of it / prefill_rate, and the wait for a running slot where all are taken
    prefill   (p − device − host) / prefill_rate + host / host_load_rate
    decode    o · step_time(b + 1) / accept_length
    others    κ · prefill · b                      what this prefill takes from those already there
    eviction  ε_r · tokens pushed out / prefill_rate
    move      μ · p / prefill_rate, at least `move_floor_s`, only where the branch is bound elsewhere: hysteresis
    crowd     β · live sessions committed to r     only for a new branch
    ramp      a newcomer's turns beyond its allowance, only for a new branch: slow start

Rates are a replica class's: beliefs of all replicas of the fleet, pooled by weight, with the profile as prior. Equal
replicas therefore cost the same, and one noisy observation cannot make a hot spot.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.domain.decision import Cost
from router.domain.replica import Fleet, Load, Replica
from router.domain.session import Residue
from router.domain.turn import Turn
from router.placement.residency import NOTHING, pushed_out, residency

__all__ = ["Rates", "Tuning", "branch_weight", "cost", "crowd_now", "decay", "rates_of"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The weights of the decision. κ and μ are the good values of the prototype before it; β is argued at its field."""

    kappa: float = 0.5
    mu: float = 1.0
    move_floor_s: float = 1.0
    """A move costs at least this: below it the estimates are noise."""
    beta_s: float = 1.0
    """Seconds one live session costs a newcomer branch beside it: about 40 turns, each some 25 ms slower."""
    crowd_half_life_s: float = 300.0
    live_half_life_s: float = 120.0
    expected_output_tokens: int = 440
    """Mean output of a coding-agent turn (WEKA traces)."""
    ramp_s: float = 10.0
    ramp_penalty_s: float = 30.0
    ramp_turns: int = 2
    """Turns a newcomer may run before its first has finished."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Effective rates of a replica class."""

    prefill_rate: float
    host_load_rate: float
    token_time_s: float
    step_slope: float
    tokens_per_byte: float


def rates_of(fleet: Fleet) -> Rates:
    """The fleet's rates: what its replicas learned, pooled by weight, else the profile."""
    profile = fleet.profile
    prefill = prefill_weight = token = token_weight = size = size_weight = 0.0
    for replica in fleet.replicas:
        b = replica.beliefs
        if b.prefill_rate > 0:
            prefill += b.prefill_rate * b.prefill_weight
            prefill_weight += b.prefill_weight
        if b.token_time_s > 0:
            token += b.token_time_s * b.token_weight
            token_weight += b.token_weight
        if b.tokens_per_byte > 0:
            size += b.tokens_per_byte * b.bytes_weight
            size_weight += b.bytes_weight
    return Rates(
        prefill_rate=prefill / prefill_weight if prefill_weight > 0 else profile.prefill_rate,
        host_load_rate=profile.host_load_rate,
        token_time_s=token / token_weight if token_weight > 0 else profile.step_time_s / profile.accept_length,
        step_slope=profile.step_slope,
        tokens_per_byte=size / size_weight if size_weight > 0 else profile.tokens_per_byte,
    )


def decay(value: float, elapsed_s: float, half_life_s: float) -> float:
    """`value` halved every `half_life_s`; a clock that jumped back does not make it grow."""
    return float(value * 2.0 ** (-max(0.0, elapsed_s) / half_life_s))


def crowd_now(load: Load, now_s: float, half_life_s: float) -> float:
    """Live branches bound to a replica, by weight, at `now_s`."""
    return decay(load.crowd, now_s - load.crowd_at_s, half_life_s)


def branch_weight(tokens: int) -> float:
    """What a branch counts in its home's crowd: half for being there, the rest by the KV it needs (1 at 64k tokens, 2
    at most).
    """
    return 0.5 + min(1.5, tokens / 131_072)


def cost(
    turn: Turn,
    residues: tuple[Residue, ...],
    replica: Replica,
    rates: Rates,
    fleet: Fleet,
    tuning: Tuning,
    *,
    bound_elsewhere: bool,
) -> Cost:
    """The cost of placing `turn` at `replica`, term by term."""
    load, max_running, prefill_rate = replica.load, replica.capacity.max_running, rates.prefill_rate
    running = load.in_flight + replica.foreign_in_flight
    held = residency(residues, replica, turn.shared_tokens) if residues else NOTHING
    uncached = max(1, turn.prompt_tokens - held.device_tokens - held.host_tokens)
    prefill_s = uncached / prefill_rate
    loaded_s = held.host_tokens / rates.host_load_rate
    decode_s = turn.output_tokens * rates.token_time_s * (1 + rates.step_slope * running)
    ahead = load.prefill_tokens + replica.foreign_prefill_tokens
    over = running + 1 - max_running
    slot_s = decode_s * over / max_running if over > 0 else 0.0
    evicted = pushed_out(replica, uncached + turn.output_tokens)
    move_s = crowd_s = ramp_s = 0.0
    if bound_elsewhere:
        move_s = max(tuning.move_floor_s, tuning.mu * turn.prompt_tokens / prefill_rate)
    if turn.fork:
        crowd_s = tuning.beta_s * crowd_now(load, fleet.now_s, tuning.crowd_half_life_s)
        ramp_s = _ramp(replica, fleet.now_s, tuning)
    return Cost(  # by place: one is made per replica and turn, and names take as long as half of the sums
        replica.id,
        ahead / prefill_rate + slot_s,
        prefill_s + loaded_s,
        decode_s,
        tuning.kappa * prefill_s * running,
        replica.beliefs.evicted_asked_share * evicted / prefill_rate if evicted else 0.0,
        move_s,
        crowd_s,
        ramp_s,
        held,
    )


def _ramp(replica: Replica, now_s: float, tuning: Tuning) -> float:
    age_s = max(0.0, now_s - replica.joined_at_s)
    if age_s >= tuning.ramp_s:
        return 0.0
    allowed = tuning.ramp_turns + int(replica.capacity.max_running * age_s / tuning.ramp_s)
    return tuning.ramp_penalty_s * max(0, replica.load.in_flight + 1 - allowed)
