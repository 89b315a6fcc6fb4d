"""Clients go away, and the replica must learn of it at once."""

from __future__ import annotations

import asyncio

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.client import connection
from tests.conformance.dialects import DIALECTS, TERMINAL, Dialect
from tests.conformance.replica import Gate
from tests.conformance.rig import Rig, Stage, until

_LEFT = (
    "https://github.com/vllm-project/router/pull/215",
    "https://github.com/sgl-project/sglang-omni/pull/931",
)


async def _leave(stage: Stage, dialect: Dialect, gate: Gate, *, stream: bool, began: bool) -> None:
    """Six clients that go away while their replicas wait; every replica must see its connection close within 2 s."""
    stage.script(gate)

    async def one() -> None:
        session = stage.session(dialect)
        body, _ = session.next(stream=stream)
        async with connection(stage.router.port) as flow:
            await flow.send("POST", dialect.path, body, session.all_headers)
            if began:
                await flow.head()
                check(await flow.piece(), "no event came")
            else:
                await arrived.wait()
            flow.abort()

    arrived = asyncio.Event()
    clients = [asyncio.create_task(one()) for _ in range(6)]
    await until(lambda: gate.arrived >= 6, 10.0, "not all of 6 turns reached a replica")
    arrived.set()
    await asyncio.gather(*clients)
    try:
        await until(lambda: gate.left >= 6, 2.5, "6 clients left and not all replicas saw their connections close")
    finally:
        gate.open()
    if stage.adapter.in_flight and Can.IN_FLIGHT in stage.adapter.can:
        await stage.idle(within_s=2.5)


@rule(
    "A client that goes before the response's head is gone for the replica within 2 s, and nothing stays in flight.",
    *_LEFT,
    each=DIALECTS,
)
async def before_the_head(rig: Rig, dialect: Dialect) -> None:
    await _leave(await rig.shared(), dialect, Gate(), stream=True, began=False)


@rule(
    "A client that goes in the middle of a stream, while its replica is silent, is gone for the replica within 2 s.",
    *_LEFT,
    each=DIALECTS,
)
async def midway(rig: Rig, dialect: Dialect) -> None:
    await _leave(await rig.shared(), dialect, Gate(begin=True), stream=True, began=True)


@rule(
    "A client that goes while it waits for a plain answer is gone for the replica within 2 s.",
    *_LEFT,
    each=DIALECTS,
)
async def waiting(rig: Rig, dialect: Dialect) -> None:
    await _leave(await rig.shared(), dialect, Gate(), stream=False, began=False)


@rule(
    "A client that closes right after the terminal event, as Codex does, harms nobody: the next turn is served.",
    "Roost",
    each=DIALECTS,
)
async def after_the_terminal_event(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared()
    session = stage.session(dialect)
    for _ in range(3):
        body, _ = session.next()
        async with connection(stage.router.port) as flow:
            await flow.send("POST", dialect.path, body, session.all_headers)
            await flow.head()
            got = b""
            while TERMINAL[dialect] not in got:
                piece = await flow.piece()
                check(piece, "the stream ended without its terminal event")
                got += piece
            flow.abort()
    await session.turn()


@rule(
    "Clients that left weigh nothing: later sessions are spread as if they had never been there.",
    "https://github.com/vllm-project/router/pull/215",
    needs=[Can.SESSIONS],
)
async def leaves_no_load(rig: Rig) -> None:
    stage = await rig.stage(2)
    await _leave(stage, Dialect.CHAT, Gate(begin=True), stream=True, began=True)
    for replica in stage.replicas:
        replica.reset()
    gate = Gate()
    stage.script(gate)
    held = []
    for session in stage.sessions(8, size_bytes=8000):
        body, _ = session.next()
        held.append(asyncio.create_task(stage.router.request("POST", session.dialect.path, body, session.all_headers)))
    await until(lambda: gate.arrived >= 8, 10.0, "not all of 8 turns reached a replica")
    counts = stage.counts()
    gate.open()
    await asyncio.gather(*held)
    check(max(counts) - min(counts) <= 2, f"after others had left, 8 sessions were spread {counts}")
