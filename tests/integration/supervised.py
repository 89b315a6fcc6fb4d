"""`roost router --workers N` as it is run: a process of its own, told by signals and heard through its log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conversations import Conversation
from tests.integration.replicas import PATHS, PATIENCE_S, Replica

ROOST = str(Path(sys.executable).with_name("roost"))
SERVING = r"serving on \S+ port (\d+), admin API on \S+ port (\d+)"
_ACCEPTS = re.compile(r"worker (\d+) accepts, pid (\d+)")


class Log:
    """What a process writes to standard error, line by line as it comes."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.lines: list[str] = []
        self._ended = False
        self._grew = asyncio.Condition()
        self._reading = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            async with self._grew:
                self.lines.append(line.decode())
                self._grew.notify_all()
        async with self._grew:
            self._ended = True
            self._grew.notify_all()

    async def line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first match from line `after` on, once it is there."""

        def found() -> re.Match[str] | None:
            return next((m for line in self.lines[after:] if (m := re.search(pattern, line))), None)

        async with asyncio.timeout(PATIENCE_S), self._grew:
            await self._grew.wait_for(lambda: found() is not None or self._ended)
        match = found()
        assert match is not None, f"no {pattern!r} in:\n{''.join(self.lines)}"
        return match

    async def end(self) -> str:
        """All of it, once nobody can write to it any more: neither the process nor a child that inherited it."""
        async with asyncio.timeout(PATIENCE_S):
            await self._reading
        return "".join(self.lines)


@dataclass
class Supervised:
    """A running router of several workers."""

    process: Process
    log: Log
    folder: Path
    """Where it keeps what it keeps in temporary files."""
    port: int = 0
    admin_port: int = 0

    def workers(self) -> dict[int, int]:
        """Place → process id of its newest worker, from the log."""
        found = (_ACCEPTS.search(line) for line in self.log.lines)
        return {int(match[1]): int(match[2]) for match in found if match}

    def children(self) -> set[int]:
        """Process ids of whatever it has started and not yet seen the end of."""
        pid = self.process.pid
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}

    async def replaced(self, place: int, pid: int) -> int:
        """The process id of the worker that took that one's place, once it accepts."""
        pattern = rf"worker {place} accepts, pid (?!{pid}\b)(\d+)"
        return int((await self.log.line(pattern))[1])

    async def lost(self, place: int) -> None:
        """Until the supervisor has noticed that the worker was killed, and tidied up after it."""
        await self.log.line(rf"worker {place} was killed by SIGKILL")

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    @asynccontextmanager
    async def connection(self, *, only: int | None = None) -> AsyncIterator[Connection]:
        """One client connection; to the worker in place `only`, for the others are held while it is made."""
        others = () if only is None else [pid for place, pid in self.workers().items() if place != only]
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=3 * PATIENCE_S)
        timeout = aiohttp.ClientTimeout(total=2 * PATIENCE_S)
        base = f"http://127.0.0.1:{self.port}"
        async with aiohttp.ClientSession(base, connector=connector, timeout=timeout) as http:
            connection = Connection(http)
            with held(others):
                await connection.settled()
            yield connection

    async def admin(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        """A call of the admin API: status and decoded JSON."""
        status, text = await self.admin_text(method, target, body)
        return status, json.loads(text)

    async def admin_text(self, method: str, target: str, body: Any = None) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{self.admin_port}") as http,
            http.request(method, target, json=body) as response,
        ):
            return response.status, await response.text()

    async def turns(self) -> float:
        """`roost_turns_total`, all labels summed."""
        return await self.total("roost_turns_total")

    async def total(self, name: str) -> float:
        """A metric, all labels summed."""
        status, text = await self.admin_text("GET", "/metrics")
        assert status == 200, text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    async def refusing(self) -> None:
        """Until nobody accepts on the public port; connecting is the only way to know."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except ConnectionRefusedError:
                    return
                except ConnectionResetError:  # the listener closed while this connection waited in its queue
                    continue
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()


@dataclass
class Connection:
    """One client connection that is kept."""

    http: aiohttp.ClientSession

    async def turn(self, conversation: Conversation) -> tuple[str, bytes]:
        """The conversation's next turn, which must succeed: the replica that served it, and the body."""
        async with self.http.post(
            PATHS[conversation.dialect], data=conversation.body(), headers=conversation.headers
        ) as response:
            body = await response.read()
            assert response.status == 200, body
            return response.headers["x-roost-replica"], body

    async def settled(self) -> None:
        """Until the worker has counted all turns of this connection: it reads the next request only after that."""
        async with self.http.get("/livez") as response:
            assert response.status == 200


@contextmanager
def held(pids: Sequence[int]) -> Iterator[None]:
    """These processes run no further meanwhile, and have stopped by the time this begins."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                os.sched_yield()
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)


async def gone(pid: int) -> None:
    """Until a process that is no child of ours has ended."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watch, ended.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    finally:
        loop.remove_reader(watch)
        os.close(watch)


@asynccontextmanager
async def command(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Supervised]:
    """The command, just started; killed in the end if it still runs."""
    config = folder / "roost.yaml"
    config.write_text(yaml.safe_dump(settings))
    temporary = folder / "t"
    temporary.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        ROOST,
        "router",
        "--config",
        str(config),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stderr is not None
    roost = Supervised(process, Log(process.stderr), temporary)
    try:
        yield roost
    finally:
        if process.returncode is None:
            process.kill()  # the workers and the store follow
            await process.wait()
        await roost.log.end()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that stays ours: bound and not listening, so nobody gets it by chance and the router may take it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def settings_for(replicas: Sequence[Replica], **groups: Any) -> dict[str, Any]:
    """Two workers before these replicas; no lag at the end, and a store that may be slow."""
    return {
        "workers": 2,
        "admin": {"port": 0},
        "fleets": [{"name": "default", "replicas": [each.url for each in replicas], "probe_interval_s": 0.1}],
        "placement": {"ramp_s": 0.001},
        "store": {"timeout_s": 10.0},
        "timeouts": {"ready_lag_s": 0.0, "shutdown_grace_s": PATIENCE_S},
        **groups,
    }


@asynccontextmanager
async def supervised(folder: Path, replicas: Sequence[Replica], **groups: Any) -> AsyncIterator[Supervised]:
    """The command, once all its workers accept and know the replicas."""
    with reserved_port() as port:
        async with command(folder, settings_for(replicas, listen={"port": port}, **groups)) as roost:
            serving = await roost.log.line(SERVING)
            roost.port, roost.admin_port = int(serving[1]), int(serving[2])
            for place in roost.workers():
                async with roost.connection(only=place) as connection:
                    await _ready(connection)
            yield roost


async def _ready(connection: Connection) -> None:
    """Until this worker's own probes have found a replica; asking is the only way to know."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with connection.http.get("/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.01)
