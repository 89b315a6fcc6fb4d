"""Telling one life of an engine from the next, so that every router gives it the same name.

What SGLang 0.5.23 shows (seen by comparing `/server_info` of a live server over time and over restarts):

- there is no process id, start time or instance id anywhere, and `/metrics` runs in multi-process mode, without
  `process_start_time_seconds`;
- `startup_time` holds durations of the start in float seconds (loading weights, allocating KV, the scheduler's whole
  start), taken once per life (srt/managers/scheduler.py) and differing between lives in their nanoseconds; the copy
  in each of `internal_states` comes from the scheduler and is therefore the same whichever HTTP or tokenizer worker
  answers;
- `random_seed` is drawn anew at each start unless set by flag (srt/arg_groups/serving_hook.py);
- all else either never changes (the resolved arguments) or changes within a life (throughput, free memory).

So the name is a digest of version, seed and the schedulers' start durations. Other servers may show
`process_start_time_seconds`, which names a life as well. Where neither is there, a refused connection or a counter
that went down tells that a life has ended, but to this router only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

__all__ = ["derive_incarnation", "incarnation_of_start"]

_CHARS = 16


def derive_incarnation(server_info: Mapping[str, object]) -> str | None:
    """The incarnation that a decoded `/server_info` tells of, or None where it shows no start durations."""
    states = server_info.get("internal_states")
    starts = (
        [_durations(state.get("startup_time")) for state in states if isinstance(state, Mapping)]
        if isinstance(states, list)
        else []
    )
    if not any(starts):
        starts = [_durations(server_info.get("startup_time"))]
    if not any(starts):
        return None
    version, seed = server_info.get("version"), server_info.get("random_seed")
    return _digest(
        [
            "sglang",
            version if isinstance(version, str) else "",
            seed if isinstance(seed, int) and 0 <= seed < 2**63 else 0,
            sorted(starts),
        ]
    )


def incarnation_of_start(start_s: float) -> str:
    """The incarnation of a process that tells its start (Unix seconds)."""
    return _digest(["process", start_s])


def _durations(startup_time: object) -> list[tuple[str, str]]:
    """Durations of one scheduler's start, exact. `tokenizer_e2e` is left out: each HTTP worker has its own."""
    if not isinstance(startup_time, Mapping):
        return []
    return sorted(
        (key, repr(value))
        for key, value in startup_time.items()
        if isinstance(key, str)
        and key != "tokenizer_e2e"
        and isinstance(value, float)
        and math.isfinite(value)
        and value > 0
    )


def _digest(facts: list[object]) -> str:
    return hashlib.sha256(ascii(facts).encode()).hexdigest()[:_CHARS]
