"""Connections to replicas: `router.ports.Upstream` over a keep-alive pool per replica URL.

Foreign errors (`OSError`, `ssl`, the HTTP parser's) become the domain's here and in `connection`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from router.domain.errors import UpstreamBroken, UpstreamUnreachable
from router.ports import ForwardRequest
from router.upstream.connection import Connection, LiveExchange, UpstreamLimits
from router.upstream.wire import Origin, parse_origin, request_head

__all__ = ["UpstreamClient", "UpstreamLimits"]


class _Pool:
    """The connections to one replica. The one used last is taken first, so that a burst's extra ones expire."""

    __slots__ = ("idle", "idle_max", "on_empty", "open", "origin")

    def __init__(self, origin: Origin, idle_max: int, on_empty: Callable[[], None]) -> None:
        self.origin = origin
        self.idle: list[Connection] = []
        self.idle_max = idle_max
        self.open: set[Connection] = set()
        self.on_empty = on_empty

    def take(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        self.idle.append(connection)
        if len(self.idle) > self.idle_max:
            self.idle.pop(0).close()

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if not self.open:
            self.on_empty()


class UpstreamClient:
    """`router.ports.Upstream`. Make it inside the running event loop that will use it."""

    def __init__(self, limits: UpstreamLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: how to speak to `https` replicas; None: the system's trusted authorities."""
        self._loop = asyncio.get_running_loop()
        self._limits = limits or UpstreamLimits()
        self._tls = tls
        self._pools: dict[str, _Pool] = {}
        self._closed = False
        self._emptied = asyncio.Event()

    async def send(self, url: str, request: ForwardRequest) -> LiveExchange:
        """See `router.ports.Upstream.send`.

        Raises besides: `ValueError` for a URL that is none, `MalformedRequest` for a head that cannot be sent.
        """
        pool = self._pools.get(url)
        if pool is None:
            if self._closed:
                raise UpstreamUnreachable("the router is closing its connections")
            pool = self._add_pool(url)
        body = request.body
        length = len(body) if request.has_body else None
        head = request_head(pool.origin, request.method, request.target, request.headers, length)
        connection = pool.take()
        if connection is not None:
            try:
                return await connection.request(request.method, head, body)
            except UpstreamBroken:
                if not connection.stale:
                    raise
        connection = await self._connect(pool)
        return await connection.request(request.method, head, body)

    def connections(self, url: str) -> tuple[int, int]:
        """How many connections to `url` are open, and how many of these are idle."""
        pool = self._pools.get(url)
        return (len(pool.open), len(pool.idle)) if pool is not None else (0, 0)

    def forget(self, url: str) -> None:
        """Close all connections to a replica that left the fleet, and forget its URL. Exchanges under way break."""
        pool = self._pools.pop(url, None)
        if pool is not None:
            for connection in tuple(pool.open):
                connection.close()

    async def close(self) -> None:
        """Close all connections and wait until they are gone. Exchanges under way break; later sends are refused."""
        self._closed = True
        pools = tuple(self._pools.values())
        self._pools.clear()
        while any(pool.open for pool in pools):
            for connection in [connection for pool in pools for connection in pool.open]:
                connection.close()
            self._emptied.clear()
            await self._emptied.wait()

    def _add_pool(self, url: str) -> _Pool:
        pool = self._pools[url] = _Pool(parse_origin(url), self._limits.idle_connections_max, self._emptied.set)
        return pool

    async def _connect(self, pool: _Pool) -> Connection:
        """A fresh connection. Raises `UpstreamUnreachable`."""
        origin = pool.origin
        tls = self._context() if origin.tls else None
        connection = Connection(self._loop, self._limits, pool.put, pool.forget)
        pool.open.add(connection)
        try:
            async with asyncio.timeout(self._limits.connect_s):
                await self._loop.create_connection(lambda: connection, origin.host, origin.port, ssl=tls)
        except TimeoutError as error:
            raise UpstreamUnreachable(f"no connection within {self._limits.connect_s:g} s", refused=False) from error
        except (OSError, UnicodeError) as error:
            raise UpstreamUnreachable(f"no connection: {error}") from error
        finally:
            if not connection.connected:
                pool.forget(connection)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls
