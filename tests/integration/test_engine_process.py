"""`roost engine` as a process: how it starts, drains, stops and dies."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest

from tests.sglang.dialects import GENERATE

PATIENCE_S = 30.0


@asynccontextmanager
async def engines(*args: str, count: int = 1) -> AsyncIterator[tuple[Process, list[str]]]:
    """The process, and the root URLs it announces."""
    code = "from router.cli import app; app(prog_name='roost')"
    command = (
        sys.executable,
        "-c",
        code,
        "engine",
        "--port",
        "0",
        "--profile",
        "cpu-tiny",
        "--count",
        str(count),
        *args,
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            lines = [(await process.stdout.readline()).decode() for _ in range(count)]
        assert all(lines)
        yield process, [line.split()[-1] for line in lines]
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended(process: Process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


async def draining(http: aiohttp.ClientSession, url: str) -> None:
    """Until it is not ready any more."""
    async with asyncio.timeout(PATIENCE_S):
        status = 200
        while status == 200:
            async with http.get(url + "/ready") as response:
                status = response.status
    assert status == 503


async def refused(http: aiohttp.ClientSession, url: str) -> None:
    """Until nobody listens there."""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(aiohttp.ClientError):
            while True:
                async with http.get(url + "/ready") as response:
                    await response.read()


async def test_on_sigterm_it_drains_and_still_takes_turns() -> None:
    """Not ready at once; what runs goes on, what comes is served, and the end is 0."""
    async with engines("--time-scale", "2") as (process, (url,)), aiohttp.ClientSession() as http:
        long = GENERATE.body("s", [], "long", max_tokens=100, stream=True)
        async with http.post(url + "/generate", json=long) as running:
            await running.content.readany()
            process.send_signal(signal.SIGTERM)
            await draining(http, url)
            async with http.get(url + "/health") as response:
                assert response.status == 503
            short = GENERATE.body("s", [], "short", max_tokens=2, stream=False)
            async with http.post(url + "/generate", json=short) as response:
                assert response.status == 200
            assert b"[DONE]" in await running.read()
        assert await ended(process) == 0


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["int", "term twice"])
async def test_it_can_be_stopped_at_once(signals: list[signal.Signals]) -> None:
    async with engines("--time-scale", "0.05") as (process, (url,)), aiohttp.ClientSession() as http:
        body = GENERATE.body("s", [], "long", max_tokens=4000, stream=True)
        async with http.post(url + "/generate", json=body) as running:
            await running.content.readany()
            first, *more = signals
            process.send_signal(first)
            if more:
                await draining(http, url)  # two signals at once would be one
                process.send_signal(*more)
            assert await ended(process) == 0


async def test_several_engines_in_one_process_and_the_crash_of_one() -> None:
    """Each has its own port and its own answers; one dies alone, the last takes the process along, as by SIGKILL."""
    async with engines(count=2) as (process, (first, second)), aiohttp.ClientSession() as http:
        assert first != second
        seeds = set()
        for url in (first, second):
            async with http.get(url + "/server_info") as response:
                seeds.add((await response.json())["random_seed"])
        assert seeds == {0, 1}
        async with http.post(first + "/simulate/crash") as response:
            assert response.status == 202
        await refused(http, first)
        async with http.get(second + "/ready") as response:
            assert response.status == 200
        async with http.post(second + "/simulate/crash") as response:
            assert response.status == 202
        assert await ended(process) == -signal.SIGKILL


async def test_wrong_arguments_are_told() -> None:
    code = "from router.cli import app; app(prog_name='roost')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, "engine", "--profile", "nothing", stderr=PIPE
    )
    _, told = await process.communicate()
    assert process.returncode == 2
    assert b"kimi-k2.6-b200-tp4" in told
