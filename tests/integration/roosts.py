"""Roost in this process: the real composition root on free ports, and a client that looks at what it answers."""

from __future__ import annotations

import asyncio
import io
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from router.main import Listeners, bind, serve
from router.settings import Fleet, Settings, Store, Timeouts
from router.settings.model import Group
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import PATHS, PATIENCE_S, Replica

PROBE_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True

    @property
    def replica(self) -> str:
        return self.headers.get("x-roost-replica", "")

    @property
    def reason(self) -> str:
        return self.headers.get("x-roost-reason", "")

    @property
    def session(self) -> str:
        return self.headers.get("x-roost-session", "")

    @property
    def sha256(self) -> str:
        return sha256(self.body).hexdigest()


class Roost:
    """A running router and a client of it."""

    def __init__(self, port: int, admin_port: int, http: aiohttp.ClientSession) -> None:
        self.port = port
        self.admin_port = admin_port
        self.http = http

    async def request(
        self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request, its target as it is. A body that breaks off leaves `complete` False (and may lose its end)."""
        url = URL(f"http://127.0.0.1:{self.port}{target}", encoded=True)
        received = bytearray()
        given = {"content-type": "application/octet-stream", **(headers or {})} if body is not None else headers
        async with self.http.request(method, url, data=body and io.BytesIO(body), headers=given) as response:
            complete = True
            try:
                async for piece in response.content.iter_any():
                    received += piece
            except (aiohttp.ClientPayloadError, ConnectionError):
                complete = False
            told = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, told, bytes(received), complete)

    async def watch(self, conversation: Conversation) -> Answer:
        """The conversation's next turn on a connection of its own, seen to the last byte before it breaks off."""
        headers = "".join(f"{name}: {value}\r\n" for name, value in conversation.headers.items())
        async with Client.to(self.port) as client:
            await client.post(conversation.body(), headers=headers, path=PATHS[conversation.dialect])
            seen = await client.answer()
        told = {name.decode(): value.decode("latin-1") for name, value in seen.headers.items()}
        return Answer(seen.status, told, seen.body, seen.complete)

    async def turn(self, conversation: Conversation) -> Answer:
        """The conversation's next turn, which must succeed."""
        answer = await self.request("POST", PATHS[conversation.dialect], conversation.body(), conversation.headers)
        assert answer.status == 200, (answer.status, answer.body[:300])
        assert answer.complete
        return answer

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """A call of the admin API: status and decoded JSON."""
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        async with self.http.request(method, url, json=body) as response:
            return response.status, await response.json()

    async def replicas(self) -> dict[str, dict[str, Any]]:
        """What the admin API says of each replica, by id."""
        status, told = await self.admin("GET", "/admin/replicas")
        assert status == 200, told
        return {each["id"]: each for each in told["replicas"]}

    async def decisions(self, limit: int = 1000) -> list[dict[str, Any]]:
        """The last decisions, newest first."""
        _, told = await self.admin("GET", f"/admin/decisions?limit={limit}")
        found: list[dict[str, Any]] = told["decisions"]
        return found

    async def metrics(self) -> str:
        async with self.http.get(f"http://127.0.0.1:{self.admin_port}/metrics") as response:
            return await response.text()

    async def gauge(self, name: str) -> dict[str, float]:
        """Samples of a metric with a `replica` label."""
        families = text_string_to_metric_families(await self.metrics())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return {sample.labels["replica"]: sample.value for sample in samples}

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        """Look until it is so. The router tells nobody when it has settled or probed: looking is all one can do."""
        async with asyncio.timeout(PATIENCE_S):
            while not await true():  # noqa: ASYNC110 (see above)
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Until nothing is in flight, by the metrics and by the store."""

        async def nothing() -> bool:
            gauges = await self.gauge("roost_in_flight")
            loads = [each["load"]["in_flight"] for each in (await self.replicas()).values()]
            return not any(gauges.values()) and not any(loads)

        await self.until(nothing)

    async def knows(self, given: Iterable[Replica]) -> None:
        """Until these replicas are healthy and their lives are known here."""
        wanted = {each.id for each in given}

        if not wanted:
            return

        async def all_known() -> bool:
            told = await self.replicas()
            return all(each in told and told[each]["healthy"] and told[each]["incarnation"] for each in wanted)

        await self.until(all_known)


def settings_for(given: Sequence[Replica] | Sequence[Fleet], store: Store | None = None, **groups: Group) -> Settings:
    """Settings for tests: a fleet of these replicas (or these fleets), quick probes, a memory store, no lag."""
    fleets = tuple(each for each in given if isinstance(each, Fleet))
    if not fleets:
        urls = tuple(each.url for each in given if isinstance(each, Replica))
        fleets = (Fleet(name="default", replicas=urls, probe_interval_s=PROBE_INTERVAL_S),)
    groups.setdefault("timeouts", Timeouts(ready_lag_s=0.0, shutdown_grace_s=PATIENCE_S))
    return Settings(fleets=fleets, store=store or Store(kind="memory"), **groups)  # type: ignore[arg-type]


def shared_store(url: str, prefix: str = "roost", timeout_s: float = 10.0) -> Store:
    """A real store at `url`. Its patience is long: a busy machine is no slow store."""
    return Store(kind="redis", url=url, prefix=prefix, timeout_s=timeout_s)


@asynccontextmanager
async def running(settings: Settings, known: Sequence[Replica] = (), *, errors: bool = False) -> AsyncIterator[Roost]:
    """Roost with these settings, once `known` are known to it. At its end nothing may be in flight or left behind.

    `errors`: the router may log errors.
    """
    complaints = _Complaints()
    logging.getLogger("roost").addHandler(complaints)
    before = asyncio.all_tasks()
    public, admin = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    stop, listening = asyncio.Event(), asyncio.Event()
    url = settings.store.url
    task = asyncio.create_task(
        serve(settings, Listeners(public, admin), stop, store_url=url, announce=listening.set), name="roost"
    )
    try:
        waiting = asyncio.create_task(listening.wait())
        await asyncio.wait((task, waiting), timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=3 * PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as http:
            roost = Roost(public.getsockname()[1], admin.getsockname()[1], http)
            await roost.knows(known)
            yield roost
            await roost.idle()
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task
        assert errors or complaints.said == []
    finally:
        logging.getLogger("roost").removeHandler(complaints)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)
        public.close()
        admin.close()
    left = {each for each in asyncio.all_tasks() - before if each.get_name().startswith(("roost", "fleet", "probe"))}
    assert not left


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


def spread(answers: Iterable[Answer]) -> list[int]:
    """How many went to each replica that got any, fewest first."""
    return sorted(Counter(answer.replica for answer in answers).values())
