"""A trace played to a server: so many clients at once, each thinking as long as the trace says.

Closed population: `sessions` trees are open at any time; one that ends makes room for the next of the trace, and the
first ones begin spread over `ramp_s`. Open loop: trees begin at random (Poisson) at `rate_per_s`, or when the trace
recorded them, however many are open. Inside a tree a turn goes when all it waits for has completed and its client has
thought; a failed turn counts as completed, because clients go on.

Times of the trace (`ramp_s`, `think_max_s`, rates, think times) are divided by `time_scale`; `duration_s` is wall time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from router.domain.turn import Dialect
from simulations.measure import Measured, TurnResult
from simulations.measure_cache import InfiniteCache
from simulations.prompt import BlockTexts, Prompt, TreePrompts
from simulations.prompt_dialects import body
from simulations.replay_client import Answer
from simulations.replay_order import Order
from simulations.trace import Ref, Tree

__all__ = ["RECORDED", "Asks", "Load", "Replay", "Wording"]

RECORDED = "trace"
"""In place of a rate: begin trees when the trace recorded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many clients, how fast, for how long."""

    sessions: int = 8
    time_scale: float = 1.0
    """Seconds of the trace that pass in one wall second."""
    ramp_s: float = 0.0
    think_max_s: float = 600.0
    """Longer pauses are cut to this."""
    open_loop: float | str | None = None
    """Trees per second, or RECORDED; None: a closed population."""
    duration_s: float | None = None
    """No turn is sent after this; those in flight end. None: until the trace does."""
    turns_max: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How turns are put into requests."""

    dialect: Dialect = Dialect.CHAT
    model: str = "default"
    block_tokens: int
    """Of the trace."""
    global_blocks: bool
    token_scale: float = 1.0
    ignore_eos: bool = True
    session_header: str | None = None
    """Header that carries the id of the turn's tree, as agents give all subagents their session's id."""

    @property
    def sent_block_tokens(self) -> int:
        """Tokens a block of the trace is sent as."""
        return max(round(self.block_tokens * self.token_scale), 1)


class Asks(Protocol):
    """What sends turns: `simulations.replay_client.Client`, or what stands for it where time is virtual."""

    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """One turn. Whatever goes wrong is in the answer's `error`."""
        ...


class Replay:
    """One replay; `run` once."""

    def __init__(
        self, client: Asks, load: Load, wording: Wording, *, progress: Callable[[], None] | None = None
    ) -> None:
        self.measured = Measured()
        self.in_flight = 0
        self.open_trees = 0
        self._client = client
        self._load = load
        self._wording = wording
        self._progress = progress
        self._texts = BlockTexts(load.seed, wording.sent_block_tokens)
        self._infinite = InfiniteCache()
        self._stop = asyncio.Event()
        self._seats: asyncio.TaskGroup
        self._waiting: Iterator[Tree]
        self._random = random.Random(load.seed)  # noqa: S311 (arrivals need no secrecy)
        self._began = 0.0
        self._sent = 0

    async def run(self, trees: Iterable[Tree]) -> None:
        """Until trace, duration or number of turns is through. Cancelling ends at once; `measured` stays."""
        self._began = time.perf_counter()
        waiting = iter(trees)
        ending = None
        if self._load.duration_s is not None:
            ending = asyncio.get_running_loop().call_later(self._load.duration_s, self._stop.set)
        try:
            async with asyncio.TaskGroup() as group:
                if self._load.open_loop is None:
                    self._seats = group
                    self._waiting = waiting
                    self.grow(self._load.sessions, self._load.ramp_s)
                else:
                    async for tree in self._arrivals(waiting):
                        group.create_task(self._play(tree))
        finally:
            if ending is not None:
                ending.cancel()

    def stop(self) -> None:
        """Send no turn from now on; those in flight end, and `run` with them."""
        self._stop.set()

    def grow(self, sessions: int, ramp_s: float) -> None:
        """So many places more in the closed population, the first trees of which begin spread over `ramp_s`."""
        for _ in range(sessions):
            self._seats.create_task(self._seat(ramp_s))

    async def _seat(self, ramp_s: float) -> None:
        """One place of a closed population."""
        await self._pause(self._random.uniform(0.0, ramp_s))
        for tree in self._waiting:
            if self._stop.is_set():
                return
            await self._play(tree)

    async def _arrivals(self, trees: Iterator[Tree]) -> AsyncIterator[Tree]:
        """Trees when it is their time, on a schedule that does not slip with what happens."""
        first_s: float | None = None
        due_s = 0.0
        rate = self._load.open_loop
        for tree in trees:
            if isinstance(rate, str):
                at_s = tree.sessions[0].turns[0].at_s or 0.0
                first_s = at_s if first_s is None else first_s
                due_s = at_s - first_s
            elif rate is not None:
                due_s += self._random.expovariate(rate)
            await self._pause(due_s - (time.perf_counter() - self._began) * self._load.time_scale)
            if self._stop.is_set():
                return
            yield tree

    async def _play(self, tree: Tree) -> None:
        """A tree from its first turn to its last."""
        order = Order(tree)
        wording = self._wording
        prompts = TreePrompts(tree, wording.block_tokens, global_blocks=wording.global_blocks, texts=self._texts)
        self.open_trees += 1
        try:
            async with asyncio.TaskGroup() as group:

                async def go(ref: Ref) -> None:
                    await self._pause(min(order.pause_s(ref), self._load.think_max_s))
                    if not self._may_send():
                        return
                    await self._turn(tree, prompts.prompt(ref))
                    for each in order.complete(ref):
                        group.create_task(go(each))

                for ref in order.begin():
                    group.create_task(go(ref))
        finally:
            self.open_trees -= 1

    def _may_send(self) -> bool:
        if self._stop.is_set():
            return False
        self._sent += 1
        if self._sent == self._load.turns_max:
            self._stop.set()
        return True

    async def _turn(self, tree: Tree, prompt: Prompt) -> None:
        wording = self._wording
        headers = {wording.session_header: f"{tree.id}-{self._load.seed}"} if wording.session_header else {}
        asked = body(wording.dialect, prompt, wording.model, ignore_eos=wording.ignore_eos)
        infinite = self._infinite.send(prompt)
        sent_s = time.perf_counter() - self._began
        self.in_flight += 1
        try:
            answer = await self._client.ask(asked, headers)
        finally:
            self.in_flight -= 1
        result = TurnResult(
            ref=prompt.ref,
            sent_s=sent_s,
            sent_tokens=prompt.tokens,
            infinite_tokens=infinite,
            duration_s=answer.duration_s,
            ttft_s=answer.ttft_s,
            prompt_tokens=answer.usage.prompt_tokens,
            cached_tokens=answer.usage.cached_tokens,
            output_tokens=answer.usage.output_tokens,
            replica=answer.replica,
            error=answer.error,
        )
        self.measured.add(result, answer.gaps_s)
        if self._progress is not None:
            self._progress()

    async def _pause(self, trace_s: float) -> None:
        """Wait so long on the trace's clock, or until the replay stops."""
        wall_s = trace_s / self._load.time_scale
        if wall_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wall_s):
                    await self._stop.wait()
