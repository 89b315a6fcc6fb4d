"""A replay's figures as a table for people and as JSON for machines."""

from __future__ import annotations

from typing import Any, TypedDict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulations.measure import Figures, Spread

__all__ = ["Report", "Setting", "as_plain", "render"]


class Setting(TypedDict):
    """What was replayed, and how."""

    trace: str
    url: str
    dialect: str
    model: str
    sessions: int | None
    open_loop: float | str | None
    time_scale: float
    token_scale: float
    session_header: str | None
    seed: int
    context_tokens: int | None
    trees: int | None
    trees_dropped: int
    trees_cut: int


class Report(TypedDict):
    """Everything `--json` says besides the figures."""

    setting: Setting
    wall_s: float
    interrupted: bool


def as_plain(report: Report, figures: Figures) -> dict[str, Any]:
    """The JSON object: the figures at its top level."""
    return {**figures, **report}


def render(report: Report, figures: Figures) -> RenderableType:
    """The same for a terminal."""
    setting = report["setting"]
    parts: list[RenderableType] = [_summary(report, figures)]
    if figures["per_replica"]:
        parts.append(_replicas(figures))
    if figures["errors_by"]:
        parts.append(Text("errors: " + ", ".join(f"{name} {count}" for name, count in figures["errors_by"].items())))
    if setting["time_scale"] != 1:
        parts.append(
            Text(
                f"Times are wall seconds; {setting['time_scale']:g} s of the trace passed in one of them.", style="dim"
            )
        )
    return Group(*parts)


def _summary(report: Report, figures: Figures) -> Table:
    setting = report["setting"]
    table = Table(title=f"{setting['trace']} → {setting['url']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    wall_s = report["wall_s"]
    interrupted = " (interrupted)" if report["interrupted"] else ""
    table.add_row(
        "turns", f"{figures['turns']:,} in {wall_s:,.1f} s{interrupted}, {figures['turns'] / max(wall_s, 1e-9):,.1f}/s"
    )
    table.add_row("errors", f"{figures['errors']:,}")
    table.add_row("prompt tokens", _tokens(figures["prompt_tokens"], figures["cached_tokens"]))
    table.add_row("output tokens", f"{figures['output_tokens']:,}")
    table.add_row("hit rate", _hits(figures))
    table.add_row("TTFT", _spread(figures["ttft_s"]))
    table.add_row("between tokens", _spread(figures["itl_s"]))
    if figures["per_replica"]:
        table.add_row("moves", f"{figures['moves']:,} turns served elsewhere than their session's turn before")
    return table


def _tokens(prompt: int, cached: int | None) -> str:
    return f"{prompt:,}" + ("" if cached is None else f", {cached:,} of them cached")


def _hits(figures: Figures) -> str:
    hit, best = figures["hit_rate"], figures["hit_rate_infinite"]
    if best is None:
        return "unknown: no server told its usage"
    if hit is None:
        return f"unknown: no cached counts told; one infinite cache {best:.4f}"
    share = f", {hit / best:.1%} of it" if best else ""
    return f"{hit:.4f}; one infinite cache {best:.4f}{share}"


def _spread(values: Spread | None) -> str:
    if values is None:
        return "none"
    parts = (f"{name} {_seconds(values[name])}" for name in ("p50", "p95", "p99", "mean"))
    return "  ".join(parts)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _replicas(figures: Figures) -> Table:
    table = Table()
    table.add_column("replica")
    for name in ("turns", "prompt tokens", "hit rate"):
        table.add_column(name, justify="right")
    for name, share in figures["per_replica"].items():
        rate = share["hit_rate"]
        told = "" if rate is None else f"{rate:.4f}"
        table.add_row(name, f"{share['turns']:,}", f"{share['prompt_tokens']:,}", told)
    return table
