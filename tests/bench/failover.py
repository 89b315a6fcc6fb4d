"""How long it takes until a death is known, and until what was lost is back: all in one run, with default settings.

    python -m tests.bench.failover [--rounds N] [--turns N] [--json FILE]

Real processes on this machine: redis-server and its standby behind one address, three simulated engines, two routers.
A time is from the fault to when *both* routers say so, by looking at their admin API every 20 ms. Last come the
latencies of `tests.bench.store_outage`. Routers, engines, clients and this share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml
from redis.asyncio import Redis

from tests.bench import store_outage
from tests.integration.conversations import Conversation
from tests.soak.proxy import FaultProxy
from tests.soak.stage import HOST, ROOST, Ports, Program, accepts, redis_server

MODEL = "kimi-k2.6"
LOOK_S = 0.02
PATIENCE_S = 120.0
CLIENTS = 12
HELD = 30
"""Turns in flight at the router that is killed."""

Rows = dict[str, list[float]]


@dataclass
class Stage:
    """What runs, and where."""

    http: aiohttp.ClientSession
    engines: dict[str, Program]
    """By the id under which routers know it."""
    routers: list[tuple[Program, int, int]]
    """Process, port, admin port."""
    servers: list[tuple[Program, int]]
    """The primary and its standby."""
    address: FaultProxy

    async def replicas(self, router: int) -> dict[str, Any]:
        """What the router says of its replicas, by id."""
        url = f"http://{HOST}:{self.routers[router][2]}/admin/replicas"
        async with self.http.get(url) as response:
            return {each["id"]: each for each in (await response.json())["replicas"]}

    async def metric(self, router: int, sample: str) -> float | None:
        """A sample without labels."""
        async with self.http.get(f"http://{HOST}:{self.routers[router][2]}/metrics") as response:
            lines = (await response.text()).splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{sample} ")), None)

    async def until_state(self, replica: str, *wanted: str) -> float:
        """Seconds until both routers say that it is so with the replica."""

        async def so(router: int) -> bool:
            return (await self.replicas(router))[replica]["health"]["state"] in wanted

        return await both(so)

    async def until_store(self, up: float) -> float:
        """Seconds until both routers use the store, or do not."""

        async def so(router: int) -> bool:
            return await self.metric(router, "roost_store_up") == up

        return await both(so)

    async def start_router(self, number: int) -> float:
        """Seconds until it is ready."""
        began_s = time.monotonic()
        program, port, _ = self.routers[number]
        await program.start()
        await accepts(port)

        async def ready() -> bool:
            if program.pid is None:
                raise SystemExit(f"a router ended: {program.log.read_text()[-1000:]}")
            async with self.http.get(f"http://{HOST}:{port}/readyz") as response:
                return response.status == 200

        await until(ready)
        return time.monotonic() - began_s

    async def start_engine(self, replica: str) -> None:
        """Until it listens."""
        await self.engines[replica].start()
        await accepts(int(replica.rpartition(":")[2]))


async def until(true: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until it is so."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        while not await true():  # noqa: ASYNC110 (a measure from outside)
            await asyncio.sleep(LOOK_S)
    return time.monotonic() - began_s


async def both(so: Callable[[int], Awaitable[bool]]) -> float:
    """Seconds until it is so at both routers."""
    return max(await asyncio.gather(until(lambda: so(0)), until(lambda: so(1))))


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """Everything up; everything gone afterwards."""
    binary = redis_server()
    if binary is None:
        raise SystemExit("no redis-server on PATH")
    async with AsyncExitStack() as stack:
        ports = Ports()
        stack.callback(ports.close)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
            )
        )
        servers = []
        for number in range(2):
            port = ports.one()
            quiet = ("--bind", HOST, "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")
            argv: tuple[str, ...] = (
                binary,
                "--port",
                str(port),
                "--dir",
                str(folder),
                "--dbfilename",
                f"{number}.rdb",
                *quiet,
            )
            servers.append((Program(f"redis-{number}", argv, folder), port))
        address = FaultProxy((HOST, servers[0][1]))
        await address.start()
        stack.push_async_callback(address.stop)
        engines = {}
        for number in range(3):
            port = ports.one()
            argv = (ROOST, "engine", "--port", str(port), "--seed", str(number))
            engines[f"{HOST}:{port}"] = Program(f"engine-{number}", argv, folder)
        routers = []
        for number in range(2):
            port, admin_port, config = ports.one(), ports.one(), folder / f"router-{number}.yaml"
            given = {
                "listen": {"host": HOST, "port": port},
                "admin": {"host": HOST, "port": admin_port},
                "store": {"url": f"redis://{HOST}:{address.port}"},
                "fleets": [{"name": "bench", "replicas": [f"http://{each}" for each in engines]}],
            }
            config.write_text(yaml.safe_dump(given))
            program = Program(f"router-{number}", (ROOST, "router", "--config", str(config)), folder)
            routers.append((program, port, admin_port))
        made = Stage(http, engines, routers, servers, address)
        for program in [*engines.values(), *(each[0] for each in routers), *(each[0] for each in servers)]:
            stack.push_async_callback(program.end)
        for program, port in servers:
            await program.start()
            await accepts(port)
        await say(servers[1][1], "REPLICAOF", HOST, str(servers[0][1]))
        await asyncio.gather(*map(made.start_engine, engines))
        await asyncio.gather(made.start_router(0), made.start_router(1))
        yield made


async def say(port: int, *command: str) -> None:
    """A command to a server."""
    async with Redis(host=HOST, port=port) as redis:
        await redis.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it so


# --- traffic ---------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Clients that talk without a pause, through both routers by turns."""

    stage: Stage
    ends: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """While it flows; it has begun at every client when this begins."""
        tasks = [asyncio.create_task(self._talk(number)) for number in range(CLIENTS)]
        try:
            await until(self._begun)
            self.ends.clear()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begun(self) -> bool:
        return self.ends["complete"] >= CLIENTS

    async def _talk(self, number: int) -> None:
        turn = 0
        while True:
            name = f"talk {number} {turn // 6}"
            conversation = Conversation(
                name, model=MODEL, header=("x-session-id", name), field_given=("max_tokens", 24)
            )
            for _ in range(6):
                self.ends[await self._turn(conversation, (number + turn) % 2)] += 1
                conversation.grow()
                turn += 1

    async def _turn(self, conversation: Conversation, router: int) -> str:
        url = f"http://{HOST}:{self.stage.routers[router][1]}/v1/chat/completions"
        try:
            async with self.stage.http.post(url, data=conversation.body(), headers=conversation.headers) as response:
                body = await response.read()
                if response.status != 200:
                    return f"status {response.status}"
                return "complete" if b"[DONE]" in body else "broken mid-stream"
        except aiohttp.ClientPayloadError:
            return "broken mid-stream"
        except aiohttp.ClientError:
            return "router gone"


# --- what is measured ------------------------------------------------------------------------------------------------


async def replicas_die(made: Stage, rows: Rows, seen: dict[str, Counter[str]]) -> None:
    """One round: killed and stopped, without traffic and with it."""
    victim = next(iter(made.engines))
    engine = made.engines[victim]
    for busy in (False, True):
        how = "under traffic" if busy else "idle"
        async with AsyncExitStack() as stack:
            traffic = Traffic(made)
            if busy:
                await stack.enter_async_context(traffic.flowing())
            await engine.end(signal.SIGKILL)
            rows.setdefault(f"eject, kill -9, {how}", []).append(await made.until_state(victim, "dead", "ejected"))
            await made.start_engine(victim)
            readmitted_s = await made.until_state(victim, "probation", "well")
            rows.setdefault(f"readmit after kill -9, {how}", []).append(readmitted_s)
            if busy:
                rows.setdefault("well again after kill -9, under traffic", []).append(
                    readmitted_s + await made.until_state(victim, "well")
                )
            engine.tell(signal.SIGSTOP)
            rows.setdefault(f"eject, SIGSTOP, {how}", []).append(await made.until_state(victim, "dead", "ejected"))
            engine.tell(signal.SIGCONT)
            rows.setdefault(f"readmit after SIGSTOP, {how}", []).append(
                await made.until_state(victim, "probation", "well")
            )
            seen.setdefault(f"turns, replica killed and stopped, {how}", Counter()).update(traffic.ends)


async def router_dies(made: Stage, rows: Rows) -> None:
    """A router with turns in flight is killed; the other counts them until their leases expire."""
    program, port, _ = made.routers[1]
    url = f"http://{HOST}:{port}/v1/chat/completions"

    async def hold(number: int) -> None:
        asked = Conversation(f"held {time.monotonic()} {number}", model=MODEL, field_given=("max_tokens", 8000))
        with suppress(aiohttp.ClientError):
            async with made.http.post(url, data=asked.body(), headers=asked.headers) as response:
                await response.read()

    async def counted() -> int:
        told = [int(each["load"]["in_flight"]) for each in (await made.replicas(0)).values()]
        if min(told) < 0:
            raise SystemExit(f"a count below zero: {told}")
        return sum(told)

    async def is_count(wanted: int) -> bool:
        return await counted() == wanted

    held = [asyncio.create_task(hold(number)) for number in range(HELD)]
    await until(lambda: is_count(HELD))
    await asyncio.sleep(1.0)  # streams flow and leases are some part of their beat old
    await program.end(signal.SIGKILL)
    rows.setdefault(f"free the {HELD} leases of a killed router", []).append(await until(lambda: is_count(0)))
    await asyncio.gather(*held)
    rows.setdefault("a router is ready after its start", []).append(await made.start_router(1))


async def store_fails_over(made: Stage, rows: Rows) -> None:
    """The primary dies, the standby is promoted and the address leads to it; then the two change their parts."""
    (primary, primary_port), (_, standby_port) = made.servers
    async with Traffic(made).flowing():
        await primary.end(signal.SIGKILL)
        rows.setdefault("store killed: both routers go on without it", []).append(await made.until_store(0.0))
        await say(standby_port, "REPLICAOF", "NO", "ONE")
        made.address.target = (HOST, standby_port)
        made.address.reset()
        rows.setdefault("store failed over: both routers use the new primary", []).append(await made.until_store(1.0))
    await primary.start()
    await accepts(primary_port)
    await say(primary_port, "REPLICAOF", HOST, str(standby_port))
    made.servers.reverse()


async def measure(rounds: int, turns: int) -> dict[str, Any]:
    """All figures: seconds, and how turns ended."""
    rows: Rows = {}
    seen: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="roost-failover-") as folder:
        async with stage(Path(folder)) as made:
            for number in range(rounds):
                sys.stderr.write(f"round {number + 1} of {rounds}\n")
                await replicas_die(made, rows, seen)
                await router_dies(made, rows)
                await store_fails_over(made, rows)
    ends = {name: dict(counts) for name, counts in seen.items() if counts}
    return {"seconds": rows, "ends": ends, "store": await store_outage.measure(turns, 4) if turns else {}}


def show(figures: dict[str, Any]) -> None:
    """The tables."""
    out = sys.stdout
    out.write(f"{'seconds until':56}{'median':>9}{'most':>9}{'rounds':>8}\n")
    for name, values in figures["seconds"].items():
        ordered = sorted(values)
        out.write(f"{name:56}{ordered[len(ordered) // 2]:9.2f}{ordered[-1]:9.2f}{len(ordered):8}\n")
    for name, ends in figures["ends"].items():
        out.write(f"{name}: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}\n")
    if figures["store"]:
        out.write(f"{'ms a turn, store':20}{'place p50':>10}{'place p99':>10}{'turn p50':>10}{'turn p99':>10}\n")
        for name, row in figures["store"].items():
            told = (row["place_p50_ms"], row["place_p99_ms"], row["turn_p50_ms"], row["turn_p99_ms"])
            out.write(f"{name:20}" + "".join(f"{value:10.1f}" for value in told) + "\n")


def main() -> None:
    """Print the tables; write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.failover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1000, help="of each phase of the store's latencies; 0: without")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    figures = uvloop.run(measure(asked.rounds, asked.turns))
    show(figures)
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
