"""How long things take, in closed form, so that a thousand decode steps cost one formula.

Prefill: a token at depth d costs (1 + d / D) / rate, the one part for the weights and the other for attention over what
is before it; D is where they are equal. Summed over n tokens from depth d: n · (1 + (d + n/2) / D) / rate.

Decode: a step costs c = base + per sequence · batch + per KV token · sum of lengths, and each further step g more,
because every turn has grown: k steps take k·c + g·k(k-1)/2.
"""

from __future__ import annotations

import math
from dataclasses import replace

from simulations.replica_model.values import ReplicaProfile

__all__ = ["faster", "prefill_s", "span_s", "steps_until"]


def prefill_s(profile: ReplicaProfile, tokens: int, depth_tokens: int) -> float:
    """Seconds to prefill `tokens` that have `depth_tokens` before them, without the pass's base."""
    mean_depth = depth_tokens + tokens / 2
    return tokens * (1.0 + mean_depth / profile.prefill_depth_tokens) / profile.prefill_tokens_per_s


def span_s(step_s: float, growth_s: float, steps: int) -> float:
    """Seconds that `steps` decode steps take, the first `step_s` and each `growth_s` longer than the one before."""
    return steps * (step_s + growth_s * (steps - 1) / 2)


def steps_until(step_s: float, growth_s: float, elapsed_s: float) -> int:
    """How many whole decode steps fit into `elapsed_s`."""
    if elapsed_s < step_s:
        return 0
    if growth_s < 1e-12:
        steps = int(elapsed_s / step_s)
    else:
        b = step_s - growth_s / 2
        # The root of g/2·k² + b·k = elapsed, in the form that keeps its digits when g is tiny.
        steps = int(2 * elapsed_s / (b + math.sqrt(b * b + 2 * growth_s * elapsed_s)))
    while span_s(step_s, growth_s, steps + 1) <= elapsed_s:
        steps += 1
    while steps and span_s(step_s, growth_s, steps) > elapsed_s:
        steps -= 1
    return steps


def faster(profile: ReplicaProfile, factor: float) -> ReplicaProfile:
    """The same replica, everything taking `factor` times less long: a time scale as seen from outside."""
    return replace(
        profile,
        prefill_tokens_per_s=profile.prefill_tokens_per_s * factor,
        host_load_tokens_per_s=profile.host_load_tokens_per_s * factor,
        prefill_base_s=profile.prefill_base_s / factor,
        decode_base_s=profile.decode_base_s / factor,
        decode_per_sequence_s=profile.decode_per_sequence_s / factor,
        decode_per_kv_token_s=profile.decode_per_kv_token_s / factor,
    )
