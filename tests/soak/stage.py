"""What the soak runs: Redis with a standby, simulated replicas, two routers; processes with fault proxies between.

    client → router 1 | 2 → proxy per replica → engine
                      → proxy per router → Redis | its standby

A failover of Redis is what a managed one looks like: the standby is promoted and the address leads to it.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.soak.proxy import FaultProxy

__all__ = ["FLEET", "Engine", "Router", "Stage", "Stores", "stage"]

HOST = "127.0.0.1"
FLEET = "soak"
TIME_SCALE = 10
START_S = 30.0
ROOST = str(Path(sys.executable).with_name("roost"))
LEASE_TTL_S = 10.0


class Ports:
    """Free ports that stay ours: bound and not listening, so nobody gets them by chance and our processes may."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def one(self) -> int:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        self._held.append(held)
        port: int = held.getsockname()[1]
        return port

    def close(self) -> None:
        for held in self._held:
            held.close()


class Program:
    """A process that dies and comes back."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log = folder / f"{name}.log"
        self.starts = 0
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def start(self) -> None:
        """Run it; its output is appended to `log`."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.starts += 1

    def tell(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.pid is not None and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self, number: int = signal.SIGKILL) -> int:
        """End it and wait for the end; the exit code."""
        if self._process is None:
            return 0
        self.tell(signal.SIGCONT)
        self.tell(number)
        return await self._process.wait()

    def rss_bytes(self) -> int:
        """Resident memory; 0 where it does not run."""
        if self.pid is None:
            return 0
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def open_files(self) -> int:
        """Open file descriptors; 0 where it does not run."""
        if self.pid is None:
            return 0
        with suppress(FileNotFoundError, ProcessLookupError):
            return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())
        return 0


async def accepts(port: int) -> None:
    """Until somebody listens there. Connecting is the only way to know."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return


@dataclass
class Engine:
    """A simulated replica and the network in front of it."""

    program: Program
    proxy: FaultProxy
    port: int

    @property
    def id(self) -> str:
        """As routers call it."""
        return f"{HOST}:{self.proxy.port}"

    @property
    def url(self) -> str:
        """As routers reach it."""
        return f"http://{self.id}"

    async def start(self) -> None:
        """A new life."""
        await self.program.start()
        await accepts(self.port)


@dataclass
class Router:
    """A router, and the network between it and the store."""

    program: Program
    store: FaultProxy
    port: int
    admin_port: int
    up: bool = False
    """Whether the balancer in front sends clients there."""

    async def start(self, http: aiohttp.ClientSession) -> None:
        """Until it says that it is ready, as a balancer asks it."""
        await self.program.start()
        await accepts(self.port)
        async with asyncio.timeout(START_S):
            while not await self._ready(http):  # noqa: ASYNC110 (asking is how a balancer knows)
                await asyncio.sleep(0.05)
        self.up = True

    async def _ready(self, http: aiohttp.ClientSession) -> bool:
        async with http.get(f"http://{HOST}:{self.port}/readyz") as response:
            return response.status == 200


@dataclass
class Stores:
    """Redis and its standby."""

    servers: list[Program]
    ports: list[int]
    proxies: list[FaultProxy] = field(default_factory=list)
    primary: int = 0

    async def start(self) -> None:
        """Both up, the second following the first."""
        for server, port in zip(self.servers, self.ports, strict=True):
            await server.start()
            await accepts(port)
        await self._say(1 - self.primary, "REPLICAOF", HOST, str(self.ports[self.primary]))

    async def fail_over(self) -> None:
        """The primary dies, the standby is promoted and the address leads to it; the dead one returns as standby."""
        old = self.primary
        await self.servers[old].end()
        self.primary = 1 - old
        await self._say(self.primary, "REPLICAOF", "NO", "ONE")
        for proxy in self.proxies:
            proxy.target = (HOST, self.ports[self.primary])
            proxy.reset()
        await self.servers[old].start()
        await accepts(self.ports[old])
        await self._say(old, "REPLICAOF", HOST, str(self.ports[self.primary]))

    async def restart_empty(self) -> None:
        """The primary comes back and knows nothing; its standby forgets with it."""
        await self.servers[self.primary].start()
        await accepts(self.ports[self.primary])

    async def flush(self) -> None:
        """Forget everything."""
        await self._say(self.primary, "FLUSHALL")

    async def leases(self) -> int:
        """Leases recorded for the fleet."""
        async with Redis(host=HOST, port=self.ports[self.primary], socket_timeout=5.0) as redis:
            found = 0
            async for key in redis.scan_iter("*:leases"):
                found += int(await redis.zcard(key))
            return found

    async def memory(self) -> tuple[int, int]:
        """Bytes used, and keys."""
        async with Redis(host=HOST, port=self.ports[self.primary], socket_timeout=5.0) as redis:
            told = await redis.info("memory")
            return int(told["used_memory"]), int(await redis.dbsize())

    async def _say(self, which: int, *command: str) -> None:
        async with Redis(host=HOST, port=self.ports[which], socket_timeout=5.0) as redis:
            for attempt in range(50):
                try:
                    await redis.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it so
                    return
                except RedisError:
                    if attempt == 49:
                        raise
                    await asyncio.sleep(0.1)


@dataclass
class Stage:
    """All of it, running."""

    folder: Path
    engines: list[Engine]
    routers: list[Router]
    stores: Stores
    http: aiohttp.ClientSession

    async def admin(self, router: Router, method: str, path: str, body: Any = None) -> Any:
        """A call of a router's admin API: the decoded answer. Raises aiohttp.ClientError."""
        url = f"http://{HOST}:{router.admin_port}{path}"
        timeout = aiohttp.ClientTimeout(total=10)
        async with self.http.request(method, url, json=body, timeout=timeout, raise_for_status=True) as response:
            return await response.json()

    @property
    def programs(self) -> list[Program]:
        """Every process."""
        return [
            *(each.program for each in self.engines),
            *(each.program for each in self.routers),
            *self.stores.servers,
        ]


def _settings(port: int, admin_port: int, store_port: int, engines: Sequence[Engine]) -> dict[str, Any]:
    """Patience is scaled down, so that every limit is met within minutes."""
    profile = {"prefill_rate": 20_000.0 * TIME_SCALE, "step_time_s": 0.02 / TIME_SCALE}
    return {
        "listen": {"host": HOST, "port": port},
        "admin": {"host": HOST, "port": admin_port},
        "store": {"url": f"redis://{HOST}:{store_port}/0", "lease_ttl_s": LEASE_TTL_S},
        "fleets": [{"name": FLEET, "replicas": [each.url for each in engines], "profile": profile}],
        "placement": {"beta_s": 1.0 / TIME_SCALE, "crowd_half_life_s": 30.0, "ramp_s": 1.0},
        "timeouts": {"first_byte_s": 20.0, "idle_s": 15.0, "ready_lag_s": 1.0, "shutdown_grace_s": 10.0},
        "log": {"level": "info"},
    }


def redis_server() -> str | None:
    """The server's binary; None where there is none."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@asynccontextmanager
async def stage(folder: Path, replicas: int, seed: int) -> AsyncIterator[Stage]:
    """Everything up; everything gone afterwards. One engine more than `replicas` stands by, not yet a member."""
    binary = redis_server()
    assert binary is not None
    async with AsyncExitStack() as stack:
        ports = Ports()
        stack.callback(ports.close)
        store_ports = [ports.one(), ports.one()]
        stores = Stores(
            [
                Program(f"redis-{n}", _redis(binary, port, folder / f"redis-{n}"), folder)
                for n, port in enumerate(store_ports)
            ],
            store_ports,
        )
        engines = []
        for number in range(replicas + 1):
            port = ports.one()
            argv = (ROOST, "engine", "--port", str(port), "--time-scale", str(TIME_SCALE))
            program = Program(f"engine-{number}", (*argv, "--seed", str(seed + number)), folder)
            engines.append(Engine(program, FaultProxy((HOST, port)), port))
        routers = []
        for number in range(2):
            port, admin_port = ports.one(), ports.one()
            config = folder / f"router-{number}.yaml"
            program = Program(f"router-{number}", (ROOST, "router", "--config", str(config)), folder)
            routers.append(Router(program, FaultProxy((HOST, store_ports[0])), port, admin_port))
        stores.proxies = [router.store for router in routers]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        )
        made = Stage(folder, engines, routers, stores, http)
        for proxy in [*(each.proxy for each in engines), *(each.store for each in routers)]:
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        for each in made.programs:
            stack.push_async_callback(each.end)
        await stores.start()
        await asyncio.gather(*(engine.start() for engine in engines))
        for router in routers:
            settings = _settings(router.port, router.admin_port, router.store.port, engines[:-1])
            (folder / f"{router.program.name}.yaml").write_text(yaml.safe_dump(settings))
            await router.start(http)
        yield made


def _redis(binary: str, port: int, folder: Path) -> list[str]:
    folder.mkdir()
    options = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder))
    return [binary, *options, "--repl-diskless-sync-delay", "0"]
