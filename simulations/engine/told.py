"""What an engine tells of itself: `/server_info`, `/model_info`, `/v1/models`, `/v1/loads`, `/metrics`.

Shapes and names are those of SGLang 0.5.23 (entrypoints/http_server.py, entrypoints/v1_loads.py,
observability/metrics_collector.py). `/server_info` there has 556 keys; here are those that say something about a
simulated engine, and `simulated`, which says that it is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from simulations.engine.ledger import Histogram, Ledger
from simulations.replica_model import ReplicaProfile, Snapshot

__all__ = ["VERSION", "Self", "loads", "loads_text", "metrics", "model_card", "model_info", "server_info"]

VERSION = "0.5.23"


@dataclass(frozen=True, slots=True)
class Self:
    """Who an engine is, in one life."""

    profile: ReplicaProfile
    """As its figures are, before any time scale."""
    served_model: str
    seed: int
    time_scale: float
    cache_report: bool
    startup_s: float
    """How long it says its start took: different in each life, as a real one's, and so it names the life."""

    @property
    def input_tokens_max(self) -> int:
        """Longest prompt that is taken."""
        return min(self.profile.context_tokens, self.profile.device_tokens - self.profile.page_tokens) - 6


def server_info(me: Self, seen: Snapshot) -> dict[str, Any]:
    """`/server_info`."""
    profile = me.profile
    startup = {
        "load_weight": me.startup_s * 0.5,
        "kv_cache_allocation": me.startup_s * 0.1,
        "scheduler_e2e": me.startup_s,
    }
    state = {
        "last_gen_throughput": seen.tokens_per_s,
        "memory_usage": {"token_capacity": profile.device_tokens},
        "effective_max_running_requests_per_dp": profile.max_running,
        "startup_time": startup,
    }
    return {
        "model_path": me.served_model,
        "served_model_name": me.served_model,
        "tokenizer_path": me.served_model,
        "context_length": profile.context_tokens,
        "random_seed": me.seed,
        "tp_size": profile.tp_size,
        "dp_size": 1,
        "page_size": profile.page_tokens,
        "chunked_prefill_size": profile.chunk_tokens,
        "max_running_requests": profile.max_running,
        "max_queued_requests": profile.max_queued,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": profile.priority_scheduling,
        "enable_cache_report": me.cache_report,
        "enable_metrics": True,
        "enable_response_store": False,
        "enable_hierarchical_cache": profile.host_tokens > 0,
        "hicache_ratio": profile.host_tokens / profile.device_tokens,
        "hicache_size": 0,
        "hicache_write_policy": "write_through",
        "speculative_algorithm": "DFLASH" if profile.draft_tokens else None,
        "speculative_num_draft_tokens": profile.draft_tokens or None,
        "disaggregation_mode": "null",
        "launch_command": f"roost engine --profile {profile.name} --seed {me.seed} --time-scale {me.time_scale:g}",
        "status": "ready",
        "max_total_num_tokens": profile.device_tokens,
        "max_req_input_len": me.input_tokens_max,
        "startup_time": {**startup, "tokenizer_e2e": me.startup_s},
        "kv_events": None,
        "internal_states": [state],
        "version": VERSION,
        "simulated": {"by": "roost", "profile": profile.name, "seed": me.seed, "time_scale": me.time_scale},
    }


def model_info(me: Self) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": me.served_model,
        "served_model_name": me.served_model,
        "tokenizer_path": me.served_model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "dummy",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "simulated",
        "architectures": ["Simulated"],
    }


def model_card(me: Self, created_s: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": me.served_model,
        "object": "model",
        "created": created_s,
        "owned_by": "sglang",
        "root": me.served_model,
        "parent": None,
        "max_model_len": me.profile.context_tokens,
    }


def loads(me: Self, seen: Snapshot, now_s: float) -> dict[str, Any]:
    """The one entry of `/v1/loads`. `num_used_tokens` leaves out what is cached and can be evicted."""
    profile, counters = me.profile, seen.counters
    used = seen.locked_tokens + seen.held_tokens
    found = {
        "timestamp": now_s,
        "dp_rank": 0,
        "num_running_reqs": seen.running,
        "num_waiting_reqs": seen.waiting,
        "num_waiting_uncached_tokens": seen.waiting_uncached_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + seen.waiting_uncached_tokens,
        "num_active_tokens": seen.sequence_tokens,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": profile.device_tokens,
        "max_running_requests": profile.max_running,
        "token_usage": round(used / profile.device_tokens, 4),
        "gen_throughput": round(seen.tokens_per_s, 2),
        "cache_hit_rate": _hit_rate(seen),
        "utilization": round(seen.running / profile.max_running, 4),
        "total_prefill_uncached_tokens": counters.prefilled_tokens,
        "total_prefill_busy_us": int(counters.prefill_busy_s * 1e6),
        "decode_moments": [0.0] * 6,
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": profile.device_tokens},
        "queues": {"waiting": seen.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    if profile.draft_tokens:
        accepted = profile.accept_length
        rate = (accepted - 1) / (profile.draft_tokens - 1) if profile.draft_tokens > 1 else 0.0
        found["speculative"] = {"accept_length": round(accepted, 3), "accept_rate": round(rate, 3)}
    return found


def loads_text(load: dict[str, Any]) -> str:
    """`/v1/loads?format=prometheus`."""
    lines = []
    rank = load["dp_rank"]
    for key, value in load.items():
        if key == "dp_rank":
            continue
        prefix = {"speculative": "spec"}.get(key, key)
        inner = {f"{prefix}_{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        for name, each in inner.items():
            if isinstance(each, int | float):
                lines += [f"# TYPE sglang_{name} gauge", f'sglang_{name}{{dp_rank="{rank}"}} {each}']
    return "\n".join(lines) + "\n"


def metrics(me: Self, seen: Snapshot, ledger: Ledger) -> str:
    """`/metrics`."""
    model = me.served_model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    tokenizer = f'model_name="{model}",engine_type="unified"'
    scheduler = f'{tokenizer},tp_rank="0",pp_rank="0",moe_ep_rank="0"'
    if me.profile.priority_scheduling:
        scheduler += ',priority=""'
    lines: list[str] = []
    for name, value in _gauges(me, seen).items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{scheduler}}} {float(value)}"]
    for name, series in _counters(seen, ledger).items():
        lines.append(f"# TYPE sglang:{name} counter")
        owner = tokenizer if name.startswith(_TOKENIZER) else scheduler
        lines += [f"sglang:{name}{{{owner}{labels}}} {float(value)}" for labels, value in series]
    for name, histogram in _histograms(ledger).items():
        owner = scheduler if name == "queue_time_seconds" else tokenizer
        lines += _histogram_lines(name, histogram, owner)
    return "\n".join(lines) + "\n"


_TOKENIZER = ("prompt_tokens", "generation_tokens", "cached_tokens", "num_requests", "num_aborted", "http_")


def _gauges(me: Self, seen: Snapshot) -> dict[str, float]:
    profile = me.profile
    used = seen.locked_tokens + seen.held_tokens
    found: dict[str, float] = {
        "num_running_reqs": seen.running,
        "num_queue_reqs": seen.waiting,
        "gen_throughput": seen.tokens_per_s,
        "cache_hit_rate": _hit_rate(seen),
        "token_usage": used / profile.device_tokens,
        "full_token_usage": used / profile.device_tokens,
        "num_used_tokens": used,
        "kv_available_tokens": seen.free_tokens,
        "kv_evictable_tokens": seen.evictable_tokens,
        "kv_used_tokens": used,
        "max_total_num_tokens": profile.device_tokens,
        "page_size": profile.page_tokens,
        "num_pages": profile.device_tokens // profile.page_tokens,
        "context_len": profile.context_tokens,
        "decode_sum_seq_lens": seen.sequence_tokens,
        "num_retracted_reqs": 0,
        "num_paused_reqs": 0,
        "utilization": seen.running / profile.max_running,
    }
    if profile.draft_tokens:
        found["spec_accept_length"] = profile.accept_length
        found["spec_num_draft_tokens"] = profile.draft_tokens
    if profile.host_tokens:
        found["hicache_host_used_tokens"] = seen.host_tokens
        found["hicache_host_total_tokens"] = profile.host_tokens
    return found


def _counters(seen: Snapshot, ledger: Ledger) -> dict[str, list[tuple[str, float]]]:
    """Name to series: further labels, value. A source of cached tokens has a series once it was used, as there."""
    counters = seen.counters
    cached = {"device": counters.cached_device_tokens, "host": counters.cached_host_tokens}
    paths = ledger.requests.items()
    answers = ledger.responses.items()
    return {
        "prompt_tokens_total": _streaming(ledger.prompt_tokens.items()),
        "generation_tokens_total": _streaming(ledger.output_tokens.items()),
        "cached_tokens_total": [(f',cache_source="{source}"', value) for source, value in cached.items() if value],
        "num_requests_total": [("", ledger.turns)],
        "num_aborted_requests_total": [("", counters.aborted)],
        "num_retracted_requests_total": [("", counters.retractions)],
        "num_retracted_input_tokens_total": [("", counters.retracted_input_tokens)],
        "num_retracted_output_tokens_total": [("", counters.retracted_output_tokens)],
        "spec_verify_calls_total": [("", counters.verify_calls)],
        "backuped_tokens_total": [("", counters.backed_up_tokens)],
        "http_requests_total": [(f',endpoint="{path}",method="{method}"', value) for (path, method), value in paths],
        "http_responses_total": [
            (f',endpoint="{path}",method="{method}",status_code="{status}"', value)
            for (path, method, status), value in answers
        ],
    }


def _histograms(ledger: Ledger) -> dict[str, Histogram]:
    return {
        "time_to_first_token_seconds": ledger.ttft_s,
        "inter_token_latency_seconds": ledger.itl_s,
        "e2e_request_latency_seconds": ledger.e2e_s,
        "queue_time_seconds": ledger.queue_s,
    }


def _histogram_lines(name: str, histogram: Histogram, labels: str) -> list[str]:
    lines, below = [f"# TYPE sglang:{name} histogram"], 0
    for bound, count in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        lines.append(f'sglang:{name}_bucket{{{labels},le="{bound}"}} {float(below)}')
    lines.append(f"sglang:{name}_sum{{{labels}}} {histogram.total}")
    lines.append(f"sglang:{name}_count{{{labels}}} {float(below)}")
    return lines


def _streaming(items: Iterable[tuple[bool, int]]) -> list[tuple[str, float]]:
    return [(f',is_streaming="{stream}"', value) for stream, value in items]


def _hit_rate(seen: Snapshot) -> float:
    counters = seen.counters
    cached = counters.cached_device_tokens + counters.cached_host_tokens
    return round(cached / counters.prompt_tokens, 4) if counters.prompt_tokens else 0.0
