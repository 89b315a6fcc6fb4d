"""Virtual time: it jumps, it is the same every time, and nothing in it can wait for the real world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from simulations.clock import EPOCH_S, NothingLeft, VirtualClock, run


def test_time_jumps_to_what_is_due_next() -> None:
    """A day passes at once, and timers fire in their order, those of one instant in the order they were set."""

    async def main() -> tuple[list[str], float]:
        loop, said = asyncio.get_running_loop(), list[str]()
        for name, at_s in (("late", 86_400.0), ("soon", 0.5), ("first", 7.0), ("second", 7.0)):
            loop.call_at(at_s, said.append, name)
        await asyncio.sleep(86_400.0)
        return said, loop.time()

    assert run(main()) == (["soon", "first", "second", "late"], 86_400.0)


def test_a_timeout_comes_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 600.0


def test_the_wall_clock_can_jump_and_the_other_cannot() -> None:
    async def main() -> tuple[float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        await asyncio.sleep(5.0)
        clock.jump(-100.0)
        return clock.now_s(), clock.monotonic_s()

    assert run(main()) == (EPOCH_S - 95.0, 5.0)


def test_who_would_wait_for_ever_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft):
        run(main())


@pytest.mark.parametrize(
    "reach",
    [
        lambda: asyncio.to_thread(print),
        lambda: asyncio.open_connection("127.0.0.1", 9),
        lambda: asyncio.start_server(print, "127.0.0.1", 0),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.get_running_loop().getaddrinfo("localhost", 80),
        lambda: asyncio.get_running_loop().create_datagram_endpoint(asyncio.DatagramProtocol, ("127.0.0.1", 0)),
    ],
)
def test_the_real_world_is_out_of_reach(reach: Callable[[], Awaitable[object]]) -> None:
    """Threads, sockets and processes take real time, and the next run would go another way."""

    async def main() -> None:
        await reach()

    with pytest.raises(RuntimeError, match="in virtual time"):
        run(main())
