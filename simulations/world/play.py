"""One run: a scenario played from the first boot until nothing goes on any more.

The end is part of the play: when the last client has left, all that went wrong is mended, every router lives, and more
than a lease's time passes; then `Quiet` is told, and whoever watches may say what must be zero by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from simulations import profiles, workload
from simulations.clock import VirtualClock, run
from simulations.replica_model import ReplicaProfile, Request, faster
from simulations.seen import Onlooker, Quiet, Seen
from simulations.trace import Tree
from simulations.world.clients import Clients, Tally
from simulations.world.network import Waits
from simulations.world.operator import Operator
from simulations.world.replicas import SimulatedReplica
from simulations.world.routers import Lives, SimulatedRouter, own_tasks
from simulations.world.scenario import Scenario
from simulations.world.storage import SharedStore

__all__ = ["Played", "World", "play"]

_BOOTED_S: Final = 5.0
_QUIET_S: Final = 25.0
"""Longer than a lease lives, with the probes and renewals that it takes to notice."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a run."""

    digest: str
    events: int
    virtual_s: float
    tally: Tally
    happened: dict[str, int]


class World:
    """Everything of one run. Made and used inside the loop."""

    def __init__(
        self,
        scenario: Scenario,
        onlookers: Sequence[Onlooker],
        trees: Iterable[Tree] | None = None,
        store: Callable[[VirtualClock], SharedStore] = SharedStore,
    ) -> None:
        """`trees`: what clients play, where it is not the built-in workload. `store`: for tests of the checkers."""
        loop = asyncio.get_running_loop()
        own_tasks(loop)
        self.scenario = scenario
        self.seen = Seen(loop, onlookers)
        self.store = store(VirtualClock(loop))
        self._profile = _profile(scenario)
        self.replicas = {f"r{number}": self._replica(f"r{number}") for number in range(scenario.replicas)}
        self._by_url = {replica.url: replica for replica in self.replicas.values()}
        jobs: dict[str, Request] = {}
        lives = Lives(
            store=self.store,
            replicas=self._by_url,
            configured=tuple(self._by_url),
            jobs=jobs,
            seen=self.seen,
            seed=scenario.seed,
            policy=scenario.policy,
            admission=scenario.admission,
            waits=Waits(),
            answers_travel=scenario.answers_travel,
        )
        self.routers = [SimulatedRouter(name, lives) for name in "abcdefgh"[: scenario.routers]]
        self.clients = Clients(scenario, self.routers, lives, trees if trees is not None else _trees(scenario))
        self.operator = Operator(self.replicas, self.routers, self.store, self._join, self.seen)

    async def play(self) -> Played:
        """From beginning to quiet. Raises `Breach` as soon as there is one."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.seen.failed(_failure(context)))
        playing = loop.create_task(self._play())
        await asyncio.wait((playing, self.seen.breach), return_when=asyncio.FIRST_COMPLETED)
        if self.seen.breach.done():
            playing.cancel()
            raise self.seen.breach.result()
        return playing.result()

    async def _play(self) -> Played:
        loop = asyncio.get_running_loop()
        for router in self.routers:
            router.boot()
        await asyncio.sleep(_BOOTED_S)
        self.operator.begin(self.scenario.faults)
        self.clients.begin()
        ending = loop.call_later(self.scenario.duration_s, self.clients.stop)
        with suppress(TimeoutError):  # whoever never ends is told at `Quiet`
            async with asyncio.timeout(self.scenario.duration_s + self.scenario.longest_s):
                await self.clients.gone()
        ending.cancel()
        await self.operator.make_well()
        await asyncio.sleep(_QUIET_S)
        lives = [router.life for router in self.routers if router.life is not None]
        # Whoever reads the store gives back what has expired.
        held = {life.name: life.leases.count for life in lives}
        under_way = {life.name: life.turns.under_way for life in lives}
        self.seen.tell(Quiet(held, under_way))
        played = Played(
            self.seen.digest,
            self.seen.count,
            loop.time(),
            self.clients.tally,
            dict(sorted(self.operator.happened.items())),
        )
        for router in self.routers:
            await router.crash()
        for replica in self._by_url.values():
            replica.close()
        return played

    def _replica(self, name: str) -> SimulatedReplica:
        return SimulatedReplica(name, self._profile, self.scenario.seed)

    def _join(self, name: str) -> SimulatedReplica:
        replica = self.replicas[name] = self._replica(name)
        self._by_url[replica.url] = replica
        return replica


def play(scenario: Scenario, onlookers: Sequence[Onlooker] = ()) -> Played:
    """Play a scenario in virtual time."""
    return run(_played(scenario, onlookers))


async def _played(scenario: Scenario, onlookers: Sequence[Onlooker]) -> Played:
    return await World(scenario, onlookers).play()


def _failure(context: dict[str, Any]) -> str:
    """What the loop says of a failure that nobody awaits."""
    return f"{context.get('message')}: {context.get('exception')!r}"


def _profile(scenario: Scenario) -> ReplicaProfile:
    profile = faster(profiles.load(scenario.profile), scenario.speed)
    room = scenario.device_tokens or profile.device_tokens
    return replace(
        profile,
        page_tokens=workload.BLOCK_TOKENS,
        device_tokens=room,
        host_tokens=0 if scenario.device_tokens else profile.host_tokens,
        max_queued=scenario.max_queued,
    )


def _trees(scenario: Scenario) -> Iterable[Tree]:
    shape = workload.Shape(context_tokens=scenario.context_tokens, fan_out_share=scenario.fan_out)
    return workload.trees(scenario.seed, shape)
