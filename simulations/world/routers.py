"""A router in virtual time: the real lifecycle over simulated links, which can die at any moment and start again.

Every task that a router's life makes belongs to it (`own_tasks` has the loop enter it), so a crash takes all of them:
its links are dead before they are cancelled, and what their `finally` blocks still do reaches nobody.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.domain.decision import Placed
from router.domain.errors import RoostError
from router.domain.turn import Facts, Turn
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.leases import Leases
from router.lifecycle.placing import Limits
from router.lifecycle.recent import Recent, Record
from router.lifecycle.turn import Turns
from router.placement.cost import Tuning
from router.ports import BodyReader, Exchange, ForwardRequest, ResponseHead
from router.store.guarded import Guarded
from router.telemetry.events import Event
from router.upstream.sse import reader_for
from simulations.clock import VirtualClock
from simulations.replica_model import Request
from simulations.seen import Asked, Booted, Decided, Died, Done, DownBytes, DownEnded, DownStarted, Seen, Told
from simulations.world.network import REQUEST_HEADER, Waits, Wires
from simulations.world.replicas import SimulatedReplica
from simulations.world.storage import Link, SharedStore, Weather

__all__ = ["FLEET", "Answer", "Lives", "SimulatedRouter", "own_tasks"]

FLEET: Final = "fleet"
_LEASE_TTL_S: Final = 10.0
_LEASE_RENEW_S: Final = 3.0
_ROUNDS: Final = 20
_TERMINAL: Final = b"data: [DONE]\n\n"

_OWNER: contextvars.ContextVar[list[asyncio.Task[Any]] | None] = contextvars.ContextVar("owner", default=None)
_REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")


def own_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Have each task of the loop entered with the router life in whose course it is made."""

    def factory(on: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=on, **named)
        owned = _OWNER.get()
        if owned is not None:
            if len(owned) > _SWEPT_AT:
                owned[:] = [each for each in owned if not each.done()]
            owned.append(task)
        return task

    loop.set_task_factory(factory)


_SWEPT_AT: Final = 4096


@dataclass(frozen=True, slots=True)
class Lives:
    """What routers are made from."""

    store: SharedStore
    replicas: Mapping[str, SimulatedReplica]
    """By URL; grows as replicas join."""
    configured: tuple[str, ...]
    jobs: dict[str, Request]
    """What a replica is asked to do, by request."""
    seen: Seen
    seed: int
    policy: str
    admission: float
    waits: Waits
    answers_travel: bool


class _Decisions(Recent):
    """The record of decisions, seen from outside."""

    def __init__(self, router: str, seen: Seen) -> None:
        super().__init__(1)
        self._router = router
        self._seen = seen

    def add(self, record: Record) -> None:
        """See `Recent.add`."""
        super().add(record)
        self._seen.tell(Decided(self._router, record))


class _Observer:
    """The router's events, while it lives."""

    def __init__(self, router: str, seen: Seen) -> None:
        self.dead = False
        self._router = router
        self._seen = seen

    def emit(self, event: Event) -> None:
        """See `Observer.emit`."""
        if not self.dead:
            self._seen.tell(Told(self._router, event))


class Answer:
    """A request as its client sees it: a `Downstream` and, once `done`, how it ended."""

    def __init__(self, router: str, request: str, seen: Seen, loop: asyncio.AbstractEventLoop, *, hasty: bool) -> None:
        """`hasty`: the client closes its connection at the terminal event."""
        self.done: asyncio.Future[str] = loop.create_future()
        self.head: ResponseHead | None = None
        self.ended = False
        self.terminal = False
        self.retry_after_s: float | None = None
        self.first_s: float | None = None
        self.began_s = loop.time()
        self.task: asyncio.Task[None] | None = None
        self.reader: BodyReader | None = None
        self.placed: Placed | None = None
        self._router = router
        self._request = request
        self._seen = seen
        self._loop = loop
        self._hasty = hasty

    @property
    def started(self) -> bool:
        """See `Downstream.started`."""
        return self.head is not None

    def start(self, head: ResponseHead, extra: Sequence[tuple[bytes, bytes]]) -> None:  # noqa: ARG002 (the port's)
        """See `Downstream.start`."""
        self.head = head
        if not self.done.done():
            self._seen.tell(DownStarted(self._router, self._request, head.status))

    def bind(self, exchange: Exchange) -> None:
        """This client is never slow."""

    def write(self, data: bytes) -> None:
        """See `Downstream.write`."""
        if self.done.done():
            return
        if self.first_s is None:
            self.first_s = self._loop.time()
        self._seen.tell(DownBytes(self._router, self._request, data))
        if data.endswith(_TERMINAL):
            self.terminal = True
            if self._hasty:
                self._loop.call_soon(self.leave)

    def end(self) -> None:
        """See `Downstream.end`."""
        self.ended = True
        if not self.done.done():
            self._seen.tell(DownEnded(self._router, self._request))

    def leave(self) -> None:
        """The client closes its connection."""
        if self.task is not None:
            self.task.cancel()

    def over(self, how: str) -> None:
        """It is over for the client."""
        if not self.done.done():
            self._seen.tell(Done(self._router, self._request, how))
            self.done.set_result(how)


class _Life:
    """One process of a router."""

    def __init__(
        self, name: str, lives: Lives, clock: VirtualClock, weather: tuple[Weather, float], cut: set[str]
    ) -> None:
        self.name = name
        self.answers: dict[str, Answer] = {}
        self._lives = lives
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(_OWNER.set, self._tasks)
        self._loop = loop = asyncio.get_running_loop()
        seed = f"{lives.seed}/{name}"
        self.link = Link(name, lives.store, lives.seen, _REQUEST.get, seed, answers_travel=lives.answers_travel)
        self.link.set(*weather)
        self.wires = Wires(name, lives.replicas, lives.jobs, lives.seen, seed, lives.waits)
        self.wires.cut_off.update(cut)
        self._observer = _Observer(name, lives.seen)
        self._numbers = iter(range(1 << 62))
        self._loop = loop
        self._context.run(self._compose, clock)

    def _compose(self, clock: VirtualClock) -> None:
        """As `router.main` does."""
        lives, store = self._lives, Guarded(self.link, clock)
        self.leases = Leases(store, _LEASE_TTL_S, _LEASE_RENEW_S)
        spec = FleetSpec(FLEET, replicas=lives.configured, policy=lives.policy, admission=lives.admission)
        self.fleet = FleetRuntime(spec, store, self.wires, clock)
        self.turns = Turns(
            store=store,
            upstream=self.wires,
            clock=clock,
            leases=self.leases,
            recent=_Decisions(self.name, lives.seen),
            observer=self._observer,
            reader_for=_reader,
            new_id=lambda: f"{_REQUEST.get()}.{next(self._numbers)}",
            tuning=Tuning(),
            limits=Limits(),
        )
        store.watch(self.turns.store_changed)
        self._running = self._loop.create_task(self._run(store))

    async def _run(self, store: Guarded) -> None:
        await store.open()
        loops = (store.run(), self.fleet.run(), self.leases.run(), self.turns.run((self.fleet,)))
        self._loops = [self._loop.create_task(work) for work in loops]

    def serve(self, request: str, facts: Facts, answer: Answer) -> None:
        """Begin to serve a request."""
        context = self._context.copy()
        context.run(_REQUEST.set, request)
        self.answers[request] = answer
        answer.task = context.run(self._loop.create_task, self._served(request, facts, answer))

    async def _served(self, request: str, facts: Facts, answer: Answer) -> None:
        forward = ForwardRequest("POST", "/v1/chat/completions", ((REQUEST_HEADER, request.encode()),), b"")

        def label(placed: Placed, turn: Turn) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG001 (router's signature)
            answer.placed = placed
            return ()

        def reading(reader: BodyReader) -> None:
            answer.reader = reader

        how = "left"
        try:
            await self.turns.serve(self.fleet, facts, forward, answer, label, reading)
            how = "complete"
        except RoostError as error:
            how = error.code
            answer.retry_after_s = getattr(error, "retry_after_s", None)
        except asyncio.CancelledError:
            pass  # the client's doing, or the crash's
        except Exception as error:  # noqa: BLE001 (a checker tells, and the run ends with it)
            how = f"unexpected {error!r}"
        finally:
            self.answers.pop(request, None)
            answer.over(how)

    async def die(self) -> None:
        """All at once: first its connections, then its tasks."""
        self.link.die()
        self.wires.die()
        self._observer.dead = True
        for answer in list(self.answers.values()):
            answer.over("router_died")
        for _ in range(_ROUNDS):
            self._tasks[:] = [task for task in self._tasks if not task.done()]
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        raise RuntimeError(f"tasks of router {self.name} do not end: {self._tasks}")


class SimulatedRouter:
    """A router and its lives."""

    def __init__(self, name: str, lives: Lives) -> None:
        self.name = name
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.life: _Life | None = None
        self._lives = lives
        self._number = 0
        self._weather: tuple[Weather, float] = (Weather.FINE, 0.0)
        self._cut: set[str] = set()

    def boot(self) -> None:
        """Start a process."""
        if self.life is None:
            name = f"{self.name}#{self._number}"
            self._number += 1
            self._lives.seen.tell(Booted(name))
            self.life = _Life(name, self._lives, self.clock, self._weather, self._cut)

    async def crash(self) -> None:
        """`kill -9`."""
        life, self.life = self.life, None
        if life is not None:
            self._lives.seen.tell(Died(life.name))
            await life.die()

    @property
    def ready(self) -> bool:
        """Whether a load balancer would send it requests."""
        return self.life is not None and self.life.fleet.ready()

    def ask(self, request: str, facts: Facts, *, hasty: bool) -> Answer:
        """A client's request arrives; it is ready."""
        life, lives = self.life, self._lives
        assert life is not None
        answer = Answer(life.name, request, lives.seen, asyncio.get_running_loop(), hasty=hasty)
        lives.seen.tell(Asked(life.name, request, facts))
        life.serve(request, facts, answer)
        return answer

    # --- what goes wrong ---

    def weather(self, weather: Weather, amount: float = 0.0) -> None:
        """Of its way to the store."""
        self._weather = (weather, amount)
        if self.life is not None:
            self.life.link.set(weather, amount)

    def weather_fine(self) -> None:
        """Its way to the store is well again."""
        self.weather(Weather.FINE)

    def cut(self, replica: str) -> None:
        """Nothing passes between it and that replica."""
        self._cut.add(replica)
        if self.life is not None:
            self.life.wires.cut(replica)

    def heal(self, replica: str) -> None:
        """Everything passes again."""
        self._cut.discard(replica)
        if self.life is not None:
            self.life.wires.heal(replica)


def _reader(facts: Facts, head: ResponseHead) -> BodyReader:
    return reader_for(facts.dialect, dict(head.headers)[b"content-type"], None)
