"""A turn's whole world in memory: clock, store, replicas and client, scriptable, without sockets or waiting.

Every call of a fake passes the `Gate` before and after its effect. A step yields to the loop, so concurrent turns
interleave at each of them, and a test may have a task cancelled there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from router.discovery.observation import Failure, Observation
from router.domain.decision import Placed
from router.domain.errors import RoostError, StoreUnavailable
from router.domain.replica import Load, Profile
from router.domain.session import Branch
from router.domain.shared import Acquired, Ask, Claim, Lease, Member, Membership, Settlement, Stale, View
from router.domain.turn import Dialect, Facts, Turn
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.leases import Leases
from router.lifecycle.placing import Limits
from router.lifecycle.recent import Recent
from router.lifecycle.turn import Turns
from router.placement.cost import Tuning
from router.placement.identity import Identity, Rules
from router.ports import BodyReader, Exchange, ForwardRequest, ResponseHead, Upstream
from router.store.memory import MemoryStore
from router.telemetry.events import Event, TurnFinished, TurnStarted
from router.upstream.sse import reader_for

T = TypeVar("T")

FLEET = "fleet"
LIFE = "life-0"
EVENTS = ((b"Content-Type", b"text/event-stream"),)
UP = Observation(reachable=True, ready=True, was_ready=True)
DOWN = Observation(failure=Failure.REFUSED)
SILENT = Observation(failure=Failure.TIMEOUT, was_ready=True)


class FakeClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.at_s = 1_000_000.0

    def now_s(self) -> float:
        """Unix seconds."""
        return self.at_s

    def monotonic_s(self) -> float:
        """The same seconds."""
        return self.at_s


class LoopClock(FakeClock):
    """The loop's time, which may be virtual."""

    def now_s(self) -> float:
        """Unix seconds."""
        return self.at_s + asyncio.get_running_loop().time()

    def monotonic_s(self) -> float:
        """The same seconds."""
        return self.now_s()


class Gate:
    """Counts the steps of all fakes and cancels `victim` at those that `cancel_at` names (1 is the first)."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.cancel_at: Collection[int] = ()
        self.victim: asyncio.Task[FakeDown] | None = None
        self._moved = asyncio.Event()

    async def step(self, name: str) -> None:
        """Pass."""
        self.steps.append(name)
        if len(self.steps) in self.cancel_at and self.victim is not None:
            self.victim.cancel()
        self._moved.set()
        await asyncio.sleep(0)

    async def passed(self, name: str, times: int = 1) -> None:
        """Wait until that step has been passed so often."""
        while self.steps.count(name) < times:
            self._moved.clear()
            await self._moved.wait()


class FakeStore(MemoryStore):
    """The real store behind a gate, which may lose questions or answers."""

    def __init__(self, clock: FakeClock, gate: Gate) -> None:
        super().__init__(clock)
        self.gate = gate
        self.calls: list[str] = []
        self.claims: list[Claim] = []
        self.away = False
        """Nothing arrives."""
        self.lose_answers: Counter[str] = Counter()
        """By call: how many of the next are carried out without an answer."""
        self.rival: Callable[[Claim], Awaitable[None]] | None = None
        """Acts between a decision and its claim."""
        self.stale: str | None = None
        """What every claim is told instead of being looked at."""

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(name)
        await self.gate.step(f"{name} asked")
        if self.away:
            raise StoreUnavailable("away")
        result = await call()
        await self.gate.step(f"{name} done")
        if self.lose_answers[name]:
            self.lose_answers[name] -= 1
            raise StoreUnavailable("the answer was lost")
        return result

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """See `Store.fetch`."""
        fetch = super().fetch
        return await self._call("fetch", lambda: fetch(fleet, ask))

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """See `Store.acquire`."""
        self.claims.append(claim)
        if self.stale is not None:
            self.calls.append("acquire")
            return Stale(self.stale)
        if self.rival is not None:
            await self.rival(claim)
        acquire = super().acquire
        return await self._call("acquire", lambda: acquire(fleet, claim))

    async def progress(self, fleet: str, lease: str) -> None:
        """See `Store.progress`."""
        progress = super().progress
        await self._call("progress", lambda: progress(fleet, lease))

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """See `Store.settle`."""
        settle = super().settle
        await self._call("settle", lambda: settle(fleet, settlement))

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """See `Store.renew`."""
        renew = super().renew
        return await self._call("renew", lambda: renew(fleet, leases, lease_ttl_s))

    async def members(self, fleet: str) -> Membership:
        """See `Store.members`."""
        members = super().members
        return await self._call("members", lambda: members(fleet))

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """See `Store.put_member`."""
        put = super().put_member
        return await self._call(
            "put_member", lambda: put(fleet, member, only_if_absent=only_if_absent, expected=expected)
        )

    def branches(self) -> dict[str, Branch]:
        """Every living branch that a claim has named."""
        at = self._fleets[FLEET].branches
        found = {claim.branch: at.get(claim.branch, self._clock.now_s()) for claim in self.claims}
        return {name: branch for name, branch in found.items() if branch is not None}

    def loads(self) -> dict[str, Load]:
        """The load of every replica that has had a turn."""
        return {name: life.load for name, life in self._fleets[FLEET].lives.items()}


# --- replicas --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a replica does with one request: fails before its head, or answers `chunks` and may break behind them."""

    error: RoostError | None = None
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = EVENTS
    chunks: tuple[bytes, ...] = ()
    breaks: RoostError | None = None


def tokens(prompt: int | None = None, cached: int | None = None, words: int = 3, *, done: bool = True) -> Answer:
    """A chat stream of a few words, with its usage if given."""
    chunks = [_data({"choices": [{"delta": {"content": "word "}, "finish_reason": None}]}) for _ in range(words)]
    if prompt is not None:
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": words, "prompt_tokens_details": details}
        chunks.append(_data({"choices": [], "usage": usage}))
    return Answer(chunks=(*chunks, b"data: [DONE]\n\n") if done else tuple(chunks))


def _data(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class FakeExchange:
    """One request under way at a fake replica."""

    def __init__(self, gate: Gate, answer: Answer) -> None:
        self.head = ResponseHead(answer.status, b"", answer.headers, None)
        self.ended = False
        self.aborted = False
        self._gate = gate
        self._answer = answer

    async def relay(self, receive: Callable[[bytes], None]) -> None:
        """See `Exchange.relay`."""
        for chunk in self._answer.chunks:
            await self._gate.step("chunk")
            receive(chunk)
        await self._gate.step("end")
        if self._answer.breaks is not None:
            raise self._answer.breaks
        self.ended = True

    def pause(self) -> None:
        """Nothing to pause."""

    def resume(self) -> None:
        """Nothing to resume."""

    def abort(self) -> None:
        """See `Exchange.abort`."""
        self.aborted = self.aborted or not self.ended


class FakeUpstream:
    """Replicas that answer as they are told, by URL, one answer a request, the last one for good."""

    def __init__(self, gate: Gate) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self.otherwise = tokens()
        self.sent: list[str] = []
        self.exchanges: list[FakeExchange] = []
        self.before: Callable[[str], Awaitable[None]] | None = None
        """Acts when a request has arrived."""
        self._gate = gate

    async def send(self, url: str, request: ForwardRequest) -> Exchange:
        """See `Upstream.send`."""
        self.sent.append(url)
        await self._gate.step("sent")
        if self.before is not None:
            await self.before(url)
        answers = self.answers.get(url, [self.otherwise])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer.error is not None:
            raise answer.error
        await self._gate.step("head")
        self.exchanges.append(FakeExchange(self._gate, answer))
        return self.exchanges[-1]

    def forget(self, url: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing to close."""


class FakeDown:
    """A client that takes everything."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.extra: tuple[tuple[bytes, bytes], ...] = ()
        self.data = b""
        self.ended = False

    @property
    def started(self) -> bool:
        """See `Downstream.started`."""
        return self.head is not None

    def start(self, head: ResponseHead, extra: Sequence[tuple[bytes, bytes]]) -> None:
        """See `Downstream.start`."""
        assert self.head is None
        self.head, self.extra = head, tuple(extra)

    def bind(self, exchange: Exchange) -> None:
        """Never slow."""

    def write(self, data: bytes) -> None:
        """See `Downstream.write`."""
        assert self.started
        self.data += data

    def end(self) -> None:
        """See `Downstream.end`."""
        self.ended = True


class FakeProber:
    """Shows what a test says, by URL, and otherwise a ready replica."""

    def __init__(self) -> None:
        self.shows: dict[str, Observation] = {}
        self.looks: Counter[str] = Counter()
        self.looked = asyncio.Event()

    async def observe(self, url: str, previous: Observation | None) -> Observation:
        """See `Prober.observe`."""
        self.looks[url] += 1
        self.looked.set()
        await asyncio.sleep(0)
        return self.shows.get(url, UP)


class Events:
    """Keeps all events."""

    def __init__(self) -> None:
        self.all: list[Event] = []

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.all.append(event)

    @property
    def started(self) -> list[TurnStarted]:
        """Places taken, in order."""
        return [event for event in self.all if isinstance(event, TurnStarted)]

    @property
    def finished(self) -> list[TurnFinished]:
        """Attempts settled, in order."""
        return [event for event in self.all if isinstance(event, TurnFinished)]


# --- conversations ---------------------------------------------------------------------------------------------------

_identity = Identity(Rules(("x-session",), ()))


def prompt(*messages: str, session: str | None = "s", stream: bool = True) -> Facts:
    """The facts of a chat request: a system prompt, then these messages of user and assistant in turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
    body = {"model": "m", "stream": stream, "messages": [{"role": "system", "content": "be brief"}, *said]}
    headers = {} if session is None else {b"x-session": session.encode()}
    return _identity.facts(Dialect.CHAT, headers, json.dumps(body).encode())


def unread(session: str | None = "s") -> Facts:
    """The facts of a turn whose prompt could not be looked into (a compressed body)."""
    headers = {} if session is None else {b"x-session": session.encode()}
    return _identity.facts(Dialect.CHAT, headers, b"\x1f\x8b", encoded=True)


def _reader(facts: Facts, head: ResponseHead) -> BodyReader:
    headers = {name.lower(): value for name, value in head.headers}
    return reader_for(facts.dialect, headers.get(b"content-type"))


def _label(placed: Placed, turn: Turn) -> Sequence[tuple[bytes, bytes]]:
    return ((b"x-reason", placed.reason.value.encode()),)


REQUEST = ForwardRequest("POST", "/v1/chat/completions", (), b"{}")


@dataclass
class Stage:
    """One router's turns on a fleet of fake replicas."""

    clock: FakeClock
    gate: Gate
    store: FakeStore
    upstream: FakeUpstream
    fleet: FleetRuntime
    events: Events
    leases: Leases
    recent: Recent
    turns: Turns
    served: list[FakeDown] = field(default_factory=list)

    async def serve(self, facts: Facts) -> FakeDown:
        """One turn to its end."""
        down = FakeDown()
        self.served.append(down)
        await self.turns.serve(self.fleet, facts, REQUEST, down, _label, lambda _: None)
        return down

    def replica_of(self, attempt: int = -1) -> str:
        """Where an attempt was placed."""
        return self.events.started[attempt].replica

    async def join(self, number: int) -> None:
        """One replica more, that is seen ready."""
        await self.store.put_member(FLEET, Member(f"r{number}:1", url_of(number), "admin", incarnation=LIFE))
        await self.fleet.refresh()
        self.fleet.observed(f"r{number}:1", UP)

    async def settled(self) -> None:
        """All that was acquired has been given back, and every start has its end."""
        await self.turns.drained()
        assert self.leases.count == 0
        for load in self.store.loads().values():
            assert (load.in_flight, load.prefill_tokens, load.locked_tokens) == (0, 0, 0)
        assert all(branch.in_flight == 0 for branch in self.store.branches().values())
        started = Counter((event.turn, event.replica) for event in self.events.started)
        assert started == Counter((event.turn, event.replica) for event in self.events.finished)
        assert all(exchange.ended or exchange.aborted for exchange in self.upstream.exchanges)


def url_of(number: int) -> str:
    """A replica's URL."""
    return f"http://r{number}:1"


async def stage(
    replicas: int = 2,
    *,
    policy: str = "roost",
    limits: Limits | None = None,
    store: FakeStore | None = None,
    profile: Profile | None = None,
    ids: str = "id",
    admission: float = 0.0,
    clock: FakeClock | None = None,
) -> Stage:
    """A fleet of equal replicas, all seen ready; `store` to share one between routers."""
    gate = store.gate if store is not None else Gate()
    clock = clock or FakeClock()
    store = store or FakeStore(clock, gate)
    urls = tuple(url_of(number) for number in range(replicas))
    spec = FleetSpec(FLEET, replicas=urls, policy=policy, profile=profile or Profile(), admission=admission)
    fleet = FleetRuntime(spec, store, FakeProber(), clock)
    await fleet.enrol()
    for member in fleet.members:
        await store.put_member(FLEET, Member(member.id, member.url, "config", incarnation=LIFE))
        fleet.observed(member.id, UP)
    await fleet.refresh()
    upstream = FakeUpstream(gate)
    made = stage_with(clock, gate, store, upstream, fleet, limits or Limits(), ids)
    gate.steps.clear()
    store.calls.clear()
    return made


def stage_with(
    clock: FakeClock,
    gate: Gate,
    store: FakeStore,
    upstream: FakeUpstream,
    fleet: FleetRuntime,
    limits: Limits,
    ids: str,
) -> Stage:
    """Turns over these."""
    events, leases, recent = Events(), Leases(store, ttl_s=10.0, renew_s=3.0), Recent(100)
    numbers = iter(range(10**6))
    port: Upstream = upstream
    turns = Turns(
        store=store,
        upstream=port,
        clock=clock,
        leases=leases,
        recent=recent,
        observer=events,
        reader_for=_reader,
        new_id=lambda: f"{ids}{next(numbers)}",
        tuning=Tuning(),
        limits=limits,
    )
    return Stage(clock, gate, store, upstream, fleet, events, leases, recent, turns)
