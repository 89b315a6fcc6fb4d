"""The store away, in every way it can be: clients notice nothing, and afterwards it knows what it missed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis.asyncio

from router.domain.turn import Dialect
from router.settings import Auth
from router.store import codec
from router.store.keys import SCHEMA, FleetKeys
from tests.contracts.groups import free_port
from tests.contracts.servers import serving_at
from tests.integration.conversations import Conversation
from tests.integration.replicas import PATIENCE_S, Gate, Replica, replicas
from tests.integration.roosts import Answer, Roost, running, settings_for, shared_store
from tests.integration.supervised import command
from tests.integration.supervised import settings_for as yaml_for
from tests.integration.test_auth import ACME, OTHER, keys_file
from tests.soak.proxy import FaultProxy, Mode

TIMEOUT_S = 0.5
"""Ten times the default: a busy machine is no store that is away."""
KEYS = FleetKeys("roost", "default")


class Server:
    """A redis-server that a test may treat as it likes. Its data is in memory only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"unix://{path}"
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = self._stack.enter_context(serving_at("redis", self.path))

    def kill(self) -> None:
        self._stack.close()
        self.path.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def do(self, *command: Any) -> Any:
        async with redis.asyncio.Redis.from_url(self.url) as client:
            run: Any = client.execute_command
            return await run(*command)

    async def turns(self) -> int:
        """How many turns all branches have had, by their records."""
        async with redis.asyncio.Redis.from_url(self.url) as client:
            names = [name async for name in client.scan_iter(match=KEYS.base + b"n:*")]
            records: Any = await client.mget(names) if names else []
        branches = [codec.unpack_branch("", raw) for raw in records if raw is not None]
        return sum(branch.turns for branch in branches if branch is not None)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Server(tmp_path_factory.mktemp("s") / "s")
    made.start()
    yield made
    made.kill()


class Lines(logging.Handler):
    """What routers say of their store, for operators."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _lines() -> Any:
    handler, logger = Lines(), logging.getLogger("roost.store")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@asynccontextmanager
async def two_routers(server: Server, fleet: list[Replica]) -> AsyncIterator[tuple[Roost, Roost, Lines]]:
    store = shared_store(server.url, timeout_s=TIMEOUT_S)
    with _lines() as lines:
        async with (
            running(settings_for(fleet, store), fleet) as one,
            running(settings_for(fleet, store), fleet) as other,
        ):
            yield one, other, lines


async def up(roost: Roost) -> bool:
    metrics = await roost.metrics()
    return "roost_store_up 1.0" in metrics


async def until_up(wanted: bool, *routers: Roost) -> None:
    for roost in routers:

        async def so(roost: Roost = roost) -> bool:
            return await up(roost) is wanted

        await roost.until(so)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await true():  # noqa: ASYNC110 (the store tells nobody)
            await asyncio.sleep(0.01)


async def next_turn(roost: Roost, conversation: Conversation) -> Answer:
    conversation.grow()
    return await roost.turn(conversation)


def conversations(name: str, count: int) -> list[Conversation]:
    """With and without a session's id, by turns."""
    return [
        Conversation(f"{name} {n}", header=("x-session-id", f"{name} {n}") if n % 2 else None) for n in range(count)
    ]


# --- ways to be away --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stopped(server: Server) -> AsyncIterator[None]:
    """It hangs: connections stand, nothing answers."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


@asynccontextmanager
async def killed(server: Server) -> AsyncIterator[None]:
    """It is gone, and comes back empty."""
    server.kill()
    yield
    server.start()


@asynccontextmanager
async def loading(server: Server) -> AsyncIterator[None]:
    """It was restarted, says for a while that it is loading, and is empty then."""

    talks: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(writer)
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while commands.gets() is not False:
                writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    server.kill()
    async with await asyncio.start_unix_server(answer, server.path):
        yield
        for writer in talks:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    server.start()


def told(spoil: tuple[Any, ...], mend: tuple[Any, ...]) -> Callable[[Server], Any]:
    @asynccontextmanager
    async def refusing(server: Server) -> AsyncIterator[None]:
        await server.do(*spoil)
        yield
        await server.do(*mend)

    return refusing


OUTAGES: dict[str, tuple[Callable[[Server], Any], bool, str]] = {
    "stopped": (stopped, True, "away"),
    "killed": (killed, False, "away"),
    "loading": (loading, False, "LOADING"),
    "out of memory": (told(("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")), True, "OOM"),
    "a replica": (told(("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")), True, "READONLY"),
    "not allowed": (
        told(("ACL", "SETUSER", "default", "-evalsha"), ("ACL", "SETUSER", "default", "+evalsha")),
        True,
        "NOPERM",
    ),
    "another version's": (told(("SET", "roost:schema", "9"), ("SET", "roost:schema", SCHEMA)), True, "schema b'9'"),
}
"""How it goes, whether its data stays, and what the log says of it."""


@pytest.mark.parametrize("kind", OUTAGES)
async def test_while_the_store_is_away_nobody_moves_and_afterwards_it_knows(server: Server, kind: str) -> None:
    """Known branches stay, new ones are placed alike by both routers, one line says each change, the admin API goes on,
    and when the store is back either router continues what the other bound without it.
    """
    outage, kept, word = OUTAGES[kind]
    known, fresh = conversations("known", 6), conversations("fresh", 4)
    homes: dict[str, str] = {}
    async with replicas(4) as fleet, two_routers(server, fleet) as (one, other, lines):
        for each in known:
            homes[each.name] = (await one.turn(each)).replica
        await one.idle()
        before = await server.turns()
        assert before == len(known)
        async with outage(server):
            await until_up(False, one, other)
            for each in known:
                answer = await next_turn(one, each)
                assert (answer.replica, answer.reason) == (homes[each.name], "home")
            for each in fresh:
                answer = await one.turn(each)
                assert answer.reason == "new"
                homes[each.name] = answer.replica
                assert (await next_turn(other, each)).replica == answer.replica, "the routers do not agree"
            assert all(each["from_memory"] and each["healthy"] for each in (await one.replicas()).values())
            assert all(each["blind"] for each in await one.decisions(10))
        await until_up(True, one, other)
        blind = len(known) + 2 * len(fresh)

        async def all_written() -> bool:
            return await server.turns() >= blind + (before if kept else 0)

        await until(all_written)
        for each in known + fresh:
            answer = await next_turn(other, each)
            assert (answer.replica, answer.reason) == (homes[each.name], "home")
        assert not any(each["from_memory"] for each in (await one.replicas()).values())
        assert await server.do("GET", "roost:schema") == SCHEMA.encode()
        away = [line for line in lines.said if word in line]
        back = [line for line in lines.said if "is back after" in line]
        assert (len(away), len(back), len(lines.said)) == (2, 2, 4), lines.said


@pytest.mark.parametrize("kind", ["stopped", "killed"])
async def test_turns_that_run_through_an_outage_count_afterwards_and_end_at_zero(server: Server, kind: str) -> None:
    """Begun with the store, begun without it, ended without it: in-flight is true as soon as the store is back."""
    outage, _, _ = OUTAGES[kind]
    async with replicas(3) as fleet, two_routers(server, fleet) as (one, other, _):
        early, late, ends = Gate(), Gate(), Gate()
        asked = {"early": early, "late": late, "ends": ends}

        def at(gate: Gate) -> None:
            for replica in fleet:
                replica.script = gate

        tasks = {}
        for name in ("early", "ends"):
            at(asked[name])
            tasks[name] = asyncio.create_task(one.turn(Conversation(name, size_bytes=8_000)))
            await asked[name].waiting(1)
        async with outage(server):
            await until_up(False, one, other)
            at(late)
            tasks["late"] = asyncio.create_task(one.turn(Conversation("late", size_bytes=8_000)))
            await late.waiting(1)
            ends.open()
            await tasks["ends"]
        await until_up(True, one, other)

        async def counted() -> bool:
            in_flight = [int(each["load"]["in_flight"]) for each in (await other.replicas()).values()]
            return sum(in_flight) == 2

        await until(counted)
        early.open()
        late.open()
        await asyncio.gather(*tasks.values())
        await other.idle()
        loads = [each["load"] for each in (await other.replicas()).values()]
        assert all((each["prefill_tokens"], each["locked_tokens"]) == (0, 0) for each in loads)


async def test_after_a_flush_members_standings_and_homes_are_what_they_were(server: Server) -> None:
    """Nobody noticed an absence: admin-added members, cordons and slow starts survive, and so do branches."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(replicas(3))
        settings = settings_for(fleet[:2], shared_store(server.url, timeout_s=TIMEOUT_S))
        one = await stack.enter_async_context(running(settings))
        status, _ = await one.admin("POST", "/admin/replicas", {"url": fleet[2].url})
        assert status == 201
        await one.knows(fleet)
        other = await stack.enter_async_context(running(settings, fleet))
        await one.admin("POST", f"/admin/replicas/{fleet[0].id}/cordon")
        known = conversations("known", 6)
        homes = {each.name: (await one.turn(each)).replica for each in known}
        assert fleet[0].id not in homes.values()
        await one.idle()
        shown = ("url", "source", "standing", "incarnation", "joined_at_s")
        members = {name: [told[key] for key in shown] for name, told in (await one.replicas()).items()}
        await server.do("FLUSHALL")
        for each in known[:3]:
            answer = await next_turn(one, each)
            assert (answer.replica, answer.reason) == (homes[each.name], "home")

        async def all_written() -> bool:
            return await server.turns() >= len(known)

        await until(all_written)
        for each in known[3:]:
            answer = await next_turn(other, each)
            assert (answer.replica, answer.reason) == (homes[each.name], "home")
        for roost in (one, other):
            assert {name: [told[key] for key in shown] for name, told in (await roost.replicas()).items()} == members


async def test_a_router_that_starts_without_the_store_says_so_once_and_serves(server: Server) -> None:
    server.kill()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(replicas(2))
        lines = stack.enter_context(_lines())
        settings = settings_for(fleet, shared_store(server.url, timeout_s=TIMEOUT_S))
        one = await stack.enter_async_context(running(settings))

        async def ready() -> bool:
            return all(each["healthy"] for each in (await one.replicas()).values())

        await one.until(ready)
        conversation = Conversation("early")
        home = (await one.turn(conversation)).replica
        server.start()
        await until_up(True, one)
        await one.knows(fleet)

        async def written() -> bool:
            return await server.turns() == 1

        await until(written)
        assert len(lines.said) == 2, lines.said
        answer = await next_turn(one, conversation)
        assert (answer.replica, answer.reason) == (home, "home")


async def test_a_slow_store_is_left_until_it_is_quick_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It answers, each time too late: as one that is away, though nothing is refused and no connection breaks."""
    port = free_port()
    slow = FaultProxy(("127.0.0.1", port))
    await slow.start()
    try:
        with serving_at("redis", tmp_path_factory.mktemp("s") / "s", "--port", str(port)):
            async with replicas(3) as fleet:
                store = shared_store(f"redis://127.0.0.1:{slow.port}", timeout_s=TIMEOUT_S)
                async with running(settings_for(fleet, store), fleet) as roost:
                    known = conversations("known", 4)
                    homes = {each.name: (await roost.turn(each)).replica for each in known}
                    slow.become(Mode.SLOW, TIMEOUT_S)  # each way
                    await until_up(False, roost)
                    for each in known:
                        answer = await next_turn(roost, each)
                        assert (answer.replica, answer.reason) == (homes[each.name], "home")
                    assert all(each["blind"] for each in await roost.decisions(len(known)))
                    slow.become(Mode.PASS)
                    await until_up(True, roost)
                    for each in known:
                        answer = await next_turn(roost, each)
                        assert (answer.replica, answer.reason) == (homes[each.name], "home")
                    assert not any(each["blind"] for each in await roost.decisions(len(known)))
    finally:
        await slow.stop()


async def test_a_router_does_not_start_on_another_versions_keys(server: Server, tmp_path: Path) -> None:
    """It says whose they are and what to do, and touches nothing."""
    await server.do("SET", "roost:schema", "9")
    given = yaml_for([], workers=1, listen={"port": 0}, store={"url": server.url})
    async with command(tmp_path, given) as roost:
        assert await roost.exit_code() != 0
        said = await roost.log.end()
    assert "roost:schema says schema b'9'" in said
    assert "Traceback" not in said
    assert await server.do("KEYS", "*") == [b"roost:schema"]


async def test_without_the_store_a_tenants_stored_response_is_a_503(server: Server, tmp_path: Path) -> None:
    """Nobody can say whose it is: no replica is asked, and the client may come again."""
    auth = Auth(keys_file=str(keys_file(tmp_path)))
    async with replicas(2) as fleet:
        settings = settings_for(fleet, shared_store(server.url, timeout_s=TIMEOUT_S), auth=auth)
        async with running(settings, fleet) as roost:
            made = await roost.turn(Conversation("kept", Dialect.RESPONSES, stream=False, key=ACME))
            path = f"/v1/responses/{json.loads(made.body)['id']}"
            await roost.idle()
            assert (await roost.request("GET", path, headers={"x-api-key": ACME})).replica == made.replica
            async with stopped(server):
                await until_up(False, roost)
                before = sum(len(each.seen) for each in fleet)
                for key in (ACME, OTHER):
                    assert (await roost.request("GET", path, headers={"x-api-key": key})).status == 503
                assert sum(len(each.seen) for each in fleet) == before
            await until_up(True, roost)
            assert (await roost.request("GET", path, headers={"x-api-key": ACME})).replica == made.replica
            assert (await roost.request("GET", path, headers={"x-api-key": OTHER})).status == 404
