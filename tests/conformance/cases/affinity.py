"""Sessions stay where their KV is."""

from __future__ import annotations

import asyncio

from tests.conformance.case import Can, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import DIALECTS, Dialect
from tests.conformance.rig import Rig, homes, spread


@rule(
    "Every turn of a session that a header names goes to the replica of its first turn, on every API.",
    "https://github.com/rainway-ai-gateway/ai-gateway-api/issues/181",
    "https://github.com/BerriAI/litellm/issues/38078",
    needs=[Can.SESSIONS],
    each=DIALECTS,
)
async def session_stays(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared(3)
    for session in stage.sessions(6, dialect):
        found = homes([await session.turn(stream=number % 2 == 0) for number in range(5)])
        check(len(found) == 1, f"5 turns of one session went to {len(found)} replicas ({spread(stage.replicas)})")


@rule(
    "Ten first requests of one session that arrive at the same moment make one binding: all later turns stay together.",
    "https://github.com/BerriAI/litellm/pull/36146",
    "https://github.com/sgl-project/sglang/pull/40086",
    needs=[Can.SESSIONS],
)
async def racing_first_turns(rig: Rig) -> None:
    stage = await rig.stage(4)
    session = stage.session()
    body, _ = session.next()
    path, headers = session.dialect.path, session.all_headers
    await asyncio.gather(*(stage.router.request("POST", path, body, headers) for _ in range(10)))
    found = homes([await session.turn() for _ in range(5)])
    check(len(found) == 1, f"5 later turns went to {len(found)} replicas")
