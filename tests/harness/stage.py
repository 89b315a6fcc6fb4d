"""One run of one harness, on a loopback of its own: `unshare … python -m tests.harness.stage SPEC.json`.

    CLI → front tap :8900 → router :8880 → taps :8911… → mocks :8901…        with a router
    CLI → front tap :8900 → mock :8901                                       without

Everything it starts ends with it: it is the first process of a PID namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from tests.harness import mocks
from tests.harness.tap import Tap
from tests.harness.wire import Exchange

__all__ = ["ADMIN_PORT", "BACK_PORTS", "FRONT_PORT", "ROUTER_PORT", "Result", "Spec", "result_of", "write_spec"]

FRONT_PORT = 8900
ROUTER_PORT = 8880
ADMIN_PORT = 8881
MOCK_PORTS = (8901, 8902, 8903)
BACK_PORTS = (8911, 8912, 8913)
_READY_WITHIN_S = 30.0
_STOP_WITHIN_S = 20.0
_QUIET_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to run. Paths are absolute; nothing of the caller's environment is handed on but PATH."""

    out: Path
    mock: Path
    """The shared mock script."""
    knobs: dict[str, str]
    """Its MOCK_… environment."""
    recipe: Path
    recipe_env: dict[str, str]
    router: tuple[str, ...] = ()
    """Command line of the router; empty: the harness talks to the first mock."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it. The mocks' own logs are mock1.jsonl … in `Spec.out`, the recipe's output is run.log."""

    rc: int
    """The recipe's exit status; 124: it ran past its time."""
    wall_s: float
    router_rc: int | None
    """The router's exit status after SIGTERM; None: there was none, or it had to be killed."""
    exchanges: tuple[Exchange, ...]
    admin: dict[str, str]
    """What the router's admin port said in the end, by path."""


def write_spec(spec: Spec, file: Path) -> None:
    """Hand a spec to the stage."""
    file.write_bytes(msgspec.json.encode(spec, enc_hook=str))


def result_of(out: Path) -> Result:
    """What the stage left in `Spec.out`."""
    return msgspec.json.decode((out / "result.json").read_bytes(), type=Result)


async def perform(spec: Spec) -> Result:
    """Start the parts, run the recipe, stop the parts."""
    exchanges: list[Exchange] = []
    begun_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begun_s

    logs = {port: spec.out / f"mock{n}.jsonl" for n, port in enumerate(MOCK_PORTS, 1)}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(mocks.serving(spec.mock, spec.knobs, logs))
        for n, (port, mock_port) in enumerate(zip(BACK_PORTS, MOCK_PORTS, strict=True), 1):
            await stack.enter_async_context(Tap(f"mock{n}", port, mock_port, exchanges.append, clock))
        behind = ROUTER_PORT if spec.router else MOCK_PORTS[0]
        router: asyncio.subprocess.Process | None = None
        if spec.router:
            router = await stack.enter_async_context(_router(spec))
        async with Tap("front", FRONT_PORT, behind, exchanges.append, clock):
            began_s = clock()
            rc = await _recipe(spec)
            wall_s = clock() - began_s
            admin = await _admin_says() if router else {}
        router_rc = await _stopped(router) if router else None
    return Result(rc=rc, wall_s=wall_s, router_rc=router_rc, exchanges=tuple(exchanges), admin=admin)


async def _recipe(spec: Spec) -> int:
    with (spec.out / "run.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "bash",
            str(spec.recipe),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=spec.out / "work",
            env=spec.recipe_env,
        )
        try:
            async with asyncio.timeout(spec.timeout_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            return 124


@contextlib.asynccontextmanager
async def _router(spec: Spec) -> AsyncIterator[asyncio.subprocess.Process]:
    with (spec.out / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *spec.router,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=spec.out,
            env={"PATH": os.environ["PATH"], "HOME": str(spec.out), "LANG": "C.UTF-8"},
        )
        try:
            await _ready(process)
            yield process
        finally:
            await _stopped(process)


async def _ready(process: asyncio.subprocess.Process) -> None:
    """Wait until the router says that turns can be placed, on either of its ports."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(_READY_WITHIN_S):
        while process.returncode is None:
            for port in (ADMIN_PORT, ROUTER_PORT):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                        if answer.status == 200:
                            return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the router ended with {process.returncode} before it was ready; see router.log")


async def _stopped(process: asyncio.subprocess.Process) -> int | None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_WITHIN_S):
            return await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        return None


async def _admin_says() -> dict[str, str]:
    """The router's own account, once it counts nothing in flight any more (or has had its time)."""
    said: dict[str, str] = {}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{ADMIN_PORT}") as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_WITHIN_S):
                while _in_flight(await _text(session, "/metrics")) > 0:  # noqa: ASYNC110 (another process counts)
                    await asyncio.sleep(0.1)
        for path in ("/metrics", "/admin/decisions", "/admin/replicas"):
            said[path] = await _text(session, path)
    return said


async def _text(session: aiohttp.ClientSession, path: str) -> str:
    try:
        async with session.get(path) as answer:
            return await answer.text() if answer.status == 200 else ""
    except aiohttp.ClientError:
        return ""


def _in_flight(metrics: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("roost_in_flight{"))


def _main(file: Path) -> None:
    spec = msgspec.json.decode(file.read_bytes(), type=Spec, dec_hook=lambda kind, text: kind(text))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    result = asyncio.run(perform(spec))
    (spec.out / "result.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
