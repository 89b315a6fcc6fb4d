"""One connection to a Redis server, shared by all calls of a process.

Commands go out in the order they come and replies return in that order, so any number of calls can be under way on
one connection (pipelining). Per script call with 50 replicas in the reply (uvloop), redis-py's client took 120 µs of
CPU, its bare connection 89 and this 22; so redis-py gives only the reading of the URL and the TLS settings, hiredis
the protocol.

Every call says by when it needs its answer (`due`, in the loop's time). A server that hangs costs a call that long at
most, and the calls after it nothing: while a reply is overdue they fail at once. The connection stays until the
overdue reply comes (all is well again) or `STALL_S` have passed; only then it is replaced. So there is never more than
one connection, however many calls fail. Likewise a connection that takes long to make, or could not be made, makes
only the first calls wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import hiredis

from router.domain.errors import StoreUnavailable
from router.store.address import Address, Command

__all__ = ["CONNECT_TIMEOUT_S", "Wire", "fixed"]

CONNECT_TIMEOUT_S = 1.0
"""Longer than a call may take: TLS and a login need several round trips. Callers do not wait that long for it."""

STALL_S = 2.0
"""Silence after which a connection is given up, since its server may be gone without a word."""

GRACE_S = 0.005
"""What a call gets beyond its time, for the loop to read what has come. Time may have passed because the loop was held
up, on a busy core or by a large body, and not because the server was silent; uvloop then runs its timers before it
reads, and counts the time of a call from the beginning of the loop's turn in which it is sent.
"""

REDIAL_S = 0.05
"""After a connection could not be made, calls fail at once for so long: a server that refuses is not hammered."""

_DEMOTED = ("READONLY", "MASTERDOWN")


def fixed(address: Address) -> Callable[[], Awaitable[Address]]:
    """For a `Wire` to a server that stays where it is."""

    async def locate() -> Address:
        return address

    return locate


class Wire:
    """Sends commands and awaits replies; connects when first used and again after a loss.

    Before each connection `locate` says where to: it may ask others, and raise StoreUnavailable. With `master_only` a
    server that says it is a replica is not accepted.
    """

    def __init__(self, label: str, locate: Callable[[], Awaitable[Address]], *, master_only: bool = False) -> None:
        self.label = label
        self._locate = locate
        self._master_only = master_only
        self._link: _Link | None = None
        self._dialing: asyncio.Task[_Link] | None = None
        self._dialed_at_s = 0.0
        self._refused: tuple[float, str] | None = None
        """Until when no connection is tried, and why."""

    @property
    def answers(self) -> bool:
        """Whether there is a connection and no reply is overdue."""
        return self._link is not None and self._link.answers

    async def call(self, command: Command, due: float, *, asking: bool = False) -> Any:
        """The reply to `command`; raises `hiredis.ReplyError` for an error reply, `StoreUnavailable` for none in time.

        `asking` sends ASKING just before it: a node of a cluster then serves a slot that is on its way to it.
        """
        link = self._link
        if link is None or link.lost:
            link = await self._connect(due)
        if asking:
            link.send(("ASKING",), due).add_done_callback(_forget)
        try:
            return await link.send(command, due)
        except hiredis.ReplyError as error:
            # A failover, perhaps behind a name or a proxy: the next call connects to who is the master then.
            if str(error).startswith(_DEMOTED) and link is self._link:
                self.lose("its server is no longer the master")
            raise

    def lose(self, why: str) -> None:
        """Give the connection up, also one being made; calls under way fail, the next one connects anew."""
        dialing, link = self._dialing, self._link
        self._dialing = self._link = self._refused = None
        if dialing is not None:
            dialing.cancel()
        if link is not None:
            link.drop(why)

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        dialing, link = self._dialing, self._link
        self.lose("closed")
        if dialing is not None:
            await asyncio.wait([dialing])
        if link is not None:
            await link.gone

    async def _connect(self, due: float) -> _Link:
        """The next connection, which all callers wait for together, each no longer than its own time."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._refused is not None:
            if now < self._refused[0]:
                raise StoreUnavailable(self._refused[1])
            self._refused = None
        if self._dialing is None:
            self._dialed_at_s = now
            self._dialing = loop.create_task(self._dial())
            self._dialing.add_done_callback(self._dialed)
        allowed_s = due - now  # counted from when the connection was begun: the first calls wait, later ones less
        done, _ = await asyncio.wait([self._dialing], timeout=max(0.0, self._dialed_at_s + allowed_s - now))
        if not done:
            raise StoreUnavailable(f"store {self.label}: no connection within {allowed_s * 1000:.0f} ms")
        if (task := done.pop()).cancelled():
            raise StoreUnavailable(f"store {self.label}: connection given up")
        return task.result()

    async def _dial(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = _Link(self.label)
        due = loop.time() + CONNECT_TIMEOUT_S
        where, greeting = "", list[Command]()
        try:
            async with asyncio.timeout_at(due):
                at = await self._locate()
                where = "" if at.label == self.label else f" to {at.label}"
                if at.path is not None:
                    await loop.create_unix_connection(lambda: link, at.path)
                else:
                    await loop.create_connection(lambda: link, at.host, at.port, ssl=at.tls)
                greeting = at.greeting()
                for command in greeting:
                    await link.send(command, due)
                if self._master_only:
                    self._check_master(at, await link.send(("ROLE",), due))
        except BaseException as error:
            link.drop("not ready")
            if isinstance(error, OSError | hiredis.ReplyError):
                said = _without_secrets(str(error), greeting) or "timed out"
                raise StoreUnavailable(f"store {self.label}: cannot connect{where}: {said}") from error
            raise
        return link

    def _check_master(self, at: Address, role: Any) -> None:
        if not isinstance(role, list) or role[:1] != [b"master"]:
            is_replica = isinstance(role, list) and role[:1] == [b"slave"]
            raise StoreUnavailable(
                f"store {self.label}: {at.label} is {'a replica' if is_replica else 'something else'}, not the master"
            )

    def _dialed(self, task: asyncio.Task[_Link]) -> None:
        if self._dialing is not task:
            if not task.cancelled() and task.exception() is None:
                task.result().drop("given up")
            return
        self._dialing = None
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._link = task.result()
        else:
            self._refused = (asyncio.get_running_loop().time() + REDIAL_S, str(error))


def _without_secrets(said: str, greeting: list[Command]) -> str:
    """An error as it may be shown: a server that does not know AUTH repeats what it was told."""
    for command in greeting:
        if command[0] == "AUTH":
            said = said.replace(str(command[-1]), "***")
    return said


def _forget(reply: asyncio.Future[Any]) -> None:
    """An answer nobody waits for, whose error needs no mention."""
    if not reply.cancelled():
        reply.exception()


class _Link(asyncio.Protocol):
    """One connection: the futures that wait for replies in their order, and one timer for the first of them."""

    def __init__(self, label: str) -> None:
        self.lost = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is closed."""
        self._label = label
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at_s = math.inf
        self._overdue = False
        self._looked_at_s = -math.inf
        """When calls were last checked."""
        self._transport: asyncio.Transport | None = None

    @property
    def answers(self) -> bool:
        """Whether it stands and no reply is overdue."""
        return not (self.lost or self._overdue)

    def send(self, command: Command, due: float) -> asyncio.Future[Any]:
        """Send a command; the future gets its reply."""
        if self._overdue or self.lost or self._transport is None:
            raise self._unavailable("does not answer" if self._overdue else "connection lost")
        future = self._loop.create_future()
        self._waiting.append((due, future))
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub says: one item
        if due < self._wakes_at_s:
            self._wake_at(max(due, self._looked_at_s + GRACE_S))
        return future

    def drop(self, why: str) -> None:
        """Close at once; whoever waits is told."""
        self.lost = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(self._unavailable(why))
        self._waiting.clear()
        self._wake_at(math.inf)
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
        """Fail those whose time was up at the last look already; look again when the next one's is.

        Looks are `GRACE_S` apart, so that the loop has read in between.
        """
        now, looked_at_s = self._loop.time(), self._looked_at_s
        self._looked_at_s = now
        wake_at_s = math.inf
        for due, future in self._waiting:  # not always in order: a call's second command has the first one's time
            if due > looked_at_s:
                wake_at_s = min(max(due, now + GRACE_S), wake_at_s)
            elif not future.done():
                future.set_exception(self._unavailable("no answer in time"))
        if self._waiting:
            first = self._waiting[0][0]
            self._overdue = first <= looked_at_s
            if first + STALL_S <= looked_at_s:
                self.drop("does not answer")
                return
            wake_at_s = min(wake_at_s, max(first + STALL_S, now + GRACE_S))
        self._wake_at(wake_at_s)

    def _wake_at(self, time_s: float) -> None:
        """Look for calls whose time is up at that time, and not before."""
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at_s = time_s
        self._timer = None if time_s == math.inf else self._loop.call_at(time_s, self._check)

    def _unavailable(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(f"store {self._label}: {why}")
