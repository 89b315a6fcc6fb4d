"""The admin API of several workers, at one address.

What each worker knows for itself is brought together here: metrics, decisions, health. Everything else, and so every
write, one worker answers for all, since membership and load live in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from router.api.admin import DECISIONS_LIMIT
from router.api.door import Door
from router.supervisor.crew import Crew
from router.supervisor.metric_files import exposition
from router.supervisor.process import Worker

__all__ = ["WorkersAdmin"]

log = logging.getLogger("roost.supervisor")

ASK_TIMEOUT_S: Final = 5.0
SCRAPE_TRIES: Final = 100
SCRAPE_PAUSE_S: Final = 0.005
_JSON: Final = "application/json"
_SAFE: Final = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a worker said."""

    status: int
    content_type: str
    body: bytes

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, content_type=self.content_type)

    def field(self, name: str) -> list[dict[str, Any]]:
        """A list of objects within an answer that is an object."""
        found: list[dict[str, Any]] = msgspec.json.decode(self.body)[name]
        return found


class WorkersAdmin:
    """Handlers over the workers' own admin APIs."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def app(self, door: Door | None = None) -> web.Application:
        """The application for the admin listener, behind `door` where it has one."""
        app = web.Application(middlewares=[] if door is None else [door.middleware()])
        app.add_routes(
            [
                web.get("/livez", self._live),
                web.get("/readyz", self._ready),
                web.get("/metrics", self._scrape),
                web.get("/admin/replicas", self._replicas),
                web.get("/admin/decisions", self._decisions),
                web.route("*", "/{path:.*}", self._forward),
            ]
        )
        return app

    async def _live(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's signature)
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        """Ready when one worker is; why not, in the words of one of them."""
        why = "no worker accepts\n"
        async for answer in self._as_they_come(request):
            if answer.status == 200:
                return answer.response()
            why = answer.body.decode(errors="replace")
        return web.Response(status=503, text=why)

    async def _scrape(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's signature)
        for _ in range(SCRAPE_TRIES):
            found = exposition(self._crew.metrics)
            if found is not None:
                content_type = "text/plain; version=0.0.4; charset=utf-8"
                return web.Response(body=found, headers={"Content-Type": content_type})
            await asyncio.sleep(SCRAPE_PAUSE_S)
        return _problem(503, "a worker stopped while it was making a metric file")

    async def _replicas(self, request: web.Request) -> web.Response:
        """One worker's answer. Each probes for itself: where they disagree about a replica, what each says is added."""
        answers = await self._all(request)
        first = _first(answers)
        if first is None or first.status != 200:
            return _nobody() if first is None else first.response()
        replicas = first.field("replicas")
        told = [
            {entry["id"]: entry["healthy"] for entry in answer.field("replicas")}
            for answer in answers
            if answer is not None and answer.status == 200
        ]
        for entry in replicas:
            verdicts = [verdict[entry["id"]] for verdict in told if entry["id"] in verdict]
            if len(set(verdicts)) > 1:
                entry["healthy_by_worker"] = verdicts
        return web.Response(body=msgspec.json.encode({"replicas": replicas}), content_type=_JSON)

    async def _decisions(self, request: web.Request) -> web.Response:
        """The decisions of all workers, newest first."""
        answers = [answer for answer in await self._all(request) if answer is not None]
        if not answers:
            return _nobody()
        refused = next((answer for answer in answers if answer.status != 200), None)
        if refused is not None:
            return refused.response()
        limit = max(0, int(request.query.get("limit", DECISIONS_LIMIT)))
        found = [decision for answer in answers for decision in answer.field("decisions")]
        found.sort(key=lambda decision: float(decision["at_s"]), reverse=True)
        return web.Response(body=msgspec.json.encode({"decisions": found[:limit]}), content_type=_JSON)

    async def _forward(self, request: web.Request) -> web.Response:
        """The answer of the first worker that can be asked."""
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            return _problem(error.status, error.reason)
        for worker in self._crew.ready():
            try:
                return (await _ask(worker, request, body)).response()
            except aiohttp.ClientConnectorError:
                continue  # it has just died, and nothing was sent
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("worker %d does not answer %s %s: %r", worker.place, request.method, request.path, error)
                if request.method not in _SAFE:
                    return _problem(503, "the worker asked did not answer; GET /admin/replicas says what holds now")
        return _nobody()

    async def _all(self, request: web.Request) -> list[_Answer | None]:
        """What each worker says, in order of their places; None for one that does not answer."""
        return await asyncio.gather(*(_ask_or_none(worker, request) for worker in self._crew.ready()))

    async def _as_they_come(self, request: web.Request) -> AsyncIterator[_Answer]:
        asking = [asyncio.create_task(_ask_or_none(worker, request)) for worker in self._crew.ready()]
        try:
            for coming in asyncio.as_completed(asking):
                answer = await coming
                if answer is not None:
                    yield answer
        finally:
            for task in asking:
                task.cancel()


async def _ask_or_none(worker: Worker, request: web.Request) -> _Answer | None:
    try:
        return await _ask(worker, request, b"")
    except (aiohttp.ClientError, TimeoutError) as error:
        log.warning("worker %d does not answer %s %s: %r", worker.place, request.method, request.path, error)
        return None


async def _ask(worker: Worker, request: web.Request, body: bytes) -> _Answer:
    connector = aiohttp.UnixConnector(worker.admin_path, force_close=True)
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    headers = {"Content-Type": request.headers.get("Content-Type", _JSON)} if body else {}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        # The very path that the door saw: a target as it came (`http://…`) might be read as another one here.
        url = URL.build(scheme="http", host="worker", path=request.rel_url.raw_path, encoded=True)
        url = url.with_query(request.rel_url.query)
        async with session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            return _Answer(response.status, response.content_type, await response.read())


def _first(answers: list[_Answer | None]) -> _Answer | None:
    return next((answer for answer in answers if answer is not None), None)


def _nobody() -> web.Response:
    return _problem(503, "no worker is running; a new one starts within seconds")


def _problem(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": message}), content_type=_JSON)
