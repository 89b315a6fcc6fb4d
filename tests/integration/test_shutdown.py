"""The end of a router: what runs may finish, what does not is cut, and nobody can hold it up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import Replica, Visit, replicas

ENDS_WITHIN_S = 20.0


class Process:
    """A `roost router` of its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self.port = self.admin_port = 0

    async def serving(self) -> None:
        """Read its log until it serves and has found its replica."""
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = json.loads(raw)["message"]
            self.lines.append(line)
            if line.startswith("serving on"):
                words = line.replace(",", "").split()
                self.port, self.admin_port = int(words[4]), int(words[10])
            if "is ready" in line:
                return

    async def told(self, number: int, answer: str) -> None:
        """Send a signal; return once the log says this."""
        assert self._process.stderr is not None
        self._process.send_signal(number)
        async with asyncio.timeout(ENDS_WITHIN_S):
            async for raw in self._process.stderr:
                self.lines.append(json.loads(raw)["message"])
                if answer in self.lines[-1]:
                    return

    async def ended(self, number: int | None = None) -> int:
        """Send a signal if one is given; its exit code."""
        assert self._process.stderr is not None
        if number is not None:
            self._process.send_signal(number)
        async with asyncio.timeout(ENDS_WITHIN_S):
            async for raw in self._process.stderr:
                self.lines.append(json.loads(raw)["message"])
            return await self._process.wait()


@asynccontextmanager
async def started(replica: Replica, tmp_path: Path, grace_s: float, lag_s: float = 0) -> AsyncIterator[Process]:
    """One router, in memory."""
    config = tmp_path / "roost.yaml"
    config.write_text(f"timeouts: {{ready_lag_s: {lag_s}, shutdown_grace_s: {grace_s}}}\n")
    arguments = ["router", "--config", str(config), "--store", "memory", "--port", "0", "--admin-port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from router.cli import main; main()", *arguments, "--replica", replica.url,
        stderr=asyncio.subprocess.PIPE, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    roost = Process(process)
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            await roost.serving()
        yield roost
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_idle_connections_do_not_hold_it_up(number: int, tmp_path: Path) -> None:
    """Clients keep their connections open between turns, monitors theirs to the admin API."""
    async with (
        replicas(1) as (replica,),
        started(replica, tmp_path, grace_s=60) as roost,
        Client.to(roost.port) as client,
        Client.to(roost.port) as unused,
        Client.to(roost.admin_port) as monitor,
    ):
        await client.post(Conversation("once").body(), path="/v1/chat/completions")
        assert (await client.answer()).status == 200
        monitor.writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await monitor.head()).status == 200
        assert await roost.ended(number) == 0
        assert unused.writer is not None


async def test_a_turn_that_does_not_finish_is_cut_and_counted(tmp_path: Path) -> None:
    """After its grace the client sees a message that did not end, and the log says how many."""
    begun, never = asyncio.Event(), asyncio.Event()

    async def endless(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        begun.set()
        await never.wait()

    async with (
        replicas(1, script=endless) as (replica,),
        started(replica, tmp_path, grace_s=0.3) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("endless", stream=True).body(), path="/v1/chat/completions")
        assert (await client.head()).status == 200
        await client.chunk()
        await begun.wait()
        assert await roost.ended(signal.SIGTERM) == 0
        assert any("1 turns had not finished" in line for line in roost.lines)
        assert await client.reader.read() == b""  # closed, and no last chunk before that
        never.set()


async def test_a_router_that_stops_says_so_first_and_lets_what_runs_finish(tmp_path: Path) -> None:
    """Not ready at once, still serving new connections for `ready_lag_s`; then running streams finish, whole, idle
    connections are closed, answers under way say `Connection: close`, and what outlasts the grace is cut and counted in
    one line.
    """
    begun, finish, never = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()

    async def script(visit: Visit) -> None:
        kind = visit.seen.header(b"x-kind")
        if not kind:
            await visit.reply()
            return
        if kind == [b"whole"]:
            begun.release()
            await finish.wait()
            await visit.reply()
            return
        await visit.begin()
        await visit.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        begun.release()
        await (finish if kind == [b"long"] else never).wait()
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    turn = "/v1/chat/completions"
    async with (
        replicas(1, script=script) as (replica,),
        started(replica, tmp_path, grace_s=3, lag_s=2) as roost,
        Client.to(roost.port) as long,
        Client.to(roost.port) as whole,
        Client.to(roost.port) as endless,
        Client.to(roost.port) as idle,
    ):
        for client, kind in ((long, "long"), (whole, "whole"), (endless, "endless")):
            asked = Conversation(kind, stream=kind != "whole").body()
            await client.post(asked, headers=f"X-Kind: {kind}\r\n", path=turn)
            await begun.acquire()
        await idle.post(Conversation("before").body(), path=turn)
        assert (await idle.answer()).status == 200

        await roost.told(signal.SIGTERM, "stopping: not ready")
        async with Client.to(roost.port) as late:
            late.writer.write(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (await late.answer()).status == 503
            await late.post(Conversation("late").body(), path=turn)
            assert (await late.answer()).complete
        assert await idle.gone()
        finish.set()
        assert (await long.answer()).complete
        answer = await whole.answer()
        assert (answer.status, answer.complete, answer.headers[b"connection"]) == (200, True, b"close")
        assert await whole.gone()
        assert await roost.ended() == 0
        assert not (await endless.answer()).complete
        assert [line for line in roost.lines if "had not finished" in line or "cut" in line] == [
            "shutting down: 1 turns had not finished after 3 s and are cut"
        ]
        never.set()
