"""Sessions stay where their KV is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.conformance.case import Can, Failed, check
from tests.conformance.case import case as rule
from tests.conformance.dialects import DIALECTS, Dialect
from tests.conformance.replica import Replica
from tests.conformance.rig import Rig, Session, Turn, homes, spread

_HARNESS_HEADERS = {
    "Claude Code": "x-claude-code-session-id",
    "OpenCode": "x-session-affinity",
    "Codex": "session-id",
    "pi": "session_id",
}


async def _settle(sessions: Sequence[Session], turns: int = 2) -> dict[str, Replica]:
    """Home of each session after a few turns."""
    found = {}
    for session in sessions:
        for _ in range(turns):
            found[session.name] = (await session.turn()).replica
    return found


async def _moved(sessions: Sequence[Session], before: dict[str, Replica]) -> int:
    """How many of them are served elsewhere now."""
    return sum([(await session.turn()).replica is not before[session.name] for session in sessions])


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
    "A header's name means the same in upper and lower case.",
    "https://www.rfc-editor.org/rfc/rfc9110#section-5.1",
    needs=[Can.SESSIONS],
)
async def header_case(rig: Rig) -> None:
    stage = await rig.shared(3)
    for number in range(4):
        key = f"case-{id(stage)}-{number}"
        session = stage.session(name="")
        found: list[Turn] = []
        for name in (str.lower, str.upper, str.title, str.lower):
            session.headers = {name(rig.adapter.session_header): key}
            found.append(await session.turn())
        check(len(homes(found)) == 1, f"spellings of one header led to {len(homes(found))} replicas")


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


@rule(
    "A conversation that nothing names stays at one replica while it grows.",
    "https://github.com/sgl-project/sglang/issues/34513",
    needs=[Can.KEYLESS],
    each=DIALECTS,
)
async def unnamed_stays(rig: Rig, dialect: Dialect) -> None:
    stage = await rig.shared(3, "keyless")
    for number in range(6):
        session = stage.session(dialect, name="", system=f"You are {dialect} agent {number}.", size_bytes=4000)
        found = homes([await session.turn(stream=turn % 2 == 0) for turn in range(5)])
        check(len(found) == 1, f"5 turns of one conversation went to {len(found)} replicas")


@rule(
    "Conversations that nothing names and that share a long system prompt are spread, and each stays where it is.",
    "https://github.com/sgl-project/sglang/issues/34513",
    needs=[Can.KEYLESS],
)
async def shared_system_prompt(rig: Rig) -> None:
    stage = await rig.stage(4)
    system = "You are a coding agent with a long system prompt. " * 400
    sessions = stage.sessions(16, name="", system=system, size_bytes=2000)
    first = [(await session.turn()).replica for session in sessions]
    counts = [first.count(replica) for replica in stage.replicas]
    check(max(counts) <= 6 and min(counts) >= 2, f"16 conversations were spread {counts}")
    for session, home in zip(sessions, first, strict=True):
        for _ in range(3):
            replica = (await session.turn()).replica
            check(replica is home, "a conversation left its replica while nothing was busy")


@rule(
    "Cached tokens that could be evicted are not load: an idle replica whose KV is full keeps its sessions.",
    "https://github.com/sgl-project/sglang/pull/31170",
    needs=[Can.SESSIONS],
)
async def full_cache_is_no_load(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = stage.session()
    home = (await session.turn()).replica
    used = int(home.device_tokens * 0.95)
    home.loads = {"num_total_tokens": used}  # what is used, SGLang 0.5.23 counts without what could be evicted
    await asyncio.sleep(2.5)  # routers look about once a second
    found = homes([await session.turn() for _ in range(3)])
    check(set(found) == {home.port}, "a session left an idle replica because its cache was full")


@rule(
    "A session leaves a replica that is saturated while others are idle.",
    "https://github.com/PrimeIntellect-ai/prime-rl/pull/3255",
    needs=[Can.SESSIONS],
    limit_s=60,
    waits=True,
)
async def leaves_saturated(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = stage.session()
    home = (await session.turn()).replica
    home.loads = {
        "num_running_reqs": 64,
        "num_waiting_reqs": 200,
        "num_waiting_uncached_tokens": 8_000_000,
        "num_used_tokens": home.device_tokens,
        "token_usage": 1.0,
    }
    for _ in range(12):  # routers look about once a second, and some want to see it more than once
        await asyncio.sleep(1)
        if (await session.turn()).replica is not home:
            return
    raise Failed("12 turns in 12 s waited behind 8 million tokens while two replicas were idle")


@rule(
    "The session headers that coding agents send are honoured without being configured.",
    "https://github.com/BerriAI/litellm/issues/38078",
    "https://github.com/earendil-works/pi/issues/7161",
    needs=[Can.AGENTS],
)
async def agents_headers(rig: Rig) -> None:
    stage = await rig.shared(3)
    for agent, header in _HARNESS_HEADERS.items():
        for number in range(3):
            session = stage.session(name="", headers={header: f"{agent}-{number}-{id(stage)}"})
            found = homes([await session.turn() for _ in range(4)])
            check(len(found) == 1, f"4 turns of {agent} ({header}) went to {len(found)} replicas")


@rule(
    "A restarted router moves no session.",
    "https://github.com/sgl-project/sglang/pull/39750",
    needs=[Can.STORE],
)
async def restart_moves_nobody(rig: Rig) -> None:
    stage = await rig.stage(4, variant="several")
    sessions = stage.sessions(12)
    before = await _settle(sessions)
    await stage.router.stop()
    await stage.router.start()
    await rig.target.ready(stage, stage.router)
    moved = await _moved(sessions, before)
    check(moved == 0, f"{moved} of 12 sessions moved when the router was restarted")


@rule(
    "A replica that joins takes no session from the others.",
    "https://github.com/envoyproxy/gateway/issues/7561",
    needs=[Can.SESSIONS, Can.ADD],
)
async def join_moves_nobody(rig: Rig) -> None:
    stage = await rig.stage(3)
    sessions = stage.sessions(30)
    before = await _settle(sessions)
    await stage.add_replica()
    moved = await _moved(sessions, before)
    check(moved == 0, f"{moved} of 30 sessions moved when a fourth replica joined")


@rule(
    "A replica that comes back at its address with an empty KV cache is no longer the home of its sessions by right: "
    "they are placed by load.",
    "https://github.com/llm-d/llm-d-router/pull/1396",
    needs=[Can.SESSIONS, Can.INCARNATIONS],
    limit_s=60,
    waits=True,
)
async def new_life_is_no_home(rig: Rig) -> None:
    stage = await rig.stage(2)
    sessions = stage.sessions(6)
    before = await _settle(sessions)
    restarted = before[sessions[0].name]
    mine = [session for session in sessions if before[session.name] is restarted]
    await restarted.restart()
    await asyncio.sleep(3)  # a probe must have seen the new life
    restarted.loads = {"num_running_reqs": 40, "num_waiting_reqs": 10, "num_waiting_uncached_tokens": 200_000}
    await asyncio.sleep(8)  # some routers want to see it more than once
    for session in mine:
        turn = await session.turn()
        check(turn.replica is not restarted, "a session went back to a busy replica that had lost its KV")


@rule(
    "A turn that failed at its session's replica and was answered elsewhere takes the session along: no ping-pong.",
    "https://github.com/ai-dynamo/dynamo/pull/10920",
    "https://github.com/router-for-me/CLIProxyAPI/issues/3884",
    needs=[Can.SESSIONS],
)
async def retry_keeps_session(rig: Rig) -> None:
    stage = await rig.stage(3)
    session = stage.session()
    home = (await session.turn()).replica
    await home.stop()
    first = await session.send()
    check(first.answer.status == 200, f"the turn after the replica's death was answered {first.answer.short}")
    winner = first.replicas[-1]
    found = homes([await session.turn() for _ in range(4)])
    check(
        set(found) == {winner.port}, f"4 turns after the move went to {len(found)} replicas, the mover's own among them"
    )
