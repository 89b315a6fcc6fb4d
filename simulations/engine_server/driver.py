"""Real time for a replica model: one timer, set to whatever happens next, and a `Run` for each turn.

Streams are told of new tokens at the model's decode steps, but no more often than every `tick_s`: tokens that come
faster arrive together. Whoever reads slowly finds all that has come meanwhile at once; nothing queues up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from simulations.replica_model import (
    Aborted,
    Event,
    Failed,
    Finished,
    FirstToken,
    Refused,
    ReplicaModel,
    Request,
    Snapshot,
    Started,
)

__all__ = ["Driver", "Run"]

_Last = Finished | Aborted | Refused | Failed


@dataclass(slots=True)
class Run:
    """One turn, as far as it has come."""

    rid: str
    prompt_tokens: int
    arrived_s: float
    stream: bool
    started: Started | None = None
    first_s: float | None = None
    said: int = 0
    """Tokens."""
    end: _Last | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def news(self) -> None:
        """Wait until something has changed since the last call."""
        await self._news.wait()
        self._news.clear()

    def tell(self) -> None:
        """Wake whoever waits for news."""
        self._news.set()


class Driver:
    """One model, driven. Everything happens in the running event loop."""

    def __init__(self, model: ReplicaModel, tick_s: float) -> None:
        """`model` must have been made with the time of `now_s`."""
        self.model = model
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, Run] = {}
        self._streams = 0
        self._answering = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = inf
        self._ticked_s = -inf
        self._idle = asyncio.Event()
        self._idle.set()

    def now_s(self) -> float:
        """The model's clock: the loop's."""
        return self._loop.time()

    async def idle(self) -> None:
        """Until no turn is being answered."""
        await self._idle.wait()

    def knows(self, rid: str) -> bool:
        """Whether a turn of that id has not ended."""
        return rid in self._runs

    @contextmanager
    def running(self, request: Request, *, stream: bool) -> Iterator[Run]:
        """A turn in the model for as long as the block lasts; left early, it is aborted."""
        run = Run(request.rid, request.prompt_tokens, self.now_s(), stream)
        self._runs[request.rid] = run
        self._streams += stream
        self._answering += 1
        self._idle.clear()
        try:
            self.model.submit(run.arrived_s, request)
            self._pass()
            yield run
        finally:
            self._streams -= stream
            self._answering -= 1
            if not self._answering:
                self._idle.set()
            if self._runs.pop(request.rid, None) is not None:
                self.model.abort(self.now_s(), request.rid)
                self._pass()

    def abort(self, rid_prefix: str) -> int:
        """End turns by the beginning of their ids; an empty one means all."""
        count = self.model.abort(self.now_s(), rid_prefix)
        self._pass()
        return count

    def snapshot(self) -> Snapshot:
        """How the model stands now."""
        seen = self.model.snapshot(self.now_s())
        self._pass()
        return seen

    def flush(self) -> bool:
        """Empty the cache, if idle."""
        return self.model.flush(self.now_s())

    def close(self) -> None:
        """Never wake again."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = inf

    def _pass(self) -> None:
        """Take what has happened by now, tell it, and set the timer to what happens next."""
        now_s = self.now_s()
        for event in self.model.advance(now_s):
            self._take(event)
        if self._streams and now_s >= self._ticked_s + self._tick_s:
            self._ticked_s = now_s
            for rid, said in self.model.progress(now_s):
                run = self._runs.get(rid)
                if run is not None and run.stream:
                    run.said = said
                    run.tell()
        due_s = self.model.next_event_s()
        if self._streams:
            due_s = min(due_s, max(self.model.next_step_s(now_s), self._ticked_s + self._tick_s))
        if due_s != self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s = due_s
            self._timer = self._loop.call_at(due_s, self._wake) if due_s < inf else None

    def _wake(self) -> None:
        self._due_s, self._timer = inf, None
        self._pass()

    def _take(self, event: Event) -> None:
        run = self._runs.get(event.rid)
        if run is None:
            return
        match event:
            case Started():
                run.started = event
                return
            case FirstToken():
                run.first_s, run.said = event.at_s, max(run.said, 1)
            case Finished() | Aborted() | Refused() | Failed():
                run.end = event
                del self._runs[event.rid]
            case _:
                return
        if run.stream or run.end is not None:
            run.tell()
