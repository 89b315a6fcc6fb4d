"""Routers under test: processes started by a command template, always killed, their output kept for reports."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import redis.asyncio

from tests.conformance.case import Failed
from tests.conformance.client import Answer, request
from tests.conformance.replica import PATIENCE_S

HOST = "127.0.0.1"
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
"""Below Linux' range for outgoing connections, so that none of them takes a port between choice and use."""


class Urls(tuple[str, ...]):
    """Root URLs of replicas, as a template wants them.

    `{replicas}` puts spaces between them, `{replicas:,}` commas, `{replicas:--replica}` that flag before each.
    """

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == ",":
            return ",".join(self)
        return " ".join(f"{spec} {url}" if spec else url for url in self)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a router is started: the template of its command, and what is added to its environment."""

    template: str
    env: Mapping[str, str]

    @property
    def wants_redis(self) -> bool:
        return "{redis}" in self.template


class Router:
    """One running router."""

    def __init__(self, launch: Launch, replicas: Sequence[str], redis_url: str = "") -> None:
        self._launch = launch
        self._urls = Urls(replicas)
        self._redis_url = redis_url
        self.port = free_port()
        self.admin_port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="conformance-"))
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        """What it wrote to standard output and error so far, over all its lives."""
        with suppress(FileNotFoundError):
            return (self._folder / "log").read_text(errors="replace")
        return ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was never started"
        return self._process.pid

    async def start(self) -> None:
        """Run the command; again, on the same ports, after it was stopped."""
        command = self._launch.template.format(
            listen=f"{HOST}:{self.port}",
            host=HOST,
            port=self.port,
            admin_port=self.admin_port,
            admin=f"{HOST}:{self.admin_port}",
            replicas=self._urls,
            redis=self._redis_url,
        )
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *shlex.split(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._launch.env},
                start_new_session=True,
            )

    async def listening(self, within_s: float = 40.0) -> None:
        """Until it accepts connections; polling is all that works for any router.

        A port that somebody else took between its choice and its use is replaced by another, once.
        """
        moved = False
        for _ in range(int(within_s / 0.05)):
            if not self.running:
                if moved or not re.search("address already in use|EADDRINUSE", self.log, re.IGNORECASE):
                    break
                moved = True
                self.port, self.admin_port = free_port(), free_port()
                await self.start()
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.port)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise Failed(f"the router did not start: {self.log[-600:]}")

    def terminate(self) -> None:
        """SIGTERM, to the process that was started."""
        os.kill(self.pid, signal.SIGTERM)

    def kill_hard(self) -> None:
        """SIGKILL to all of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def ended(self, within_s: float = PATIENCE_S) -> int | None:
        """Its exit code; None if it still runs after that time."""
        assert self._process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._process.wait()
        return None

    async def stop(self) -> None:
        """Kill it and everything it started. Idempotent."""
        if self._process is None:
            return
        self.kill_hard()
        await self._process.wait()

    async def close(self) -> None:
        """Stop, and forget its files."""
        await self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def family(self) -> list[int]:
        """Its process and all descendants."""
        return _descendants(self.pid)

    @staticmethod
    def alive(pids: Sequence[int]) -> list[int]:
        """Those of them that run; a zombie does not."""
        found = []
        for pid in pids:
            with suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(pid)
        return found

    def rss_bytes(self) -> int:
        """Resident memory of its process and all descendants."""
        return sum(_rss_bytes(pid) for pid in _descendants(self.pid))

    async def request(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A client's request, on a connection of its own."""
        return await request(self.port, method, target, body, headers)

    async def admin(self, method: str, path: str, body: object = None, *, port: int = 0) -> tuple[int, object, str]:
        """A call of its admin listener: status, decoded JSON where it is JSON, text."""
        url = f"http://{HOST}:{port or self.admin_port}{path}"
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.request(method, url, json=body) as response,
        ):
            text = await response.text()
            with suppress(ValueError, aiohttp.ContentTypeError):
                return response.status, await response.json(content_type=None), text
            return response.status, None, text


class Redis:
    """A redis-server of one stage, which may be stopped, frozen and flushed."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    @staticmethod
    def available() -> bool:
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    async def start(self) -> None:
        """Until it accepts."""
        self._process = await asyncio.create_subprocess_exec(
            *("redis-server", "--port", str(self.port), "--bind", HOST, "--save", "", "--appendonly", "no"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(200):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.port)
                writer.close()
                return
            await asyncio.sleep(0.02)
        raise Failed("redis-server did not start")

    async def keys(self) -> list[bytes]:
        """All of them."""
        async with redis.asyncio.Redis(host=HOST, port=self.port) as client:
            return [key async for key in client.scan_iter(count=1000)]

    async def ttl(self, key: bytes) -> int:
        """Seconds until it expires; negative: never."""
        async with redis.asyncio.Redis(host=HOST, port=self.port) as client:
            return int(await client.ttl(key))

    async def command(self, *words: str) -> bytes:
        """The first line of the answer to a command."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in words))
        try:
            return await reader.readline()
        finally:
            writer.close()

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    async def stop(self) -> None:
        """Kill it. Idempotent."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    while True:
        port = random.randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with suppress(OSError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found.extend(int(child) for child in children.read_text().split())
    return found


def _rss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
