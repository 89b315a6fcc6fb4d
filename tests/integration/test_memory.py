"""What a router's process holds while clients send much or take little: bounded, whatever their number."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.integration.conversations import Conversation
from tests.integration.relay_rig import PATIENCE_S, Client
from tests.integration.replicas import Gate, Visit, replicas
from tests.integration.router_process import started

TURN = "/v1/chat/completions"
MB = 1_000_000

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / MB
    raise AssertionError


async def test_bodies_beyond_the_budget_stay_with_their_clients(tmp_path: Path) -> None:
    """64 bodies of 8 MB at a router that may hold 64 MB, before a replica that does not answer yet: 512 MB are sent,
    and far less is held. Then all are served.
    """
    gate = Gate()
    limits = f"limits: {{body_max_bytes: {8 * MB}, bodies_max_bytes: {64 * MB}}}\n"
    body = Conversation("large", size_bytes=8 * MB - 1000).body()
    async with (
        replicas(1, script=gate, device_tokens=1_000_000_000) as (replica,),
        started(replica, tmp_path, more=limits) as roost,
        AsyncExitStack() as stack,
    ):
        before_mb = resident_mb(roost.pid)
        clients = [await stack.enter_async_context(Client.to(roost.port)) for _ in range(64)]
        sending = [asyncio.create_task(client.post(body, path=TURN)) for client in clients]
        await gate.waiting(8)
        held_mb = resident_mb(roost.pid) - before_mb
        assert held_mb < 200  # the eight, what one costs while it is read, and some 500 kB of each that waits
        gate.open()
        async with asyncio.timeout(3 * PATIENCE_S):
            await asyncio.gather(*sending)
            assert [(await client.answer()).status for client in clients] == [200] * 64


async def test_readers_that_stall_hold_back_their_replicas(tmp_path: Path) -> None:
    """50 streams of 40 MB whose clients read nothing: little is held of 2 GB; others are served meanwhile."""
    sent = 0

    async def endless(visit: Visit) -> None:
        nonlocal sent
        if not visit.seen.header(b"x-endless"):
            await visit.reply()
            return
        await visit.begin()
        for _ in range(400):
            await visit.chunk(b": " + b"x" * 100_000 + b"\n\n")
            sent += 100_000

    async with (
        replicas(1, script=endless) as (replica,),
        started(replica, tmp_path) as roost,
        AsyncExitStack() as stack,
    ):
        before_mb = resident_mb(roost.pid)
        for number in range(50):
            client = await stack.enter_async_context(Client.to(roost.port))
            await client.post(Conversation(f"{number}").body(), headers="X-Endless: 1\r\n", path=TURN)
        seen = -1
        async with asyncio.timeout(3 * PATIENCE_S):
            while seen != sent or not sent:
                seen = sent
                await asyncio.sleep(0.5)
        assert resident_mb(roost.pid) - before_mb < 100
        async with Client.to(roost.port) as reader:
            await reader.post(Conversation("reader").body(), path=TURN)
            assert (await reader.answer()).complete


async def test_heads_that_never_end_are_let_go_of_early(tmp_path: Path) -> None:
    """40 clients send 15 MB of header fields each, none too long and not too many: each reads its 431, or is cut where
    that would be written into an answer, and little is held of 600 MB.
    """
    fields = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 60_000) for number in range(250))
    async with replicas(1) as (replica,), started(replica, tmp_path) as roost, AsyncExitStack() as stack:
        before_mb = resident_mb(roost.pid)
        for number in range(40):
            client = await stack.enter_async_context(Client.to(roost.port))
            if number % 2:
                await client.post(Conversation(f"{number}").body(), path=TURN)
                assert (await client.answer()).status == 200
            client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n" + fields)
            try:
                assert (await client.answer()).status == 431
            except (ConnectionError, asyncio.IncompleteReadError):
                assert number % 2, "no answer was under way"
        assert resident_mb(roost.pid) - before_mb < 60
