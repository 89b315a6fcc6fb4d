"""The conformance suite as it is run: its exit code, JSON and last line; Roost passes, and a bad router does not."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import naive
from tests.conformance.case import Verdict
from tests.conformance.cases import all_cases
from tests.conformance.report import side_by_side

_ROOT = Path(__file__).parents[2]
_SMOKE = (
    "affinity.session_stays",
    "affinity.racing_first_turns",
    "bytes.request_body",
    "failover.refused[chat]",
    "failover.full_in_stream[messages]",
    "headers.hop_by_hop_request",
    "leaving.midway[chat]",
    "shared.alternating_routers",
    "spreading.burst_with_frozen_loads",
    "streams.at_once",
    "streams.death_midway[responses]",
)
"""One of each kind, quick."""
_BAD = (
    "affinity.session_stays[chat]",
    "bytes.request_body[chat]",
    "bytes.query[messages]",
    "failover.all_refuse[chat]",
    "failover.never_twice",
    "leaving.midway[messages]",
    "security.authorization[chat]",
    "security.log_is_silent",
    "streams.at_once[chat]",
    "streams.death_is_incomplete[chat]",
    "streams.death_midway[responses]",
)
"""What the bad router breaks, quick to find out."""
_KEPT = ("routes.models", "bytes.unknown_fields[chat]", "headers.unknown_pass")
"""What even the bad router keeps."""


async def _run(folder: Path, *arguments: str) -> tuple[int | None, dict[str, Any], str]:
    """Exit code, JSON and last line of a run."""
    told = folder / "told.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.conformance", "--json", str(told), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    lines = out.decode().strip().splitlines()
    return process.returncode, json.loads(told.read_text()) if told.exists() else {}, lines[-1] if lines else ""


def _only(cases: tuple[str, ...]) -> list[str]:
    return [word for case in cases for word in ("--only", case)]


@pytest.mark.timeout(240)
async def test_roost_passes_one_case_of_each_kind(tmp_path: Path) -> None:
    code, told, last = await _run(tmp_path, *_only(_SMOKE))
    broken = {each["id"]: each["said"] for each in told["cases"] if each["verdict"] == "fail"}
    assert (code, broken) == (0, {}), last
    assert told["router"] == "roost"
    assert told["summary"]["pass"] + told["summary"]["n/a"] == len(told["cases"]) >= len(_SMOKE)
    pattern = r"conformance: roost: \d+ passed, 0 failed, \d+ n/a of \d+ cases in \d+ s"
    assert re.fullmatch(pattern, last), last


@pytest.mark.timeout(240)
async def test_a_bad_router_fails_what_it_breaks_and_passes_what_it_keeps(tmp_path: Path) -> None:
    command = f"{sys.executable} {naive.__file__} --host {{host}} --port {{port}} {{replicas}}"
    chosen = _only(_BAD + _KEPT)
    code, told, last = await _run(tmp_path, "--router", command, "--session-header", "x-session-id", *chosen)
    assert code == 1, last
    verdicts = {each["id"]: each["verdict"] for each in told["cases"]}
    assert verdicts == dict.fromkeys(_BAD, "fail") | dict.fromkeys(_KEPT, "pass")
    assert all(each["said"] for each in told["cases"] if each["verdict"] == "fail")


async def test_what_a_router_does_not_offer_is_not_applicable_and_no_failure(tmp_path: Path) -> None:
    command = f"{sys.executable} {naive.__file__} --host {{host}} --port {{port}} {{replicas}}"
    chosen = ("routes.models", "shared.alternating_routers", "membership.drain")
    code, told, last = await _run(tmp_path, "--router", command, *_only(chosen))
    assert code == 0, last
    verdicts = {each["id"]: each["verdict"] for each in told["cases"]}
    assert verdicts == {"routes.models": "pass", "shared.alternating_routers": "n/a", "membership.drain": "n/a"}
    assert all(each["said"] for each in told["cases"] if each["verdict"] == "n/a")


async def test_a_router_that_does_not_start_is_told_apart_from_one_that_fails(tmp_path: Path) -> None:
    code, told, last = await _run(tmp_path, "--router", "false {listen} {replicas}", "--only", "routes.models")
    assert (code, told) == (2, {})
    assert "did not start" in last, last


async def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    code, _, last = await _run(tmp_path, "--only", "no.such.case")
    assert code == 2
    assert "no.such.case" in last


def test_every_case_states_its_rule_in_one_sentence_and_names_a_source() -> None:
    for case in all_cases():
        assert re.fullmatch(r"[A-Z0-9`].*[.]", case.rule), case.id
        assert case.sources, case.id
        assert all(each == "Roost" or each.startswith("https://") for each in case.sources), case.id


def test_the_readme_lists_every_case() -> None:
    told = (_ROOT / "tests/conformance/README.md").read_text()
    names = {case.id.partition("[")[0] for case in all_cases()}
    missing = sorted(name for name in names if f"`{name}`" not in told)
    assert not missing


def test_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    paths = []
    for router, verdicts in {"a": ("pass", "fail"), "b": ("n/a", "pass")}.items():
        cases = [
            {"id": f"x.y[{dialect}]", "rule": "A rule.", "verdict": verdict}
            for dialect, verdict in zip(("chat", "messages"), verdicts, strict=True)
        ]
        summary = {verdict.value: verdicts.count(verdict.value) for verdict in Verdict}
        path = tmp_path / f"{router}.json"
        path.write_text(json.dumps({"router": router, "summary": summary, "cases": cases}))
        paths.append(path)
    assert "| `x.y` | A rule. | **fail** (1 of 2 pass) | pass (1 of 2 served) |" in side_by_side(paths)
