"""What is believed after a turn: rates, residency and the price of eviction, from what came true.

All learning is a robust EWMA: an observation counts as at most twice or at least half of the belief, so that one
stalled turn (a client that paused, a JIT compile) moves it little. Nothing is learned where the engine did not say what
it did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from router.domain.decision import Placed
from router.domain.outcome import End, Outcome, Usage
from router.domain.replica import Beliefs, Replica
from router.domain.turn import Turn
from router.placement.cost import Rates
from router.placement.residency import pushed_out

__all__ = ["Learned", "learn"]

RATE_ALPHA: Final = 0.1
RATIO_ALPHA: Final = 0.05
ROBUST_FACTOR: Final = 2.0
WEIGHT_MAX: Final = 64.0
PREFILL_TOKENS_MIN: Final = 1024
"""Shorter prefills are dominated by fixed costs."""
OUTPUT_TOKENS_MIN: Final = 16
TEXT_BYTES_MIN: Final = 512
PREDICTED_TOKENS_MIN: Final = 1024
COUNT_MAX: Final = 16_000_000
"""Tokens: no context is that long, so a replica that counts more speaks nonsense and is taken to have said nothing."""
RESIDENCY_FLOOR: Final = 0.05


@dataclass(frozen=True, slots=True)
class Learned:
    """What to save of a turn."""

    beliefs: Beliefs | None
    """New beliefs of the replica; None: nothing learned."""
    tokens: int
    """Held now at the replica by this branch (prompt and output); 0 where the turn left nothing."""
    prompt_tokens: int
    admitted_tokens: int
    """Newly written there."""


def learn(turn: Turn, text_bytes: int, placed: Placed, replica: Replica, rates: Rates, outcome: Outcome) -> Learned:
    """Compare `outcome` with what was expected at `replica` (as it stood at the decision) and say what to believe
    now.
    """
    if outcome.ttft_s is None or outcome.end in (End.UNREACHED, End.UPSTREAM_ERROR, End.REJECTED):
        return Learned(None, 0, 0, 0)
    usage = outcome.usage
    if max(usage.prompt_tokens or 0, usage.output_tokens or 0) > COUNT_MAX:
        usage = Usage()
        outcome = replace(outcome, usage=usage)
    if usage.cached_tokens is None and usage.prompt_tokens is not None and replica.reports_cache:
        # SGLang's /v1/messages leaves out a cached count of zero (srt/entrypoints/anthropic/serving.py).
        usage = replace(usage, cached_tokens=0)
        outcome = replace(outcome, usage=usage)
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else turn.prompt_tokens
    cached = min(prompt, usage.cached_tokens if usage.cached_tokens is not None else placed.cached_tokens)
    output = usage.output_tokens if usage.output_tokens is not None else outcome.output_events
    uncached = prompt - cached
    beliefs = _speed(replica, placed, rates, outcome, uncached, output)
    if usage.prompt_tokens is not None and text_bytes >= TEXT_BYTES_MIN:
        value = _ewma(beliefs.tokens_per_byte, prompt / text_bytes, rates.tokens_per_byte, RATE_ALPHA)
        beliefs = replace(beliefs, tokens_per_byte=value, bytes_weight=min(WEIGHT_MAX, beliefs.bytes_weight + 1))
    if usage.cached_tokens is not None:
        beliefs = _residency(beliefs, placed, cached)
        beliefs = _eviction(beliefs, replica, placed, cached, uncached + output)
    return Learned(None if beliefs == replica.beliefs else beliefs, prompt + output, prompt, uncached + output)


def _speed(replica: Replica, placed: Placed, rates: Rates, outcome: Outcome, uncached: int, output: int) -> Beliefs:
    """Prefill rate from the time to first output, token time from the rest of a stream that ended well."""
    beliefs = replica.beliefs
    ttft_s = outcome.ttft_s or 0.0
    counted = outcome.usage.cached_tokens is not None or placed.cached_tokens == 0
    if outcome.streamed and counted and uncached >= PREFILL_TOKENS_MIN and ttft_s > 0:
        ahead = replica.load.prefill_tokens + replica.foreign_prefill_tokens
        value = _ewma(beliefs.prefill_rate, (ahead + uncached) / ttft_s, rates.prefill_rate, RATE_ALPHA)
        beliefs = replace(beliefs, prefill_rate=value, prefill_weight=min(WEIGHT_MAX, beliefs.prefill_weight + 1))
    decode_s = outcome.duration_s - ttft_s
    if outcome.streamed and outcome.end is End.COMPLETE and output >= OUTPUT_TOKENS_MIN and decode_s > 0:
        beside = replica.load.in_flight + replica.foreign_in_flight
        alone_s = decode_s / (output - 1) / (1 + rates.step_slope * beside)
        value = _ewma(beliefs.token_time_s, alone_s, rates.token_time_s, RATE_ALPHA)
        beliefs = replace(beliefs, token_time_s=value, token_weight=min(WEIGHT_MAX, beliefs.token_weight + 1))
    return beliefs


def _residency(beliefs: Beliefs, placed: Placed, cached: int) -> Beliefs:
    """Move the correction towards cached tokens found / cached tokens predicted without it."""
    predicted = placed.cached_tokens / beliefs.residency_factor
    if predicted < PREDICTED_TOKENS_MIN:
        return beliefs
    found = max(RESIDENCY_FLOOR, min(1.0, cached / predicted))
    return replace(
        beliefs, residency_factor=beliefs.residency_factor + RATIO_ALPHA * (found - beliefs.residency_factor)
    )


def _eviction(beliefs: Beliefs, replica: Replica, placed: Placed, cached: int, admitted: int) -> Beliefs:
    """ε: tokens asked for again after they were evicted, over tokens evicted, with a memory of one cache full of
    tokens.
    """
    evicted = pushed_out(replica, admitted)
    asked_again = (
        max(0, placed.held_once_tokens - cached) if replica.load.admitted_tokens > replica.capacity.device_tokens else 0
    )
    if not evicted and not asked_again:
        return beliefs
    memory = max(1, replica.capacity.device_tokens + replica.capacity.host_tokens)
    share = (beliefs.evicted_asked_share * memory + asked_again) / (memory + max(evicted, asked_again))
    return replace(beliefs, evicted_asked_share=max(0.0, min(1.0, share)))


def _ewma(belief: float, observed: float, prior: float, alpha: float) -> float:
    """One robust step from `belief` (the prior where there is none yet) towards `observed`."""
    base = belief if belief > 0 else prior
    bounded = max(base / ROBUST_FACTOR, min(base * ROBUST_FACTOR, observed))
    return base + alpha * (bounded - base)
