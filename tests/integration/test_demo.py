"""`roost demo` as a process and on its stage: its figures, its end, and what it leaves behind, which is nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from router.main import bind
from simulations import profiles
from simulations.demo.cast import Cast
from simulations.demo.programme import POLICIES, Compared, Programme
from simulations.demo.screen import Frame
from simulations.demo.show import Plan, Show
from simulations.demo.stage import HOST, stage
from simulations.demo.story import Act, Acts
from simulations.demo.theatre import EXIT_INTERRUPTED
from simulations.demo.versus import compared
from tests.integration.replicas import PATIENCE_S

PATIENCE_WHOLE_S = 110
"""Below the suite's own limit for a test."""
BRIEF = Acts(arrive_s=1.5, fan_out_s=2.0, join_s=2.0)
QUICK = """
from pathlib import Path
from simulations.demo import theatre
from simulations.demo.story import Acts
theatre.SHORT = Acts(arrive_s=1.0, fan_out_s=1.0, join_s=1.5)
raise SystemExit(theatre.run(once=True, json_file=Path("told.json"), seed=7, port=0, sessions=4))
"""
WHOLE = """
import sys
from simulations.demo_cli import demo_app
sys.argv[1:] = ["--once", "--json", "told.json", "--sessions", "12", "--port", "0"]
demo_app(prog_name="roost demo")
"""


class Performance:
    """A demo as a process, and traces of it: whatever it starts inherits its mark."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, mark: str) -> None:
        self.process = process
        self.folder = folder
        self._mark = mark.encode()
        self.said = ""

    async def until(self, text: str) -> None:
        """Read on until that was said."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.said:
                line = await self.process.stdout.readline()
                assert line, f"it ended before it said {text!r}: {self.said}"
                self.said += line.decode()

    async def end(self) -> tuple[int, str]:
        """Its exit code, and what it complained of."""
        async with asyncio.timeout(PATIENCE_WHOLE_S):
            out, complaints = await self.process.communicate()
        self.said += out.decode()
        assert self.process.returncode is not None
        return self.process.returncode, complaints.decode()

    def left(self) -> list[str]:
        """Files and processes that are still there."""
        files = [str(path) for path in (self.folder / "tmp").iterdir()]
        return files + [name for name, environment in _environments() if self._mark in environment]


def _environments() -> Iterator[tuple[str, bytes]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield (process / "cmdline").read_text(), (process / "environ").read_bytes()
        except OSError:
            continue  # it has just ended, or is not ours


@asynccontextmanager
async def performance(code: str) -> AsyncIterator[Performance]:
    folder, mark = Path(tempfile.mkdtemp(prefix="demo-")), f"ROOST_TEST_MARK={uuid4()}"
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), **dict([mark.split("=")])}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        code,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Performance(process, folder, mark)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        shutil.rmtree(folder)


async def test_the_whole_story_headless() -> None:
    """`roost demo --once --json FILE`: no turn failed, nothing is left in flight, no old branch moved."""
    async with performance(WHOLE) as demo:
        code, complaints = await demo.end()
        assert (code, complaints) == (0, ""), demo.said
        told = json.loads((demo.folder / "told.json").read_text())
        (demo.folder / "told.json").unlink()
        assert demo.left() == []
    assert told["errors"] == told["in_flight_after"] == told["moved_by_join"] == 0
    assert told["turns"] == sum(told["reasons"].values()) > 100
    assert 0.5 < told["hit_rate"] <= 1.01 * told["hit_rate_infinite"]
    assert 0 < told["ttft_p50_s"] <= told["ttft_p99_s"]
    assert told["old_branches_at_join"] > 0
    assert 0 < told["newcomer_new_sessions"] <= told["new_sessions_after_join"]
    assert told["fan_out"]["stayed"] == told["fan_out"]["later_turns"] > 0
    assert len(told["fan_out"]["began"]) > 1
    assert tuple(told["comparison"]) == POLICIES
    assert told["comparison"]["roost"]["hit_rate"] > told["comparison"]["round_robin"]["hit_rate"]
    for said in ("1 of 4", "2 of 4", "3 of 4", "4 of 4", "session_sticky", "old branches moved there"):
        assert said in demo.said
    assert "\x1b" not in demo.said


async def test_a_file_that_cannot_be_written_is_refused_before_anything_starts() -> None:
    async with performance(WHOLE.replace("told.json", "nowhere/told.json")) as demo:
        code, complaints = await demo.end()
        assert code == 2
        assert "nowhere" in complaints
        assert demo.left() == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are told apart by /proc")
@pytest.mark.parametrize("moment", ["1 of 4", "3 of 4", "4 of 4"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_leaves_nothing(moment: str, number: signal.Signals) -> None:
    """At any moment: no process, no file, no trace back; exit code 130."""
    async with performance(QUICK) as demo:
        await demo.until(moment)
        demo.process.send_signal(number)
        assert await demo.end() == (EXIT_INTERRUPTED, "")
        assert demo.left() == []


async def test_a_show_in_this_process_leaves_no_task_and_no_thread() -> None:
    """Its encore ends when it is told to; frames are of the running router and its engines."""
    threads, tasks = threading.enumerate(), asyncio.all_tasks()
    frames: list[Frame] = []

    def draw(frame: Frame) -> None:
        frames.append(frame)
        if show.act is Act.ENCORE:
            show.finish()

    show = Show(Plan(seed=3, sessions=6, port=0, acts=BRIEF, encore=True), draw)
    async with asyncio.timeout(PATIENCE_WHOLE_S):
        told = await show.play()
    assert (told["errors"], told["in_flight_after"]) == (0, 0)
    assert [frame.act for frame in frames if frame.act == Act.ENCORE.value]
    last = show.frame()
    assert [row.name for row in last.rows] == list("ABCDE")
    assert [row.newcomer for row in last.rows] == [False] * 4 + [True]
    assert sum(row.in_flight for row in last.rows) == 0
    assert last.totals.turns == told["turns"]
    assert last.totals.hit_rate == pytest.approx(told["hit_rate"])
    kv = {row.locked_tokens + row.cached_tokens + row.free_tokens for row in last.rows}
    assert kv == {profiles.load("kimi-k2.6-b200-tp4").device_tokens}
    assert threading.enumerate() == threads
    assert {task for task in asyncio.all_tasks() - tasks if not task.done()} == set()


async def test_a_taken_port_is_no_obstacle() -> None:
    """Another one is found, and it says so."""
    with bind(HOST, 0) as taken:
        port = taken.getsockname()[1]
        profile = profiles.load("cpu-tiny")
        async with stage(profile, replicas=1, port=port, time_scale=10.0, seed=0) as here:
            assert here.port_taken
            assert not here.url.endswith(f":{port}")


def test_a_rehearsal_is_the_same_every_time() -> None:
    """The same programme gives the same figures, to the last digit; another policy plays the same sessions worse."""
    programme = Programme("kimi-k2.6-b200-tp4", 5, 6, 4, 20.0, 40.0, 70.0, 3, 10.0, 120.0)
    first, again = compared("roost", programme), compared("roost", programme)
    assert first == again
    assert (first.errors, first.turns > 50) == (0, True)
    other: Compared = compared("round_robin", programme)
    assert other.errors == 0
    assert other.hit_rate < first.hit_rate
    assert other.moves > first.moves


def test_the_cast_asks_for_no_more_than_replicas_hold() -> None:
    """Every turn fits the demo's replicas."""
    room = profiles.load("kimi-k2.6-b200-tp4").context_tokens
    cast = Cast(1)
    for _ in range(50):
        assert all(session.peak_tokens < room for session in next(cast).sessions)
