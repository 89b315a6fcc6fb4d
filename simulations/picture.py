"""A replay as a picture: time to first token and hit rate over time, turns per replica.

Drawn with matplotlib (its licence is of the PSF's kind), which only the extra `plots` installs: `pip install .[plots]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from simulations.measure import TurnResult, percentile

__all__ = ["SUFFIXES", "PictureUnavailable", "draw", "require"]

SUFFIXES: Final = (".png", ".svg")
_WINDOWS: Final = 60
"""Points along the time axis."""
_INK: Final = "#333333"
_BLUE: Final = "#2c6fbb"
_ORANGE: Final = "#d1731f"
_GREY: Final = "#9aa5b1"
_TITLE: Final[dict[str, Any]] = {"loc": "left", "fontsize": 10, "color": _INK}


class PictureUnavailable(Exception):
    """matplotlib is not installed."""


def require() -> Any:
    """The `Figure` of matplotlib. Raises PictureUnavailable."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise PictureUnavailable("pictures need matplotlib: pip install 'roost[plots]'") from None


def draw(path: Path, title: str, results: Sequence[TurnResult]) -> None:
    """Write the picture; the suffix of `path` says which format. Raises PictureUnavailable and OSError."""
    figure = require()(figsize=(10, 8.5), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK)
    end_s = max((each.sent_s for each in results), default=0.0) * 1.01 or 1.0
    times, hits, replicas = figure.subplots(3, 1, height_ratios=(3, 2, _bar_height(results)))
    done = [each for each in results if each.error is None]
    _times(times, done, [each for each in results if each.error is not None])
    _hits(hits, done)
    _replicas(replicas, done)
    for axes in (times, hits):
        axes.set_xlim(0, end_s)
    for axes in (times, hits, replicas):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
    figure.savefig(path, dpi=120)


def _bar_height(results: Sequence[TurnResult]) -> float:
    return min(0.6 + 0.22 * len({each.replica for each in results}), 3.0)


def _windows(results: Sequence[TurnResult]) -> list[tuple[float, list[TurnResult]]]:
    """Results by time of sending, cut into windows of equal length: each window's middle and its turns."""
    if not results:
        return []
    end_s = max(each.sent_s for each in results)
    size_s = max(end_s / _WINDOWS, 1e-9)
    grouped: dict[int, list[TurnResult]] = {}
    for each in results:
        grouped.setdefault(min(int(each.sent_s / size_s), _WINDOWS - 1), []).append(each)
    return [((place + 0.5) * size_s, grouped[place]) for place in sorted(grouped)]


def _times(axes: Any, done: Sequence[TurnResult], failed: Sequence[TurnResult]) -> None:
    seen = [(each.sent_s, each.ttft_s) for each in done if each.ttft_s is not None]
    axes.set_title("time to first token, by time of sending", **_TITLE)
    axes.set_ylabel("seconds (log)")
    if seen:
        axes.set_yscale("log")
        axes.scatter(*zip(*seen, strict=True), s=5, alpha=0.35, linewidths=0, color=_GREY, label="a turn")
        for share, colour in ((0.5, _BLUE), (0.95, _ORANGE)):
            line = [
                (middle_s, percentile(sorted(values), share))
                for middle_s, group in _windows(done)
                if (values := [each.ttft_s for each in group if each.ttft_s is not None])
            ]
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.8, label=f"p{share * 100:.0f} of a window")
    if failed:
        floor = axes.get_ylim()[0]
        axes.plot(
            [each.sent_s for each in failed],
            [floor] * len(failed),
            "x",
            color="#c0392b",
            label="an error",
            clip_on=False,
        )
    if seen or failed:
        axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=4, markerscale=2)
    axes.grid(axis="y", alpha=0.25)


def _hits(axes: Any, done: Sequence[TurnResult]) -> None:
    axes.set_title("hit rate, by tokens", **_TITLE)
    axes.set_xlabel("seconds since the start")
    told = [each for each in done if each.prompt_tokens]
    windows = _windows(told)
    middles = [middle_s for middle_s, _ in windows]
    best = [_share(group, infinite=True) for _, group in windows]
    axes.plot(middles, best, color=_GREY, linewidth=1.5, linestyle="--", label="one infinite cache")
    if any(each.cached_tokens is not None for each in told):
        axes.plot(middles, [_share(group) for _, group in windows], color=_BLUE, linewidth=1.8, label="reported")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right", fontsize=8, frameon=False, ncols=2)
    axes.grid(axis="y", alpha=0.25)


def _share(group: Sequence[TurnResult], *, infinite: bool = False) -> float:
    if infinite:
        return sum(each.infinite_tokens for each in group) / max(sum(each.sent_tokens for each in group), 1)
    return sum(each.cached_tokens or 0 for each in group) / max(sum(each.prompt_tokens or 0 for each in group), 1)


def _replicas(axes: Any, done: Sequence[TurnResult]) -> None:
    names = sorted({each.replica for each in done if each.replica is not None})
    axes.set_title("turns per replica, and hit rate" if names else "no replica was named", **_TITLE)
    counts = [sum(each.replica == name for each in done) for name in names]
    bars = axes.barh(names, counts, color=_BLUE, height=0.65)
    rates = [_share([each for each in done if each.replica == name]) for name in names]
    labels = [f" {count:,} · {rate:.1%}" for count, rate in zip(counts, rates, strict=True)]
    axes.bar_label(bars, labels=labels, fontsize=8, color=_INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    if not names:
        axes.set_axis_off()
