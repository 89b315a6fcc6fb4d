"""One engine on one port, through its lives.

A life is a replica model and its driver. It ends with `stop`, after what runs has ended, or with `crash`, at once; a
crashed engine may come back on the same port, with an empty cache and under another incarnation.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from simulations.engine.ledger import Ledger
from simulations.engine.told import Self
from simulations.engine_server.driver import Driver
from simulations.engine_server.surface import errors, routes
from simulations.replica_model import ReplicaModel, ReplicaProfile, faster

__all__ = ["SIMULATED_HEADER", "Engine"]

SIMULATED_HEADER = "x-roost-simulated"
_KEEP_ALIVE_S = 5.0
"""SGLANG_TIMEOUT_KEEP_ALIVE."""
_SHUTDOWN_S = 0.1
"""For turns under way when the end comes at once; `drain` is what waits for them."""
_BODY_MAX_BYTES = 256 * 1024 * 1024
_TICK_S = 0.02


class Engine:
    """A simulated SGLang server. Use from one event loop."""

    def __init__(
        self,
        profile: ReplicaProfile,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "",
        seed: int = 0,
        time_scale: float = 1.0,
        cache_report: bool = True,
    ) -> None:
        """`port` 0 takes a free one at the first start; `time_scale` 10 is ten times faster than the profile."""
        self.host = host
        self.port = port
        self.draining = False
        self.on_crash: Callable[[Engine], None] | None = None
        """Told of a crash without return."""
        self._reviving: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self.me = Self(
            profile=profile,
            served_model=model or profile.model,
            seed=seed,
            time_scale=time_scale,
            cache_report=cache_report,
            startup_s=0.0,
        )
        self._fast = faster(profile, time_scale)
        self.driver: Driver
        self.ledger: Ledger

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Begin a life and listen. Raises OSError where the port is taken."""
        # A real start's duration differs between lives in its digits; so must this, whatever the seed.
        self.me = replace(self.me, startup_s=20.0 + time.time_ns() % 10**9 / 10**9)
        model = ReplicaModel(self._fast, self.me.seed, asyncio.get_running_loop().time())
        self.driver = Driver(model, _TICK_S)
        self.ledger = Ledger()
        app = web.Application(middlewares=[errors], client_max_size=_BODY_MAX_BYTES)
        app.add_routes(routes(self))
        app.on_response_prepare.append(self._prepare)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True, backlog=1024)
        await site.start()
        server = site._server  # noqa: SLF001 (aiohttp tells the bound port nowhere else)
        assert isinstance(server, asyncio.Server)
        self.port = server.sockets[0].getsockname()[1]

    async def drain(self) -> None:
        """What SIGTERM does: not ready any more, still taking turns; returns once none runs."""
        self.draining = True
        await self.driver.idle()

    async def stop(self) -> None:
        """Listen no more and end whatever runs."""
        if self._reviving is not None:
            self._reviving.cancel()
            with suppress(asyncio.CancelledError):
                await self._reviving
        await self._end()

    def crash(self, restart_after_s: float | None) -> None:
        """Die: connections are reset, nobody listens; perhaps come back."""
        self._reviving = asyncio.get_running_loop().create_task(self._crash(restart_after_s), name="engine crash")

    async def _crash(self, restart_after_s: float | None) -> None:
        await self._end(reset=True)
        if restart_after_s is None:
            if self.on_crash is not None:
                self.on_crash(self)
            return
        await asyncio.sleep(restart_after_s)
        self._reviving = None
        await self.start()

    async def _end(self, *, reset: bool = False) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if reset:
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if isinstance(connection.transport, asyncio.Transport):
                    _linger_not(connection.transport)
                    connection.transport.abort()
        self.driver.close()
        await runner.cleanup()

    async def _prepare(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers[SIMULATED_HEADER] = "true"
        response.headers["Server"] = "uvicorn"
        response.headers["Vary"] = "Origin"


def _linger_not(transport: asyncio.Transport) -> None:
    """Closing is to reset the connection, as the death of a process with unread data does."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
