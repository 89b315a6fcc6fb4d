"""A reader of Prometheus text that survives a text cut anywhere and lines of nonsense.

The reader of `prometheus_client` raises at the first odd line and takes the first half of a number for the number
when the text is cut inside its last line; a probe wants the good lines and no wrong figure. So this reads line by
line, only the gauges named here, and only lines that are ended.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["EngineMetrics", "parse_metrics"]

_LABELS = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*+"'
_SAMPLE = re.compile(
    rf"(?P<name>sglang:[a-z_]+|process_start_time_seconds)(?:\{{(?P<labels>(?:{_LABELS},?)*+)\}})?"
    r"[ \t]+(?P<value>[^\s]+)(?:[ \t]+-?\d+)?[ \t\r]*"
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*+)"')
_SUMMED = ("sglang:max_total_num_tokens", "sglang:hicache_host_total_tokens")
_LARGEST = ("sglang:page_size", "sglang:context_len", "sglang:spec_accept_length", "process_start_time_seconds")
_WANTED = (*_SUMMED, *_LARGEST)
_VALUE_MAX = 2.0**53


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The gauges that tell what `/server_info` does not, or a non-SGLang server's start time."""

    sglang: bool = False
    """Some gauge is named as SGLang names them."""
    device_tokens: int | None = None
    host_tokens: int | None = None
    page_size: int | None = None
    context_length: int | None = None
    accept_length: float | None = None
    process_start_s: float | None = None
    """Unix seconds; SGLang has none (multi-process mode)."""
    problems: tuple[str, ...] = ()


def parse_metrics(body: bytes) -> EngineMetrics:
    """Read `/metrics`.

    Labels (srt/observability/metrics_collector.py): every tensor- or pipeline-parallel rank that publishes shows the
    same value, so per `dp_rank` the largest counts; ranks are then summed. Where a gauge has a series per priority,
    priority="" is the total.
    """
    lines = body.decode("utf-8", errors="replace").split("\n")
    problems: list[str] = []
    if lines[-1]:
        problems.append(f"/metrics: cut short at line {len(lines)}")
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for number, line in enumerate(lines[:-1], start=1):
        if not line.startswith(_WANTED):
            continue
        match = _SAMPLE.fullmatch(line)
        value = None if match is None else _value(match["value"])
        if match is None or value is None:
            problems.append(f"/metrics: line {number} is no sample")
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        if match["name"] in _WANTED and not labels.get("priority"):
            rank = labels.get("dp_rank", "")
            values[match["name"]][rank] = max(value, values[match["name"]].get(rank, 0.0))
    found = {name: sum(ranks.values()) for name, ranks in values.items() if name in _SUMMED}
    found |= {name: max(ranks.values()) for name, ranks in values.items() if name in _LARGEST}
    accept_length = found.get("sglang:spec_accept_length", 0.0)
    return EngineMetrics(
        sglang=any(name.startswith("sglang:") for name in found),
        device_tokens=_whole(found.get("sglang:max_total_num_tokens")),
        host_tokens=_whole(found.get("sglang:hicache_host_total_tokens")),
        page_size=_whole(found.get("sglang:page_size")),
        context_length=_whole(found.get("sglang:context_len")),
        accept_length=accept_length if accept_length >= 1 else None,
        process_start_s=found.get("process_start_time_seconds") or None,
        problems=tuple(problems),
    )


def _value(text: str) -> float | None:
    """A credible sample value; NaN, infinities, negatives and the huge are none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value <= _VALUE_MAX else None


def _whole(value: float | None) -> int | None:
    """Zero is what a gauge shows that was never set."""
    return int(value) if value else None
