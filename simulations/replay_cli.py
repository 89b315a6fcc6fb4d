"""`roost replay`: a trace or the built-in workload, played to a server; a table, JSON and a picture of it."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.domain.turn import Dialect
from simulations import picture, workload
from simulations.prompt_dialects import DIALECTS
from simulations.replay import RECORDED, Load, Replay, Wording
from simulations.replay_client import Client, Served, Unreachable
from simulations.report import Report, Setting, as_plain, render
from simulations.trace import Fit, Trace, TraceError, Tree, fit
from simulations.trace_files import load as load_trace

__all__ = ["SYNTHETIC", "app"]

SYNTHETIC = "synthetic"
_TREES_PER_SESSION = 4
"""Length of a synthetic trace where neither a duration nor a number of turns ends it."""
_REFRESH_HZ = 4

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@dataclass(frozen=True, slots=True)
class _Given:
    """The command line, checked."""

    trace: str
    url: str
    load: Load
    dialect: Dialect
    model: str | None
    context_tokens: int | None
    cut: bool
    token_scale: float
    ignore_eos: bool
    session_header: str | None
    fan_out: float


@app.command()
def replay(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help=f"File (satrace/1, Mooncake, AIPerf; .xz too) or '{SYNTHETIC}'.")
    ],
    url: Annotated[str, typer.Option(metavar="URL", help="Root URL of the router or server.")],
    sessions: Annotated[
        int, typer.Option(min=1, help="Sessions open at a time; one that ends makes room for the next.")
    ] = 8,
    open_loop: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help=f"Sessions that begin per second of the trace, or '{RECORDED}': as recorded."
        ),
    ] = None,
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Seconds of the trace that pass in one second.")] = 1.0,
    duration: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Send no turn after this many seconds.")
    ] = None,
    turns: Annotated[int | None, typer.Option(metavar="N", min=1, help="Send no more turns than this.")] = None,
    think_max: Annotated[
        float, typer.Option(metavar="S", min=0, help="Cut longer pauses of the trace to this.")
    ] = 600.0,
    ramp: Annotated[
        float, typer.Option(metavar="S", min=0, help="Spread the first sessions over this, in trace time.")
    ] = 30.0,
    dialect: Annotated[Dialect, typer.Option(help="API to speak.")] = Dialect.CHAT,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: what the server serves.")] = None,
    session_header: Annotated[
        str | None, typer.Option(metavar="NAME", help="Header to name sessions by; default: none.")
    ] = None,
    token_scale: Annotated[float, typer.Option(help="Send so many tokens for each one of the trace.")] = 1.0,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Longest context; default: what the server says.")
    ] = None,
    over_context: Annotated[
        str, typer.Option(metavar="drop|cut", help="Sessions that do not fit: leave them out, or end them early.")
    ] = "drop",
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for outputs as long as the trace's (SGLang and vLLM only).")
    ] = True,
    fan_out: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Share of synthetic tool turns that start subagents.")
    ] = 0.02,
    seed: Annotated[int, typer.Option(min=0, help="Order, words and arrivals; another seed shares no text.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a picture: .png or .svg.")] = None,
) -> None:
    """Play a trace to a server and measure it. Exit code 0 if every turn completed, 1 if not, 2 for a wrong command."""
    given = _Given(
        trace=trace,
        url=url,
        load=Load(
            sessions=sessions,
            time_scale=time_scale,
            ramp_s=ramp,
            think_max_s=think_max,
            open_loop=_rate(open_loop),
            duration_s=duration,
            turns_max=turns,
            seed=seed,
        ),
        dialect=_speakable(dialect),
        model=model,
        context_tokens=context,
        cut=_cut(over_context),
        token_scale=_positive(token_scale),
        ignore_eos=ignore_eos,
        session_header=session_header,
        fan_out=fan_out,
    )
    _in_a_folder(json_file, "--json")
    _in_a_folder(plot, "--plot")
    _drawable(plot)
    try:
        recorded = None if trace == SYNTHETIC else load_trace(Path(trace))
        run, report = asyncio.run(_run(given, recorded))
    except (TraceError, Unreachable) as error:
        typer.echo(f"roost replay: {error}", err=True)
        raise typer.Exit(1) from None
    figures = run.measured.figures()
    Console().print(render(report, figures))
    if json_file is not None:
        json_file.write_text(json.dumps(as_plain(report, figures), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        title = f"{Path(trace).name} → {url}: {figures['turns']:,} turns, {figures['errors']:,} errors"
        picture.draw(plot, title, run.measured.results)
    raise typer.Exit(1 if figures["errors"] or not figures["turns"] else 0)


# --- the command line -------------------------------------------------------------------------------------------------


def _rate(text: str | None) -> float | str | None:
    if text is None or text == RECORDED:
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise typer.BadParameter(f"{text!r} is neither a positive rate nor '{RECORDED}'", param_hint="--open-loop")
    return rate


def _speakable(dialect: Dialect) -> Dialect:
    if dialect not in DIALECTS:
        raise typer.BadParameter(f"one of {', '.join(DIALECTS)}", param_hint="--dialect")
    return dialect


def _cut(over_context: str) -> bool:
    if over_context not in ("drop", "cut"):
        raise typer.BadParameter("drop or cut", param_hint="--over-context")
    return over_context == "cut"


def _positive(token_scale: float) -> float:
    if not 0 < token_scale <= 16:
        raise typer.BadParameter("more than 0 and at most 16", param_hint="--token-scale")
    return token_scale


def _in_a_folder(file: Path | None, flag: str) -> None:
    """Said before the run, not after it."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}", param_hint=flag)


def _drawable(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in picture.SUFFIXES:
        raise typer.BadParameter(f"must end with {' or '.join(picture.SUFFIXES)}", param_hint="--plot")
    try:
        picture.require()
    except picture.PictureUnavailable as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from None


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The trees to play."""

    trees: Iterable[Tree]
    count: int | None
    """None: without end."""
    turn_count: int | None
    block_tokens: int
    global_blocks: bool
    fitted: Fit


def _chosen(given: _Given, recorded: Trace | None, context_tokens: int | None) -> _Chosen:
    """What of the trace, or of the workload, is played, in an order that the seed decides."""
    load = given.load
    if recorded is None:
        window = min(context_tokens or workload.Shape().context_tokens, workload.Shape().context_tokens)
        drawn: Iterable[Tree] = workload.trees(
            load.seed, workload.Shape(context_tokens=window, fan_out_share=given.fan_out)
        )
        if load.duration_s is not None or load.turns_max is not None:
            return _Chosen(drawn, None, load.turns_max, workload.BLOCK_TOKENS, True, Fit(()))
        finite = tuple(islice(drawn, _TREES_PER_SESSION * load.sessions))
        total = sum(tree.turn_count for tree in finite)
        return _Chosen(finite, len(finite), total, workload.BLOCK_TOKENS, True, Fit(()))
    if load.open_loop == RECORDED and not recorded.shared_clock:
        raise TraceError("its sessions have no common clock: --open-loop needs a rate")
    fitted = fit(recorded.trees, context_tokens, cut=given.cut) if context_tokens else Fit(recorded.trees)
    if not fitted.trees:
        raise TraceError(f"no session fits a context of {context_tokens:,} tokens")
    trees = list(fitted.trees)
    if load.open_loop == RECORDED:
        trees.sort(key=lambda tree: tree.sessions[0].turns[0].at_s or 0.0)
    else:
        random.Random(load.seed).shuffle(trees)  # noqa: S311 (an order needs no secrecy)
    total = sum(tree.turn_count for tree in trees)
    expected = total if load.turns_max is None else min(total, load.turns_max)
    return _Chosen(trees, len(trees), expected, recorded.block_tokens, recorded.global_blocks, fitted)


async def _run(given: _Given, recorded: Trace | None) -> tuple[Replay, Report]:
    console = Console(stderr=True)
    async with Client.session() as http:
        client = Client(http, given.url, given.dialect)
        served = await client.served()
        context_tokens = _context(given, served)
        chosen = _chosen(given, recorded, context_tokens)
        if chosen.fitted.dropped or chosen.fitted.cut:
            console.print(
                f"{context_tokens:,} tokens of context: {chosen.fitted.dropped} sessions left out, "
                f"{chosen.fitted.cut} end early, {chosen.fitted.turns_lost:,} turns in all"
            )
        wording = Wording(
            dialect=given.dialect,
            model=given.model or served.model or "default",
            block_tokens=chosen.block_tokens,
            global_blocks=chosen.global_blocks,
            token_scale=given.token_scale,
            ignore_eos=given.ignore_eos,
            session_header=given.session_header,
        )
        began = time.perf_counter()
        run, interrupted = await _watched(client, given.load, wording, chosen, console)
        wall_s = time.perf_counter() - began
    setting: Setting = {
        "trace": given.trace,
        "url": given.url,
        "dialect": str(given.dialect),
        "model": wording.model,
        "sessions": given.load.sessions if given.load.open_loop is None else None,
        "open_loop": given.load.open_loop,
        "time_scale": given.load.time_scale,
        "token_scale": wording.sent_block_tokens / wording.block_tokens,
        "session_header": given.session_header,
        "seed": given.load.seed,
        "context_tokens": context_tokens,
        "trees": chosen.count,
        "trees_dropped": chosen.fitted.dropped,
        "trees_cut": chosen.fitted.cut,
    }
    return run, {"setting": setting, "wall_s": wall_s, "interrupted": interrupted}


def _context(given: _Given, served: Served) -> int | None:
    """The longest context in tokens of the trace: a server's own limit counts tokens as they are sent."""
    if given.context_tokens is not None:
        return given.context_tokens
    return None if served.context_tokens is None else int(served.context_tokens / given.token_scale)


async def _watched(
    client: Client, load: Load, wording: Wording, chosen: _Chosen, console: Console
) -> tuple[Replay, bool]:
    """Play with a progress bar, until the end or the first Ctrl-C."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=_REFRESH_HZ) as progress:
        bar = progress.add_task("turns", total=chosen.turn_count, told="")

        def step() -> None:
            measured = run.measured
            told = f"{run.open_trees} open, {run.in_flight} in flight, {measured.errors} errors"
            progress.update(bar, advance=1, told=told)

        run = Replay(client, load, wording, progress=step)
        playing = asyncio.create_task(run.run(chosen.trees))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, playing.cancel)
        try:
            with suppress(asyncio.CancelledError):
                await playing
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return run, playing.cancelled()
