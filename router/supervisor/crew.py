"""The workers: started, replaced when they die, stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from router.settings import SECRETS_TOLD, Settings
from router.supervisor.metric_files import retire
from router.supervisor.process import Kin, Worker

__all__ = ["Crew"]

log = logging.getLogger("roost.supervisor")

BACKOFF_MIN_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0
SETTLED_S: Final = 60.0
"""A worker that lived this long had nothing wrong with it from the start."""
STOP_MARGIN_S: Final = 5.0
"""Beyond lag and grace: for settling what was cut, and for a busy machine."""


class Crew:
    """`settings.workers` places, each with a worker in it or about to have one."""

    def __init__(
        self, settings: Settings, public: socket.socket, folder: Path, lock: int, store_url: str | None
    ) -> None:
        """`public` listens, and is closed when stopping begins; `folder` is empty."""
        self._settings = settings
        self._public = public
        self._folder = folder
        self.metrics = folder / "metrics"
        """Where the workers' metric files lie."""
        self._kin = Kin(settings.model_dump_json(context=SECRETS_TOLD), public, lock, store_url, self.metrics)
        self._workers: dict[int, Worker] = {}
        self._never_ready = set(range(settings.workers))
        self._started = 0
        self._stopping = asyncio.Event()
        self._announce: Callable[[], None] = lambda: None

    def ready(self) -> list[Worker]:
        """The workers that accept, in order of their places."""
        return [worker for _, worker in sorted(self._workers.items()) if worker.ready]

    async def serve(self, stop: asyncio.Event, kill: asyncio.Event, announce: Callable[[], None]) -> None:
        """Keep the workers until `stop`, then let them finish until `kill`. `announce` is called once all accept.

        Raises RuntimeError or OSError where a worker cannot be started in the first place.
        """
        self.metrics.mkdir(mode=0o700)
        self._announce = announce
        stopped = asyncio.create_task(stop.wait())
        keepers = [asyncio.create_task(self._keep(place)) for place in range(self._settings.workers)]
        await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await self._end(keepers, kill)
        for keeper in keepers:
            keeper.result()

    async def _keep(self, place: int) -> None:
        """Have a worker in this place until stopping."""
        loop = asyncio.get_running_loop()
        pause_s = BACKOFF_MIN_S
        while True:
            began_s = loop.time()
            why = await self._life(place)
            if self._stopping.is_set():
                return
            if place in self._never_ready:
                raise RuntimeError(why)
            if loop.time() - began_s >= SETTLED_S:
                pause_s = BACKOFF_MIN_S
            log.warning("worker %d %s; a new one starts in %g s", place, why, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _life(self, place: int) -> str:
        """One worker from its start to its end; returns how that came."""
        self._started += 1
        admin_path = self._folder / f"{place}-{self._started}"
        try:
            worker = await Worker.start(place, str(admin_path), self._kin, self._accepts)
        except OSError as error:
            return f"could not be started: {error}"
        self._workers[place] = worker
        if self._stopping.is_set():  # it was being started while the others were told
            worker.signal(signal.SIGTERM)
        why = await worker.ended()
        del self._workers[place]
        retire(self.metrics, worker.pid)
        admin_path.unlink(missing_ok=True)
        return why

    def _accepts(self, worker: Worker) -> None:
        log.info("worker %d accepts, pid %d", worker.place, worker.pid)
        if worker.place in self._never_ready:
            self._never_ready.discard(worker.place)
            if not self._never_ready:
                self._announce()

    async def _end(self, keepers: list[asyncio.Task[None]], kill: asyncio.Event) -> None:
        """Stop all workers, by force once they have had their time or `kill` is set."""
        log.info("stopping; workers running: %d", len(self._workers))
        self._stopping.set()
        self._public.close()  # so that new connections are refused as soon as no worker accepts them
        self._signal(signal.SIGTERM)
        timeouts = self._settings.timeouts
        patience_s = timeouts.ready_lag_s + timeouts.shutdown_grace_s + STOP_MARGIN_S
        finished = asyncio.ensure_future(asyncio.wait(keepers))
        killed = asyncio.create_task(kill.wait())
        await asyncio.wait([finished, killed], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            why = "told to" if kill.is_set() else f"not finished after {patience_s:g} s"
            log.warning("killing the workers left, %d: %s", len(self._workers), why)
            self._signal(signal.SIGKILL)
        killed.cancel()
        await finished

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.signal(number)
