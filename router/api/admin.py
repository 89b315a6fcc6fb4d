"""The admin API: replicas added, cordoned, drained and removed for all routers at once, and why turns went where they
went.

GET    /admin/replicas                  every fleet's replicas: standing, health, load, beliefs; while the store is away
                                        `from_memory`: as this router last knew them, without loads and beliefs
POST   /admin/replicas                  {"url": …, "fleet": …?} adds one
DELETE /admin/replicas/{id}             removes one: no new turns; running streams finish
POST   /admin/replicas/{id}/cordon      no new branches
POST   /admin/replicas/{id}/drain       no new turns; its branches move, once each, as they speak again
POST   /admin/replicas/{id}/undrain     serving again, from either
GET    /admin/decisions?limit=&replica=&session=   the last decisions, newest first; a session by the beginning of its
                                        key, or as `x-roost-session` names it
GET    /metrics · /livez · /readyz

Who may ask what: `router.api.door`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
from aiohttp import web

from router.api.door import Door
from router.api.health import Health
from router.domain.errors import StoreError
from router.domain.replica import Standing
from router.domain.shared import Ask, Member, View
from router.lifecycle.fleet import FleetRuntime, replica_id
from router.lifecycle.fleets import Fleets
from router.lifecycle.recent import Recent, explain
from router.placement.cost import rates_of
from router.ports import Store
from router.upstream.wire import replica_root

__all__ = ["Admin"]

STANDINGS: Final = {"cordon": Standing.CORDONED, "drain": Standing.DRAINING, "undrain": Standing.SERVING}
STAND_TRIES: Final = 10
DECISIONS_LIMIT: Final = 50
_ADD_KEYS: Final = ("url", "fleet")
_DIGITS_MAX: Final = 9
_PATHS: Final = "/admin/replicas, /admin/decisions, /metrics, /livez, /readyz"


class Admin:
    """Handlers over fleets, store and recent decisions."""

    def __init__(
        self, fleets: Fleets, store: Store, recent: Recent, health: Health, metrics: Callable[[], bytes]
    ) -> None:
        self._fleets = fleets
        self._store = store
        self._recent = recent
        self._health = health
        self._metrics = metrics

    def app(self, door: Door | None = None) -> web.Application:
        """The application for the admin listener, behind `door` where it has one."""
        app = web.Application(middlewares=[_plainly] if door is None else [door.middleware(), _plainly])
        app.add_routes(
            [
                web.get("/livez", self._probe),
                web.get("/readyz", self._probe),
                web.get("/metrics", self._scrape),
                web.get("/admin/replicas", self._list),
                web.post("/admin/replicas", self._add),
                web.delete("/admin/replicas/{id}", self._remove),
                web.post("/admin/replicas/{id}/{standing:cordon|drain|undrain}", self._stand),
                web.get("/admin/decisions", self._decisions),
            ]
        )
        return app

    async def _probe(self, request: web.Request) -> web.Response:
        answer = self._health.answer("GET", request.path)
        assert answer is not None
        return answer

    async def _scrape(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's signature)
        return web.Response(body=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _list(self, request: web.Request) -> web.Response:  # noqa: ARG002 (aiohttp's signature)
        replicas = [entry for fleet in self._fleets for entry in await self._described(fleet)]
        return _json({"replicas": replicas})

    async def _described(self, fleet: FleetRuntime) -> list[dict[str, Any]]:
        try:
            view = await self._store.fetch(fleet.name, Ask(session=None))
            if view.membership_version != fleet.version:
                await fleet.refresh()
            snapshot, from_memory = fleet.snapshot(view), False
        except StoreError:
            nothing = View(0.0, fleet.version, loads={}, incarnations={}, beliefs={})
            snapshot, from_memory = fleet.snapshot(nothing, blind=True), True
        rates = asdict(rates_of(snapshot))
        sources = {member.id: member.source for member in fleet.members}
        return [
            {
                "id": replica.id,
                "url": replica.url,
                "fleet": fleet.name,
                "source": sources.get(replica.id, ""),
                "standing": replica.standing.value,
                "healthy": replica.healthy and not replica.ejected,
                "health": fleet.watch.described(replica.id),
                "incarnation": replica.incarnation,
                "models": list(replica.models),
                "joined_at_s": replica.joined_at_s,
                "capacity": asdict(replica.capacity),
                "load": asdict(replica.load),
                "beliefs": asdict(replica.beliefs),
                "foreign_in_flight": replica.foreign_in_flight,
                "rates": rates,
                "problem": fleet.problems.get(replica.id),
                "from_memory": from_memory,
            }
            for replica in snapshot.replicas
        ]

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            asked = msgspec.json.decode(body) if body else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _problem(400, f"the body is not JSON: {error}")
        url = asked.get("url") if isinstance(asked, dict) else None
        if not isinstance(asked, dict) or not isinstance(url, str):
            return _problem(400, 'the body must be an object with "url": "http://HOST:PORT"')
        if unknown := sorted(asked.keys() - _ADD_KEYS):
            return _problem(400, f"unknown key {unknown[0]!r}; allowed: {', '.join(_ADD_KEYS)}")
        try:
            root = replica_root(url)
        except ValueError as error:
            return _problem(400, f"url {error} (allowed: http://HOST:PORT or https://HOST:PORT)")
        name = asked.get("fleet")
        fleet = self._fleets.first() if name is None else self._fleets.named(str(name))
        if fleet is None:
            known = ", ".join(each.name for each in self._fleets)
            return _problem(404, f"no fleet of that name; fleets: {known}")
        member = Member(replica_id(root), root, "admin")
        added = await self._store.put_member(fleet.name, member, only_if_absent=True)
        await fleet.refresh()
        return _json({"id": member.id, "fleet": fleet.name, "added": added}, status=201 if added else 200)

    async def _remove(self, request: web.Request) -> web.Response:
        found = await self._find(request.match_info["id"])
        if found is None:
            return _no_replica(request)
        fleet, member = found
        removed = await self._store.remove_member(fleet.name, member.id)
        await fleet.refresh()
        return _json({"id": member.id, "fleet": fleet.name, "removed": removed})

    async def _stand(self, request: web.Request) -> web.Response:
        standing = STANDINGS[request.match_info["standing"]]
        for _ in range(STAND_TRIES):  # a probe may record what it found at the same moment
            found = await self._find(request.match_info["id"])
            if found is None:
                return _no_replica(request)
            fleet, member = found
            if await fleet.put(replace(member, standing=standing), over=member):
                return _json({"id": member.id, "fleet": fleet.name, "standing": standing.value})
        return _problem(503, "the replica's record kept changing meanwhile; ask again")

    async def _find(self, member_id: str) -> tuple[FleetRuntime, Member] | None:
        for fleet in self._fleets:
            await fleet.refresh()
            member = fleet.member(member_id)
            if member is not None:
                return fleet, member
        return None

    async def _decisions(self, request: web.Request) -> web.Response:
        asked = request.query.get("limit", str(DECISIONS_LIMIT))
        if not (asked.isascii() and asked.isdigit() and len(asked) <= _DIGITS_MAX):
            return _problem(400, "limit must be a whole number, 0 or more")
        replica, session = request.query.get("replica"), request.query.get("session")
        if session is not None:
            session = session.partition("-")[0]  # as `x-roost-session` shows it, with the tenant's seal behind
        found = [
            explain(record)
            for record in self._recent.newest(1 << 30)
            if (replica is None or record.placed.replica == replica)
            and (session is None or record.turn.session.startswith(session))
        ]
        return _json({"decisions": found[: int(asked)]})


@web.middleware
async def _plainly(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Errors in one form: {"error": "…"}."""
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPMethodNotAllowed as error:
        return _problem(405, f"{request.path} takes {', '.join(sorted(error.allowed_methods))}")
    except web.HTTPNotFound:
        return _problem(404, f"{request.method} {request.path}: no such path; there are {_PATHS}")
    except web.HTTPException as error:
        return _problem(error.status, f"{request.method} {request.path}: {error.reason}")
    except StoreError as error:
        return _problem(503, f"the store cannot be used now: {error}")
    return response


def _no_replica(request: web.Request) -> web.Response:
    return _problem(404, f"no replica {request.match_info['id']!r}; GET /admin/replicas lists them")


def _problem(status: int, message: str) -> web.Response:
    return _json({"error": message}, status=status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
