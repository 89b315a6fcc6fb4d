"""Clients: sessions that are played turn by turn, tried again as agent harnesses do, and given up now and then.

As the harnesses of public record: a turn that failed is sent again, word for word, up to four times with growing
pauses, `Retry-After` heeded; a client whose router vanished goes to another; some close their connection right after
the terminal event, and some vanish at any moment, after which their user sends the turn anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from simulations.prompt import BlockTexts
from simulations.replay_order import Order
from simulations.trace import Ref, Tree
from simulations.workload import BLOCK_TOKENS
from simulations.world.conversations import Asking, Built, Conversation, Real, burst_context, forked
from simulations.world.routers import Answer, Lives, SimulatedRouter
from simulations.world.scenario import Scenario

__all__ = ["Clients", "Tally"]

_TRIES: Final = 5
_BACKOFF_S: Final = 0.5
_NOBODY_S: Final = 0.25
_VANISHES_WITHIN_S: Final = (0.001, 20.0)
_BURST: Final = 32


@dataclass(slots=True)
class Tally:
    """What clients count."""

    turns: int = 0
    requests: int = 0
    given_up: int = 0
    by_end: dict[str, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Clients:
    """Everybody who asks."""

    def __init__(
        self, scenario: Scenario, routers: Sequence[SimulatedRouter], lives: Lives, trees: Iterable[Tree]
    ) -> None:
        self.tally = Tally()
        self.open = 0
        """Trees being played."""
        self._scenario = scenario
        self._routers = routers
        self._lives = lives
        self._loop = asyncio.get_running_loop()
        self._waiting: Iterator[Tree] = iter(trees)
        self._profile = next(iter(lives.replicas.values())).profile
        self._texts = BlockTexts(scenario.seed, BLOCK_TOKENS)
        self._identity = Real.identity()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Open all seats."""
        for seat in range(self._scenario.seats):
            self._spawn(self._seat(seat))
        for burst in range(self._scenario.bursts):
            self._spawn(self._burst(burst))

    def stop(self) -> None:
        """Nobody begins another turn."""
        self._stopping = True

    async def gone(self) -> None:
        """Until the last one has left."""
        while self._tasks:
            await self._tasks.pop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._loop.create_task(work))

    # --- sessions ---

    async def _seat(self, seat: int) -> None:
        """One place of a closed population."""
        dice = random.Random(f"seat/{self._scenario.seed}/{seat}")  # noqa: S311 (clients need no secrecy)
        await asyncio.sleep(dice.uniform(0.0, self._scenario.think_max_s))
        for tree in self._waiting:
            if self._stopping:
                return
            await self._play(tree)

    async def _play(self, tree: Tree) -> None:
        dice = random.Random(f"tree/{self._scenario.seed}/{tree.id}")  # noqa: S311
        tenant = f"tenant{dice.randrange(self._scenario.tenants)}"
        asker = self._asker(Conversation(tree, tenant, named=dice.random() >= self._scenario.keyless))
        hasty = dice.random() < self._scenario.hasty
        order = Order(tree)
        under_way = 0
        all_done = asyncio.Event()
        self.open += 1

        async def go(ref: Ref) -> None:
            nonlocal under_way
            await asyncio.sleep(min(order.pause_s(ref), self._scenario.think_max_s))
            if self._may_begin():
                await self._turn(f"{ref.session}:{ref.turn}", asker.asking(ref), hasty=hasty)
                for each in order.complete(ref):
                    under_way += 1
                    self._spawn(go(each))
            under_way -= 1
            if not under_way:
                all_done.set()

        for ref in order.begin():
            under_way += 1
            self._spawn(go(ref))
        await all_done.wait()
        self.open -= 1

    def _asker(self, conversation: Conversation) -> Built | Real:
        if self._scenario.real_requests:
            return Real(conversation, self._profile, self._texts, self._identity)
        return Built(conversation, self._profile.model)

    def _may_begin(self) -> bool:
        if self._stopping:
            return False
        self.tally.turns += 1
        if self.tally.turns >= self._scenario.turns:
            self.stop()
        return True

    # --- turns ---

    async def _turn(self, name: str, asking: Asking, *, hasty: bool) -> None:
        """One turn, until it is answered or given up."""
        dice = random.Random(f"turn/{self._scenario.seed}/{name}")  # noqa: S311
        for attempt in range(_TRIES):
            answer = await self._request(f"{name}~{attempt}", asking, dice, hasty=hasty)
            how = answer.done.result()
            self.tally.by_end[how] = self.tally.by_end.get(how, 0) + 1
            if how == "complete" or answer.terminal:
                self._count(answer)
                return
            pause_s = _BACKOFF_S * 2**attempt * dice.uniform(0.75, 1.25)
            await asyncio.sleep(max(pause_s, answer.retry_after_s or 0.0))
        self.tally.given_up += 1

    async def _request(self, name: str, asking: Asking, dice: random.Random, *, hasty: bool) -> Answer:
        router = await self._router(dice)
        self.tally.requests += 1
        self._lives.jobs[name] = asking.job(name)
        answer = router.ask(name, asking.facts, hasty=hasty)
        vanishing: asyncio.TimerHandle | None = None
        if self._scenario.leaving and dice.random() < self._scenario.leaving:
            shortest_s, longest_s = _VANISHES_WITHIN_S
            within_s = shortest_s * (longest_s / shortest_s) ** dice.random()
            vanishing = self._loop.call_later(within_s, answer.leave)
        await answer.done
        if vanishing is not None:
            vanishing.cancel()
        del self._lives.jobs[name]
        return answer

    async def _router(self, dice: random.Random) -> SimulatedRouter:
        """A router that is ready; clients keep knocking."""
        while True:
            ready = [router for router in self._routers if router.ready]
            if ready:
                return dice.choice(ready)
            await asyncio.sleep(_NOBODY_S)

    def _count(self, answer: Answer) -> None:
        tally = self.tally
        if answer.first_s is not None:
            tally.ttft_s.append(answer.first_s - answer.began_s)
        usage = answer.reader.usage if answer.reader is not None else None
        if usage is not None:
            tally.prompt_tokens += usage.prompt_tokens or 0
            tally.cached_tokens += usage.cached_tokens or 0

    # --- bursts ---

    async def _burst(self, number: int) -> None:
        """Many at once, as of a harness that starts subagents: the one time of a known context, the next of none."""
        dice = random.Random(f"burst/{self._scenario.seed}/{number}")  # noqa: S311
        await asyncio.sleep(dice.uniform(5.0, 60.0))
        if self._stopping:
            return
        first, blocks = (1 << 61) + number * (1 << 20), dice.randint(100, 600)
        asking = burst_context(self._profile.model, f"burst{number}", first, blocks)
        if number % 2:
            await self._turn(f"burst{number}:0", asking, hasty=False)
            await asyncio.sleep(dice.uniform(0.0, 5.0))
        for fork in range(_BURST):
            asked = forked(asking, first + blocks + 64 * (fork + 1), fork)
            self._spawn(self._turn(f"burst{number}:fork{fork}", asked, hasty=False))
