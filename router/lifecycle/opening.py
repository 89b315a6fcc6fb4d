"""The beginning of a stream, held back for a moment.

SGLang answers most streams with 200 before its scheduler has seen them, and says inside the stream that its queue is
full (srt/managers/scheduler.py `_abort_on_queued_limit`; seen in every dialect). It says so within milliseconds. So
where another replica could take the turn, the head waits for the first output, an error, or `patience_s`, whichever
comes first: a refusal is then known before the client has seen a byte. Nothing waits longer, and once open every read
passes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.domain.errors import UpstreamBroken
from router.ports import BodyReader, Downstream, Exchange

__all__ = ["BUSY_STATUS", "Opening", "QueueFullError"]

BUSY_STATUS = 503
"""What SGLang means by a full queue, as the response's status or inside its stream."""


class QueueFullError(Exception):
    """The replica refused the turn inside its stream, before a byte of it went to the client."""


class Opening:
    """A response that has not begun for the client. Exactly one of `open` and an error ends it."""

    __slots__ = ("_down", "_exchange", "_kept", "_reader", "_start", "_timer")

    def __init__(self, down: Downstream, exchange: Exchange, reader: BodyReader, start: Callable[[], None]) -> None:
        """`start` writes the head."""
        self._down = down
        self._exchange = exchange
        self._reader = reader
        self._start = start
        self._kept: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether the client has seen nothing yet."""
        return not self._down.started

    def wait(self, patience_s: float) -> None:
        """Open after `patience_s` at the latest."""
        self._timer = asyncio.get_running_loop().call_later(patience_s, self._give_up)

    def keep(self, data: bytes) -> None:
        """Take in a read that the reader has just seen. Raises QueueFullError."""
        self._kept.append(data)
        reader = self._reader
        if reader.error_code == BUSY_STATUS and not reader.first_output:
            raise QueueFullError
        if reader.first_output or reader.error is not None:
            self.open()

    def open(self) -> None:
        """Begin: the head, and what was kept."""
        self.forget()
        if self._down.started:
            return
        self._start()
        self._down.bind(self._exchange)
        for data in self._kept:
            self._down.write(data)
        self._kept.clear()

    def forget(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        try:
            self.open()
        except UpstreamBroken:  # a head that cannot be passed on: relaying ends with the same error
            self._exchange.abort()
