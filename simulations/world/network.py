"""The network between routers and replicas: the router's `Upstream` and `Prober` ports over simulated replicas.

One `Wires` belongs to one life of a router. Latencies are drawn from a stream of its own, so that what one router does
moves no other's dice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from router.discovery.assemble import unreachable
from router.discovery.observation import Engine, Failure, Observation
from router.domain.errors import RoostError, UpstreamBroken, UpstreamSilent, UpstreamUnreachable
from router.ports import Exchange, ForwardRequest, ResponseHead
from simulations.replica_model import ReplicaProfile, Request
from simulations.seen import Headed, Probed, Seen, Sent, UpBytes, UpEnded
from simulations.world.replicas import Response, SimulatedReplica

__all__ = ["REQUEST_HEADER", "Waits", "Wires"]

REQUEST_HEADER: Final = b"x-simulated-request"
_HOP_S: Final = (0.0001, 0.001)
_PROBE_S: Final = (0.001, 0.01)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a router waits for a replica; defaults as the settings'."""

    connect_s: float = 2.0
    head_s: float = 600.0
    idle_s: float = 600.0
    probe_s: float = 2.0


class Wires:
    """What one router sees of the replicas."""

    def __init__(
        self,
        router: str,
        replicas: Mapping[str, SimulatedReplica],
        jobs: Mapping[str, Request],
        seen: Seen,
        seed: str,
        waits: Waits,
    ) -> None:
        """`replicas` by URL; `jobs`: what a replica is asked to do, by request."""
        self.dead = False
        self.cut_off: set[str] = set()
        """Replicas that nothing passes to or from."""
        self._router = router
        self._replicas = replicas
        self._jobs = jobs
        self._seen = seen
        self._dice = random.Random(f"wires/{seed}")  # noqa: S311 (latencies need no secrecy)
        self._waits = waits
        self._under_way: dict[_Exchange, None] = {}
        self._looks: dict[str, tuple[tuple[str, int, int, int, int], Observation]] = {}
        """By replica: the newest look at one that answered, which most looks are like, and what it was made from."""

    # --- the Upstream port ---

    async def send(self, url: str, request: ForwardRequest) -> Exchange:
        """See `Upstream.send`."""
        name = dict(request.headers)[REQUEST_HEADER].decode()
        self._seen.tell(Sent(self._router, name, url))
        exchange: _Exchange | None = None
        try:
            replica = await self._connected(url)
            exchange = _Exchange(self, name, replica, Response(self._jobs[name]))
            self._under_way[exchange] = None
            if replica.name in self.cut_off:  # cut off between connecting and sending
                exchange.response.held_back = True
            replica.accept(exchange.response)
            await exchange.head_came(self._waits.head_s)
        except RoostError as error:
            self.over(exchange, name, url, error.code)
            raise
        except asyncio.CancelledError:
            self.over(exchange, name, url, "aborted")
            raise
        self._seen.tell(Headed(self._router, name, url, exchange.head.status))
        return exchange

    def forget(self, url: str) -> None:
        """See `Upstream.forget`: nothing is pooled."""

    async def close(self) -> None:
        """Nothing stays open."""

    async def _connected(self, url: str) -> SimulatedReplica:
        replica = self._replicas[url]
        await asyncio.sleep(self._dice.uniform(*_HOP_S))
        if replica.name in self.cut_off:
            await asyncio.sleep(self._waits.connect_s)
            raise UpstreamUnreachable("no connection in time")
        if not replica.answers:
            raise UpstreamUnreachable("connection refused")
        return replica

    def over(self, exchange: _Exchange | None, name: str, url: str, how: str) -> None:
        """An exchange has ended."""
        if exchange is not None:
            if exchange not in self._under_way:
                return
            del self._under_way[exchange]
            exchange.replica.abort(exchange.response)
        if not self.dead:
            self._seen.tell(UpEnded(self._router, name, url, how))

    def came(self, name: str, url: str, data: bytes) -> None:
        """Bytes have come from a replica."""
        self._seen.tell(UpBytes(self._router, name, url, data))

    @property
    def idle_s(self) -> float:
        """How long a stream may be silent."""
        return self._waits.idle_s

    # --- the Prober port ---

    async def observe(self, url: str, previous: Observation | None) -> Observation:
        """See `Prober.observe`."""
        replica = self._replicas[url]
        await asyncio.sleep(self._dice.uniform(*_PROBE_S))
        if replica.name in self.cut_off or (replica.hung and replica.answers):
            await asyncio.sleep(self._waits.probe_s)
            observation = unreachable(previous, Failure.TIMEOUT, ("/ready: timeout",))
        elif not replica.answers:
            observation = unreachable(previous, Failure.REFUSED, ("/ready: refused",))
        else:
            observation = self._found(replica, previous)
        if not self.dead:
            self._seen.tell(Probed(self._router, url, observation))
        return observation

    def _found(self, replica: SimulatedReplica, previous: Observation | None) -> Observation:
        running, waiting, uncached = replica.load()
        profile, incarnation = replica.profile, replica.incarnation
        lives = 0 if previous is None else previous.lives + (previous.incarnation != incarnation)
        key = (incarnation, lives, running, waiting, uncached)
        found = self._looks.get(replica.name)
        if found is None or found[0] != key:
            found = self._looks[replica.name] = (key, self._look(profile, *key))
        return found[1]

    def _look(
        self, profile: ReplicaProfile, incarnation: str, lives: int, running: int, waiting: int, uncached: int
    ) -> Observation:
        return Observation(
            reachable=True,
            ready=True,
            engine=Engine.SGLANG,
            models=(profile.model,),
            incarnation=incarnation,
            lives=lives,
            device_tokens=profile.device_tokens,
            host_tokens=profile.host_tokens,
            max_running=profile.max_running,
            running=running,
            waiting=waiting,
            waiting_uncached_tokens=uncached,
            cache_report=True,
            was_ready=True,
        )

    # --- what goes wrong ---

    def cut(self, replica: str) -> None:
        """Nothing passes to or from that replica any more."""
        self.cut_off.add(replica)
        for exchange in self._under_way:
            if exchange.replica.name == replica:
                exchange.response.held_back = True

    def heal(self, replica: str) -> None:
        """What was held back arrives."""
        self.cut_off.discard(replica)
        for exchange in list(self._under_way):
            if exchange.replica.name == replica:
                exchange.response.let_go()

    def die(self) -> None:
        """The router's process is gone: its connections close, and nothing it still does is seen."""
        self.dead = True
        for exchange in list(self._under_way):
            exchange.replica.abort(exchange.response)
        self._under_way.clear()


class _Exchange:
    """See `router.ports.Exchange`."""

    def __init__(self, wires: Wires, name: str, replica: SimulatedReplica, response: Response) -> None:
        self.replica = replica
        self.response = response
        self._wires = wires
        self._name = name

    @property
    def head(self) -> ResponseHead:
        """The response's head."""
        head = self.response.head
        assert head is not None
        return head

    async def head_came(self, patience_s: float) -> None:
        """Wait for the head. Raises UpstreamBroken and UpstreamSilent."""
        response = self.response
        if not response.headed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await response.headed.wait()
        if response.error is not None:
            raise UpstreamBroken("connection reset", answered=False)
        if not response.headed.is_set():
            raise UpstreamSilent("no head in time")

    async def relay(self, receive: Callable[[bytes], None]) -> None:
        """See `Exchange.relay`."""
        wires, response, name, url = self._wires, self.response, self._name, self.replica.url

        def take(data: bytes) -> None:
            wires.came(name, url, data)
            receive(data)

        response.take(take)
        try:
            await self._ended()
        except RoostError as error:
            wires.over(self, name, url, error.code)
            raise
        finally:
            response.leave()
        wires.over(self, name, url, "clean")

    async def _ended(self) -> None:
        """Until the body has ended. Raises UpstreamSilent."""
        response, loop = self.response, asyncio.get_running_loop()
        response.said_at_s = loop.time()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            due_s = response.said_at_s + self._wires.idle_s
            if loop.time() < due_s:
                timer = loop.call_at(due_s, look)
            elif not response.ended.done():
                response.ended.set_exception(UpstreamSilent("no byte in time"))

        if not response.ended.done():
            timer = loop.call_at(response.said_at_s + self._wires.idle_s, look)
        try:
            await response.ended
        finally:
            if timer is not None:
                timer.cancel()

    def pause(self) -> None:
        """No client here is slow."""

    def resume(self) -> None:
        """No client here is slow."""

    def abort(self) -> None:
        """See `Exchange.abort`."""
        self._wires.over(self, self._name, self.replica.url, "aborted")
