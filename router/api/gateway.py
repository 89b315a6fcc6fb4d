"""The public listener: reads facts from a request, changes nothing, and hands it to the life of a turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from router.api.access import Access
from router.api.bodies import Bodies, HeldBody
from router.api.downstream import Downstream
from router.api.errors import error_frame, render
from router.api.head_rules import fewer_hops, hops_left, path_of
from router.api.health import Health
from router.api.paths import BROADCAST, error_dialect, stored_response, tenant_may, turn_dialect
from router.api.repair import repair
from router.contract import REASON_HEADER, REPAIRED_HEADER, REPLICA_HEADER, SESSION_HEADER
from router.domain.decision import Placed
from router.domain.errors import (
    HeadersTooLarge,
    RequestError,
    RoostError,
    StoreError,
    UnknownModel,
    UnknownResponse,
    UpstreamError,
)
from router.domain.session import Binding
from router.domain.tenant import Tenant
from router.domain.turn import Dialect, Facts, Turn
from router.lifecycle.fleet import FleetRuntime
from router.lifecycle.fleets import Fleets
from router.lifecycle.passage import Passages
from router.lifecycle.turn import Turns
from router.placement.identity import Identity, session_token
from router.ports import BodyReader, ForwardRequest
from router.telemetry.events import Observer, TurnRefused
from router.upstream.wire import Header, forward_request_headers, via_of, with_credentials

__all__ = ["Gateway", "GatewayLimits"]

log = logging.getLogger("roost.gateway")

_REPLICA: Final = REPLICA_HEADER.encode()
_REASON: Final = REASON_HEADER.encode()
_SESSION: Final = SESSION_HEADER.encode()
_REPAIRED: Final = REPAIRED_HEADER.encode()


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """What is refused at the door."""

    header_max_bytes: int
    bare_abort_agents: tuple[bytes, ...]
    """User-Agent prefixes, lower case: a stream that breaks under them is aborted without an error event."""


@dataclass(slots=True)
class _Request:
    """One request as it was read."""

    method: str
    target: str
    path: str
    raw_headers: Sequence[Header]
    headers: dict[bytes, bytes]
    down: Downstream
    via: bytes
    tenant: Tenant | None = None
    fleet: str = ""
    repaired: tuple[str, ...] = field(default=())


class Gateway:
    """Serves every path of the public listener."""

    def __init__(
        self,
        fleets: Fleets,
        turns: Turns,
        passages: Passages,
        identity: Identity,
        access: Access,
        health: Health,
        bodies: Bodies,
        observer: Observer,
        limits: GatewayLimits,
        now_s: Callable[[], float],
    ) -> None:
        self._fleets = fleets
        self._turns = turns
        self._passages = passages
        self._identity = identity
        self._access = access
        self._health = health
        self._bodies = bodies
        self._observer = observer
        self._limits = limits
        self._now_s = now_s

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. Whatever Roost itself has to say comes in the dialect of the path."""
        read = _read(request)
        own = self._health.answer(read.method, read.path)
        if own is not None:
            return own
        try:
            # Before anything is read: strangers must not fill memory with bodies.
            read.tenant = self._access.whose(read.raw_headers)
            self._access.admit(read.tenant, read.method, read.path)
            if (own := self._models(read)) is not None:
                return own
            if hops_left(read.method, read.headers) == 0:
                return web.Response(status=204)
            return await self._serve(request, read)
        except RoostError as error:
            tenant = read.tenant.name if read.tenant is not None else None
            self._observer.emit(TurnRefused(read.fleet, error_dialect(read.path).value, error.code, tenant))
            # What a client did wrong is told to the client: the log must not hold what it wrote.
            why = error.code if isinstance(error, RequestError) else error
            whose = f" of tenant {tenant}" if tenant is not None else ""
            log.info("%s %s%s: %s", read.method, error_dialect(read.path).value, whose, why)
            return _refuse(error, read)

    async def _serve(self, request: web.BaseRequest, read: _Request) -> web.StreamResponse:
        size = sum(len(name) + len(value) + 4 for name, value in read.raw_headers)
        if size > self._limits.header_max_bytes:
            raise HeadersTooLarge(f"the headers have {size} bytes, more than {self._limits.header_max_bytes}")
        held = await self._bodies.read(request, read.tenant.name if read.tenant is not None else None)
        try:
            await self._forward(request, read, held)
        finally:
            held.let_go()
        return read.down.response

    async def _forward(self, request: web.BaseRequest, read: _Request, held: HeldBody) -> None:
        dialect = turn_dialect(read.method, read.path)
        encoded = read.headers.get(b"content-encoding", b"identity").lower() != b"identity"
        scope = read.tenant.scope if read.tenant is not None else None
        facts = self._identity.facts(dialect, read.headers, held.data, encoded=encoded, scope=scope)
        self._access.check(read.tenant, facts, encoded=encoded)
        async with self._access.turn(read.tenant, read.method, read.path):
            if dialect is Dialect.OTHER:
                await self._pass(read, facts, held, has_body=request.body_exists or request.content_length is not None)
            else:
                fleet = self._fleets.serving(facts.model)
                read.fleet = fleet.name
                if read.tenant is not None and facts.refers_to is not None:
                    await self._own_response(facts.tenant, facts.refers_to)
                await self._turn(read, facts, fleet, held)

    async def _own_response(self, scope: str, response_id: str) -> tuple[FleetRuntime, Binding]:
        """Where a tenant's stored response is. Raises UnknownResponse: a replica would tell it to whoever asks."""
        found = await self._passages.holder(tuple(self._fleets), scope, response_id)
        if found is None:
            raise UnknownResponse("there is no stored response of that id, or not any more")
        return found

    async def _turn(self, read: _Request, facts: Facts, fleet: FleetRuntime, held: HeldBody) -> None:
        if fleet.spec.repairs:
            held.data, read.repaired = repair(fleet.spec.repairs, facts.dialect, held.data)
        forward = ForwardRequest(read.method, read.target, _headers(read, fleet), held.data, on_sent=held.let_go)
        held.data = b""  # it is the forward's now, which forgets it once it will not be sent again

        def label(placed: Placed, turn: Turn) -> Sequence[Header]:
            headers = [
                (_REPLICA, placed.replica.encode()),
                (_REASON, placed.reason.value.encode()),
                (_SESSION, session_token(facts.tenant, turn.session).encode()),
            ]
            if read.repaired:
                headers.append((_REPAIRED, ",".join(read.repaired).encode()))
            return headers

        readers: list[BodyReader] = []
        try:
            await self._turns.serve(fleet, facts, forward, read.down, label, readers.append)
        except UpstreamError as error:
            if not read.down.started:
                raise
            log.info("response broken: %s", error)
            reader = readers[-1]
            if facts.stream and read.down.extensible and not reader.terminal and self._wants_last_words(read):
                read.down.write(_last_words(error, facts.dialect, reader))
            read.down.abort()

    def _wants_last_words(self, read: _Request) -> bool:
        """Whether an error event helps this client. Agents retry a stream that merely breaks, and some do worse when
        told why: Qwen Code ends its run, Claude Code goes on without streaming (both run against 0.24.4 and 2.1.332).
        """
        return not read.headers.get(b"user-agent", b"").lower().startswith(self._limits.bare_abort_agents)

    async def _pass(self, read: _Request, facts: Facts, held: HeldBody, *, has_body: bool) -> None:
        def forward(fleet: FleetRuntime) -> ForwardRequest:
            headers = fewer_hops(read.method, _headers(read, fleet))
            return ForwardRequest(read.method, read.target, headers, held.data, has_body, on_sent=held.let_go)

        fleets = tuple(self._fleets)
        try:
            if read.path in BROADCAST:
                await self._passages.broadcast([(fleet, forward(fleet)) for fleet in fleets], read.down)
                return
            fleet = self._fleets.serving(facts.model) if facts.model is not None else self._fleets.first()
            holder = None
            if (response_id := stored_response(read.path)) is not None:
                if read.tenant is not None:
                    fleet, holder = await self._own_response(facts.tenant, response_id)
                else:
                    with suppress(StoreError):
                        found = await self._passages.holder(fleets, facts.tenant, response_id)
                        fleet, holder = found or (fleet, None)
            read.fleet = fleet.name
            steers = not tenant_may(read.method, read.path)
            await self._passages.serve(fleet, forward(fleet), read.down, holder, steers=steers)
        except UpstreamError:
            if not read.down.started:
                raise
            read.down.abort()

    def _models(self, read: _Request) -> web.Response | None:
        """`GET /v1/models`, the union of the fleets, and one of them; both OpenAI's and Anthropic's clients read it."""
        if read.method not in ("GET", "HEAD") or not (read.path == "/v1/models" or read.path.startswith("/v1/models/")):
            return None
        models = {name: fleet for fleet in self._fleets for name in fleet.models()}
        entries = [self._model(name, fleet) for name, fleet in models.items()]
        if read.path == "/v1/models":
            listing = {"object": "list", "data": entries, "has_more": False}
            return web.Response(body=msgspec.json.encode(listing), content_type="application/json")
        asked = read.path.removeprefix("/v1/models/")
        for entry in entries:
            if entry["id"] == asked:
                return web.Response(body=msgspec.json.encode(entry), content_type="application/json")
        wire = render(UnknownModel(f"no such model; served: {', '.join(sorted(models))}"), Dialect.CHAT)
        return web.Response(status=wire.status, headers=dict(wire.headers), body=wire.body)

    def _model(self, name: str, fleet: FleetRuntime) -> dict[str, object]:
        entry: dict[str, object] = {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": int(self._now_s()),
            "owned_by": "roost",
            "root": name,
        }
        length = fleet.context_length()
        if length is not None:
            entry["max_model_len"] = length
        return entry


def _read(request: web.BaseRequest) -> _Request:
    raw = request.raw_headers
    headers: dict[bytes, bytes] = {}
    for name, value in raw:
        headers.setdefault(name.lower(), value)
    target = request.raw_path
    return _Request(request.method, target, path_of(target), raw, headers, Downstream(request), via_of(request.version))


def _headers(read: _Request, fleet: FleetRuntime) -> tuple[Header, ...]:
    """The client's headers as the replicas of this fleet are to see them."""
    forwarded = forward_request_headers(read.raw_headers, read.via)
    return with_credentials(forwarded, fleet.spec.replica_key, keep=fleet.spec.passes_credentials)


def _last_words(error: UpstreamError, dialect: Dialect, reader: BodyReader) -> bytes:
    return error_frame(
        error,
        dialect,
        mid_event=reader.mid_event,
        response_id=reader.response_id,
        sequence_number=reader.next_sequence,
    )


def _refuse(error: RoostError, read: _Request) -> web.StreamResponse:
    wire = render(error, error_dialect(read.path))
    return web.Response(status=wire.status, headers=dict(wire.headers), body=wire.body)
