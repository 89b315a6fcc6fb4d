"""A store whose servers die: behind Sentinels and as a cluster, in Redis and Valkey."""

from __future__ import annotations

import asyncio
import signal
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest
from redis.crc import key_slot

from router.domain.errors import StoreUnavailable
from router.ports import Acquired, Ask, View
from router.store.keys import FleetKeys
from router.store.redis import RedisStore
from tests.contracts.groups import Node, cluster, group, sentinels, until
from tests.contracts.servers import KINDS
from tests.contracts.worlds import FLEET, boundary, claim
from tests.integration.conversations import Conversation
from tests.integration.replicas import replicas
from tests.integration.roosts import Roost, running, settings_for, shared_store
from tests.soak.proxy import FaultProxy

KEYS = FleetKeys("roost", FLEET)
TIMEOUT_S = 0.05
SLACK_S = 0.5
"""What a busy machine may add. A call that waits for a connection, a Sentinel or a stall would take seconds."""


@dataclass(frozen=True)
class Group:
    url: str
    master: Node
    """The one that has the fleet's keys."""
    leader: Callable[[], Node]
    """The one that has them now."""


@contextmanager
def behind_sentinels(kind: str) -> Iterator[Group]:
    with sentinels(kind) as group:
        yield Group(group.url, group.master, group.leader)


@contextmanager
def clustered(kind: str) -> Iterator[Group]:
    with cluster(kind, replicas=True, node_timeout_ms=1000) as group:
        owner = group.owner(key_slot(KEYS.load))
        heir = group.replicas[group.masters.index(owner)]
        yield Group(group.url, owner, lambda: heir)


TOPOLOGIES = {"sentinel": behind_sentinels, "cluster": clustered}


@dataclass
class Stream:
    """Claims without end, and what became of each."""

    store: RedisStore
    won: list[str] = field(default_factory=list)
    failed_s: list[float] = field(default_factory=list)
    """How long each call took that failed."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        while True:
            number += 1
            began_s = loop.time()
            try:
                got = await self.store.acquire(FLEET, claim(f"l{number}", f"b{number}", boundary(number)))
            except StoreUnavailable:
                self.failed_s.append(loop.time() - began_s)
            else:
                assert isinstance(got, Acquired)
                self.won.append(f"l{number}")
            self._news.set()
            await asyncio.sleep(0.002)

    async def until(self, met: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not met():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def streaming(url: str) -> AsyncIterator[Stream]:
    store = RedisStore(url, timeout_s=TIMEOUT_S)
    stream = Stream(store)
    task = asyncio.create_task(stream.run())
    try:
        await stream.until(lambda: len(stream.won) >= 20)
        yield stream
    finally:
        task.cancel()
        await asyncio.wait([task])
        await store.close()


CASES = [
    *((topology, kind, "kill") for topology in TOPOLOGIES for kind in KINDS),
    *((topology, "valkey", "hang") for topology in TOPOLOGIES),
]


@pytest.mark.parametrize(("topology", "kind", "how"), CASES)
async def test_writes_come_back_and_go_to_the_new_master_only(topology: str, kind: str, how: str) -> None:
    """The master dies, or hangs and comes back: calls fail within their time, and what is acknowledged then is kept.

    What had been replicated is there too, and the new master learns the scripts, which are not replicated.
    """
    with TOPOLOGIES[topology](kind) as group:
        async with streaming(group.url) as stream:
            known = int(stream.won[-1][1:])
            await asyncio.to_thread(until, lambda: group.master.say("WAIT", 1, 1000), "it replicates")
            stream.failed_s.clear()
            if how == "kill":
                group.master.kill()
            else:
                group.master.process.send_signal(signal.SIGSTOP)
            await stream.until(lambda: stream.failed_s)
            before = len(stream.won)
            await stream.until(lambda: len(stream.won) >= before + 50)
            if how == "hang":  # it still takes itself for the master
                group.master.process.send_signal(signal.SIGCONT)
            await stream.until(lambda: len(stream.won) >= before + 150)
            view = await answered(stream.store, boundary(known).hash)
        leader = await asyncio.to_thread(group.leader)
        assert leader.port != group.master.port
        kept = {lease.decode() for lease in leader.say("ZRANGE", KEYS.leases, 0, -1)}
        assert set(stream.won[before:]) <= kept
        assert view.branch is not None
        assert view.branch.id == f"b{known}"
        assert statistics.median(stream.failed_s) < TIMEOUT_S + SLACK_S
        assert max(stream.failed_s) < TIMEOUT_S + 2 * SLACK_S


async def answered(store: RedisStore, boundary_hash: str) -> View:
    """On a busy machine an answer may be late."""
    while True:
        try:
            return await store.fetch(FLEET, Ask(None, (boundary_hash,)))
        except StoreUnavailable:
            await asyncio.sleep(0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_turns_go_on_at_home_while_the_stores_master_dies(topology: str) -> None:
    """Ten sessions speak all the while, through two routers; a router that starts later finds them all at home."""
    with TOPOLOGIES[topology]("redis") as group:
        async with replicas(3) as fleet:
            settings = settings_for(fleet, shared_store(group.url, timeout_s=0.5))
            talks = [Conversation(f"talk {number}", header=("Modal-Session-Id", f"s{number}")) for number in range(10)]
            homes: dict[str, set[str]] = {each.name: set() for each in talks}
            async with running(settings, fleet) as one, running(settings, fleet) as other:
                again = asyncio.Event()

                async def talk(number: int) -> None:
                    while not again.is_set():
                        homes[talks[number].name].add((await (one, other)[number % 2].turn(talks[number])).replica)
                        talks[number].grow()

                async def up(roost: Roost, wanted: float) -> None:
                    async def so() -> bool:
                        return f"roost_store_up {wanted}" in await roost.metrics()

                    await roost.until(so)

                async with asyncio.TaskGroup() as tasks:
                    for number in range(len(talks)):
                        tasks.create_task(talk(number))
                    try:
                        await up(one, 1.0)
                        group.master.kill()
                        await asyncio.gather(up(one, 0.0), up(other, 0.0))
                        await asyncio.gather(up(one, 1.0), up(other, 1.0))
                    finally:
                        again.set()
                for number, each in enumerate(talks):  # the new master is told what the old one had not passed on
                    homes[each.name].add((await (one, other)[number % 2].turn(each)).replica)
                    each.grow()
            async with running(settings, fleet) as later:
                for each in talks:
                    answer = await later.turn(each)
                    homes[each.name].add(answer.replica)
                    assert answer.reason == "home"
            assert {len(home) for home in homes.values()} == {1}


async def test_turns_go_on_at_home_while_the_stores_address_moves() -> None:
    """A managed failover: the master dies, its standby is promoted, and the same address leads there. Sessions stay
    at home without it, and after it by either router, and by one that starts later.
    """
    with group("redis") as servers:
        master = servers.start()
        standby = servers.start("--replicaof", f"127.0.0.1 {master.port}")
        address = FaultProxy(("127.0.0.1", master.port))
        await address.start()
        try:
            async with replicas(3) as fleet:
                settings = settings_for(fleet, shared_store(f"redis://127.0.0.1:{address.port}", timeout_s=0.5))
                talks = [Conversation(f"moves {n}", header=("x-session-id", f"m{n}")) for n in range(8)]
                homes: dict[str, set[str]] = {each.name: set() for each in talks}

                async def speak(roost: Roost) -> None:
                    for each in talks:
                        answer = await roost.turn(each)
                        homes[each.name].add(answer.replica)
                        each.grow()

                async def up(roost: Roost, wanted: float) -> None:
                    async def so() -> bool:
                        return f"roost_store_up {wanted}" in await roost.metrics()

                    await roost.until(so)

                async with running(settings, fleet) as one, running(settings, fleet) as other:
                    await speak(one)
                    await asyncio.to_thread(until, lambda: master.say("WAIT", 1, 1000), "it replicates")
                    master.kill()
                    await asyncio.gather(up(one, 0.0), up(other, 0.0))
                    await speak(one)
                    standby.say("REPLICAOF", "NO", "ONE")
                    address.target = ("127.0.0.1", standby.port)
                    address.reset()
                    await asyncio.gather(up(one, 1.0), up(other, 1.0))
                    await speak(one)  # which tells the new master what the old one had not passed on
                    await speak(other)
                async with running(settings, fleet) as later:
                    await speak(later)
                    assert {each["reason"] for each in await later.decisions()} == {"home"}
                assert {len(home) for home in homes.values()} == {1}
        finally:
            await address.stop()
