"""Readers of the engine's JSON surface: bytes in, values out. They never raise; what is odd comes back as `problems`.

Shapes are those of SGLang 0.5.23: `/v1/loads` (srt/entrypoints/v1_loads.py), `/server_info`, `/model_info` and
`/v1/models` (srt/entrypoints/http_server.py). `/server_info` holds the replica's API key in clear text: nothing of it
is kept but the fields named here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from router.discovery.incarnation import derive_incarnation

__all__ = [
    "Loads",
    "ModelInfo",
    "Models",
    "ServerInfo",
    "parse_loads",
    "parse_model_info",
    "parse_models",
    "parse_server_info",
]

_COUNT_MAX = 2**53
"""Above this a JSON number is no longer exact; no count of ours comes near."""
_NAME_CHARS_MAX = 512
_MODELS_MAX = 512
_RANKS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Loads:
    """`/v1/loads`, summed over data-parallel ranks. `understood` is False where the text is something else."""

    understood: bool = False
    version: str = ""
    dp_ranks: int = 1
    running: int | None = None
    waiting: int | None = None
    used_tokens: int | None = None
    waiting_uncached_tokens: int | None = None
    device_tokens: int | None = None
    max_running: int | None = None
    prefill_uncached_total: int | None = None
    prefill_busy_us_total: int | None = None
    accept_length: float | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The few facts of `/server_info` that placement needs."""

    understood: bool = False
    version: str = ""
    incarnation: str | None = None
    dp_ranks: int = 1
    models: tuple[str, ...] = ()
    device_tokens: int | None = None
    host_tokens: int | None = None
    page_size: int | None = None
    context_length: int | None = None
    max_running: int | None = None
    cache_report: bool | None = None
    response_store: bool | None = None
    disaggregation_mode: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Models:
    """`/v1/models`: served names, and the context length where the server tells it (`max_model_len`)."""

    understood: bool = False
    models: tuple[str, ...] = ()
    context_length: int | None = None
    sglang: bool = False
    """The server calls itself SGLang (`owned_by`)."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`/model_info`: the served name; SGLang only."""

    understood: bool = False
    models: tuple[str, ...] = ()
    disaggregation_mode: str = ""
    problems: tuple[str, ...] = ()


def parse_loads(body: bytes) -> Loads:
    """Read `/v1/loads`. A rank without a count makes that count's sum unknown rather than too small."""
    payload, problems = _object(body, "/v1/loads")
    ranks = payload.get("loads")
    if not isinstance(ranks, list) or not all(isinstance(rank, Mapping) for rank in ranks) or not ranks:
        return Loads(problems=problems or ("/v1/loads: no list of loads",))
    if len(ranks) > _RANKS_MAX:
        return Loads(problems=(f"/v1/loads: {len(ranks)} ranks",))
    odd: list[str] = []

    def total(key: str) -> int | None:
        counts = [_count(rank.get(key)) for rank in ranks]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            odd.append(f"/v1/loads: {key} is missing or no count")
            return None
        return sum(known)

    return Loads(
        understood=True,
        version=_name(payload.get("version")) or "",
        dp_ranks=len(ranks),
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        used_tokens=total("num_used_tokens"),
        waiting_uncached_tokens=total("num_waiting_uncached_tokens"),
        device_tokens=total("max_total_num_tokens") or None,
        max_running=total("max_running_requests") or None,
        prefill_uncached_total=total("total_prefill_uncached_tokens"),
        prefill_busy_us_total=total("total_prefill_busy_us"),
        accept_length=_mean_accept_length(ranks),
        problems=tuple(odd),
    )


def parse_server_info(body: bytes) -> ServerInfo:
    """Read `/server_info`."""
    payload, problems = _object(body, "/server_info")
    states = [state for state in _list(payload.get("internal_states")) if isinstance(state, Mapping)][:_RANKS_MAX]
    version = _name(payload.get("version")) or ""
    if not version or not (states or "max_total_num_tokens" in payload or "launch_command" in payload):
        return ServerInfo(problems=problems or ("/server_info: not SGLang's",))
    ranks = max(1, len(states))
    device_tokens = _positive(payload.get("max_total_num_tokens"))
    running = [_positive(state.get("effective_max_running_requests_per_dp")) for state in states]
    return ServerInfo(
        understood=True,
        version=version,
        incarnation=derive_incarnation(payload),
        dp_ranks=ranks,
        models=_names([payload.get("served_model_name")]),
        device_tokens=None if device_tokens is None else device_tokens * ranks,
        host_tokens=_host_tokens(payload, device_tokens, ranks),
        page_size=_positive(payload.get("page_size")),
        context_length=_positive(payload.get("context_length")),
        max_running=sum(count for count in running if count is not None)
        or _positive(payload.get("max_running_requests")),
        cache_report=_flag(payload.get("enable_cache_report")),
        response_store=_flag(payload.get("enable_response_store")),
        disaggregation_mode=_name(payload.get("disaggregation_mode")) or "",
        problems=() if "internal_states" not in payload or states else ("/server_info: no internal_states",),
    )


def parse_models(body: bytes) -> Models:
    """Read `/v1/models`."""
    payload, problems = _object(body, "/v1/models")
    data = payload.get("data")
    if not isinstance(data, list):
        return Models(problems=problems or ("/v1/models: no list of models",))
    cards = [card for card in data if isinstance(card, Mapping)]
    models = _names([card.get("id") for card in cards])
    lengths = [length for length in (_positive(card.get("max_model_len")) for card in cards) if length is not None]
    complete = len(models) == len(data) or len(models) == _MODELS_MAX
    return Models(
        understood=True,
        models=models,
        context_length=max(lengths, default=None),
        sglang=any(card.get("owned_by") == "sglang" for card in cards),
        problems=() if complete else ("/v1/models: a model without a usable name, or twice",),
    )


def parse_model_info(body: bytes) -> ModelInfo:
    """Read `/model_info`."""
    payload, problems = _object(body, "/model_info")
    models = _names([payload.get("served_model_name")])
    if not models and "model_path" not in payload:
        return ModelInfo(problems=problems or ("/model_info: not SGLang's",))
    return ModelInfo(
        understood=True, models=models, disaggregation_mode=_name(payload.get("disaggregation_mode")) or ""
    )


def _object(body: bytes, path: str) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """The JSON object in `body`, or an empty one and what is wrong."""
    try:
        payload = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return {}, (f"{path}: not JSON",)
    if not isinstance(payload, dict):
        return {}, (f"{path}: no JSON object",)
    return payload, ()


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _count(value: object) -> int | None:
    """A credible count: a finite number, not negative, not huge, not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value) if 0 <= value <= _COUNT_MAX else None


def _positive(value: object) -> int | None:
    return _count(value) or None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _name(value: object) -> str | None:
    """A usable name: not empty, not over-long, printable throughout."""
    if isinstance(value, str) and 0 < len(value) <= _NAME_CHARS_MAX and value.isprintable():
        return value
    return None


def _names(values: Sequence[object]) -> tuple[str, ...]:
    """The usable names among `values`, each once, in order."""
    names = (name for name in map(_name, values) if name is not None)
    return tuple(dict.fromkeys(names))[:_MODELS_MAX]


def _mean_accept_length(ranks: Sequence[Mapping[str, object]]) -> float | None:
    lengths: list[float] = []
    for rank in ranks:
        section = rank.get("speculative")
        length = section.get("accept_length") if isinstance(section, Mapping) else None
        if isinstance(length, int | float) and not isinstance(length, bool) and 1 <= length < 1e3:
            lengths.append(float(length))
    return sum(lengths) / len(lengths) if lengths else None


def _host_tokens(payload: Mapping[str, object], device_tokens: int | None, ranks: int) -> int | None:
    """The size of HiCache's host pool by its flags: known when off, or when sized as a multiple of the device pool
    (`hicache_ratio`).

    Sized in gigabytes (`hicache_size`) it depends on the bytes of a token, which only `/metrics` resolves.
    """
    enabled = _flag(payload.get("enable_hierarchical_cache"))
    if enabled is None:
        return None
    if not enabled:
        return 0
    ratio = payload.get("hicache_ratio")
    if _positive(payload.get("hicache_size")) or device_tokens is None or isinstance(ratio, bool):
        return None
    if isinstance(ratio, int | float) and 0 < ratio < 1e3:
        return int(device_tokens * ratio) * ranks
    return None
