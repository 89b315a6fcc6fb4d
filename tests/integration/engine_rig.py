"""Simulated engines in this process, and a plain client of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from simulations import profiles
from simulations.engine_server.server import Engine
from tests.sglang.dialects import Dialect, Reply, events_of
from tests.sglang.servers import MODEL

PROFILE = "cpu-tiny"
FAST = 50.0


@dataclass(frozen=True, slots=True)
class Got:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks one engine."""

    def __init__(self, engine: Engine, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.http = http

    async def get(self, path: str) -> Got:
        async with self.http.get(self.engine.url + path) as response:
            return Got(response.status, _lower(response), await response.read())

    async def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Got:
        async with self.http.post(self.engine.url + path, json=body, headers=headers) as response:
            return Got(response.status, _lower(response), await response.read())

    async def say(self, dialect: Dialect, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """A turn that must go well, read as a client of real SGLang reads it."""
        got = await self.post(dialect.path, body, headers)
        assert got.status == 200, got.body[:500]
        assert got.headers["x-roost-simulated"] == "true"
        assert b"roost-simulated" in got.body
        if body.get("stream"):
            reply = dialect.streamed(events_of(got.body))
            assert reply.ended
            assert not reply.errors
            return reply
        return dialect.whole(got.json())

    async def until(self, *, running: int, waiting: int = 0) -> None:
        """Look until that many turns run and wait; the engine tells nobody, so looking is all one can do."""
        load: dict[str, Any] = {}
        async with asyncio.timeout(20):
            while (load.get("num_running_reqs"), load.get("num_waiting_reqs")) != (running, waiting):
                load = (await self.get("/v1/loads")).json()["loads"][0]


@asynccontextmanager
async def engine(
    *, profile: str = PROFILE, time_scale: float = FAST, seed: int = 0, **changes: Any
) -> AsyncIterator[Client]:
    """A simulated engine that listens, quick unless told otherwise; `changes` are of its profile."""
    report = changes.pop("cache_report", True)
    made = Engine(profiles.load(profile, **changes), model=MODEL, seed=seed, time_scale=time_scale, cache_report=report)
    await made.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield Client(made, http)
    finally:
        await made.stop()


def _lower(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
