"""Answers to what never becomes a request of the gateway's: written as they are, after which the connection closes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from aiohttp import web

from router.api.errors import render
from router.domain.errors import RoostError
from router.domain.turn import Dialect
from router.upstream.wire import response_head

__all__ = ["SERVER", "Refusal", "refusal"]

SERVER: Final = "roost"
"""What Roost's own answers call it: no versions. A replica's `Server` passes as it is."""


class Refusal:
    """A refusal, as aiohttp takes an answer from a handler."""

    keep_alive = False

    def __init__(self, error: RoostError, dialect: Dialect) -> None:
        self._raw = refusal(error, dialect)

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write it."""
        raw = self._raw
        if request.method == "HEAD":
            raw = raw[: raw.index(b"\r\n\r\n") + 4]
        if request.transport is not None:
            request.transport.write(raw)

    async def write_eof(self) -> None:
        """Nothing is left to write."""


def refusal(error: RoostError, dialect: Dialect) -> bytes:
    """The whole response."""
    wire = render(error, dialect)
    headers = [(name.encode(), value.encode()) for name, value in wire.headers]
    headers += [
        (b"Server", SERVER.encode()),
        (b"Content-Length", b"%d" % len(wire.body)),
        (b"Connection", b"close"),
    ]
    return response_head(wire.status, HTTPStatus(wire.status).phrase.encode(), headers) + wire.body
