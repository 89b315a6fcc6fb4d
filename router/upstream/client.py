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
from router.upstream.wire import parse_origin, request_head

__all__ = ["UpstreamClient", "UpstreamLimits"]


class _Pool:
    """The connections to one replica. The one used last is taken first, so that a burst's extra ones expire."""

    __slots__ = ("idle", "idle_max", "left", "on_empty", "open", "origin", "url")

    def __init__(self, url: str, idle_max: int, on_empty: Callable[[_Pool], None]) -> None:
        """`on_empty`: the last connection has ended. Raises ValueError for a URL that is none."""
        self.url = url
        self.origin = parse_origin(url)
        self.idle: list[Connection] = []
        self.idle_max = idle_max
        self.open: set[Connection] = set()
        self.on_empty = on_empty
        self.left = False
        """The replica left the fleet: no connection is kept beyond its exchange."""

    def take(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        self.idle.append(connection)
        if len(self.idle) > self.idle_max or self.left:
            self.idle.pop(0).close()

    def leave(self) -> None:
        self.left = True
        for connection in tuple(self.idle):
            connection.close()

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        if not self.open:
            self.on_empty(self)


class UpstreamClient:
    """`router.ports.Upstream`. Make it inside the running event loop that will use it.

    What is known of a replica lasts as long as a connection to it, so that replicas that come and go leave nothing.
    """

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
        pool = self._pool(url)
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
        connection = await self._connect(self._pool(url))
        return await connection.request(request.method, head, body)

    def connections(self, url: str) -> tuple[int, int]:
        """How many connections to `url` are open, and how many of these are idle."""
        pool = self._pools.get(url)
        return (len(pool.open), len(pool.idle)) if pool is not None else (0, 0)

    def forget(self, url: str) -> None:
        """See `router.ports.Upstream.forget`."""
        pool = self._pools.get(url)
        if pool is not None:
            pool.leave()

    async def close(self) -> None:
        """Close all connections and wait until they are gone. Exchanges under way break; later sends are refused."""
        self._closed = True
        while self._pools:
            for connection in [connection for pool in self._pools.values() for connection in pool.open]:
                connection.close()
            self._emptied.clear()
            if self._pools:
                await self._emptied.wait()

    def _pool(self, url: str) -> _Pool:
        """The pool of a replica, which is there, then, if it had left."""
        if self._closed:
            raise UpstreamUnreachable("the router is closing its connections")
        pool = self._pools.get(url)
        if pool is None:
            pool = _Pool(url, self._limits.idle_connections_max, self._ended)
        pool.left = False
        return pool

    def _ended(self, pool: _Pool) -> None:
        if self._pools.get(pool.url) is pool:
            del self._pools[pool.url]
        self._emptied.set()

    async def _connect(self, pool: _Pool) -> Connection:
        """A fresh connection. Raises `UpstreamUnreachable`."""
        origin = pool.origin
        tls = self._context() if origin.tls else None
        connection = Connection(self._loop, self._limits, pool.put, pool.forget)
        self._pools[pool.url] = pool
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
        if self._closed:
            connection.close()
            raise UpstreamUnreachable("the router is closing its connections")
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls
