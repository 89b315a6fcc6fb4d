"""The beginning of a stream, held back for a moment.

SGLang answers most streams with 200 before its scheduler has seen them, and says inside the stream that its queue is
full (srt/managers/scheduler.py `_abort_on_queued_limit`; seen in every dialect). It says so within milliseconds. So
where another replica could take the turn, the head waits for the first output, an error, or `patience_s`, whichever
comes first: a refusal is then known before the client has seen a byte. Nothing waits longer, and once open every read
passes at once.

Where `/v1/responses` is no stream, it says the same by a 400 whose message begins with "503: " (serving_responses.py
makes every abort one). Such an answer is short: it is read to its end before it begins for the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.domain.errors import UpstreamBroken
from router.domain.turn import Dialect, Facts
from router.ports import BodyReader, Downstream, Exchange, ResponseHead

__all__ = ["BUSY_STATUS", "Opening", "QueueFullError", "may_refuse"]

BUSY_STATUS = 503
"""What SGLang means by a full queue, as the response's status or inside its stream."""


_REFUSAL_MAX_BYTES = 4096
"""Longer answers are not read ahead; SGLang's has about 200 bytes."""


def may_refuse(facts: Facts, head: ResponseHead) -> bool:
    """Whether a response may be a refusal that its status does not tell."""
    if facts.stream:
        return head.status == 200
    short = head.content_length is not None and head.content_length <= _REFUSAL_MAX_BYTES
    return facts.dialect is Dialect.RESPONSES and head.status == 400 and short


class QueueFullError(Exception):
    """The replica refused the turn inside its response, before a byte of it went to the client."""


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
        if self._exchange.head.status >= 400:  # all of it is an error; `finish` tells which
            return
        if reader.error_code == BUSY_STATUS and not reader.first_output:
            raise QueueFullError
        if reader.first_output or reader.error is not None:
            self.open()

    def finish(self) -> None:
        """The response has ended, and the reader has been told. Raises QueueFullError."""
        if self.closed and self._kept and self._reader.error_code == BUSY_STATUS:
            raise QueueFullError
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
