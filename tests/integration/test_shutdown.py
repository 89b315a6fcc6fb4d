"""The end of a router: what runs may finish, what does not is cut, and nobody can hold it up."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import Visit, replicas
from tests.integration.router_process import started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_idle_connections_do_not_hold_it_up(number: int, tmp_path: Path) -> None:
    """Clients keep their connections open between turns, monitors theirs to the admin API."""
    async with (
        replicas(1) as (replica,),
        started(replica, tmp_path, grace_s=60) as roost,
        Client.to(roost.port) as client,
        Client.to(roost.port) as unused,
        Client.to(roost.admin_port) as monitor,
    ):
        await client.post(Conversation("once").body(), path="/v1/chat/completions")
        assert (await client.answer()).status == 200
        monitor.writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await monitor.head()).status == 200
        assert await roost.ended(number) == 0
        assert unused.writer is not None


async def test_a_turn_that_does_not_finish_is_cut_and_counted(tmp_path: Path) -> None:
    """After its grace the client sees a message that did not end, and the log says how many."""
    begun, never = asyncio.Event(), asyncio.Event()

    async def endless(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        begun.set()
        await never.wait()

    async with (
        replicas(1, script=endless) as (replica,),
        started(replica, tmp_path, grace_s=0.3) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("endless", stream=True).body(), path="/v1/chat/completions")
        assert (await client.head()).status == 200
        await client.chunk()
        await begun.wait()
        assert await roost.ended(signal.SIGTERM) == 0
        assert any("1 requests had not finished" in line for line in roost.lines)
        assert await client.reader.read() == b""  # closed, and no last chunk before that
        never.set()


async def test_a_router_that_stops_says_so_first_and_lets_what_runs_finish(tmp_path: Path) -> None:
    """Not ready at once, still serving new connections for `ready_lag_s`; then running streams finish, whole, idle
    connections are closed, answers under way say `Connection: close`, and what outlasts the grace is cut and counted in
    one line.
    """
    begun, finish, never = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()

    async def script(visit: Visit) -> None:
        kind = visit.seen.header(b"x-kind")
        if not kind:
            await visit.reply()
            return
        if kind == [b"whole"]:
            begun.release()
            await finish.wait()
            await visit.reply()
            return
        await visit.begin()
        await visit.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        begun.release()
        await (finish if kind == [b"long"] else never).wait()
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    turn = "/v1/chat/completions"
    async with (
        replicas(1, script=script) as (replica,),
        started(replica, tmp_path, grace_s=3, lag_s=2) as roost,
        Client.to(roost.port) as long,
        Client.to(roost.port) as whole,
        Client.to(roost.port) as endless,
        Client.to(roost.port) as passing,
        Client.to(roost.port) as upload,
        Client.to(roost.port) as idle,
    ):
        for client, kind in ((long, "long"), (whole, "whole"), (endless, "endless")):
            asked = Conversation(kind, stream=kind != "whole").body()
            await client.post(asked, headers=f"X-Kind: {kind}\r\n", path=turn)
            await begun.acquire()
        await passing.post(b"{}", headers="X-Kind: whole\r\n", path="/v1/embeddings")
        await begun.acquire()
        large = Conversation("upload").body()
        upload.writer.write(f"POST {turn} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(large)}\r\n\r\n".encode())
        upload.writer.write(large[:100])
        await idle.post(Conversation("before").body(), path=turn)
        assert (await idle.answer()).status == 200

        await roost.told(signal.SIGTERM, "stopping: not ready")
        async with Client.to(roost.port) as late:
            late.writer.write(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert (await late.answer()).status == 503
            await late.post(Conversation("late").body(), path=turn)
            assert (await late.answer()).complete
        assert await idle.gone()
        finish.set()
        assert (await long.answer()).complete
        upload.writer.write(large[100:])
        for client in (whole, passing, upload):
            answer = await client.answer()
            assert (answer.status, answer.complete, answer.headers[b"connection"]) == (200, True, b"close")
            assert await client.gone()
        assert await roost.ended() == 0
        assert not (await endless.answer()).complete
        assert [line for line in roost.lines if "had not finished" in line or "cut" in line] == [
            "shutting down: 1 requests had not finished after 3 s and are cut"
        ]
        never.set()
