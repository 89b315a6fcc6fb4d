"""The command line: what reaches the router, exit codes, and what is printed where."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from router import __version__
from router.api.keys import KeysFile, hash_of
from router.cli import app
from router.settings import Fleet, Settings, effective

runner = CliRunner()

# Installed beside the interpreter that runs the tests (`make install`).
ROOST = Path(sys.executable).with_name("roost")

installed = pytest.mark.skipif(
    not importlib.metadata.entry_points(group="roost.commands"), reason="Roost is not installed (make install)"
)
pytestmark = installed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "roost.yaml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that `router.supervisor.run` was called with; it returns 7 and starts nothing."""
    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 7

    stand_in = types.ModuleType("router.supervisor")
    stand_in.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "router.supervisor", stand_in)
    return seen


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"roost {__version__}\n")


def test_commands_are_found_by_entry_point() -> None:
    """`router` and `config` are this package's; help lists whatever is registered."""
    names = set(importlib.metadata.entry_points(group="roost.commands").names)
    assert {"router", "config"} <= names
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f"  {name}" in result.stdout for name in names)


def test_an_unknown_command_is_a_usage_error() -> None:
    result = runner.invoke(app, ["nest"])
    assert result.exit_code == 2
    assert "No such command 'nest'" in result.stderr


def test_the_routers_exit_code_is_the_commands(started: list[Settings]) -> None:
    result = runner.invoke(app, ["router"])
    assert result.exit_code == 7
    assert started == [Settings()]


def test_every_flag_of_the_contract_reaches_the_router(started: list[Settings], file: Path) -> None:
    """Others script against these flags: they stay."""
    file.write_text("timeouts: {idle_s: 5}\n", encoding="utf-8")
    args = "--host h --port 1 --admin-host 127.0.0.2 --admin-port 2 --redis redis://r:3 --workers 4 --log-level debug"
    args += f" --policy round_robin --store redis --replica http://x:1 --replica http://y:2 --config {file}"
    result = runner.invoke(app, ["router", *args.split()])
    assert result.exit_code == 7, result.output
    (settings,) = started
    assert (settings.listen.host, settings.listen.port) == ("h", 1)
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.2", 2)
    assert (settings.store.kind, settings.store.url) == ("redis", "redis://r:3")
    assert (settings.workers, settings.log.level, settings.timeouts.idle_s) == (4, "debug", 5)
    assert settings.fleets == (Fleet(name="default", replicas=("http://x:1", "http://y:2"), policy="round_robin"),)


def test_help_tells_the_defaults_in_effect() -> None:
    """They are written out there, since settings are not loaded for a help text."""
    words = " ".join(runner.invoke(app, ["router", "--help"], env={"COLUMNS": "200"}).stdout.split())
    default = Settings()
    for said in (
        f"(listen.host); {default.listen.host} by default",
        f"(listen.port); {default.listen.port} by default",
        f"(admin.host); {default.admin.host} by default",
        f"(admin.port); {default.admin.port} by default",
        f"{default.store.kind} (default), redis or memory",
        f"replica; {default.fleets[0].policy} by default",
        f"(workers); {default.workers} by default",
        f"(log.level); {default.log.level} by default",
    ):
        assert said in words


def test_the_environment_is_read(started: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_WORKERS", "3")
    monkeypatch.setenv("ROOST_LISTEN__PORT", "3")
    runner.invoke(app, ["router", "--port", "4"])
    assert (started[0].workers, started[0].listen.port) == (3, 4)


def test_wrong_settings_end_with_2_and_a_line_each(started: list[Settings]) -> None:
    result = runner.invoke(app, ["router", "--port", "99999", "--policy", "rost"])
    assert (result.exit_code, result.stdout, started) == (2, "", [])
    first, second = result.stderr.splitlines()
    assert first.startswith("listen.port: 99999 is not allowed")
    assert second.startswith("fleets[0].policy: 'rost' is not allowed, did you mean 'roost'?")


@pytest.mark.parametrize("args", [["--prot", "1"], ["--port", "x"], ["surplus"]])
def test_wrong_usage_ends_with_2(started: list[Settings], args: list[str]) -> None:
    result = runner.invoke(app, ["router", *args])
    assert (result.exit_code, result.stdout, started) == (2, "", [])
    assert "Traceback" not in result.stderr


def test_a_caution_is_said_and_the_router_starts(started: list[Settings], file: Path) -> None:
    file.write_text("timeouts: {keepalive_s: 60}\n", encoding="utf-8")
    result = runner.invoke(app, ["router", "--config", str(file)])
    assert (result.exit_code, len(started)) == (7, 1)
    assert result.stderr.startswith("warning: timeouts.keepalive_s: 60 s is not below")


# --- roost config ----------------------------------------------------------------------------------------------------


def test_check_of_a_good_file(file: Path) -> None:
    file.write_text("workers: 2\n", encoding="utf-8")
    result = runner.invoke(app, ["config", "check", str(file)])
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{file}: fine\n", "")
    result = runner.invoke(app, ["config", "check", str(file), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"ok": True, "problems": [], "cautions": []}


def test_check_of_a_bad_file(file: Path) -> None:
    file.write_text("fleets: [{name: a, polcy: roost}]\n", encoding="utf-8")
    result = runner.invoke(app, ["config", "check", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("fleets[0].polcy: unknown key, did you mean 'policy'? (allowed: name, models, ")
    result = runner.invoke(app, ["config", "check", str(file), "--json"])
    assert (result.exit_code, result.stderr) == (2, "")
    told = json.loads(result.stdout)
    assert told["ok"] is False
    assert [(each["key"], each["origin"]) for each in told["problems"]] == [("fleets[0].polcy", str(file))]


def test_check_tells_cautions_and_succeeds(file: Path) -> None:
    file.write_text("timeouts: {keepalive_s: 60}\n", encoding="utf-8")
    result = runner.invoke(app, ["config", "check", str(file)])
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: timeouts.keepalive_s")
    told = json.loads(runner.invoke(app, ["config", "check", str(file), "--json"]).stdout)
    assert (told["ok"], [each["key"] for each in told["cautions"]]) == (True, ["timeouts.keepalive_s"])


def test_check_looks_at_the_file_only(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file gives the same answer in a pipeline and in a pod."""
    monkeypatch.setenv("ROOST_WORKERS", "none")
    file.write_text("workers: 2\n", encoding="utf-8")
    assert runner.invoke(app, ["config", "check", str(file)]).exit_code == 0


def test_show_prints_the_settings_in_effect(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_WORKERS", "3")
    file.write_text("store: {url: 'redis://u:secret@h:1'}\n", encoding="utf-8")
    wanted = effective(Settings.model_validate({"workers": 3, "store": {"url": "redis://u:***@h:1"}}))
    result = runner.invoke(app, ["config", "show", "--config", str(file)])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout) == wanted
    result = runner.invoke(app, ["config", "show", "--config", str(file), "--json"])
    assert json.loads(result.stdout) == wanted
    assert "secret" not in result.output


def test_show_of_wrong_settings_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_WORKERS", "none")
    result = runner.invoke(app, ["config", "show"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("set by environment ROOST_WORKERS)\n")


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ROOST.exists(), reason="the roost script is not beside this interpreter (make install)")
def test_the_installed_command(file: Path) -> None:
    """In a process of its own: the console script, an entry point, stderr and the exit code."""
    file.write_text("workers: 0\n", encoding="utf-8")
    done = subprocess.run(
        [ROOST, "config", "check", file], capture_output=True, text=True, check=False, timeout=60, cwd=file.parent
    )
    wanted = f"workers: 0 is not allowed (allowed: a whole number from 1; set by {file})\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_without_installed_commands_it_says_so() -> None:
    """A source tree on the path is not an installation: no entry points, one sentence."""
    code = "import importlib.metadata as m; m.entry_points = lambda **_: ()\nfrom router.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "roost: no commands found; is Roost installed? (pip install .)\n"


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", ["acme", "5", "no", "1e5", "null", "2026-01-01"])
def test_a_new_key_and_its_line_fit_each_other(tmp_path: Path, tenant: str) -> None:
    """What is printed is a keys file, whatever YAML takes the name for, and the key then names the tenant."""
    result = runner.invoke(app, ["keys", "new", tenant])
    assert result.exit_code == 0
    told, _, lines = result.stdout.partition("\n\nfor auth.keys_file, into its tenants where it has some:\n\n")
    key = told.removeprefix("key, for the client: ")
    assert key.startswith("roost-")
    file = tmp_path / "keys.yaml"
    file.write_text(lines)
    assert KeysFile(file).ring.find([(b"x-api-key", key.encode())]).name == tenant
    hashed = runner.invoke(app, ["keys", "hash"], input=f"{key}\n")
    assert hashed.stdout.strip() in lines
    checked = runner.invoke(app, ["keys", "check", str(file)])
    assert (checked.exit_code, checked.stdout) == (0, f"{file}: 1 keys; comes in: {tenant}\n")


def test_a_key_typed_at_a_terminal_is_asked_for_and_not_shown() -> None:
    """Else the command waits without a word, and the key stays on the screen."""
    ours, theirs = pty.openpty()
    command = subprocess.Popen(
        [ROOST, "keys", "hash"], stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    )
    with command:
        shown = b""
        while b"key: " not in shown:
            shown += os.read(ours, 1)
        os.write(ours, b"0123456789abcdef01234567\n")
        assert command.stdout is not None
        assert command.stdout.read().decode().strip() == hash_of(b"0123456789abcdef01234567")
        assert command.wait() == 0
        assert b"0123" not in shown + os.read(ours, 100)
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize(
    ("args", "given", "said"),
    [
        (["keys", "new", "a b"], "", "cannot be a tenant's name"),
        (["keys", "hash"], "short\n", "can be guessed"),
        (["keys", "hash"], "", "can be guessed"),
        (["keys", "check", "/absent/keys"], "", "No such file"),
    ],
)
def test_keys_that_cannot_be_end_with_2(args: list[str], given: str, said: str) -> None:
    result = runner.invoke(app, args, input=given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
