"""A soak as a picture: what went wrong when, turns under way against those counted in the store, turns, memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from simulations.picture import require

__all__ = ["draw"]

INK: Final = "#333333"
COLOURS: Final = {"replica": "#2c6fbb", "store": "#d1731f", "router": "#7a3b8f"}
MOMENT_S: Final = 1.0
"""Faults that last no time are drawn this wide."""


def draw(path: Path, figures: dict[str, Any]) -> None:
    """Write the picture. Raises PictureUnavailable and OSError."""
    figure = require()(figsize=(11, 9), layout="constrained")
    title = f"soak, seed {figures['seed']}: {figures['turns']:,} turns, {len(figures['fault_log'])} faults, "
    title += f"{len(figures['violations']) or 'no'} violations"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    faults, turns, speed, memory = figure.subplots(4, 1, sharex=True, height_ratios=(4, 2, 1.5, 1.5))
    _faults(faults, figures["fault_log"], figures["seconds"])
    samples = figures["samples"]
    at_s = [each["at_s"] for each in samples]
    turns.plot(at_s, [each["open"] for each in samples], color=INK, lw=1, label="under way at clients")
    counted = [(each["at_s"], each["in_flight"]) for each in samples if each["in_flight"] is not None]
    turns.plot(*zip(*counted, strict=True), color=COLOURS["store"], lw=1, label="in flight by the store")
    turns.legend(loc="upper right", fontsize=8, frameon=False)
    rates = [(b["turns"] - a["turns"]) / (b["at_s"] - a["at_s"]) for a, b in pairwise(samples) if b["at_s"] > a["at_s"]]
    speed.plot(at_s[1 : len(rates) + 1], rates, color=COLOURS["replica"], lw=1)
    for number, name in enumerate(("router-0", "router-1 (restarted)")):
        sizes = [each["rss_mb"][number] or None for each in samples]
        memory.plot(at_s, sizes, lw=1, color=(COLOURS["router"], "#c9a7d4")[number], label=name)
    memory.set_ylim(bottom=0)
    memory.legend(loc="lower right", fontsize=8, frameon=False)
    memory.set_xlabel("seconds", fontsize=9, color=INK)
    for axes, told in ((faults, "what went wrong"), (turns, "turns"), (speed, "turns a second"), (memory, "RSS, MB")):
        axes.set_title(told, loc="left", fontsize=10, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
    figure.savefig(path, dpi=110)


def _faults(axes: Any, faults: list[dict[str, Any]], seconds: float) -> None:
    kinds = sorted({each["kind"] for each in faults})
    for each in faults:
        subject = "router" if each["kind"].startswith("router") else "store" if each["target"] == "store" else "replica"
        end_s = each["to_s"] if each["to_s"] is not None else seconds
        width_s = max(MOMENT_S, end_s - each["from_s"])
        axes.barh(kinds.index(each["kind"]), width_s, left=each["from_s"], color=COLOURS[subject], height=0.7)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlim(0, seconds)
