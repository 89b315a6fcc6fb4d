"""The one command `roost`, and the subcommands of this package: `router`, `config` and `keys`.

`roost` itself knows no subcommand. It finds them in the entry points `roost.commands`, where each package registers its
own Typer app under the name it is called by, and imports a package only when its command is asked for. Settings and the
router are imported inside the commands, so that `roost --version` and shell completion stay quick.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from router import __version__

if TYPE_CHECKING:
    from router.settings import Flags, Settings

__all__ = ["EXIT_CONFIG", "app", "config_app", "keys_app", "main", "router_app"]

EXIT_CONFIG = 2
"""Exit code for settings that cannot be used; the same that a wrong flag has."""

_GROUP = "roost.commands"


class _Installed(typer.core.TyperGroup):
    """The commands that installed packages have registered, each loaded when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (Typer's signature)
        """Names of all registered commands."""
        return sorted(importlib.metadata.entry_points(group=_GROUP).names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (Typer's signature)
        """The command of that name; None where no package registers it."""
        for entry in importlib.metadata.entry_points(group=_GROUP, name=cmd_name):
            command = typer.main.get_command(entry.load())
            command.name = cmd_name
            return command
        return None


app = typer.Typer(cls=_Installed, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
router_app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
config_app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Look at settings without starting anything.",
)

keys_app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Make tenants' API keys, look at a keys file (auth.keys_file).",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"roost {__version__}")
        raise typer.Exit


@app.callback()
def _roost(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep each coding-agent conversation on the SGLang replica that holds its KV cache."""


@router_app.command()
def router(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with settings.")] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Root URL of a replica of the fleet `default`; may be repeated."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (listen.host); 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (listen.port); 8080 by default.")] = None,
    admin_host: Annotated[
        str | None, typer.Option(help="Address of the admin API (admin.host); 127.0.0.1 by default.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of the admin API and /metrics (admin.port); 9090 by default.")
    ] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Redis shared by all routers (store.url).")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="KIND", help="embedded (default), redis or memory (store.kind).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="How every fleet chooses a replica; roost by default.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port (workers); 1 by default.")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Least severe line (log.level); info by default.")
    ] = None,
) -> None:
    """Route turns to replicas until told to stop.

    Flags win over the environment (ROOST_STORE__URL), that over the file, that over the defaults; `roost config show`
    prints all settings. Ctrl-C or SIGTERM lets running turns finish, a second Ctrl-C does not.
    """
    from router.settings import Flags

    flags = Flags(
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        workers=workers,
        redis=redis,
        store=store,
        log_level=log_level,
        replicas=tuple(replica or ()),
        policy=policy,
    )
    settings = _loaded(config, flags)
    from router.supervisor import run

    raise typer.Exit(run(settings))


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with settings.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say what is wrong with a file.

    Exit code 0 when nothing is, 2 otherwise. The environment is not looked at.
    """
    from router.settings import ConfigError, Problem, cautions, load

    problems: tuple[Problem, ...] = ()
    doubts: tuple[Problem, ...] = ()
    try:
        doubts = cautions(load(file, {}))
    except ConfigError as error:
        problems = error.problems
    if as_json:
        found = {"problems": [each.as_plain() for each in problems], "cautions": [each.as_plain() for each in doubts]}
        typer.echo(json.dumps({"ok": not problems, **found}, indent=2))
    else:
        _complain(problems, doubts)
        if not problems:
            typer.echo(f"{file}: fine")
    raise typer.Exit(EXIT_CONFIG if problems else 0)


@config_app.command()
def show(
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML file with settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the settings in effect.

    Defaults, file and environment together, passwords masked.
    """
    import yaml

    from router.settings import Flags, effective

    plain = effective(_loaded(config, Flags()))
    typer.echo(json.dumps(plain, indent=2) if as_json else yaml.safe_dump(plain, sort_keys=False), nl=as_json)


@keys_app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="Who gets the key; sessions belong to the name, not the key.")],
) -> None:
    """Print a fresh key, and what to put into the keys file for it.

    The key is shown once and kept nowhere.
    """
    import yaml

    from router.api.keys import NAME_ALLOWED, hash_of, is_tenant_name, new_key

    if not is_tenant_name(tenant):
        typer.echo(f"{tenant!r} cannot be a tenant's name ({NAME_ALLOWED})", err=True)
        raise typer.Exit(EXIT_CONFIG)
    key = new_key()
    typer.echo(f"key, for the client: {key}\n\nfor auth.keys_file, into its tenants where it has some:\n")
    # Written by YAML itself: a name such as 5 or "no" needs quotes there.
    entry = {"tenants": {tenant: {"keys": [hash_of(key.encode())]}}}
    typer.echo(yaml.safe_dump(entry, sort_keys=False), nl=False)


@keys_app.command("hash")
def hash_key() -> None:
    """Hash a key, read from standard input, for the keys file."""
    from router.api.keys import KEY_LENGTH_MIN, hash_of

    key = (getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if len(key) < KEY_LENGTH_MIN:
        typer.echo(
            f"a key of {len(key)} characters can be guessed from its hash; {KEY_LENGTH_MIN} random ones are the least "
            "(`roost keys new` makes one)",
            err=True,
        )
        raise typer.Exit(EXIT_CONFIG)
    typer.echo(hash_of(key.encode()))


@keys_app.command("check")
def check_keys(file: Annotated[Path, typer.Argument(metavar="FILE", help="The keys file.")]) -> None:
    """Say what is wrong with a keys file, or whom it lets in.

    Exit code 0 when nothing is wrong, 2 otherwise.
    """
    from router.api.keys import KeysFile, KeysFileError

    try:
        ring = KeysFile(file).ring
    except KeysFileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    names = ", ".join(sorted(tenant.name for tenant in ring.tenants)) or "nobody"
    typer.echo(f"{file}: {len(ring)} keys; comes in: {names}")


def _loaded(config: Path | None, flags: Flags) -> Settings:
    """The settings, or the end of the process with every problem on a line of its own."""
    from router.settings import ConfigError, cautions, load

    try:
        settings = load(config, os.environ, flags)
    except ConfigError as error:
        _complain(error.problems, ())
        raise typer.Exit(EXIT_CONFIG) from None
    _complain((), cautions(settings))
    return settings


def _complain(problems: Sequence[object], doubts: Sequence[object]) -> None:
    for problem in problems:
        typer.echo(str(problem), err=True)
    for doubt in doubts:
        typer.echo(f"warning: {doubt}", err=True)


def main() -> None:
    """Run `roost`; the console script."""
    if not importlib.metadata.entry_points(group=_GROUP):
        typer.echo("roost: no commands found; is Roost installed? (pip install .)", err=True)
        sys.exit(1)
    app(prog_name="roost")
