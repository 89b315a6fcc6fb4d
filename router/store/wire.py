"""One connection to a Redis server, shared by all calls of a process.

Commands go out in the order they come and replies return in that order, so any number of calls can be under way on
one connection (pipelining). Per script call with 50 replicas in the reply (uvloop), redis-py's client took 120 µs of
CPU, its bare connection 89 and this 22; so redis-py gives only the reading of the URL and the TLS settings, hiredis
the protocol.

A server that hangs costs a call at most `timeout_s`, and the calls after it nothing: while a reply is overdue they
fail at once. The connection stays until the overdue reply comes (all is well again) or `STALL_S` have passed; only
then it is replaced. So there is never more than one connection, however many calls fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import hiredis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url

from router.domain.errors import StoreUnavailable

__all__ = ["Address", "Wire"]

Command = tuple[bytes | str | int, ...]

CONNECT_TIMEOUT_S = 1.0
"""Longer than a call may take: TLS and a login need several round trips. Callers do not wait that long for it."""

STALL_S = 2.0
"""Silence after which a connection is given up, since its server may be gone without a word."""


class Address:
    """Where a Redis is and how to log in. Raises ValueError for a URL that is not redis://, rediss:// or unix://."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = dict(parse_url(url))
        kind: type[Any] = options.pop("connection_class", Connection)
        try:
            settings = kind(**options)
        except TypeError as error:
            raise ValueError("the store's URL has an option in its query that is not known") from error
        self.path = str(settings.path) if kind is UnixDomainSocketConnection else None
        self.host, self.port = ("", 0) if self.path is not None else (str(settings.host), int(settings.port))
        self.tls = settings.ssl_context.get() if kind is SSLConnection else None
        self.label = f"unix://{self.path}" if self.path is not None else f"{self.host}:{self.port}"
        """The address without its credentials, for messages."""
        self.greeting: list[Command] = []
        """What is said first on a connection: login and choice of database."""
        if settings.password:
            self.greeting.append(("AUTH", *((settings.username,) if settings.username else ()), settings.password))
        if settings.db:
            self.greeting.append(("SELECT", int(settings.db)))


class Wire:
    """Sends commands and awaits replies; connects when first used and again after a loss."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.label = address.label
        self._address = address
        self._timeout_s = timeout_s
        self._link: _Link | None = None
        self._dialing: asyncio.Task[_Link] | None = None

    async def call(self, command: Command) -> Any:
        """The reply to `command`; raises `hiredis.ReplyError` for an error reply, `StoreUnavailable` for none."""
        link = self._link
        if link is None or link.lost:
            link = await self._connect()
        return await link.send(command)

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        dialing, link = self._dialing, self._link
        self._dialing = self._link = None
        if dialing is not None:
            dialing.cancel()
            await asyncio.wait([dialing])
        if link is not None:
            link.drop("closed")
            await link.gone

    async def _connect(self) -> _Link:
        """The next connection, which all callers wait for together, each no longer than its own timeout."""
        if self._dialing is None:
            self._dialing = asyncio.get_running_loop().create_task(self._dial())
            self._dialing.add_done_callback(self._dialed)
        done, _ = await asyncio.wait([self._dialing], timeout=self._timeout_s)
        if not done:
            raise StoreUnavailable(f"store {self.label}: no connection within {self._timeout_s * 1000:.0f} ms")
        if (task := done.pop()).cancelled():
            raise StoreUnavailable(f"store {self.label}: closed")
        return task.result()

    async def _dial(self) -> _Link:
        loop, at = asyncio.get_running_loop(), self._address
        link = _Link(self.label, CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if at.path is not None:
                    await loop.create_unix_connection(lambda: link, at.path)
                else:
                    await loop.create_connection(lambda: link, at.host, at.port, ssl=at.tls)
                for command in at.greeting:
                    await link.send(command)
        except BaseException as error:
            link.drop("not ready")
            if isinstance(error, OSError | hiredis.ReplyError):
                raise StoreUnavailable(f"store {self.label}: cannot connect: {str(error) or 'timed out'}") from error
            raise
        link.timeout_s = self._timeout_s
        return link

    def _dialed(self, task: asyncio.Task[_Link]) -> None:
        if self._dialing is not task:
            return
        self._dialing = None
        if not task.cancelled() and task.exception() is None:
            self._link = task.result()


class _Link(asyncio.Protocol):
    """One connection: the futures that wait for replies in their order, and one timer for the first of them."""

    def __init__(self, label: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.lost = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is closed."""
        self._label = label
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False
        self._transport: asyncio.Transport | None = None

    def send(self, command: Command) -> asyncio.Future[Any]:
        """Send a command; the future gets its reply."""
        if self._overdue or self.lost or self._transport is None:
            raise self._unavailable("does not answer" if self._overdue else "connection lost")
        future = self._loop.create_future()
        self._waiting.append((self._loop.time() + self.timeout_s, future))
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub says: one item
        if self._timer is None:
            self._timer = self._loop.call_later(self.timeout_s, self._check)
        return future

    def drop(self, why: str) -> None:
        """Close at once; whoever waits is told."""
        self.lost = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(self._unavailable(why))
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        transport = cast("asyncio.Transport", transport)  # uvloop's transports do not derive from it
        self._transport = transport
        if self.lost:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand replies to those who wait; replies that came too late, or to someone cancelled, are let go."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                future = self._waiting.popleft()[1]
                if future.done():
                    continue
                if isinstance(reply, hiredis.ReplyError):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError):
            self.drop("does not speak the protocol of Redis")
        if self._overdue:
            self._overdue = bool(self._waiting) and self._waiting[0][0] <= self._loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.drop(f"connection lost: {exc}" if exc else "connection lost")
        if not self.gone.done():
            self.gone.set_result(None)

    def _check(self) -> None:
        """Fail those whose time is up; look again when the next one's is."""
        self._timer = None
        now = self._loop.time()
        wake_at = None
        for due, future in self._waiting:
            if due > now:
                wake_at = due
                break
            if not future.done():
                future.set_exception(self._unavailable(f"no answer within {self.timeout_s * 1000:.0f} ms"))
        if not self._waiting:
            return
        first = self._waiting[0][0]
        self._overdue = first <= now
        if first + STALL_S <= now:
            self.drop("does not answer")
            return
        self._timer = self._loop.call_at(wake_at if wake_at is not None else first + STALL_S, self._check)

    def _unavailable(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(f"store {self._label}: {why}")
