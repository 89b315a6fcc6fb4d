"""The runs that the tests share, each made once, and the table of what came of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import report
from tests.harness.rig import HARNESSES, Harness, Rig, Run

# Read before any test runs: tests see no ROOST_… variables.
_RIG = Rig.from_environment(os.environ)
_JSON = os.environ.get("ROOST_HARNESS_JSON", "")

# Second main turn reports a context that is full.
_COMPACTION = {"MOCK_BIGUSAGE": "2"}
# By main request: two are refused with Retry-After, a turn works, then three break one after the other.
_FAULTS = {"MOCK_FAIL": "1:429,2:503,4:reset,5:reset0,6:eof", "MOCK_NOSUB": "1", "MOCK_DELAY": "0.2"}
_OWN_IDS = {"identity": {"session_headers": ["x-claude-code-session-id", "x-session-id", "session-id"]}}
# The first two turns fall silent in the middle of their answer, far longer than the router waits to fill a silence.
SILENCE_S, KEEPALIVE_S = 8, 1
_SILENCES = {
    "MOCK_FAIL": "1:stall,2:stall",
    "MOCK_SILENCE_S": str(SILENCE_S),
    "MOCK_NOSUB": "1",
    "MOCK_DELAY": "0.2",
}
_KEEPALIVE = {"streams": {"keepalive_s": KEEPALIVE_S}}
_NO_RETRIES = {"limits": {"retries": 0}}


class Runs:
    """Runs by kind and harness, each made when first asked for; one that failed fails again at once."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self._folder = folder
        self._made: dict[tuple[str, str], tuple[Run, ...] | Exception] = {}

    def whole(self, name: str) -> Run:
        """The recipe through the router."""
        return self._once("whole", name, lambda harness, out: (self.rig.run(harness, out / "through"),))[0]

    def compacted(self, name: str) -> Run:
        """The recipe through the router, with a context that fills up on the way."""
        return self._once("compacted", name, lambda harness, out: (self.rig.run(harness, out, knobs=_COMPACTION),))[0]

    def unnamed(self, name: str) -> Run:
        """The recipe through a router that does not look at the header which the recipes configure.

        Qwen Code's only up to the resume: that one rewrites its first message and sends no id, so it is another prompt.
        """
        cut = name == "qwen"

        def one(harness: Harness, out: Path) -> tuple[Run]:
            return (self.rig.run(harness, out, settings=_OWN_IDS, until_resume=cut),)

        return self._once("unnamed", name, one)[0]

    def silent(self, name: str) -> Run:
        """The recipe's first part before mocks that fall silent, through a router that fills silences."""

        def one(harness: Harness, out: Path) -> tuple[Run]:
            return (self.rig.run(harness, out, knobs=_SILENCES, settings=_KEEPALIVE, until_resume=True),)

        return self._once("silent", name, one)[0]

    def faulty(self, name: str) -> tuple[Run, Run]:
        """The recipe's first part without and with the router, at the same time, before mocks that fail."""

        def both(harness: Harness, out: Path) -> tuple[Run, ...]:
            def one(through: bool) -> Run:
                return self.rig.run(
                    harness,
                    out / ("through" if through else "direct"),
                    through=through,
                    knobs=_FAULTS,
                    settings=_NO_RETRIES,
                    until_resume=True,
                )

            with ThreadPoolExecutor(2) as pool:
                return tuple(pool.map(one, (False, True)))

        direct, through = self._once("faulty", name, both)
        return direct, through

    def made(self, kind: str) -> Iterator[tuple[str, tuple[Run, ...]]]:
        """Those of a kind that were made."""
        for (of_kind, name), runs in self._made.items():
            if of_kind == kind and not isinstance(runs, Exception):
                yield name, runs

    def _once(self, kind: str, name: str, make: Callable[[Harness, Path], tuple[Run, ...]]) -> tuple[Run, ...]:
        harness = HARNESSES[name]
        if reason := self.rig.missing_for(harness):
            pytest.skip(reason)
        if (kind, name) not in self._made:
            try:
                self._made[kind, name] = make(harness, self._folder / f"{kind}-{name}")
            except Exception as error:  # noqa: BLE001 (kept for the other tests of this run, and raised below)
                self._made[kind, name] = error
        runs = self._made[kind, name]
        if isinstance(runs, Exception):
            raise runs
        return runs


_KEY = pytest.StashKey[Runs]()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """The runs of this session."""
    made = Runs(_RIG, tmp_path_factory.mktemp("harness"))
    request.config.stash[_KEY] = made
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures and, with ROOST_HARNESS_JSON=FILE, write them."""
    runs = config.stash.get(_KEY, None)
    if runs is None:
        return
    found = report.figures(
        {kind: {name: each for name, (each,) in runs.made(kind)} for kind in ("whole", "unnamed", "compacted")},
        {name: (each[0], each[1]) for name, each in runs.made("faulty")},
    )
    for line in report.table(found):
        terminalreporter.write_line(line)
    if _JSON:
        report.write(found, Path(_JSON))
