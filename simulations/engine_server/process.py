"""One process of simulated engines: it starts them, says so, and ends as SGLang would.

SIGTERM: every engine is not ready at once, goes on taking turns, and the process ends with 0 when nothing runs.
SIGINT, or a second SIGTERM: the end at once. A crash without return that leaves no engine is SIGKILL to itself (-9).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from simulations.engine_server.server import Engine

__all__ = ["serve"]


async def serve(engines: Sequence[Engine], announce: Callable[[Engine], None]) -> int:
    """Run engines until a signal; the exit code. `announce` is called for each that listens."""
    loop = asyncio.get_running_loop()
    term, now = asyncio.Event(), asyncio.Event()

    def on_term() -> None:
        if term.is_set():
            now.set()
        term.set()

    alive = set(engines)

    def on_crash(engine: Engine) -> None:
        alive.discard(engine)
        if not alive:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.add_signal_handler(signal.SIGTERM, on_term)
    loop.add_signal_handler(signal.SIGINT, now.set)
    started: list[Engine] = []
    try:
        for engine in engines:
            engine.on_crash = on_crash
            await engine.start()
            started.append(engine)
            announce(engine)
        drained = asyncio.create_task(_drain(engines, term), name="drain")
        stop = asyncio.create_task(now.wait(), name="stop")
        await asyncio.wait((drained, stop), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, stop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return 0
    finally:
        for engine in started:
            await engine.stop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


async def _drain(engines: Sequence[Engine], term: asyncio.Event) -> None:
    await term.wait()
    await asyncio.gather(*(engine.drain() for engine in engines))
