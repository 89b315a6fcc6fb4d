"""The composition root of one router process: settings → adapters → lifecycle → listeners; signals; exit codes.

Shutdown: not ready at once, still accepting for `timeouts.ready_lag_s` so that load balancers notice, then no new
connections; running requests get `timeouts.shutdown_grace_s`, what is left is cut and counted in one log line. A second
SIGINT waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import ClientSession, web
from pydantic import SecretStr

from router.api.access import Access
from router.api.admin import Admin
from router.api.bodies import Bodies, BodyLimits
from router.api.connection import ClientLimits
from router.api.door import Door
from router.api.gateway import Gateway, GatewayLimits
from router.api.health import Health
from router.api.keys import KeysFile
from router.api.server import RelayServer
from router.discovery import Probe, open_session
from router.domain.errors import RoostError
from router.domain.turn import Facts
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.fleets import Fleets
from router.lifecycle.health import Ejection
from router.lifecycle.leases import Leases
from router.lifecycle.passage import Passages
from router.lifecycle.placing import Limits
from router.lifecycle.recent import Recent
from router.lifecycle.turn import Turns
from router.lifecycle.turnstile import Turnstile
from router.lifecycle.waiting import watch
from router.lifecycle.watch import Outside
from router.placement.cost import Tuning
from router.placement.identity import Identity, Rules
from router.ports import Clock, Permits, ResponseHead, Store
from router.secret import read_secrets
from router.settings import Auth, Fleet, Settings
from router.store.embedded import EmbeddedValkey
from router.store.guarded import Guarded
from router.store.memory import MemoryStore
from router.store.permits import MemoryPermits, RedisPermits
from router.store.redis import RedisStore
from router.telemetry.events import Event
from router.telemetry.logs import TurnLog, configure
from router.telemetry.metrics import Metrics
from router.upstream.body import Reader
from router.upstream.client import UpstreamClient, UpstreamLimits
from router.upstream.sse import reader_for

__all__ = ["CUT_S", "EXIT_FAILED", "EXIT_OK", "Listeners", "admin_door", "announcer", "bind", "bound", "run", "serve"]

log = logging.getLogger("roost")

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
BACKLOG: Final = 4096
CUT_S: Final = 0.25
"""What a connection gets to close by itself when there is no more waiting. Not 0, which aiohttp takes for no limit:
then one idle keep-alive connection would hold up the end for ever.
"""
SPARE_FILES: Final = 256
"""Open files that are neither a client's nor a replica's connection."""
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()


class _Observers:
    """Metrics and the turn log, from the same events."""

    def __init__(self, metrics: Metrics, turn_log: TurnLog) -> None:
        self._metrics = metrics
        self._turn_log = turn_log

    def emit(self, event: Event) -> None:
        self._metrics.emit(event)
        self._turn_log.emit(event)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where a process serves. `admin` is a bound socket, TCP or Unix."""

    public: socket.socket
    admin: socket.socket


def bind(host: str, port: int) -> socket.socket:
    """A bound and listening TCP socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def run(settings: Settings) -> int:
    """Serve in this process until SIGTERM or SIGINT. Returns the exit code."""
    configure(settings.log.level, settings.log.format)
    try:
        with contextlib.ExitStack() as stack:
            public = stack.enter_context(bound("listen", settings.listen.host, settings.listen.port))
            admin = stack.enter_context(bound("admin", settings.admin.host, settings.admin.port))
            url = None
            if settings.store.kind == "embedded":
                url = stack.enter_context(EmbeddedValkey()).url
            uvloop.run(_until_signalled(settings, Listeners(public, admin), url))
    except (RoostError, OSError, RuntimeError) as error:
        sys.stderr.write(f"roost: {error}\n")
        return EXIT_FAILED
    return EXIT_OK


@contextlib.contextmanager
def bound(key: str, host: str, port: int) -> Iterator[socket.socket]:
    """A bound and listening TCP socket, closed in the end. Raises OSError that names `key`, the settings' group."""
    try:
        sock = bind(host, port)
    except OSError as error:
        hint = f" ({key}.port chooses another)" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"{key}: cannot listen on {host} port {port}: {error.strerror or error}{hint}") from error
    with sock:
        yield sock


def _allow_connections(count: int) -> int:
    """So many clients, each with a connection to a replica, as far as the system lets a process open files. Returns
    how many that is: one more could not even be told that it is too many.
    """
    wanted = 2 * count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return count
    allowed = max(most // 4, (most - SPARE_FILES) // 2)
    log.warning(
        "the system allows %d open files, so %d clients at once, not limits.connections_max (%d): use ulimit -n %d",
        most, allowed, count, wanted,
    )  # fmt: skip
    return allowed


def _tune_process() -> None:
    """Spend less on memory that comes and goes with every turn.

    Collections are rarer and skip what lives as long as the process: a turn makes hundreds of small objects and few
    cycles. And glibc keeps freed memory up to 64 MiB instead of giving each request body's pages back and faulting them
    in again (a 400 KB body costs a fifth less CPU so).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(M_TRIM_THRESHOLD, 64 << 20)
            mallopt(M_MMAP_THRESHOLD, 16 << 20)


async def _until_signalled(settings: Settings, listeners: Listeners, store_url: str | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    announce = announcer(listeners)
    serving = asyncio.create_task(serve(settings, listeners, stop, store_url=store_url, announce=announce))

    def interrupted() -> None:
        if stop.is_set():
            log.warning("stopping at once")
            serving.cancel()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def announcer(listeners: Listeners) -> Callable[[], None]:
    """What writes the log line that tells where two TCP listeners accept."""

    def say() -> None:
        public, admin = listeners.public.getsockname(), listeners.admin.getsockname()
        log.info("serving on %s port %d, admin API on %s port %d", public[0], public[1], admin[0], admin[1])

    return say


async def serve(
    settings: Settings,
    listeners: Listeners,
    stop: asyncio.Event,
    *,
    store_url: str | None,
    announce: Callable[[], None],
) -> None:
    """Serve until `stop` is set. `store_url` overrides the settings' (the embedded server's socket); `announce` is
    called once both listeners accept. Raises StoreForeign.
    """
    clock = SystemClock()
    keys = _keys(settings)
    shared = _store(settings, clock, store_url)
    store = Guarded(shared, clock)
    upstream = UpstreamClient(_upstream_limits(settings))
    metrics = Metrics()
    observer = _Observers(metrics, TurnLog())
    recent = Recent(settings.placement.decisions_kept)
    leases = Leases(store, settings.store.lease_ttl_s, settings.store.lease_renew_s)
    turnstile = Turnstile(
        _permits(shared, settings, clock),
        clock,
        _new_id,
        ttl_s=settings.store.lease_ttl_s,
        renew_s=settings.store.lease_renew_s,
    )
    async with open_session() as probing:
        outside = Outside(left=upstream.forget, ejected=metrics.ejected)
        specs = [_spec(fleet, settings) for fleet in settings.fleets]
        fleets = Fleets([FleetRuntime(spec, store, _probe(spec, probing), clock, outside) for spec in specs])
        health = Health(fleets)
        turns = Turns(
            store=store,
            upstream=upstream,
            clock=clock,
            leases=leases,
            recent=recent,
            observer=observer,
            reader_for=_reader_for,
            new_id=_new_id,
            tuning=_tuning(settings),
            limits=Limits(
                attempts=settings.placement.attempts,
                retries=settings.limits.retries,
                refusal_s=settings.timeouts.refusal_s,
                keepalive_s=settings.streams.keepalive_s,
                tips_kept=settings.store.boundaries_kept,
                branch_ttl_s=settings.store.branch_ttl_s,
                queue_max=settings.limits.queue_max,
                queue_s=settings.timeouts.queue_s,
            ),
        )
        gateway = Gateway(
            fleets=fleets,
            turns=turns,
            passages=Passages(store, upstream, settings.limits.retries),
            identity=Identity(Rules(settings.identity.session_headers, settings.identity.session_fields)),
            access=Access(keys, turnstile, engine_paths=settings.auth.engine_paths == "pass"),
            health=health,
            bodies=Bodies(_body_limits(settings)),
            observer=observer,
            limits=GatewayLimits(
                settings.limits.header_max_bytes,
                tuple(agent.lower().encode() for agent in settings.limits.bare_abort_agents),
            ),
            now_s=clock.now_s,
        )
        admin = Admin(fleets, store, recent, health, metrics.render)
        _tune_process()
        watching = watch(fleets, _tuning(settings), observer)
        watches = (turnstile.run(), keys.run()) if keys is not None else ()
        store.watch(metrics.store)
        store.watch(turns.store_changed)
        store.watch(turnstile.store_changed)
        loops = (store.run(), fleets.run(), leases.run(), turns.run(fleets), watching, *watches)
        async with _running(store, stop, *loops):
            try:
                await _listen(settings, listeners, stop, gateway, admin, health, turns, announce)
            finally:
                await turns.drained()
                await turnstile.drained()
                await upstream.close()
    await store.close()


@contextlib.asynccontextmanager
async def _running(store: Store, stop: asyncio.Event, *loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """The store opened and the background loops going; a router whose loop fails would go on blindly, so it stops, and
    raises what failed. Raises StoreForeign.
    """

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("stopping, since part of this router has failed: %r", error)
            stop.set()

    await store.open()
    async with contextlib.AsyncExitStack() as stack:
        for loop in loops:
            task = asyncio.create_task(loop)
            task.add_done_callback(ended)
            stack.push_async_callback(_end, task)
        yield


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _listen(
    settings: Settings,
    listeners: Listeners,
    stop: asyncio.Event,
    gateway: Gateway,
    admin: Admin,
    health: Health,
    turns: Turns,
    announce: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    # Workers serve theirs on Unix sockets in a private folder; the supervisor keeps the door for all.
    door = admin_door(settings) if listeners.admin.family != socket.AF_UNIX else None
    runner = web.AppRunner(admin.app(door), access_log=None, shutdown_timeout=CUT_S)
    await runner.setup()
    await web.SockSite(runner, listeners.admin).start()
    connections_max = _allow_connections(settings.limits.connections_max)
    protocol = RelayServer(gateway.handle, _client_limits(settings, connections_max))
    server = await loop.create_server(protocol, sock=listeners.public, backlog=BACKLOG)
    announce()
    try:
        await stop.wait()
        health.stopping = True
        turns.stopping()
        lag_s, grace_s = settings.timeouts.ready_lag_s, settings.timeouts.shutdown_grace_s
        log.info("stopping: not ready, accepting for %g s more, then running turns get %g s", lag_s, grace_s)
        await asyncio.sleep(lag_s)
        server.close()
        protocol.retire()
        cut = await protocol.idle(grace_s)
        if cut:
            log.warning("shutting down: %d requests had not finished after %g s and are cut", cut, grace_s)
    finally:
        server.close()
        await protocol.shutdown(timeout=CUT_S)
        await runner.cleanup()


def admin_door(settings: Settings) -> Door:
    """Who may come in at the admin listener. Raises OSError where a file of tokens cannot be used."""
    given = settings.admin
    own_names = None if given.unprotected else frozenset({"localhost", given.host.lower()})
    return Door(
        _secrets("admin.read_token_file", given.read_token, given.read_token_file),
        _secrets("admin.write_token_file", given.write_token, given.write_token_file),
        own_names=own_names,
    )


def _secrets(key: str, value: SecretStr | None, file: str | None) -> tuple[str, ...]:
    if value is not None:
        return (value.get_secret_value(),)
    return read_secrets(key, file) if file is not None else ()


def _replica_key(fleet: Fleet, auth: Auth) -> bytes | None:
    """The key of a fleet's replicas: its own, else that of all. Of several in a file the first."""
    found = _secrets(f"fleets, {fleet.name}: replica_key_file", fleet.replica_key, fleet.replica_key_file)
    found = found or _secrets("auth.replica_key_file", auth.replica_key, auth.replica_key_file)
    return found[0].encode() if found else None


def _probe(spec: FleetSpec, session: ClientSession) -> Probe:
    return Probe(session, api_key=spec.replica_key.decode() if spec.replica_key is not None else None)


def _keys(settings: Settings) -> KeysFile | None:
    if settings.auth.keys_file is None:
        return None
    keys = KeysFile(Path(settings.auth.keys_file))
    log.info("keys read: %d tenants, %d keys", len(keys.ring.tenants), len(keys.ring))
    return keys


def _permits(store: Store, settings: Settings, clock: Clock) -> Permits:
    return RedisPermits(store, settings.store.prefix) if isinstance(store, RedisStore) else MemoryPermits(clock)


def _new_id() -> str:
    return os.urandom(12).hex()


def _store(settings: Settings, clock: Clock, url: str | None) -> Store:
    url = url or settings.store.url
    if settings.store.kind == "memory" or url is None:
        return MemoryStore(clock)
    given = settings.store
    shared = given.kind == "redis"  # else the embedded one, which nobody logs into
    try:
        return RedisStore(
            url,
            prefix=given.prefix,
            timeout_s=given.timeout_s,
            username=given.username if shared else None,
            password_file=_path(given.password_file) if shared else None,
            sentinel_password_file=_path(given.sentinel_password_file) if shared else None,
        )
    except ValueError as error:  # its TLS files, which settings do not look at
        raise RuntimeError(f"store.url: {error}") from error


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _spec(fleet: Fleet, settings: Settings) -> FleetSpec:
    return FleetSpec(
        name=fleet.name,
        models=fleet.models,
        replicas=fleet.replicas,
        policy=fleet.policy,
        profile=fleet.profile.prior(),
        repairs=fleet.repairs,
        probe_interval_s=fleet.probe_interval_s,
        replica_key=_replica_key(fleet, settings.auth),
        passes_credentials=(fleet.client_credentials or settings.auth.client_credentials) == "pass",
        ejection=Ejection(**settings.ejection.model_dump()),
        admission=fleet.admission,
    )


def _tuning(settings: Settings) -> Tuning:
    given = settings.placement
    return Tuning(
        kappa=given.kappa,
        mu=given.mu,
        beta_s=given.beta_s,
        crowd_half_life_s=given.crowd_half_life_s,
        live_half_life_s=given.live_half_life_s,
        expected_output_tokens=given.expected_output_tokens,
        ramp_s=given.ramp_s,
    )


def _client_limits(settings: Settings, connections_max: int) -> ClientLimits:
    return ClientLimits(
        head_max_bytes=settings.limits.header_max_bytes + ClientLimits().line_max_bytes,
        head_s=settings.timeouts.client_head_s,
        connections_max=connections_max,
    )


def _body_limits(settings: Settings) -> BodyLimits:
    return BodyLimits(
        body_max_bytes=settings.limits.body_max_bytes,
        total_max_bytes=settings.limits.bodies_max_bytes,
        wait_s=settings.timeouts.body_wait_s,
        idle_s=settings.timeouts.body_idle_s,
        rate_min=settings.limits.body_rate_min,
    )


def _upstream_limits(settings: Settings) -> UpstreamLimits:
    given = settings.timeouts
    return UpstreamLimits(
        connect_s=given.connect_s, head_s=given.first_byte_s, idle_s=given.idle_s, keepalive_s=given.keepalive_s
    )


def _reader_for(facts: Facts, head: ResponseHead) -> Reader:
    headers = {name.lower(): value for name, value in head.headers}
    return reader_for(facts.dialect, headers.get(b"content-type"), headers.get(b"content-encoding"))
