"""The soak's own parts: its judges find what is wrong, its proxy breaks what it is told to, and all of it runs."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tests.integration.conversations import Conversation
from tests.integration.replicas import PATIENCE_S, Replica, Visit, replicas, speak
from tests.soak.clients import Clients, Unfinished
from tests.soak.faults import Ledger
from tests.soak.proxy import FaultProxy, Mode
from tests.soak.stage import redis_server

Script = Callable[[Visit], Awaitable[None]]


@asynccontextmanager
async def client_of(replica: Replica) -> AsyncIterator[tuple[Clients, list[str], Ledger]]:
    """A client whose router is that replica, what it complains of, and what is known to have gone wrong."""
    async with aiohttp.ClientSession() as http:
        router = SimpleNamespace(port=replica.port, up=True, program=SimpleNamespace(name="router-0"))
        found: list[str] = []
        ledger = Ledger()
        stage: Any = SimpleNamespace(routers=[router], http=http)
        yield Clients(stage, ledger, 1, found.append), found, ledger


async def ask(clients: Clients) -> None:
    talk = Conversation("talk")
    await clients._attempt(talk, talk.body(), leave=False, dice=random.Random(1), began_s=0.0)


def told(script: Script) -> Script:
    """The script behind a head that names a replica, as Roost does."""

    async def run(visit: Visit) -> None:
        chunked = "Transfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\nx-roost-replica: r1\r\n\r\n"
        await visit.send(f"HTTP/1.1 200 OK\r\n{chunked}".encode())
        await visit.chunk(b'data: {"choices":[]}\n\n')
        await script(visit)

    return run


async def well(visit: Visit) -> None:
    await visit.chunk(b"data: [DONE]\n\n")
    await visit.end()


async def clean_end(visit: Visit) -> None:
    await visit.end()


async def death(visit: Visit) -> None:
    visit.reset()


async def refusal(visit: Visit) -> None:
    await visit.answer(400, b'{"error":{"message":"no"}}')


async def no_words(visit: Visit) -> None:
    await visit.answer(503, b"away")


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (told(well), None),
        (told(clean_end), "a clean end without its terminal event"),
        (told(death), "no fault explains it"),
        (refusal, "got 400"),
        (no_words, "without a JSON error"),
    ],
    ids=["well", "clean end", "death", "400", "no words"],
)
async def test_clients_find_what_is_wrong(script: Script, complaint: str | None) -> None:
    async with replicas(1, script=script) as (replica,), client_of(replica) as (clients, found, _):
        try:
            await ask(clients)
        except Unfinished:
            assert script is not well
        assert [complaint in each for each in found] == ([True] if complaint else []) if complaint else not found
        assert not clients.open


async def test_a_death_that_a_fault_explains_is_no_violation() -> None:
    async with replicas(1, script=told(death)) as (replica,), client_of(replica) as (clients, found, ledger):
        ledger.begin("replica killed", "r1", lethal=True)
        with pytest.raises(Unfinished, match="broken"):
            await ask(clients)
        assert found == []
        assert clients.tally.broken == 1


def test_only_what_is_lethal_and_of_that_time_and_place_explains_a_death() -> None:
    ledger = Ledger()
    slow = ledger.begin("slow", "a", lethal=False)
    killed = ledger.begin("killed", "b", lethal=True)
    at_s = killed.began_s
    killed.ended_s = at_s + 1
    slow.ended_s = at_s + 1
    assert ledger.explains("b", at_s - 5, at_s + 0.5, 0.0)
    assert ledger.explains("b", at_s + 3, at_s + 4, 10.0), "its effect may be late"
    assert not ledger.explains("b", at_s + 3, at_s + 4, 1.0)
    assert not ledger.explains("b", at_s - 5, at_s - 1, 0.0)
    assert not ledger.explains("a", at_s - 5, at_s + 0.5, 0.0)


async def test_the_proxy_breaks_what_it_is_told_to() -> None:
    async with replicas(1, script=speak) as (replica,):
        proxy = FaultProxy(("127.0.0.1", replica.port))
        await proxy.start()
        try:
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{proxy.port}", timeout=timeout) as http:

                async def get() -> int:
                    async with http.get("/x") as response:
                        return response.status

                assert await get() == 200
                proxy.become(Mode.REFUSE)
                with pytest.raises(aiohttp.ClientError):
                    await get()
                proxy.become(Mode.SILENT)
                waiting = asyncio.create_task(get())
                while not proxy._tasks:  # noqa: ASYNC110 (it tells nobody)
                    await asyncio.sleep(0.01)
                assert len(replica.seen) == 1
                proxy.become(Mode.PASS)
                assert await waiting == 200
        finally:
            await proxy.stop()


async def test_it_runs_and_tells(tmp_path: Path) -> None:
    """A few seconds of it; the long one is `make soak`."""
    if redis_server() is None:
        pytest.skip("no redis-server on PATH (apt-get install redis-server)")
    told = tmp_path / "soak.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.soak", "--minutes", "0.1", "--replicas", "3", "--sessions", "6"),
        *("--seed", "3", "--json", str(told)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    async with asyncio.timeout(100):
        out, err = await process.communicate()
    assert process.returncode == 0, (out + err).decode()[-3000:]
    figures = json.loads(told.read_text())
    assert figures["turns"] > 0
    assert figures["violations"] == []
    assert figures["left_at_the_end"]["leases"] == 0
    assert out.decode().strip().endswith("nothing was lost")
