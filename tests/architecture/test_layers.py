"""The architecture is a test: layers, purity, and who may read the environment."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter import api as importlinter

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
PACKAGE = ROOT / "router"

READS_ENVIRONMENT = {"main", "cli", "supervisor", "settings"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """`lint-imports` over the packages in a folder, in a process of its own: it looks at what can be imported."""
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_logo=True, cache_dir=None))"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60
    )


def test_contracts_are_kept() -> None:
    """No module imports what its layer forbids."""
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_layers_are_exhaustive_and_name_every_module() -> None:
    """A module of `router` that has no place among the layers is an error, and so is a place without a module."""
    contracts = importlinter.read_configuration(str(PYPROJECT))["contracts_options"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")
    assert layers["exhaustive"] in {True, "True"}
    assert layers["containers"] == ["router"]
    named = {name.strip(" ()") for layer in layers["layers"] for name in layer.split("|")}
    present = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert named == present - {"__init__"}


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("newcomer", "", "exhaustive"),
        ("domain.newcomer", "import time", "neither clock nor dice"),
        ("placement.newcomer", "from random import random", "neither clock nor dice"),
        ("placement.newcomer", "import redis.asyncio", "neither clock nor dice"),
        ("domain.newcomer", "import router.placement", "layers"),
        ("store.newcomer", "import router.telemetry", "layers"),
        ("lifecycle.newcomer", "import router.settings", "handed down as plain values"),
        ("api.newcomer", "import replica_agent", "neither the replica agent nor the simulations"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """The contracts bite: each of these lines, added to the package, breaks the contract that forbids it."""
    shutil.copytree(PACKAGE, tmp_path / "router", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PYPROJECT, tmp_path)
    target = tmp_path / "router" / f"{module.replace('.', '/')}.py"
    target.write_text(f"{line}\n", encoding="utf-8")
    done = _lint(tmp_path)
    assert done.returncode != 0
    broken = [told for told in done.stdout.splitlines() if told.endswith("BROKEN")]
    assert any(contract in told for told in broken), done.stdout + done.stderr


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield name, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _touches_environment(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {x.name for x in node.names})
        for node in ast.walk(tree)
    )


def test_only_the_composition_root_reads_the_environment() -> None:
    """Everything below `settings` is told what it needs; none of it looks into the environment."""
    readers = {name for name, tree in _modules() if _touches_environment(tree)}
    assert readers <= READS_ENVIRONMENT


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ as e"]
)
def test_a_look_at_the_environment_is_found(source: str) -> None:
    """However it is spelt."""
    assert _touches_environment(ast.parse(source))


def test_importing_the_router_is_light() -> None:
    """`import router` loads nothing but itself: every other package's `roost` subcommand pays for it."""
    code = "import sys; before = set(sys.modules); import router; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['router']"


def test_the_command_line_is_light() -> None:
    """`roost --version` and shell completion load neither settings nor any client library."""
    heavy = {"pydantic_settings", "yaml", "aiohttp", "redis", "prometheus_client", "asyncio", "router.settings"}
    code = "import sys, router.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert heavy.isdisjoint(done.stdout.split())
