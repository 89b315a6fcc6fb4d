"""Several scripted models that follow one script: the shared mock, loaded once for each port.

The copies share the mock's counters, so that `MOCK_FAIL=4:reset` means the fourth main request wherever it lands. A
`stall`, which the script means for ever, lasts `MOCK_SILENCE_S` where that is given, and the stream then goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohttp import web

__all__ = ["serving"]

_SHARED = ("S", "FAIL", "T0")


@contextlib.asynccontextmanager
async def serving(script: Path, knobs: Mapping[str, str], logs: Mapping[int, Path]) -> AsyncIterator[None]:
    """Serve the script on each port of `logs`, which says where that copy writes what it saw."""
    runners = []
    copies = [_load(script, knobs, port, log) for port, log in logs.items()]
    for copy in copies[1:]:
        for name in _SHARED:
            setattr(copy, name, getattr(copies[0], name))
    try:
        for port, copy in zip(logs, copies, strict=True):
            runner = web.AppRunner(copy.app, access_log=None, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


def _load(script: Path, knobs: Mapping[str, str], port: int, log: Path) -> ModuleType:
    # The script reads its environment when it is loaded.
    os.environ.update(knobs, MOCK_PORT=str(port), MOCK_LOG=str(log))
    spec = importlib.util.spec_from_file_location(f"mock_{port}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (silence_s := knobs.get("MOCK_SILENCE_S")) is not None:
        module.asyncio = _Hurried(float(silence_s))  # type: ignore[attr-defined]  # the script's own name for it
    return module


class _Hurried:
    """asyncio, but for a sleep that would outlast every run."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, self._longest_s))
