"""Request bodies: read whole, within a budget of bytes and of patience.

    held = await bodies.read(request, owner)   waits for room, asks for the body (`Expect`), reads it
    held.data                                  the body as it was sent (still compressed if it was)
    held.let_go()                              once nobody will send it again: its room is another's

A body must be whole before a turn can be placed, so this is where memory is spent. All bodies of the process share one
budget; who finds it spent waits in line, unread, so that TCP holds the client back, and is told after a while to come
again. A body of known length takes its room at once, others as they come; these go first in line, since they hold room
that only their end gives back. Room that is taken need not be filled: eight who announce the largest body and send none
of it would keep everybody out. So a tenant has half of the room at most, and holds up nobody but itself beyond that.

A large body is written into one growing buffer as it comes, and that buffer becomes the body without a copy (CPython's
`BytesIO.getvalue`); a small one is joined from what was read, which costs one wake-up instead of one per read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11

from router.domain.errors import MalformedRequest, RequestTooLarge, RouterBusy, TooSlow

__all__ = ["Bodies", "BodyLimits", "HeldBody"]

_JOINED_MAX_BYTES: Final = 1 << 20
_STEP_BYTES: Final = 1 << 20
"""Room that a body of unknown length takes at a time."""
_RETRY_AFTER_S: Final = 2.0
"""A body's room is free again once its turn's answer has begun, which is a matter of seconds."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much is held, and how long is waited for it."""

    body_max_bytes: int
    total_max_bytes: int = 1 << 30
    """Of all bodies held by this process."""
    wait_s: float = 10.0
    """For room."""
    idle_s: float = 30.0
    """Within this time a body must bring `rate_min` · `idle_s` bytes or end."""
    rate_min: float = 1024.0
    """Bytes per second."""


class HeldBody:
    """A body, and the room that it takes."""

    __slots__ = ("_budget", "_owner", "_size_bytes", "data")

    def __init__(self, budget: _Budget, owner: str | None) -> None:
        self._budget = budget
        self._owner = owner
        self._size_bytes = 0
        self.data = b""

    async def take(self, size_bytes: int, *, first: bool = False) -> None:
        """Wait for room for so many bytes more. Raises `RouterBusy`."""
        await self._budget.take(size_bytes, self._owner, first=first)
        self._size_bytes += size_bytes

    def keep(self, data: bytes) -> None:
        """The body is whole. Room that was taken beyond its size is given back."""
        self.data = data
        spare_bytes = self._size_bytes - len(data)
        if spare_bytes > 0:
            self._size_bytes = len(data)
            self._budget.give(spare_bytes, self._owner)

    def let_go(self) -> None:
        """Forget the body and give its room back. Idempotent."""
        size_bytes, self._size_bytes = self._size_bytes, 0
        self.data = b""
        if size_bytes:
            self._budget.give(size_bytes, self._owner)


class Bodies:
    """Reads the bodies of one process. Use from one event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._budget = _Budget(limits.total_max_bytes, limits.wait_s)

    @property
    def held_bytes(self) -> int:
        """Room taken at this moment."""
        return self._budget.taken_bytes

    async def read(self, request: web.BaseRequest, owner: str | None) -> HeldBody:
        """The whole body. `owner`: the tenant that a keys file names; None: nobody is told from others.

        Raises `RequestTooLarge` (at once where the length is announced: nothing is read then), `RouterBusy` where there
        is no room, `TooSlow`, and `MalformedRequest` where the framing is broken.
        """
        limits, length, content = self._limits, request.content_length, request.content
        if length is not None and length > limits.body_max_bytes:
            raise RequestTooLarge(f"the body has {length} bytes, more than {limits.body_max_bytes}")
        held = HeldBody(self._budget, owner)
        if length == 0 or (length is None and content.is_eof() and not content.total_bytes):
            return held
        try:
            await held.take(min(_STEP_BYTES, limits.body_max_bytes) if length is None else length)
            if not content.is_eof():
                _ask_for_body(request)
            if length is not None and length <= _JOINED_MAX_BYTES:
                held.keep(await self._joined(content, length))
            else:
                held.keep(await self._gathered(content, held, length))
        except web.RequestPayloadError as error:
            held.let_go()
            raise MalformedRequest("the body's framing is broken") from error
        except BaseException:
            held.let_go()
            raise
        return held

    async def _joined(self, content: StreamReader, length: int) -> bytes:
        if content.is_eof():
            return content.read_nowait()
        # What came before this may have paused reading already, and only taking it out resumes that (aiohttp 3.14.5
        # `StreamReader`).
        content.set_read_chunk_size(length)
        begun = content.read_nowait()
        patience = self._patience(content)
        while not content.is_eof():
            async with patience:
                await content.wait_eof()
        rest = content.read_nowait()
        return begun + rest if begun else rest

    async def _gathered(self, content: StreamReader, held: HeldBody, length: int | None) -> bytes:
        buffer = BytesIO()
        size_bytes = 0
        room_bytes = length or min(_STEP_BYTES, self._limits.body_max_bytes)
        patience = self._patience(content)
        while True:
            piece = b""
            async with patience:
                piece = await content.readany()
            if not piece:
                if content.at_eof():
                    return buffer.getvalue()
                continue
            size_bytes += len(piece)
            if size_bytes > self._limits.body_max_bytes:
                raise RequestTooLarge(f"the body has more than {self._limits.body_max_bytes} bytes")
            while size_bytes > room_bytes:
                await held.take(_STEP_BYTES, first=True)
                room_bytes += _STEP_BYTES
                patience = self._patience(content)
            buffer.write(piece)

    def _patience(self, content: StreamReader) -> _Patience:
        return _Patience(content, self._limits.idle_s, self._limits.rate_min)


class _Patience:
    """`async with patience:` around each wait. Raises `TooSlow` where one window of time brought too little."""

    __slots__ = ("_content", "_ends_s", "_least_bytes", "_loop", "_seen_bytes", "_timeout", "_window_s")

    def __init__(self, content: StreamReader, window_s: float, rate_min: float) -> None:
        self._content = content
        self._window_s = window_s
        self._least_bytes = max(1.0, window_s * rate_min)
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout_at(0.0)
        self._begin()

    def _begin(self) -> None:
        self._seen_bytes = self._content.total_bytes
        self._ends_s = self._loop.time() + self._window_s

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout_at(self._ends_s)
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: object) -> bool:
        late = False
        try:
            await self._timeout.__aexit__(*raised)  # type: ignore[arg-type]  # exc_info as it came
        except TimeoutError:
            late = True
        if raised[0] is not None and not late:
            return False
        if late or self._loop.time() >= self._ends_s:
            if self._content.total_bytes - self._seen_bytes < self._least_bytes and not self._content.is_eof():
                raise TooSlow("the body comes too slowly")
            self._begin()
        return late


class _Budget:
    """Bytes to be taken and given back, in line, at most half of them by one owner."""

    def __init__(self, max_bytes: int, wait_s: float) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._wait_s = wait_s
        self._owned: Counter[str] = Counter()
        self._line: deque[tuple[asyncio.Future[None], int, str | None]] = deque()

    @property
    def taken_bytes(self) -> int:
        return self._max_bytes - self._free_bytes

    async def take(self, size_bytes: int, owner: str | None, *, first: bool) -> None:
        turn = asyncio.get_running_loop().create_future(), size_bytes, owner
        if first:
            self._line.appendleft(turn)
        else:
            self._line.append(turn)
        self._serve()
        if turn[0].done():
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[0]
        except BaseException as error:
            if turn in self._line:
                self._line.remove(turn)
                self._serve()
            else:
                self.give(size_bytes, owner)
            if isinstance(error, TimeoutError):
                raise RouterBusy("too many request bodies are being held", _RETRY_AFTER_S) from None
            raise

    def give(self, size_bytes: int, owner: str | None) -> None:
        self._move(-size_bytes, owner)
        self._serve()

    def _move(self, size_bytes: int, owner: str | None) -> None:
        self._free_bytes -= size_bytes
        if owner is not None:
            self._owned[owner] += size_bytes
            if not self._owned[owner]:
                del self._owned[owner]

    def _within_share(self, size_bytes: int, owner: str | None) -> bool:
        owned_bytes = self._owned[owner] if owner is not None else 0
        return not owned_bytes or owned_bytes + size_bytes <= self._max_bytes // 2

    def _serve(self) -> None:
        passed_over = []
        while self._line:
            turn, size_bytes, owner = self._line[0]
            if not self._within_share(size_bytes, owner):
                passed_over.append(self._line.popleft())
                continue
            if size_bytes > self._free_bytes:
                break
            self._line.popleft()
            self._move(size_bytes, owner)
            # One that was cancelled has yet to wake up, and gives back what it finds itself to have.
            if not turn.cancelled():
                turn.set_result(None)
        self._line.extendleft(reversed(passed_over))


def _ask_for_body(request: web.BaseRequest) -> None:
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        transport = request.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
