"""Virtual time: an asyncio loop whose clock jumps to whatever is due next, and the router's clock over it.

The loop has no selector, no self-pipe and no executor: what would wait for a socket, a thread or a child process
raises. Timers that are due at the same instant fire in the order in which they were set, so a run is a function of its
inputs; only what iterates over a set (of strings, of tasks) can break that.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heapify, heappop, heappush
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple

__all__ = ["EPOCH_S", "NothingLeft", "VirtualClock", "VirtualLoop", "run"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

EPOCH_S: Final = 1_000_000.0
"""The wall clock where a run begins. Small, so that a float still tells nanoseconds."""
_SAME_INSTANT_S: Final = 1e-9
"""Timers this close to each other fire in one turn of the loop."""
_CANCELLED_MIN: Final = 100


class NothingLeft(RuntimeError):
    """Every task waits and no timer is set: whoever waits would wait for ever."""


def _nothing() -> None:
    """What a cancelled timer calls."""


class _NoSelector:
    """What the loop asks when nothing is due: in virtual time nobody can come from outside."""

    def select(self, timeout: float | None) -> list[Any]:  # noqa: ARG002 (the selector's signature)
        raise NothingLeft("every task waits, and no timer is set")


class _Soon(asyncio.Handle):
    """A handle, made with less around it."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = context if context is not None else contextvars.copy_context()
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._source_traceback = self._repr = None


class _Timer(asyncio.TimerHandle):
    """A timer; the loop's heap compares a tuple in its place."""

    __slots__ = ()
    _loop: VirtualLoop

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = context if context is not None else contextvars.copy_context()
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._source_traceback = self._repr = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        """See `asyncio.Handle.cancel`."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = _nothing, ()  # what they hold is let go of now
            if self._scheduled:
                self._loop.timer_cancelled()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Nothing in it can wait for a socket or a thread.

    It runs callbacks as `BaseEventLoop` does, with less around them: half of a simulation would be asyncio's own work.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, int, _Timer]]
    """When, which number, what: a heap."""
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self._now_s = 0.0
        self._numbers = 0
        self._cancelled_count = 0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`."""
        handle = _Soon(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_later`."""
        when = self._now_s + delay
        timer = _Timer(when, callback, args, self, context)
        self._numbers += 1
        heappush(self._scheduled, (when, self._numbers, timer))
        return timer

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`."""
        timer = _Timer(when, callback, args, self, context)
        self._numbers += 1
        heappush(self._scheduled, (when, self._numbers, timer))
        return timer

    def timer_cancelled(self) -> None:
        """Forget cancelled timers when they are most of all."""
        self._cancelled_count += 1
        if self._cancelled_count > _CANCELLED_MIN and 2 * self._cancelled_count > len(self._scheduled):
            self._scheduled = [entry for entry in self._scheduled if not entry[2]._cancelled]  # noqa: SLF001
            heapify(self._scheduled)
            self._cancelled_count = 0

    def _run_once(self) -> None:
        """What is ready runs once, after time has passed to the next timer if nothing is."""
        ready = self._ready
        if not ready and not self._stopping:
            self._pass_time()
        due_s = self._now_s + _SAME_INSTANT_S
        while self._scheduled and self._scheduled[0][0] < due_s:
            timer = heappop(self._scheduled)[2]
            timer._scheduled = False  # noqa: SLF001 (this loop's own)
            if timer.cancelled():
                self._cancelled_count -= 1
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if handle._cancelled:  # noqa: SLF001 (this loop's own handles)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # noqa: SLF001
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 (as asyncio's own loop)
                self.call_exception_handler(
                    {"message": f"Exception in callback {handle!r}", "exception": error, "handle": handle}
                )

    def _pass_time(self) -> None:
        while self._scheduled and self._scheduled[0][2].cancelled():
            heappop(self._scheduled)
            self._cancelled_count -= 1
        if not self._scheduled:
            self._selector.select(None)
        self._now_s = max(self._now_s, self._scheduled[0][0])

    def run_in_executor(self, *_: object) -> NoReturn:
        """Refused."""
        raise RuntimeError("a thread in virtual time")

    def _refused(self, *_: object, **__: object) -> NoReturn:
        """Refused."""
        raise RuntimeError("a socket or a process in virtual time")

    create_connection = create_server = create_datagram_endpoint = _refused
    create_unix_connection = create_unix_server = sendfile = start_tls = _refused
    add_reader = add_writer = sock_recv = sock_sendall = sock_connect = sock_accept = _refused
    subprocess_exec = subprocess_shell = connect_read_pipe = connect_write_pipe = _refused
    add_signal_handler = _refused

    def _write_to_self(self) -> None:
        """Nobody sleeps in a system call."""


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """What `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The loop's time as the router's two clocks; only the wall clock can be set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic_s = loop.time
        self._loop = loop
        self._offset_s = EPOCH_S

    def now_s(self) -> float:
        """Unix seconds."""
        return self._loop.time() + self._offset_s

    def jump(self, by_s: float) -> None:
        """Set the wall clock on, or back."""
        self._offset_s += by_s
