"""Long silences of an event stream, kept alive by comments.

A client, or a proxy in between, may take silence for death: coding agents give up after two to six minutes, proxies
mostly after one. Where the operator asks for it, a stream that is silent for `every_s` gets a comment, which the event
stream format has readers ignore. It stands between events, never inside one, and none comes after the last event or an
error. Nothing else of the stream changes.
"""

from __future__ import annotations

import asyncio
from typing import Final

from router.ports import BodyReader, Downstream

__all__ = ["COMMENT", "Heartbeat"]

COMMENT: Final = b": keep-alive\n\n"


class Heartbeat:
    """Comments in one stream, from its making until `stop`."""

    __slots__ = ("_down", "_every_s", "_loop", "_reader", "_timer", "_wrote_s")

    def __init__(self, down: Downstream, reader: BodyReader, every_s: float) -> None:
        self._down = down
        self._reader = reader
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._wrote_s = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._look)

    def wrote(self) -> None:
        """Bytes of the stream went out."""
        self._wrote_s = self._loop.time()

    def stop(self) -> None:
        """No more comments."""
        self._timer.cancel()

    def _look(self) -> None:
        due_s = self._wrote_s + self._every_s
        if self._loop.time() >= due_s:
            if self._down.started and self._reader.between_events:
                self._down.write(COMMENT)
            self.wrote()
            due_s = self._wrote_s + self._every_s
        self._timer = self._loop.call_at(due_s, self._look)
