"""A `roost router` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.replicas import Replica

ENDS_WITHIN_S = 20.0


class Process:
    """A `roost router` of its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
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
async def started(
    replica: Replica, tmp_path: Path, grace_s: float = 5, lag_s: float = 0, more: str = "", files: int | None = None
) -> AsyncIterator[Process]:
    """One router, in memory; `more` is further YAML of its settings, `files` what the system lets it open."""
    config = tmp_path / "roost.yaml"
    config.write_text(f"timeouts: {{ready_lag_s: {lag_s}, shutdown_grace_s: {grace_s}, body_wait_s: 60}}\n{more}")
    arguments = ["router", "--config", str(config), "--store", "memory", "--port", "0", "--admin-port", "0"]
    allowing = "" if files is None else f"from resource import *; setrlimit(RLIMIT_NOFILE, ({files}, {files})); "
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{allowing}from router.cli import main; main()", *arguments, "--replica", replica.url,
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
