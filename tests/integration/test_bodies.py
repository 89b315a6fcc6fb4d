"""Request bodies: whole, within a budget of bytes and of patience, and the words of whoever exceeds one."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from router.domain.turn import Dialect
from router.settings import Auth, Limits, Timeouts
from tests.integration.relay_rig import Answer, Client
from tests.integration.replicas import DIALECTS, PATHS, Gate, Replica, Script, Visit, replicas, speak
from tests.integration.roosts import Roost, running, settings_for
from tests.integration.router_process import started
from tests.integration.test_auth import ACME, OTHER, keys_file

MB = 1_000_000
TURN = PATHS[Dialect.CHAT]


def body_of(size_bytes: int, seed: int = 1) -> bytes:
    """A turn's body of exactly this size that no compression or repetition could stand for."""
    text = random.Random(seed).randbytes(size_bytes // 2).hex().encode()
    head, tail = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
    return head + text[: size_bytes - len(head) - len(tail)] + tail + b" " * (size_bytes % 2)


def told(answer_body: bytes, dialect: Dialect) -> str:
    told = json.loads(answer_body)
    assert (told.get("type") == "error") == (dialect is Dialect.MESSAGES)
    message: str = told["error"]["message"]
    return message


@asynccontextmanager
async def edge(
    script: Script = speak, *, limits: Limits | None = None, timeouts: Timeouts | None = None
) -> AsyncIterator[tuple[Roost, Replica]]:
    """A router before one replica with room for any number of such turns."""
    async with replicas(1, script=script, device_tokens=1_000_000_000) as (replica,):
        settings = settings_for([replica], limits=limits or Limits(), timeouts=timeouts or Timeouts(ready_lag_s=0))
        async with running(settings, [replica]) as roost:
            yield roost, replica


async def upload(client: Client, body: bytes, *, in_chunks: bool, path: str = TURN) -> None:
    framing = "Transfer-Encoding: chunked" if in_chunks else f"Content-Length: {len(body)}"
    client.writer.write(f"POST {path} HTTP/1.1\r\nHost: r\r\n{framing}\r\n\r\n".encode())
    dice = random.Random(len(body))
    at = 0
    while at < len(body):
        piece = body[at : at + dice.choice((1, 1000, 65_536, 300_000))]
        client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if in_chunks else piece)
        await client.writer.drain()
        at += len(piece)
    client.writer.write(b"0\r\n\r\n" if in_chunks else b"")


@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("size_bytes", [1 * MB, 8 * MB, 40 * MB, 100 * MB])
async def test_large_bodies_arrive_as_they_were_sent(size_bytes: int, in_chunks: bool) -> None:
    """By SHA-256, and with their length."""
    body = body_of(size_bytes)
    assert len(body) == size_bytes
    async with edge() as (roost, replica), Client.to(roost.port) as client:
        await upload(client, body, in_chunks=in_chunks)
        assert (await client.answer()).status == 200
        (seen,) = replica.seen
        assert seen.sha256 == sha256(body).hexdigest()
        assert seen.header(b"content-length") == [b"%d" % size_bytes]
        assert seen.header(b"transfer-encoding") == []


async def test_large_bodies_at_once_arrive_each_as_its_own() -> None:
    bodies = [body_of(8 * MB, seed) for seed in range(16)]
    async with edge() as (roost, replica):

        async def send(body: bytes, in_chunks: bool) -> None:
            async with Client.to(roost.port) as client:
                await upload(client, body, in_chunks=in_chunks)
                assert (await client.answer()).status == 200

        await asyncio.gather(*(send(body, number % 2 == 0) for number, body in enumerate(bodies)))
        assert {seen.sha256 for seen in replica.seen} == {sha256(body).hexdigest() for body in bodies}


# --- too large -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_announced_body_that_is_too_large_is_refused_unread(dialect: Dialect) -> None:
    """413 in the dialect before a byte of the body was sent; the client may go on sending and still reads it."""
    async with edge(limits=Limits(body_max_bytes=1 * MB)) as (roost, replica), Client.to(roost.port) as client:
        head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: r\r\nContent-Length: {20 * MB}\r\n\r\n"
        client.writer.write(head.encode())
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (413, b"close")
        assert str(20 * MB) in told(answer.body, dialect)
        assert str(1 * MB) in told(answer.body, dialect)
        assert replica.seen == []


@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
async def test_a_client_that_looks_only_after_it_has_sent_everything_reads_the_413(in_chunks: bool) -> None:
    """The rest of its body is read and thrown away, so that no reset overtakes the answer."""
    async with edge(limits=Limits(body_max_bytes=1 * MB)) as (roost, replica):
        async with Client.to(roost.port) as client:
            await upload(client, body_of(30 * MB), in_chunks=in_chunks)
            answer = await client.answer()
            assert (answer.status, answer.headers[b"x-roost-error"]) == (413, b"request_too_large")
            assert await client.gone()
        assert replica.seen == []


# --- room ------------------------------------------------------------------------------------------------------------

TIGHT = Limits(body_max_bytes=1 * MB, bodies_max_bytes=3 * MB)


@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
async def test_bodies_wait_unread_for_room_and_get_it_in_line(in_chunks: bool) -> None:
    """Three fill the budget while their replica is silent; the others follow as these are answered."""
    gate = Gate()
    async with edge(gate, limits=TIGHT) as (roost, replica):

        async def send(seed: int) -> int:
            async with Client.to(roost.port) as client:
                await upload(client, body_of(1 * MB, seed), in_chunks=in_chunks)
                return (await client.answer()).status

        sending = [asyncio.create_task(send(seed)) for seed in range(9)]
        await gate.waiting(2 if in_chunks else 3)
        assert gate.arrived <= 3
        gate.open()
        assert await asyncio.gather(*sending) == [200] * 9
        assert len({seen.sha256 for seen in replica.seen}) == 9


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_who_waits_too_long_for_room_is_told_to_come_again(dialect: Dialect) -> None:
    """503 with Retry-After, in the dialect; the body was not asked for (`Expect`)."""
    gate = Gate()
    limits = Limits(body_max_bytes=1 * MB, bodies_max_bytes=1 * MB)
    async with edge(gate, limits=limits, timeouts=Timeouts(body_wait_s=0.1, ready_lag_s=0)) as (roost, replica):
        async with Client.to(roost.port) as holder, Client.to(roost.port) as client:
            await holder.post(body_of(1 * MB), path=TURN)
            await gate.waiting(1)
            head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 900\r\n\r\n"
            client.writer.write(head.encode())
            answer = await client.answer()
            assert (answer.status, answer.headers[b"x-roost-error"]) == (503, b"router_busy")
            assert int(answer.headers[b"retry-after"]) >= 1
            assert told(answer.body, dialect)
            gate.open()
            assert (await holder.answer()).status == 200
        assert len(replica.turns) == 1


async def test_a_tenant_that_announces_bodies_and_sends_none_holds_up_nobody_else(tmp_path: Path) -> None:
    """It has half of the room at most; beyond that its own wait, and are told to come again."""
    auth, limits = Auth(keys_file=str(keys_file(tmp_path))), Limits(body_max_bytes=1 * MB, bodies_max_bytes=4 * MB)
    timeouts = Timeouts(body_wait_s=0.5, ready_lag_s=0)
    async with replicas(1, device_tokens=1_000_000_000) as fleet, AsyncExitStack() as stack:
        roost = await stack.enter_async_context(
            running(settings_for(fleet, limits=limits, timeouts=timeouts, auth=auth), fleet)
        )
        hoarding = []
        for _ in range(8):
            client = await stack.enter_async_context(Client.to(roost.port))
            head = f"POST {TURN} HTTP/1.1\r\nHost: r\r\nX-Api-Key: {OTHER}\r\nContent-Length: {MB}\r\n\r\n"
            client.writer.write(head.encode())
            hoarding.append(client)
        async with Client.to(roost.port) as client:
            for seed in range(5):
                await client.post(body_of(1 * MB, seed), headers=f"X-Api-Key: {ACME}\r\n", path=TURN)
                assert (await client.answer()).status == 200
        waiting, refused = {asyncio.create_task(client.answer()) for client in hoarding}, set[asyncio.Task[Answer]]()
        while len(refused) < 6:
            told, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= told
        assert {each.result().headers[b"x-roost-error"] for each in refused} == {b"router_busy"}
        for each in waiting:
            each.cancel()


async def test_a_turn_holds_its_body_only_until_its_answer_begins() -> None:
    """Long streams keep no room: more of them run at once than bodies fit into the budget."""
    begun, finish = asyncio.Semaphore(0), asyncio.Event()

    async def streams(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        begun.release()
        await finish.wait()
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    async with edge(streams, limits=TIGHT) as (roost, _):

        async def send(seed: int) -> bool:
            async with Client.to(roost.port) as client:
                await upload(client, body_of(1 * MB, seed), in_chunks=False)
                return (await client.answer()).complete

        sending = [asyncio.create_task(send(seed)) for seed in range(8)]
        for _ in sending:
            await begun.acquire()
        finish.set()
        assert await asyncio.gather(*sending) == [True] * 8


async def test_who_leaves_gives_its_room_back() -> None:
    """While it waits for room, while it uploads, while its replica is silent."""
    gate = Gate()
    limits = Limits(body_max_bytes=1 * MB, bodies_max_bytes=1 * MB)
    async with edge(gate, limits=limits) as (roost, _):
        async with Client.to(roost.port) as holder, Client.to(roost.port) as waiter, Client.to(roost.port) as patient:
            await holder.post(body_of(1 * MB), path=TURN)
            await gate.waiting(1)
            await waiter.post(body_of(1 * MB, 2), path=TURN)
            waiter.writer.transport.abort()
            await patient.post(body_of(1 * MB, 3), path=TURN)
            holder.writer.transport.abort()
            await gate.waiting(2)
            gate.open()
            assert (await patient.answer()).status == 200
        async with Client.to(roost.port) as half:
            half.writer.write(f"POST {TURN} HTTP/1.1\r\nHost: r\r\nContent-Length: {MB}\r\n\r\n".encode() + b"x" * 9000)
            await half.writer.drain()
        async with Client.to(roost.port) as client:
            await client.post(body_of(1 * MB, 4), path=TURN)
            assert (await client.answer()).status == 200


# --- patience --------------------------------------------------------------------------------------------------------

HASTY = Timeouts(client_head_s=0.2, body_idle_s=0.2, ready_lag_s=0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("in_chunks", [False, True], ids=["length", "chunks"])
async def test_a_body_that_stops_coming_is_a_408(dialect: Dialect, in_chunks: bool) -> None:
    framing = "Transfer-Encoding: chunked" if in_chunks else "Content-Length: 1000"
    async with edge(timeouts=HASTY) as (roost, replica), Client.to(roost.port) as client:
        client.writer.write(f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: r\r\n{framing}\r\n\r\n5\r\nhello\r\n".encode())
        answer = await client.answer()
        assert (answer.status, answer.headers[b"x-roost-error"]) == (408, b"request_timeout")
        assert answer.headers[b"connection"] == b"close"
        assert "slowly" in told(answer.body, dialect)
        assert replica.seen == []


@pytest.mark.parametrize("filler", [b"1\r\nx\r\n", b"1;" + b"e" * 200 + b"\r\nx\r\n"], ids=["chunks", "extensions"])
async def test_a_body_that_dribbles_is_a_408(filler: bytes) -> None:
    """Bytes that come too slowly, and framing that brings none, do not keep a body open."""
    async with edge(timeouts=HASTY) as (roost, replica), Client.to(roost.port) as client:
        client.writer.write(f"POST {TURN} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        answering = asyncio.create_task(client.answer())
        while not answering.done():
            client.writer.write(filler)
            await asyncio.wait((answering,), timeout=0.02)
        assert (await answering).status == 408
        assert replica.seen == []


async def test_a_slow_body_that_keeps_its_rate_is_served() -> None:
    """However long it takes in all."""
    body = body_of(30_000)
    patience = Timeouts(body_idle_s=1.0, ready_lag_s=0)
    async with edge(timeouts=patience) as (roost, replica), Client.to(roost.port) as client:
        client.writer.write(f"POST {TURN} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), 2000):
            client.writer.write(body[at : at + 2000])
            await asyncio.sleep(0.1)
        assert (await client.answer()).status == 200
        assert replica.seen[0].body == body


@pytest.mark.parametrize("begun", [b"G", b"POST /v1/messages HTTP/1.1\r\nHost: r\r\nX-A: ", b"\r\n\r\n"])
async def test_a_head_that_does_not_come_is_a_408(begun: bytes) -> None:
    async with edge(timeouts=HASTY) as (roost, _), Client.to(roost.port) as client:
        client.writer.write(begun)
        answer = await client.answer()
        assert (answer.status, answer.headers[b"connection"]) == (408, b"close")
        assert await client.gone()


async def test_a_head_in_small_pieces_has_its_time_in_all() -> None:
    """Each piece does not buy another patience."""
    async with edge(timeouts=HASTY) as (roost, _), Client.to(roost.port) as client:
        client.writer.write(b"GET /readyz HTTP/1.1\r\nHost: r\r\n")
        answering = asyncio.create_task(client.answer())
        while not answering.done():
            client.writer.write(b"X-A: 1\r\n")
            await asyncio.wait((answering,), timeout=0.02)
        assert (await answering).status == 408


async def test_half_open_connections_hold_up_nobody() -> None:
    """Hundreds that sent half a head or half a body: a turn is served among them, and they are let go."""
    async with edge(timeouts=HASTY) as (roost, replica):
        open_ = [await asyncio.open_connection("127.0.0.1", roost.port) for _ in range(300)]
        for number, (_, writer) in enumerate(open_):
            writer.write(
                b"POST /v1/x HTTP/1.1\r\nHost: r\r\n" + (b"Content-Length: 9\r\n\r\nabc" if number % 2 else b"")
            )
        async with Client.to(roost.port) as client:
            await client.post(body_of(2000), path=TURN)
            assert (await client.answer()).status == 200
        for reader, writer in open_:
            assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 408 Request Timeout\r\n"
            writer.close()
        assert len(replica.seen) == 1


async def test_connections_beyond_the_limit_are_told_so() -> None:
    """503 with Retry-After at once; as soon as one has gone there is a place again."""
    async with edge(limits=Limits(connections_max=3)) as (roost, _):
        # The router's own client of this rig holds no connection to the public listener.
        async with Client.to(roost.port) as first, Client.to(roost.port) as second:
            for client in (first, second):
                await client.post(body_of(2000), path=TURN)
                assert (await client.answer()).status == 200
            async with Client.to(roost.port) as third:
                await third.post(body_of(2000), path=TURN)
                assert (await third.answer()).status == 200
                async with Client.to(roost.port) as fourth:
                    answer = await fourth.answer()
                    assert (answer.status, answer.headers[b"x-roost-error"]) == (503, b"router_busy")
                    assert b"retry-after" in answer.headers
                    assert await fourth.gone()

        async def admitted() -> bool:
            async with Client.to(roost.port) as client:
                await client.get()
                return (await client.answer()).status == 200

        await roost.until(admitted)


async def test_where_the_system_allows_few_files_clients_beyond_are_told_too(tmp_path: Path) -> None:
    """Not cut without a word: a router takes no more connections than it has files for, and says so at the start."""
    async with replicas(1) as (replica,), started(replica, tmp_path, files=400) as roost, AsyncExitStack() as stack:
        (warned,) = (line for line in roost.lines if "open files" in line)
        assert "400 open files, so 100 clients" in warned
        assert "ulimit -n" in warned
        statuses = []
        for _ in range(120):
            client = await stack.enter_async_context(Client.to(roost.port))
            await client.get()
            statuses.append((await client.answer()).status)
        assert statuses == [200] * 100 + [503] * 20
