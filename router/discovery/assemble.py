"""From one round's answers, and the round before, to an `Observation`. Pure.

Reading `/ready` (srt/managers/tokenizer_manager.py `is_ready`): 200 means not paused, status up, and not draining;
503 means any of not yet warm, paused, marked unhealthy by a failed `/health`, or draining after SIGTERM. The surface
does not say which, and `/health`, which would, generates a token and may itself mark the server unhealthy. What can
be told apart:

- *warming*: this life has never been ready, and its prefill counter shows no more than the warmup's few tokens;
- *draining*: this life has been ready, or has prefilled more than a warmup does. Drain, pause and unhealthy are one
  to a router: no new turns, running ones go on; a paused replica comes back by itself in the same life.

A new life (see `incarnation`) is noticed by the slow facts, which are read again at once when a sign of it was seen:
the connection was refused, or a counter went down. A mere timeout is no sign: an engine inside a 100k-token prefill
is busy, not dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from router.discovery.engine_json import Loads, ModelInfo, Models, ServerInfo
from router.discovery.engine_metrics import EngineMetrics
from router.discovery.incarnation import incarnation_of_start
from router.discovery.observation import Engine, Failure, Observation, bounded_problems

__all__ = ["Description", "assemble", "description_due", "restart_sign", "unreachable"]

_T = TypeVar("_T")

_WARMUP_TOKENS_MAX = 4096
"""SGLang's own warmup prompts are a few tokens, an image's worth at most."""


@dataclass(frozen=True, slots=True)
class Description:
    """The slow facts, read when a replica is new, back, or was last described a while ago."""

    server_info: ServerInfo = field(default_factory=ServerInfo)
    models: Models = field(default_factory=Models)
    model_info: ModelInfo = field(default_factory=ModelInfo)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    answered: bool = True
    """Every path gave an answer, be it "no such path"; False: ask again soon."""


def unreachable(previous: Observation | None, failure: Failure, problems: Iterable[str]) -> Observation:
    """The replica did not answer. What was known of it stays, but for what only a living engine can say."""
    known = previous or Observation()
    return replace(
        known,
        reachable=False,
        failure=failure,
        ready=None,
        draining=False,
        running=None,
        waiting=None,
        used_tokens=None,
        waiting_uncached_tokens=None,
        restart_suspected=previous is not None and (known.restart_suspected or failure is Failure.REFUSED),
        problems=bounded_problems(problems),
    )


def restart_sign(previous: Observation | None, loads: Loads) -> bool:
    """Whether this round, or an unanswered one before it, speaks for a new life."""
    if previous is None:
        return False
    before, now = previous.prefill_uncached_total, loads.prefill_uncached_total
    fell = before is not None and now is not None and now < before and previous.dp_ranks == loads.dp_ranks
    return previous.restart_suspected or fell


def description_due(previous: Observation | None, ready: bool | None, restarted: bool, now_s: float) -> bool:
    """Whether to read the slow facts now. `/server_info` asks the scheduler, so not in every round."""
    if previous is None or restarted or now_s >= previous.describe_at_s:
        return True
    return ready is True and not previous.was_ready


def assemble(
    previous: Observation | None,
    ready: bool | None,
    loads: Loads,
    description: Description | None,
    *,
    describe_at_s: float,
    problems: Iterable[str] = (),
) -> Observation:
    """Put one answered round together. `description` is None when the slow facts were not asked for.

    Facts that this round leaves out are taken from the round before; counters and having been ready die with a life.
    """
    restarted = restart_sign(previous, loads)
    found = None if description is None else _found_incarnation(description)
    incarnation, lives, new_life = _life(previous, found, restarted)
    known = previous or Observation()
    if new_life:
        known = replace(
            known, was_ready=False, accept_length=None, prefill_uncached_total=None, prefill_busy_us_total=None
        )
    engine = _engine(previous, loads, description)
    sglang = engine is Engine.SGLANG
    was_ready = known.was_ready or ready is True
    served = was_ready or (loads.prefill_uncached_total or 0) > _WARMUP_TOKENS_MAX
    all_problems = [*problems, *loads.problems]
    if description is not None:
        parts = (description.server_info, description.models, description.model_info, description.metrics)
        all_problems += [problem for part in parts for problem in part.problems]
    return _described(
        replace(
            known,
            reachable=True,
            failure=None,
            ready=ready if sglang or ready is False else None,
            engine=engine,
            version=loads.version or known.version,
            incarnation=incarnation,
            lives=lives,
            running=loads.running,
            waiting=loads.waiting,
            used_tokens=loads.used_tokens,
            waiting_uncached_tokens=loads.waiting_uncached_tokens,
            prefill_uncached_total=_or(loads.prefill_uncached_total, known.prefill_uncached_total),
            prefill_busy_us_total=_or(loads.prefill_busy_us_total, known.prefill_busy_us_total),
            accept_length=loads.accept_length or known.accept_length,
            dp_ranks=loads.dp_ranks if loads.understood else known.dp_ranks,
            device_tokens=loads.device_tokens or known.device_tokens,
            max_running=loads.max_running or known.max_running,
            draining=sglang and ready is False and served,
            was_ready=was_ready,
            restart_suspected=False,
            describe_at_s=describe_at_s,
            problems=bounded_problems(all_problems),
        ),
        loads,
        description,
    )


def _described(round_facts: Observation, loads: Loads, description: Description | None) -> Observation:
    """Lay the slow facts over those of the round; live ones (`/v1/loads`) win where both tell."""
    if description is None:
        return round_facts
    info, models, metrics = description.server_info, description.models, description.metrics
    names = dict.fromkeys((*models.models, *description.model_info.models, *info.models))
    mode = description.model_info.disaggregation_mode or info.disaggregation_mode
    return replace(
        round_facts,
        version=loads.version or info.version or round_facts.version,
        models=tuple(names) or round_facts.models,
        device_tokens=loads.device_tokens or metrics.device_tokens or info.device_tokens or round_facts.device_tokens,
        host_tokens=_or(_or(metrics.host_tokens, info.host_tokens), round_facts.host_tokens),
        page_size=info.page_size or metrics.page_size or round_facts.page_size,
        context_length=info.context_length
        or models.context_length
        or metrics.context_length
        or round_facts.context_length,
        max_running=loads.max_running or info.max_running or round_facts.max_running,
        accept_length=loads.accept_length or metrics.accept_length or round_facts.accept_length,
        cache_report=_or(info.cache_report, round_facts.cache_report),
        response_store=_or(info.response_store, round_facts.response_store),
        disaggregation_mode=mode or round_facts.disaggregation_mode,
        dp_ranks=loads.dp_ranks if loads.understood or not info.understood else info.dp_ranks,
    )


def _found_incarnation(description: Description) -> str | None:
    if description.server_info.incarnation is not None:
        return description.server_info.incarnation
    start_s = description.metrics.process_start_s
    return None if start_s is None else incarnation_of_start(start_s)


def _life(previous: Observation | None, found: str | None, restarted: bool) -> tuple[str | None, int, bool]:
    """The incarnation, the lives noticed so far, and whether this round begins a new one."""
    if previous is None:
        return found, 0, False
    if found is not None:
        changed = previous.incarnation is not None and found != previous.incarnation
        return found, previous.lives + changed, changed
    if restarted:
        return None, previous.lives + 1, True
    return previous.incarnation, previous.lives, False


def _engine(previous: Observation | None, loads: Loads, description: Description | None) -> Engine:
    if loads.understood:
        return Engine.SGLANG
    before = Engine.UNKNOWN if previous is None else previous.engine
    if description is None:
        return before
    info, model_info = description.server_info, description.model_info
    if info.understood or model_info.understood or description.models.sglang or description.metrics.sglang:
        return Engine.SGLANG
    if description.models.understood:
        return Engine.OPENAI
    return Engine.UNKNOWN if description.answered else before


def _or(first: _T | None, second: _T | None) -> _T | None:
    """`first`, which may be zero or False, unless it is None."""
    return second if first is None else first
