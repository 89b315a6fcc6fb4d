"""The story on a terminal of 100 × 30, and the same as plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from simulations.demo.programme import Compared

__all__ = ["WIDTH", "Frame", "Reason", "Row", "Totals", "bar", "comparison", "plain", "render"]

WIDTH: Final = 100
_BAR_CHARS: Final = 25
_GLYPHS: Final = (("█", "yellow"), ("▓", "cyan"), ("░", "bright_black"))
_REASON_STYLES: Final = {"home": "green", "new": "cyan", "fork": "blue", "rebind": "magenta"}
_BECAUSE: Final = {
    "wait": "prompts wait there",
    "prefill": "its KV is not there",
    "decode": "more turns run there",
    "others": "it would stall more turns",
    "eviction": "it would push KV out",
    "crowd": "more sessions live there",
    "ramp": "that one is new",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One replica."""

    name: str
    phase: str
    in_flight: int
    locked_tokens: int
    cached_tokens: int
    free_tokens: int
    sessions: int
    hit_rate: float | None
    ttft_p50_s: float | None
    """Simulated seconds."""
    newcomer: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole story so far. Seconds are simulated."""

    turns: int = 0
    errors: int = 0
    hit_rate: float | None = None
    hit_rate_infinite: float | None = None
    moves: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    reasons: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a turn went where it went. Seconds are simulated."""

    why: str
    session: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    cost_s: float
    other: str | None
    other_s: float
    because: str


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is on the screen."""

    where: str
    """Addresses."""
    about: str
    """What plays, and how time runs."""
    clock: str
    act: str
    caption: str
    rows: Sequence[Row] = ()
    totals: Totals = field(default_factory=Totals)
    recent: Sequence[Reason] = ()
    compared: Sequence[Compared] = ()


def bar(locked: int, cached: int, free: int, chars: int = _BAR_CHARS) -> tuple[int, int, int]:
    """Characters for each part; whoever has a token gets one, and together they are `chars`."""
    parts = (locked, cached, free)
    total = sum(parts)
    if not total:
        return (0, 0, chars)
    lengths = [max(round(part / total * chars), int(part > 0)) for part in parts]
    lengths[lengths.index(max(lengths))] += chars - sum(lengths)
    return (lengths[0], lengths[1], lengths[2])


def render(frame: Frame) -> RenderableType:
    """The frame."""
    caption = Panel(
        Text(frame.caption, style="bold"),
        title=Text(frame.act, style="bold green"),
        title_align="left",
        border_style="green",
        width=WIDTH,
        padding=(0, 1),
    )
    parts: list[RenderableType] = [_head(frame), caption, _replicas(frame.rows), _totals(frame.totals)]
    if frame.recent:
        parts.append(_reasons(frame.recent))
    if frame.compared:
        parts.append(comparison(frame.compared))
    return Group(*parts)


def _head(frame: Frame) -> Text:
    head = Text(no_wrap=True)
    head.append("Roost demo", style="bold green")
    head.append(f"  {frame.where}  ")
    head.append(frame.clock, style="bold")
    head.append(f"\n{frame.about}", style="dim")
    return head


def _replicas(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("replica", width=7)
    table.add_column("phase", width=8)
    table.add_column("in flight", justify="right", width=9)
    table.add_column(_legend(), width=_BAR_CHARS)
    table.add_column("KV tokens", justify="right", width=9)
    table.add_column("sessions", justify="right", width=8)
    table.add_column("hit rate", justify="right", width=8)
    table.add_column("TTFT p50", justify="right", width=8)
    for row in rows:
        table.add_row(
            Text(row.name + (" new" if row.newcomer else ""), style="bold green" if row.newcomer else "bold"),
            Text(row.phase, style="" if row.phase == "serving" else "yellow"),
            str(row.in_flight),
            _bar(row),
            f"{_tokens(row.locked_tokens + row.cached_tokens)}/{_tokens(_room(row))}",
            str(row.sessions),
            _rate(row.hit_rate),
            _seconds(row.ttft_p50_s),
        )
    return table


def _legend() -> Text:
    legend = Text("KV ")
    for (glyph, style), name in zip(_GLYPHS, ("locked", "cached", "free"), strict=True):
        legend.append(glyph, style=style)
        legend.append(f"{name} ", style="none")
    legend.rstrip()
    return legend


def _bar(row: Row) -> Text:
    drawn = Text()
    for (glyph, style), length in zip(_GLYPHS, bar(row.locked_tokens, row.cached_tokens, row.free_tokens), strict=True):
        drawn.append(glyph * length, style=style)
    return drawn


def _room(row: Row) -> int:
    return row.locked_tokens + row.cached_tokens + row.free_tokens


def _totals(totals: Totals) -> Text:
    text = Text()
    errors = "bold red" if totals.errors else ""
    text.append(f" {totals.turns:,} turns", style="bold")
    text.append(f"  {totals.errors} errors", style=errors)
    text.append(f"  hit rate {_rate(totals.hit_rate)} (infinite cache {_rate(totals.hit_rate_infinite)})")
    text.append(f"  TTFT p50 {_seconds(totals.ttft_p50_s)} p99 {_seconds(totals.ttft_p99_s)}\n")
    text.append(f" {totals.moves} moves", style="bold")
    text.append("  why turns went where they went:", style="dim")
    for why, count in totals.reasons:
        text.append(f"  {why}", style=_REASON_STYLES.get(why, "yellow"))
        text.append(f" {count:,}")
    return text


def _reasons(recent: Sequence[Reason]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis", end="")
    for each in recent:
        text.append(f" {each.why:<7}", style=_REASON_STYLES.get(each.why, "yellow"))
        held = f"{_tokens(each.prompt_tokens)} tokens, {_tokens(each.cached_tokens)} cached"
        text.append(f"{each.session:<7} → {each.replica}  {held:<25}")
        text.append(f"{_argument(each)}\n", style="dim")
    return text


def _argument(each: Reason) -> str:
    if each.other is None:
        return f"{each.cost_s:.1f} s"
    because = _BECAUSE.get(each.because, each.because)
    return f"{each.cost_s:.1f} s there, {each.other_s:.1f} s at {each.other}: {because}"


def comparison(compared: Sequence[Compared]) -> Table:
    """Policies side by side."""
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1))
    table.add_column("policy")
    for name in ("turns", "errors", "hit rate", "TTFT p50", "TTFT p99", "mean", "moves"):
        table.add_column(name, justify="right")
    for each in compared:
        table.add_row(
            Text(each.policy, style="bold green" if each.policy == "roost" else ""),
            f"{each.turns:,}",
            str(each.errors),
            _rate(each.hit_rate),
            _seconds(each.ttft_p50_s),
            _seconds(each.ttft_p99_s),
            _seconds(each.ttft_mean_s),
            f"{each.moves:,}",
        )
    return table


def plain(frame: Frame) -> str:
    """The frame in one line, for what is no terminal."""
    totals = frame.totals
    rows = "  ".join(f"{row.name} {row.sessions}" for row in frame.rows)
    counts = f"{totals.turns} turns, {totals.errors} errors, hit rate {_rate(totals.hit_rate)}"
    return f"{frame.clock:>6}  {counts}, sessions {rows}"


def _tokens(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 1000 else str(count)


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.3f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
