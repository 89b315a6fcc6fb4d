"""Virtual time: an asyncio loop whose clock jumps to whatever is due next, and the router's clock over it.

The loop has no selector, no self-pipe and no executor: what would wait for a socket, a thread or a child process
raises. Timers that are due at the same instant fire in the order in which they were set, so a run is a function of its
inputs; only what iterates over a set (of strings, of tasks) can break that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

__all__ = ["EPOCH_S", "NothingLeft", "VirtualClock", "VirtualLoop", "run"]

_T = TypeVar("_T")

EPOCH_S: Final = 1_000_000.0
"""The wall clock where a run begins. Small, so that a float still tells nanoseconds."""
_SAME_INSTANT_S: Final = 1e-9
"""Timers this close to each other fire in one turn of the loop."""


class NothingLeft(RuntimeError):
    """Every task waits and no timer is set: whoever waits would wait for ever."""


class _Jump:
    """What the loop takes for a selector: it waits by letting virtual time pass."""

    def __init__(self, next_due_s: Callable[[], float]) -> None:
        self.now_s = 0.0
        self._next_due_s = next_due_s

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeft("every task waits, and no timer is set")
        if timeout > 0:
            self.now_s = max(self.now_s, self._next_due_s())
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Nothing in it can wait for a socket or a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._jump = _Jump(self._next_due_s)
        self._selector = self._jump
        self._clock_resolution = _SAME_INSTANT_S

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now_s

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

    def _next_due_s(self) -> float:
        return self._scheduled[0].when()  # type: ignore[attr-defined, no-any-return]

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

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
