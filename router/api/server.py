"""The public listener: aiohttp's low-level server over connections of our own (`router.api.connection`).

Not `web.Application`: no routing, no signals, no access log. Heads that the grammar lets pass and HTTP forbids
(`router.api.head_rules`) reach no handler; and at its end it says when no request is under way any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

from aiohttp import web

from router.api.connection import ClientConnection, ClientLimits, Places
from router.api.head_rules import head_refusal, path_of
from router.api.paths import error_dialect
from router.api.refusal import Refusal

__all__ = ["RelayServer"]

_LOG = logging.getLogger("roost.http")


class RelayServer(web.Server):
    """The protocol factory for `loop.create_server`. Make it inside the running event loop.

    A client that goes away cancels its handler at once, whatever the handler awaits.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__(self._checked, handler_cancellation=True)
        self._handler = handler
        self._limits = limits or ClientLimits()
        self._places = Places(self._limits.connections_max)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __call__(self) -> ClientConnection:
        """One protocol per connection."""
        return ClientConnection(self, self._places, loop=self._loop, limits=self._limits)

    def retire(self) -> None:
        """No request is taken any more but those under way: idle connections are closed, others after their answer."""
        for connection in self.connections:
            cast("ClientConnection", connection).retire()

    async def idle(self, patience_s: float) -> int:
        """Wait until no request is under way, at most `patience_s`; returns how many still are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        return self._under_way

    async def _checked(self, request: web.BaseRequest) -> web.StreamResponse:
        """The handler's answer, or a refusal of heads that no handler should see."""
        target = request.raw_path
        refusal = head_refusal(request.method, request.version, target, request.headers)
        if refusal is None:
            self._under_way += 1
            self._idle.clear()
            try:
                return await self._handler(request)
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.set()
        _LOG.info("refused a request: %s", refusal)
        return cast("web.StreamResponse", Refusal(refusal, error_dialect(path_of(target))))
