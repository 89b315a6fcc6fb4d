"""Several workers behind one port: what they share, what survives a death, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from router.folder import PrivateFolder
from router.store.embedded import EmbeddedValkey
from router.supervisor.admin import WorkersAdmin
from router.supervisor.crew import Crew
from tests.integration.conversations import Conversation
from tests.integration.replicas import Gate, Visit, events, replicas
from tests.integration.supervised import (
    SERVING,
    Connection,
    Supervised,
    command,
    gone,
    held,
    reserved_port,
    settings_for,
    supervised,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc and pidfd")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: Unix sockets lie in it."""
    return tmp_path_factory.mktemp("w")


async def _talk(connection: Connection, name: str, turns: int) -> None:
    conversation = Conversation(name)
    for _ in range(turns):
        await connection.turn(conversation)
        conversation.grow()


async def test_metrics_are_the_exact_sum_on_every_scrape(folder: Path) -> None:
    """Both workers serve; every scrape, whoever serves and whenever, counts all that ended and nothing twice."""
    async with (
        replicas(2) as fleet,
        supervised(folder, fleet) as roost,
        roost.connection(only=0) as first,
        roost.connection(only=1) as second,
    ):
        for number in range(1, 6):
            talks = [
                asyncio.create_task(_talk(first, f"a{number}", 4)),
                asyncio.create_task(_talk(second, f"b{number}", 4)),
            ]
            scraped = [await roost.turns() for _ in range(5)]  # while they talk
            await asyncio.gather(*talks)
            assert scraped == sorted(scraped)
            assert 8 * (number - 1) <= scraped[0] <= scraped[-1] <= 8 * number
            await asyncio.gather(first.settled(), second.settled())
            assert await roost.turns() == 8 * number
            assert await roost.total("roost_turn_duration_seconds_count") == 8 * number
            assert await roost.total("roost_in_flight") == 0


async def test_workers_share_bindings_membership_and_one_admin_api(folder: Path) -> None:
    """A session's turns meet one replica whichever worker serves them, and the admin API speaks for all workers."""
    async with (
        replicas(3) as fleet,
        supervised(folder, fleet[:2]) as roost,
        roost.connection(only=0) as first,
        roost.connection(only=1) as second,
    ):
        served = {}
        for name in ("a", "b", "c", "d"):
            conversation = Conversation(name, header=("x-session-id", name))
            at = []
            for connection in (first, second, first, second):
                replica, _ = await connection.turn(conversation)
                at.append(replica)
                conversation.grow()
            assert len(set(at)) == 1
            served[name] = at[0]
        assert set(served.values()) == {each.id for each in fleet[:2]}

        # Decisions of both, newest first.
        status, told = await roost.admin("GET", "/admin/decisions")
        assert status == 200
        assert [each["replica"] for each in told["decisions"]] == [served[name] for name in "ddddccccbbbbaaaa"]
        times = [each["at_s"] for each in told["decisions"]]
        assert times == sorted(times, reverse=True)
        _, newest = await roost.admin("GET", "/admin/decisions?limit=3")
        assert newest["decisions"] == told["decisions"][:3]
        session = told["decisions"][-1]["session"]
        _, of_one = await roost.admin("GET", f"/admin/decisions?session={session}&replica={served['a']}")
        assert [each["session"] for each in of_one["decisions"]] == [session] * 4
        assert (await roost.admin("GET", "/admin/decisions?limit=few")) == (
            400,
            {"error": "limit must be a whole number, 0 or more"},
        )

        # A write through the one is known to the other.
        added = {"id": fleet[2].id, "fleet": "default", "added": True}
        assert await roost.admin("POST", "/admin/replicas", {"url": fleet[2].url}) == (201, added)
        for each in fleet[:2]:
            assert (await roost.admin("POST", f"/admin/replicas/{each.id}/drain"))[0] == 200
        _, listed = await roost.admin("GET", "/admin/replicas")
        standings = {each["id"]: each["standing"] for each in listed["replicas"]}
        assert standings == {fleet[0].id: "draining", fleet[1].id: "draining", fleet[2].id: "serving"}
        for connection, name in ((first, "e"), (second, "f")):
            await _known(connection)
            assert (await connection.turn(Conversation(name)))[0] == fleet[2].id

        assert (await roost.admin("POST", "/admin/replicas", {"url": "nonsense"}))[0] == 400
        status, wrong = await roost.admin("GET", "/nowhere")
        assert (status, list(wrong)) == (404, ["error"])
        assert wrong["error"].startswith("GET /nowhere: no such path")
        assert await roost.admin_text("GET", "/livez") == (200, "ok\n")
        assert await roost.admin_text("GET", "/readyz") == (200, "ok\n")


async def _known(connection: Connection) -> None:
    """Until this worker's own probe has found the newcomer; placing is the only way to know."""
    while True:
        async with connection.http.post("/v1/chat/completions", data=Conversation("known").body()) as response:
            await response.read()
            if response.status == 200:
                return
        await asyncio.sleep(0.01)


async def test_a_killed_worker_is_replaced_and_its_counts_stay(folder: Path) -> None:
    """kill -9 of a worker: the other goes on; in flight tells the truth; no count is lost, then or later."""
    gate = Gate()
    async with replicas(2) as fleet, supervised(folder, fleet) as roost:
        pids = roost.workers()
        async with roost.connection(only=0) as doomed, roost.connection(only=1) as other:
            await asyncio.gather(_talk(doomed, "a", 3), _talk(other, "b", 2))
            for each in fleet:
                each.script = gate
            hanging = asyncio.create_task(doomed.turn(Conversation("c")))
            await gate.waiting(1)
            assert await roost.total("roost_in_flight") == 1

            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await hanging
            gate.open()
            await _talk(other, "d", 1)  # at once, without waiting for a new worker
            await roost.lost(0)
            await other.settled()
            assert await roost.total("roost_in_flight") == 0
            assert await roost.turns() == 6

            pid = await roost.replaced(0, pids[0])
            async with roost.connection(only=0) as newcomer:
                await _known(newcomer)
                before = await _settled_turns(roost, newcomer)
                await _talk(newcomer, "e", 2)
                assert await _settled_turns(roost, newcomer) == before + 2
                os.kill(pid, signal.SIGKILL)
            await roost.replaced(0, pid)
            assert await roost.turns() == before + 2
            assert await roost.total("roost_turn_duration_seconds_count") == before + 2
            assert (
                len(list(roost.folder.glob("roost-workers-*/metrics/counter_*"))) <= 3
            )  # two living, one for the dead


async def _settled_turns(roost: Supervised, connection: Connection) -> float:
    await connection.settled()
    return await roost.turns()


async def test_a_waiting_connection_survives_the_death_of_a_worker(folder: Path) -> None:
    """Connections wait in one queue, so those that a worker did not yet accept are served by another."""
    async with replicas(1) as fleet, supervised(folder, fleet) as roost:
        pids = roost.workers()
        with held(list(pids.values())):
            reader, writer = await asyncio.open_connection("127.0.0.1", roost.port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            os.kill(pids[0], signal.SIGKILL)
            await roost.lost(0)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()


class _Halfway:
    """A script that sends half of a stream, and the rest once it is let go."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, visit: Visit) -> None:
        first, *rest = events(visit.seen.dialect, visit.response_id, 100)
        await visit.begin()
        await visit.chunk(first)
        await self.go_on.wait()
        for event in rest:
            await visit.chunk(event)
        await visit.end()


async def _begun(connection: Connection, name: str) -> aiohttp.ClientResponse:
    """A turn whose response has begun to come."""
    response = await connection.http.post("/v1/chat/completions", data=Conversation(name).body())
    await response.content.readany()
    return response


async def test_sigterm_lets_running_streams_finish(folder: Path) -> None:
    """SIGTERM: no new connections, streams on every worker come to their end, exit code 0, nothing left behind."""
    script = _Halfway()
    async with replicas(1, script=script) as fleet, supervised(folder, fleet) as roost:
        async with roost.connection(only=0) as first, roost.connection(only=1) as second:
            running = [await _begun(first, "a"), await _begun(second, "b")]
            roost.process.send_signal(signal.SIGTERM)
            await roost.refusing()
            assert (await roost.admin_text("GET", "/readyz"))[0] == 503
            assert await roost.total("roost_in_flight") == 2
            script.go_on.set()
            for response in running:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await roost.exit_code() == 0
        assert "are cut" not in await roost.log.end()
        assert list(roost.folder.iterdir()) == []


async def test_one_process_stops_as_several_do(folder: Path) -> None:
    """`workers: 1`: the first SIGINT lets running streams finish and says so, the second cuts them; nothing is left."""
    async with replicas(1, script=_Halfway()) as fleet, supervised(folder, fleet, workers=1) as roost:
        await roost.log.line("is ready")
        async with roost.connection() as only:
            response = await _begun(only, "a")
            roost.process.send_signal(signal.SIGINT)
            await roost.log.line("stopping: not ready")
            await roost.refusing()
            roost.process.send_signal(signal.SIGINT)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert await roost.exit_code() == 0
        said = await roost.log.end()
        assert "stopping at once" in said
        assert "Traceback" not in said
        assert list(roost.folder.iterdir()) == []


async def test_workers_share_a_port_that_the_system_chose(folder: Path) -> None:
    """Port 0 is bound once, by the supervisor, which says what it became."""
    async with command(folder, settings_for([], listen={"port": 0})) as roost:
        roost.port = int((await roost.log.line(SERVING))[1])
        for place in (0, 1):
            async with roost.connection(only=place) as connection:
                await connection.settled()


async def test_a_second_sigint_kills(folder: Path) -> None:
    """The first SIGINT stops as SIGTERM does, the second waits for nobody, hung workers included."""
    async with replicas(1, script=_Halfway()) as fleet, supervised(folder, fleet) as roost:
        async with roost.connection(only=0) as first:
            response = await _begun(first, "a")
            os.kill(roost.workers()[1], signal.SIGSTOP)
            roost.process.send_signal(signal.SIGINT)
            await roost.log.line("stopping; workers running: 2")
            roost.process.send_signal(signal.SIGINT)
            assert await roost.exit_code() == 0
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert "killing the workers left, 2: told to" in await roost.log.end()
        assert list(roost.folder.iterdir()) == []


async def test_nothing_outlives_a_killed_supervisor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of the supervisor: the store dies at once, the workers after their streams; the next start tidies up."""
    script = _Halfway()
    async with replicas(1, script=script) as fleet, supervised(folder, fleet) as roost:
        monkeypatch.setattr(tempfile, "tempdir", str(roost.folder))
        workers = set(roost.workers().values())
        stores = roost.children() - workers
        assert len(stores) == 1
        async with roost.connection(only=0) as first:
            response = await _begun(first, "a")
            roost.process.kill()
            await asyncio.gather(*(gone(pid) for pid in stores))
            await roost.refusing()
            (left,) = roost.folder.glob("roost-workers-*")
            with PrivateFolder("workers"):
                assert left.exists()  # still in use
            script.go_on.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.gather(*(gone(pid) for pid in workers))
        await roost.log.end()
        assert left.exists()
        with PrivateFolder("workers"):
            assert not left.exists()


async def test_a_taken_port_is_said_and_ends_it(folder: Path) -> None:
    """Which listener, which address, exit code 1; no worker is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with command(folder, settings_for([], listen={"port": port})) as roost:
            assert await roost.exit_code() == 1
            said = await roost.log.end()
    why = "Address already in use (listen.port chooses another)"
    assert said == f"roost: listen: cannot listen on 127.0.0.1 port {port}: {why}\n"


async def test_a_worker_that_cannot_start_ends_it_with_its_message(folder: Path) -> None:
    """A store with another version's keys: said once, exit code 1, nothing left behind."""
    with EmbeddedValkey() as server, reserved_port() as port:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.url.removeprefix("unix://"))
            client.sendall(b"SET roost:schema 999\r\n")
            assert client.recv(16).startswith(b"+OK")
        async with command(folder, settings_for([], listen={"port": port}, store={"url": server.url})) as roost:
            assert await roost.exit_code() == 1
            said = await roost.log.end()
            assert said.count("roost: ") == 1, said
            assert "999" in said
            assert list(roost.folder.iterdir()) == []


async def test_without_workers_the_admin_api_says_so(tmp_path: Path) -> None:
    """While none accepts: alive, not ready, counters still there, and a clear error for the rest."""

    class Nobody:
        metrics = tmp_path

        def ready(self) -> list[Any]:
            return []

    async with TestClient(TestServer(WorkersAdmin(cast("Crew", Nobody())).app())) as client:
        for method, target in (("GET", "/admin/replicas"), ("GET", "/admin/decisions"), ("POST", "/admin/replicas")):
            response = await client.request(method, target)
            assert response.status == 503
            assert await response.json() == {"error": "no worker is running; a new one starts within seconds"}
        assert (await client.get("/livez")).status == 200
        assert (await client.get("/metrics")).status == 200
        ready = await client.get("/readyz")
        assert (ready.status, await ready.text()) == (503, "no worker accepts\n")
