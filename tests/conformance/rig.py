"""What a case works with: mock replicas, routers before them, and sessions of clients."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from tests.conformance.adapters import Adapter, Variant
from tests.conformance.case import Can, Case, Failed, NotApplicable, check
from tests.conformance.client import Answer
from tests.conformance.dialects import Dialect, ask
from tests.conformance.replica import PATIENCE_S, Replica
from tests.conformance.routers import Redis, Router

_WORDS = "the build log says that module seven of the parser was compiled without a warning and then "


def new_mark() -> str:
    """What tells one turn from all others, within its text."""
    return f"mark-{secrets.token_hex(6)}"


def prose(seed: str, size_bytes: int) -> str:
    """Text of about that size that shares no beginning with any other seed's."""
    own = sha256(seed.encode()).hexdigest()[:12]
    return (f"{own} " + f"{own} {_WORDS}" * (size_bytes // len(_WORDS) + 1))[:size_bytes]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that was answered."""

    answer: Answer
    replicas: tuple[Replica, ...]
    """Those that were asked for it, in the stage's order."""

    @property
    def replica(self) -> Replica:
        """The one that was asked for it."""
        check(len(self.replicas) == 1, f"{len(self.replicas)} replicas were asked for one turn")
        return self.replicas[0]


@dataclass
class Session:
    """A conversation that grows by a question and an answer with each turn."""

    stage: Stage
    name: str
    """Session id as its header says it; empty: no header."""
    dialect: Dialect = Dialect.CHAT
    system: str = "You are a coding agent."
    size_bytes: int = 0
    """Of each thing said; 0: 400, and ten times that in the dialects of raw text, where nobody can see turns."""
    said: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""

    def __post_init__(self) -> None:
        raw = self.dialect in (Dialect.COMPLETIONS, Dialect.GENERATE)
        self.size_bytes = self.size_bytes or (4000 if raw else 400)

    @property
    def all_headers(self) -> dict[str, str]:
        named = {self.stage.adapter.session_header: self.name} if self.name else {}
        return {**named, **self.headers}

    def next(self, *, stream: bool = True) -> tuple[bytes, bytes]:
        """The next turn's body and its mark. The conversation has grown."""
        mark = new_mark()
        if self.said:
            self.said.append(prose(f"answer {len(self.said)} {self.said[0]}", self.size_bytes))
        self.said.append(f"{prose(mark, self.size_bytes)} {mark}")
        return ask(self.dialect, self.said, stream=stream, system=self.system, **self.more), mark.encode()

    async def send(self, router: Router | None = None, *, stream: bool = True) -> Turn:
        """The next turn, whatever the answer."""
        body, mark = self.next(stream=stream)
        answer = await (router or self.stage.router).request("POST", self.dialect.path, body, self.all_headers)
        return Turn(answer, self.stage.asked(mark))

    async def turn(self, router: Router | None = None, *, stream: bool = True) -> Turn:
        """The next turn, which must succeed at one replica."""
        turn = await self.send(router, stream=stream)
        check(turn.answer.status == 200 and turn.answer.complete, f"a turn was answered {turn.answer.short}")
        check(turn.replicas, "a turn was answered and no replica was asked")
        return turn


@dataclass
class Stage:
    """Replicas, routers before them, and the Redis that the routers share, if they do."""

    adapter: Adapter
    replicas: list[Replica]
    routers: list[Router]
    redis: Redis | None
    dialects: frozenset[Dialect]

    @property
    def router(self) -> Router:
        return self.routers[0]

    def session(self, dialect: Dialect = Dialect.CHAT, *, name: str | None = None, **given: Any) -> Session:
        """A new session with a name of its own, or the given one; an empty name sends none."""
        if name is None:
            name = f"session-{secrets.token_hex(8)}" if self.adapter.session_header else ""
        return Session(self, name, dialect, **given)

    def sessions(self, count: int, dialect: Dialect = Dialect.CHAT, **given: Any) -> list[Session]:
        """That many new sessions."""
        return [self.session(dialect, **given) for _ in range(count)]

    def asked(self, mark: bytes) -> tuple[Replica, ...]:
        """The replicas that were asked for a turn; one that was asked twice comes twice."""
        return tuple(replica for replica in self.replicas for _ in range(replica.saw(mark)))

    def counts(self) -> list[int]:
        """Turns that each replica was asked for."""
        return [len(replica.turns) for replica in self.replicas]

    def script(self, script: Any) -> None:
        """The same script for every replica."""
        for replica in self.replicas:
            replica.script = script

    async def add_replica(self, **given: Any) -> Replica:
        """A further replica, known to every router."""
        replica = Replica(**given)
        await replica.start()
        self.replicas.append(replica)
        members = self.adapter.members
        assert members is not None
        await members.add(self.router, replica.url)
        for router in self.routers:
            await known(self.adapter, router, [replica])
        return replica

    async def idle(self, within_s: float = 2.0) -> None:
        """Until no router says that anything is in flight."""
        for router in self.routers:
            await until(partial(self._idle, router), within_s, "turns are still in flight by the router's own metrics")

    async def _idle(self, router: Router) -> bool:
        return await self.adapter.turns_in_flight(router) == 0

    async def close(self) -> None:
        for router in self.routers:
            await router.close()
        if self.redis is not None:
            await self.redis.stop()
        for replica in self.replicas:
            await replica.stop()


async def until(true: Callable[[], Awaitable[object] | object], within_s: float, otherwise: str) -> None:
    """Look until it is so; fail with `otherwise` when the time is over. Looking works with any router."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while True:
        found = true()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return
        if loop.time() >= end:
            raise Failed(f"{otherwise} ({within_s:g} s)")
        await asyncio.sleep(0.02)


async def known(adapter: Adapter, router: Router, replicas: Sequence[Replica]) -> None:
    """Until the router would send turns to each of these, by what it says itself."""
    if adapter.members is None:
        return
    wanted = {replica.url for replica in replicas}
    members = adapter.members

    async def all_known() -> bool:
        return wanted <= await members.known(router)

    await until(all_known, 30.0, f"the router does not know its replicas: {router.log[-400:]}")


@dataclass
class Target:
    """The router under test, and which dialects it was found to serve."""

    adapter: Adapter
    dialects: frozenset[Dialect] = frozenset()
    without: dict[Dialect, str] = field(default_factory=dict)
    """Dialect not served → what a plain request was answered."""

    async def stage(
        self, replicas: int, routers: int, variant: Variant, given: Mapping[str, Any], stack: AsyncExitStack
    ) -> Stage:
        """A fresh stage, ready; closed with the stack."""
        launch = self.adapter.launches.get(variant)
        if launch is None:
            raise NotApplicable(f"it has no configuration for this ({variant})")
        redis = None
        if launch.wants_redis:
            if not Redis.available():
                raise NotApplicable("there is no redis-server here")
            redis = Redis()
        mocks = [Replica(**given) for _ in range(replicas)]
        stage = Stage(self.adapter, mocks, [], redis, self.dialects)
        stack.push_async_callback(stage.close)
        for mock in mocks:
            await mock.start()
        if redis is not None:
            await redis.start()
        for _ in range(routers):
            router = Router(launch, [mock.url for mock in mocks], redis.url if redis else "")
            stage.routers.append(router)
            await router.start()
        for router in stage.routers:
            await self.ready(stage, router)
        for mock in mocks:
            mock.seen.clear()
        return stage

    async def ready(self, stage: Stage, router: Router) -> None:
        """Until a request passes and, where the router tells its replicas, all of them are known."""
        await router.listening()
        await known(self.adapter, router, stage.replicas)

        async def passes() -> bool:
            body = ask(Dialect.CHAT, [f"warm {new_mark()}"], stream=False)
            answer = await router.request("POST", Dialect.CHAT.path, body)
            return answer.status == 200

        async def tried() -> bool:
            try:
                return await passes()
            except (OSError, asyncio.IncompleteReadError):
                return False

        await until(tried, 30.0, f"no request passes: {router.log[-400:]}")


Pool = dict[tuple[int, Variant], tuple[Stage, AsyncExitStack]]
"""Stages that cases share, by replicas and configuration, and what closes each."""


class Rig:
    """What one case is given."""

    def __init__(self, target: Target, case: Case, pool: Pool) -> None:
        self.target = target
        self.case = case
        self._pool = pool
        self._stack = AsyncExitStack()
        self._used: list[tuple[int, Variant]] = []

    @property
    def adapter(self) -> Adapter:
        return self.target.adapter

    async def stage(
        self, replicas: int = 3, *, routers: int = 1, variant: Variant | None = None, **given: Any
    ) -> Stage:
        """Routers and replicas of the case's own. `given` goes to each replica."""
        if variant is None:
            variant = "several" if routers > 1 else "keyless" if Can.KEYLESS in self.case.needs else "sessions"
        return await self.target.stage(replicas, routers, variant, given, self._stack)

    async def shared(self, replicas: int = 2, variant: Variant = "sessions") -> Stage:
        """A router that other cases use before and after, its replicas well again.

        For cases that change nothing in the router that another could notice.
        """
        key = (replicas, variant)
        if key not in self._pool:
            stack = AsyncExitStack()
            try:
                self._pool[key] = (await self.target.stage(replicas, 1, variant, {}, stack), stack)
            except BaseException:
                await stack.aclose()
                raise
        stage = self._pool[key][0]
        for replica in stage.replicas:
            replica.reset()
        self._used.append(key)
        return stage

    async def close(self, *, failed: bool) -> None:
        """Stop what was the case's own; after a failure also what it shared."""
        await self._stack.aclose()
        for key in self._used:
            if failed and key in self._pool:
                _, stack = self._pool.pop(key)
                await stack.aclose()


def spread(replicas: Sequence[Replica]) -> str:
    """For messages: how many turns each was asked for."""
    return "/".join(str(len(replica.turns)) for replica in replicas)


def homes(turns: Sequence[Turn]) -> Counter[int]:
    """Ports of the replicas that served these turns."""
    return Counter(turn.replica.port for turn in turns)


__all__ = [
    "PATIENCE_S",
    "Rig",
    "Session",
    "Stage",
    "Target",
    "Turn",
    "homes",
    "known",
    "new_mark",
    "prose",
    "spread",
    "until",
]
