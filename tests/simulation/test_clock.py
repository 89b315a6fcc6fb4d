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


def test_cancelled_timers_are_forgotten_and_the_others_keep_their_order() -> None:
    """However many are set and cancelled, as a deadline of ten minutes is for each turn of a second."""

    async def main() -> tuple[list[int], int]:
        loop, said, most = asyncio.get_running_loop(), list[int](), 0
        for number in range(1000):
            loop.call_at(7.0, said.append, number)
            for _ in range(10):
                loop.call_at(600.0, said.append, -1).cancel()
            most = max(most, len(loop._scheduled))  # type: ignore[attr-defined]
        await asyncio.sleep(700.0)
        return said, most

    said, most = run(main())
    assert said == list(range(1000))
    assert most < 2500


def test_a_callback_that_fails_is_told_and_the_rest_goes_on() -> None:
    async def main() -> tuple[list[str], list[str]]:
        loop, said, told = asyncio.get_running_loop(), list[str](), list[str]()
        loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        loop.call_soon(lambda: 1 // 0)
        loop.call_soon(said.append, "next")
        await asyncio.sleep(1.0)
        return said, told

    assert run(main()) == (["next"], ["ZeroDivisionError('integer division or modulo by zero')"])


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
