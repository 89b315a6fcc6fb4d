"""Tenants' limits over real sockets: shared by routers, told so that agents come again, free however a turn ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.domain.turn import Dialect
from router.settings import Auth, Store
from tests.contracts.servers import serving_with
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Gate, Replica, Script, Visit, events, replicas, speak
from tests.integration.roosts import Answer, Roost, running, settings_for, shared_store
from tests.integration.test_auth import keys_file

KEY, FREE = "roost-limited", "roost-free"


def auth(folder: Path, **limits: int) -> Auth:
    tenants: dict[str, dict[str, Any]] = {"limited": {"keys": [KEY], **limits}, "free": {"keys": [FREE]}}
    return Auth(keys_file=str(keys_file(folder, tenants)))


@asynccontextmanager
async def routers(
    fleet: list[Replica], folder: Path, store: Store | None, count: int = 1, **limits: int
) -> AsyncIterator[list[Roost]]:
    """So many routers before one fleet and one store; no permit expires while a test waits for it."""
    async with AsyncExitStack() as stack:
        kept = store or Store(kind="memory", lease_ttl_s=600.0)
        settings = settings_for(fleet, kept, auth=auth(folder, **limits))
        yield [await stack.enter_async_context(running(settings, fleet)) for _ in range(count)]


def asks(name: str, key: str = KEY, dialect: Dialect = Dialect.CHAT) -> Conversation:
    return Conversation(name, dialect, key=key, size_bytes=100)


async def ask(roost: Roost, asked: Conversation) -> Answer:
    return await roost.request("POST", PATHS[asked.dialect], asked.body(), asked.headers)


async def test_two_routers_share_a_tenants_turns(tmp_path: Path, valkey_url: str) -> None:
    """Three at once whichever router has them; the fourth is refused by either before anything is placed. Who has no
    limit is not held up."""
    async with (
        replicas(2) as fleet,
        routers(fleet, tmp_path, shared_store(valkey_url, "limits"), 2, concurrent=3) as (one, other),
    ):
        gate = Gate()
        for replica in fleet:
            replica.script = gate
        running_turns = [
            asyncio.create_task(ask(roost, asks(f"held {number}"))) for number, roost in enumerate((one, other, one))
        ]
        await gate.waiting(3)
        for roost in (one, other):
            refused = await ask(roost, asks("over"))
            assert (refused.status, refused.headers["x-roost-error"]) == (429, "rate_limit_exceeded")
            assert refused.headers["retry-after"] == "2"
        free = asyncio.create_task(ask(other, asks("free", FREE)))
        await gate.waiting(4)
        assert gate.arrived == 4
        gate.open()
        assert [answer.status for answer in await asyncio.gather(*running_turns, free)] == [200] * 4

        async def again() -> bool:
            return (await ask(other, asks("again"))).status == 200

        await one.until(again)


async def test_two_routers_share_a_tenants_rate(tmp_path: Path, valkey_url: str) -> None:
    async with (
        replicas(1) as fleet,
        routers(fleet, tmp_path, shared_store(valkey_url, "rates"), 2, rate_per_minute=5) as both,
    ):
        answers = [await ask(both[number % 2], asks(f"q{number}")) for number in range(7)]
        assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 12
        assert len(fleet[0].turns) == 5
        assert (await ask(both[0], asks("free", FREE))).status == 200
        refused = 'roost_tenant_requests_refused_total{code="rate_limit_exceeded",tenant="limited"} 1.0'
        assert [refused in await roost.metrics() for roost in both] == [True, True]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_refusal_is_in_the_dialects_shape(tmp_path: Path, dialect: Dialect) -> None:
    async with replicas(1) as fleet, routers(fleet, tmp_path, None, rate_per_minute=1) as (roost,):
        assert (await ask(roost, asks("q", dialect=dialect))).status == 200
        refused = await ask(roost, asks("q", dialect=dialect))
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) in range(1, 61)
        told = json.loads(refused.body)
        assert (told.get("type") == "error") == (dialect is Dialect.MESSAGES)
        assert told["error"]["type"] == "rate_limit_error"


async def test_embeddings_count_and_questions_about_text_do_not(tmp_path: Path) -> None:
    """Claude Code counts tokens before each turn: that must not use turns up."""
    async with replicas(1) as fleet, routers(fleet, tmp_path, None, rate_per_minute=2) as (roost,):
        headers = {"x-api-key": KEY}
        for _ in range(5):
            assert (await roost.request("POST", "/v1/messages/count_tokens", b"{}", headers)).status == 200
        statuses = [(await roost.request("POST", "/v1/embeddings", b"{}", headers)).status for _ in range(3)]
        assert statuses == [200, 200, 429]


async def _dies_before_its_head(visit: Visit) -> None:
    visit.reset()


async def _dies_midway(visit: Visit) -> None:
    await visit.begin()
    await visit.chunk(events(Dialect.CHAT, "r", 5)[0])
    visit.reset()


async def _fails(visit: Visit) -> None:
    await visit.answer(500, b"{}")


async def _is_full(visit: Visit) -> None:
    await visit.answer(503, b"{}")


@pytest.mark.parametrize(
    "script", [speak, _dies_before_its_head, _dies_midway, _fails, _is_full], ids=lambda each: each.__name__
)
async def test_a_turn_gives_back_however_its_replica_ends_it(tmp_path: Path, script: Script) -> None:
    """With one turn at a time allowed, the next is let through."""
    async with replicas(2) as fleet, routers(fleet, tmp_path, None, concurrent=1) as (roost,):
        for replica in fleet:
            replica.script = script
        for number in range(3):
            await roost.watch(asks(f"bad {number}"))
        for replica in fleet:
            replica.script = speak
        await _lets_through(roost)


@pytest.mark.parametrize("silent", [True, False])
async def test_a_turn_gives_back_when_its_client_leaves(tmp_path: Path, silent: bool) -> None:
    """Before the head as well as midway."""
    begun = asyncio.Event()

    async def hangs(visit: Visit) -> None:
        if not silent:
            await visit.begin()
            await visit.chunk(events(Dialect.CHAT, "r", 5)[0])
        begun.set()
        await visit.until_closed()

    async with replicas(1, script=hangs) as fleet, routers(fleet, tmp_path, None, concurrent=1) as (roost,):
        async with Client.to(roost.port) as client:
            asked = asks("leaves")
            headers = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
            await client.post(asked.body(), headers=headers, path=PATHS[Dialect.CHAT])
            await begun.wait()
            assert (await ask(roost, asks("over"))).status == 429
        fleet[0].script = speak
        await _lets_through(roost)


async def test_what_is_refused_gives_back(tmp_path: Path) -> None:
    """A model that is not served, a body that is no JSON."""
    async with replicas(1) as fleet, routers(fleet, tmp_path, None, concurrent=1) as (roost,):
        for _ in range(3):
            unserved = asks("q")
            unserved.model = "unserved"
            assert (await ask(roost, unserved)).status == 404
            bad = await roost.request("POST", PATHS[Dialect.CHAT], b"no json", {"x-api-key": KEY})
            assert bad.status == 400
        await _lets_through(roost)


async def test_a_store_that_hangs_leaves_the_limit_to_each_process(tmp_path: Path) -> None:
    """What was let through before counts, and nobody is let through unlimited. Whose a stored response is nobody can
    say then, so no replica is asked for it.
    """
    with serving_with("valkey") as (process, socket):
        store = shared_store(f"unix://{socket}", "hangs", timeout_s=0.5)
        async with (
            replicas(1) as fleet,
            routers(fleet, tmp_path, store, rate_per_minute=4) as (roost,),
        ):
            assert [(await ask(roost, asks(f"a{number}"))).status for number in range(2)] == [200, 200]
            process.send_signal(signal.SIGSTOP)
            try:
                statuses = [(await ask(roost, asks(f"b{number}"))).status for number in range(4)]
                whose = await roost.request("GET", "/v1/responses/resp_1", headers={"x-api-key": FREE})
            finally:
                process.send_signal(signal.SIGCONT)
            assert statuses == [200, 200, 429, 429]
            assert (whose.status, whose.headers["x-roost-error"]) == (503, "store_unavailable")
            assert len(fleet[0].seen) == 4


async def _lets_through(roost: Roost) -> None:
    async def passed() -> bool:
        return (await ask(roost, asks("next"))).status == 200

    await roost.until(passed)
