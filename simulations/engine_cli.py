"""`roost engine`: simulated SGLang servers from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["engine_app"]

engine_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


@engine_app.command()
def engine(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the first engine; 0 takes a free one.")] = 30000,
    profile: Annotated[str, typer.Option(metavar="NAME", help="What is simulated.")] = "kimi-k2.6-b200-tp4",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    count: Annotated[int, typer.Option(min=1, max=1024, help="Engines, on consecutive ports, in this process.")] = 1,
    time_scale: Annotated[float, typer.Option(min=0.001, help="How many times faster than the profile.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is said and how it goes; each engine adds its number.")] = 0,
    model: Annotated[str, typer.Option(metavar="NAME", help="Served name; the profile's by default.")] = "",
    max_queued: Annotated[
        int | None, typer.Option(min=1, help="Turns that may wait before one is refused; the profile's by default.")
    ] = None,
    cache_report: Annotated[bool, typer.Option(help="Tell cached tokens in OpenAI's and Anthropic's usage.")] = True,
    show: Annotated[bool, typer.Option("--show-profile", help="Print every figure with its source, and exit.")] = False,
) -> None:
    """Simulate SGLang servers.

    The real surface, with a model of the cache and of the times behind it. No language model runs: every reply says so.
    """
    import asyncio

    from simulations import profiles
    from simulations.engine_server.process import serve
    from simulations.engine_server.server import Engine

    try:
        chosen = profiles.load(profile, **({} if max_queued is None else {"max_queued": max_queued}))
        if show:
            _show(profile)
            return
    except profiles.UnknownProfile as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None

    async def run() -> int:
        engines = [
            Engine(
                chosen,
                host=host,
                port=port + number if port else 0,
                model=model,
                seed=seed + number,
                time_scale=time_scale,
                cache_report=cache_report,
            )
            for number in range(count)
        ]
        return await serve(engines, _announce)

    try:
        code = asyncio.run(run())
    except OSError as error:
        typer.echo(f"cannot listen: {error.strerror or error} (--port 0 takes a free one)", err=True)
        code = 1
    raise typer.Exit(code)


def _announce(started: object) -> None:
    typer.echo(f"simulated engine at {getattr(started, 'url', '')}")


def _show(name: str) -> None:
    from simulations import profiles

    figures = profiles.load(name)
    for key, source in profiles.sources(name).items():
        typer.echo(f"{key} = {getattr(figures, key)}\n    {source}")
