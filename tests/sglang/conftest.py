"""Fixtures: the two servers for the whole session, Roost as a process per test, and the figures told in the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.front import Roost
from tests.sglang.servers import Pair, missing, venv

_HERE = Path(__file__).parent
_FIGURES = pytest.StashKey[dict[str, Any]]()
_ENV = dict(os.environ)
"""As it was before any test; ROOST_… variables are hidden from the tests themselves."""
_TIMEOUT_S = 420
"""Of one test, with the start of servers that it may need: 30 to 150 s each on two busy cores."""

StartRoost = Callable[..., Roost]


def sglang_python() -> Path:
    """The Python that has SGLang, and with it the official SDKs."""
    return venv(_ENV) / "bin" / "python"


def pytest_configure(config: pytest.Config) -> None:
    """Where figures are collected."""
    config.stash[_FIGURES] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server's start counts to the first test that wants it."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures, as a short table, and as JSON in the file that ROOST_SGLANG_JSON names."""
    figures = config.stash[_FIGURES]
    if not figures:
        return
    terminalreporter.section("figures")
    for name, value in figures.items():
        columns = value if all(isinstance(column, dict) for column in value.values()) else {"": value}
        terminalreporter.write_line(f"{name:<40}" + "".join(f"{column:>14}" for column in columns))
        for row, first in next(iter(columns.values())).items():
            if not isinstance(first, dict | list):
                cells = (str(column.get(row, "")) for column in columns.values())
                terminalreporter.write_line(f"  {row:<38}" + "".join(f"{cell:>14}" for cell in cells))
    target = _ENV.get("ROOST_SGLANG_JSON")
    if target:
        Path(target).write_text(json.dumps(figures) + "\n")


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Figures to tell when the session ends: by name, then by row, or by column and row. Lists go to the JSON only."""
    return request.config.stash[_FIGURES]


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The two servers. Ask `ensure` for the state a test needs; whatever still runs in the end is stopped."""
    if reason := missing(_ENV):
        pytest.skip(reason)
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")

    def say(line: str) -> None:
        if reporter is not None and capture is not None:
            with capture.global_and_fixture_disabled():
                reporter.ensure_newline()
                reporter.write_line(line)

    servers = Pair(_ENV, tmp_path_factory.mktemp("sglang"), say)
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture(scope="session")
def start_roost(tmp_path_factory: pytest.TempPathFactory) -> StartRoost:
    """Roost before given servers, as a context: `start_roost(servers, "--policy", "round_robin")`."""
    folder = tmp_path_factory.mktemp("roost")
    count = iter(range(1_000_000))

    def start(servers: tuple[Any, ...], *args: str) -> Roost:
        return Roost(servers, folder / f"roost-{next(count)}.log", *args)

    return start
