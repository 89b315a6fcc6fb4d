"""The story's fleet in virtual time: the router's own lifecycle and placement, its store in memory, replica models.

What differs from the stage: no sockets, so nothing takes time but the replicas; a clock that jumps to whatever is due
next. Requests are the same bytes, read by the router's `Identity` and by the simulated engine, so the same prefixes are
shared. One `Rehearsal` plays one policy, in the loop of `simulations.clock.run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

from router.discovery.observation import Engine, Observation
from router.domain.decision import Placed
from router.domain.errors import NotPlaced, RoostError, UpstreamBroken
from router.domain.shared import Member
from router.domain.turn import Dialect, Facts, Turn
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.leases import Leases
from router.lifecycle.placing import Limits
from router.lifecycle.recent import Recent
from router.lifecycle.turn import Turns
from router.placement.cost import Tuning
from router.placement.identity import Identity, Rules
from router.ports import BodyReader, Exchange, ForwardRequest, ResponseHead
from router.store.memory import MemoryStore
from router.telemetry.events import Observer
from router.upstream.sse import reader_for
from simulations.clock import VirtualClock
from simulations.demo.tally import AWAY
from simulations.engine import asked, tokens
from simulations.engine_server.driver import Driver, Run
from simulations.replay_client import Answer
from simulations.replica_model import Finished, ReplicaModel, ReplicaProfile, Request, keys_of_bytes

__all__ = ["Rehearsal"]

ADMISSION: Final = 1.2
"""As the router's own default."""
_FLEET: Final = "rehearsal"
_EVENT_STREAM: Final = b"text/event-stream"
_NEVER_S: Final = 1e9
_FIRST: Final = b'data: {"choices":[{"index":0,"delta":{"content":"said"},"finish_reason":null}]}\n\n'


class _Prober:
    """Sees replicas that are always well."""

    def __init__(self, profile: ReplicaProfile) -> None:
        self._seen = Observation(
            reachable=True,
            ready=True,
            engine=Engine.SGLANG,
            models=(profile.model,),
            incarnation="first",
            device_tokens=profile.device_tokens,
            host_tokens=profile.host_tokens,
            max_running=profile.max_running,
            cache_report=True,
            was_ready=True,
        )

    async def observe(self, url: str, previous: Observation | None) -> Observation:  # noqa: ARG002 (router's signature)
        return self._seen


class _Upstream:
    """Replica models by URL."""

    def __init__(self, profile: ReplicaProfile, seed: int) -> None:
        self._profile = profile
        self._seed = seed
        self._drivers: dict[str, Driver] = {}
        self._count = 0

    async def send(self, url: str, request: ForwardRequest) -> Exchange:
        """The turn as a simulated engine would read it."""
        if url not in self._drivers:
            model = ReplicaModel(self._profile, self._seed + len(self._drivers), asyncio.get_running_loop().time())
            self._drivers[url] = Driver(model, tick_s=_NEVER_S)
        wanted = asked.read(asked.CHAT, asked.decoded(request.body), self._profile.model)
        output = wanted.max_tokens or 1
        said = tokens.said(self._seed, wanted.prompt, output)
        pages = keys_of_bytes(wanted.prompt + said, self._profile.page_tokens * tokens.TOKEN_BYTES, wanted.namespace)
        self._count += 1
        job = Request(f"turn-{self._count}", pages, wanted.prompt_tokens, output, max_tokens=output)
        return _Exchange(self._drivers[url], job)

    def forget(self, url: str) -> None:
        """Nothing is pooled."""

    async def close(self) -> None:
        """Nothing is open."""


class _Exchange:
    """One turn in a replica model, told as a stream of two events."""

    head = ResponseHead(200, b"OK", ((b"content-type", _EVENT_STREAM),), None)

    def __init__(self, driver: Driver, job: Request) -> None:
        self._driver = driver
        self._job = job

    async def relay(self, receive: Callable[[bytes], None]) -> None:
        """Until the model has said all."""
        told = False
        with self._driver.running(self._job, stream=True) as turn:
            while turn.end is None:
                await turn.news()
                if turn.first_s is not None and not told:
                    receive(_FIRST)
                    told = True
        if not isinstance(turn.end, Finished):
            raise UpstreamBroken(f"the replica model ended the turn: {turn.end}")
        receive(_last(turn, turn.end))

    def pause(self) -> None:
        """Nobody is slow here."""

    def resume(self) -> None:
        """Nobody is slow here."""

    def abort(self) -> None:
        """The turn has left the model by now."""


def _last(turn: Run, end: Finished) -> bytes:
    """The end of a chat stream with its usage, as SGLang writes it."""
    cached = end.device_tokens + end.host_tokens
    usage = (
        f'{{"prompt_tokens":{turn.prompt_tokens},"completion_tokens":{end.output_tokens},'
        f'"total_tokens":{turn.prompt_tokens + end.output_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}'
    )
    return (
        'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
        f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n'
    ).encode()


class _Down:
    """The client's side: when the first output came."""

    started = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.first_s: float | None = None

    def start(self, head: ResponseHead, extra: Sequence[tuple[bytes, bytes]]) -> None:  # noqa: ARG002 (router's)
        self.started = True

    def bind(self, exchange: Exchange) -> None:
        """Nobody is slow here."""

    def write(self, data: bytes) -> None:  # noqa: ARG002 (router's signature)
        if self.first_s is None:
            self.first_s = self._loop.time()

    def end(self) -> None:
        """Nothing to close."""


class _Nobody:
    """Nobody watches."""

    def emit(self, event: object) -> None:
        """Forgotten."""


class Rehearsal:
    """A router with one policy and replicas; asks turns as `Client` does. Made and used inside the loop.

    A turn that is told to come back does so after Retry-After, as agents do; what it waited counts in its TTFT.
    """

    def __init__(
        self,
        profile: ReplicaProfile,
        policy: str,
        seed: int,
        replicas: int,
        *,
        admission: float = ADMISSION,
        tuning: Tuning | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.moves = 0
        """Turns sent away from their branch's home."""
        self._loop = loop = asyncio.get_running_loop()
        clock = VirtualClock(loop)
        self._store = MemoryStore(clock)
        self._leases = Leases(self._store, ttl_s=10.0, renew_s=3.0)
        self._identity = Identity(Rules(("x-session-id",), ()))
        urls = tuple(f"http://{name}" for name in "ABCDEFGHIJ"[:replicas])
        spec = FleetSpec(_FLEET, replicas=urls, policy=policy, admission=admission)
        self._fleet = FleetRuntime(spec, self._store, _Prober(profile), clock)
        self._numbers = iter(range(1 << 62))
        self._turns = Turns(
            store=self._store,
            upstream=_Upstream(profile, seed),
            clock=clock,
            leases=self._leases,
            recent=Recent(1),
            observer=observer or _Nobody(),
            reader_for=_reader,
            new_id=lambda: f"{seed}-{next(self._numbers)}",
            tuning=tuning or Tuning(),
            limits=Limits(),
        )

    async def __aenter__(self) -> Self:
        self._background = [asyncio.create_task(work) for work in (self._fleet.run(), self._leases.run())]
        while not self._fleet.ready():  # noqa: ASYNC110 (the fleet tells nobody)
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._turns.drained()
        for task in self._background:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def join(self, name: str) -> None:
        """One replica more."""
        await self._store.put_member(_FLEET, Member(name, f"http://{name}", "admin"))
        await self._fleet.refresh()

    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """One turn; as `simulations.replay_client.Client.ask`."""
        facts = self._identity.facts(
            Dialect.CHAT, {name.lower().encode(): value.encode() for name, value in headers.items()}, body
        )
        answer, down, readers = Answer(), _Down(self._loop), list[BodyReader]()
        began_s = self._loop.time()

        def label(placed: Placed, turn: Turn) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG001 (router's signature)
            answer.replica = placed.replica
            self.moves += placed.reason in AWAY
            return ()

        forward = ForwardRequest("POST", asked.CHAT, (), body)
        while True:
            try:
                await self._turns.serve(self._fleet, facts, forward, down, label, readers.append)
            except NotPlaced as error:
                await asyncio.sleep(error.retry_after_s)
                continue
            except RoostError as error:
                answer.error = error.code
            break
        answer.duration_s = self._loop.time() - began_s
        answer.ttft_s = None if down.first_s is None else down.first_s - began_s
        if readers:
            answer.usage = readers[-1].usage
        return answer


def _reader(facts: Facts, head: ResponseHead) -> BodyReader:
    return reader_for(facts.dialect, dict(head.headers)[b"content-type"], None)
