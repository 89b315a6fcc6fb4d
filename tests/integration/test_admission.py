"""New sessions wait before a fleet thrashes: the known flow, tenants take turns, the rest are told to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.domain.turn import Dialect
from router.settings import Fleet, Limits, Placement, Settings, Timeouts
from tests.integration.conversations import Conversation, prose
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, PATIENCE_S, Replica, replicas
from tests.integration.roosts import PROBE_INTERVAL_S, Answer, Roost, running, settings_for

ROOM_TOKENS = 1_050
"""For two sessions of about 520 tokens."""
FOREVER_S = 1e9


def settings(
    given: list[Replica], *, half_life_s: float = FOREVER_S, queue_max: int = 100, queue_s: float = PATIENCE_S
) -> Settings:
    """A fleet that counts live tokens so long, and lets so many wait so long."""
    fleet = Fleet(name="default", replicas=tuple(each.url for each in given), probe_interval_s=PROBE_INTERVAL_S)
    return settings_for(
        [fleet],
        placement=Placement(live_half_life_s=half_life_s),
        limits=Limits(queue_max=queue_max),
        timeouts=Timeouts(ready_lag_s=0.0, shutdown_grace_s=PATIENCE_S, queue_s=queue_s),
    )


@asynccontextmanager
async def small(**given: float) -> AsyncIterator[Roost]:
    """Roost before one replica with room for two sessions, which live there, and somebody else's turn that runs."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(replicas(1, device_tokens=ROOM_TOKENS, loads={"num_running_reqs": 1}))
        roost = await stack.enter_async_context(running(settings(fleet, **given), fleet))  # type: ignore[arg-type]
        for number in range(2):
            await roost.turn(session(f"old {number}"))
        await until_busy(roost)
        yield roost


async def until_busy(roost: Roost) -> None:
    """Until somebody else's turn is known of: in an idle fleet nobody waits."""

    async def busy() -> bool:
        return all(each["foreign_in_flight"] for each in (await roost.replicas()).values())

    await roost.until(busy)


def session(name: str, dialect: Dialect = Dialect.CHAT, **changes: object) -> Conversation:
    return Conversation(name, dialect, header=("x-session-id", name), **changes)  # type: ignore[arg-type]


async def ask(roost: Roost, asked: Conversation, **headers: str) -> Answer:
    return await roost.request("POST", PATHS[asked.dialect], asked.body(), {**asked.headers, **headers})


async def sample(roost: Roost, name: str, **labels: str) -> float:
    """A metric's value; 0 where it is not there yet."""
    families = text_string_to_metric_families(await roost.metrics())
    samples = (each for family in families for each in family.samples if each.name == name)
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


async def until_waiting(roost: Roost, count: int) -> None:
    async def so_many() -> bool:
        return await sample(roost, "roost_waiting") == count

    await roost.until(so_many)


@asynccontextmanager
async def waiting(roost: Roost, *asked: Conversation) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Turns that sit in the waiting room, in this order."""
    tasks: list[asyncio.Task[Answer]] = []
    try:
        for each in asked:
            tasks.append(asyncio.create_task(ask(roost, each)))
            await until_waiting(roost, len(tasks))
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_sessions_beyond_the_room_wait_and_known_ones_flow() -> None:
    async with small() as roost:
        known = session("old 0")
        async with waiting(roost, session("new")) as (task,):
            for _ in range(3):
                known.grow()
                assert (await roost.turn(known)).reason == "home"
            fork = session("old 0")
            fork.said = [*known.said[:-1], prose("asks otherwise", 2000)]
            assert (await roost.turn(fork)).status == 200
            subagent = Conversation("find", header=("x-session-id", "old 1"), system="You find files.")
            assert (await roost.turn(subagent)).status == 200
            opencodes = session("own id", system="You find files.")
            assert (await ask(roost, opencodes, **{"x-parent-session-id": "old 1"})).status == 200
            assert not task.done()
            assert await sample(roost, "roost_waiting", fleet="default") == 1


async def test_a_new_session_gets_in_when_the_old_ones_have_been_silent() -> None:
    async with small(half_life_s=2.0) as roost:
        answer = await ask(roost, session("new"))
        assert (answer.status, answer.reason) == (200, "new")
        decision = (await roost.decisions(1))[0]
        assert decision["waited_s"] > 0
        assert decision["place_s"] < decision["waited_s"]
        assert await sample(roost, "roost_wait_seconds_count", fleet="default", result="admitted") == 1
        assert await sample(roost, "roost_waiting") == 0


async def test_a_replica_that_joins_lets_the_waiting_in() -> None:
    async with small() as roost, replicas(1) as more, waiting(roost, session("new")) as (task,):
        status, _ = await roost.admin("POST", "/admin/replicas", {"url": more[0].url})
        assert status in (200, 201)
        assert (await task).replica == more[0].id


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_who_waits_in_vain_is_told_to_come_back_in_its_dialect(dialect: Dialect) -> None:
    """A 503 with Retry-After, which every harness heeds, under no name that ends an agent's retries."""
    async with small(queue_s=0.05) as roost:
        answer = await ask(roost, session("new", dialect))
        assert (answer.status, answer.headers["x-roost-error"]) == (503, "fleet_full")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        told = json.loads(answer.body)["error"]
        assert "full" in told["message"]
        assert "overloaded" not in json.dumps(told)
        refused = await sample(roost, "roost_requests_refused_total", code="fleet_full", dialect=dialect.value)
        assert refused == 1
        assert await sample(roost, "roost_wait_seconds_count", result="not_admitted") == 1


async def test_beyond_the_queue_clients_are_told_at_once() -> None:
    async with small(queue_max=2) as roost:
        async with waiting(roost, session("n1"), session("n2")):
            answers = [await ask(roost, session(f"n{number}")) for number in range(3, 9)]
        assert {answer.status for answer in answers} == {503}
        assert len({answer.headers["retry-after"] for answer in answers}) > 1, "they would all come back at once"


async def test_one_tenant_cannot_fill_the_queue_and_tenants_take_turns() -> None:
    """Of four seats two go to the tenant that came second; room for one at a time then comes in turns."""
    async with small(queue_max=4) as roost, replicas(1, device_tokens=950) as more:
        greedy = [session(f"g{number}", key="greedy") for number in range(4)]
        modest = [session(f"m{number}", key="modest") for number in range(2)]
        async with waiting(roost, *greedy) as tasks:
            others = [asyncio.create_task(ask(roost, each)) for each in modest]
            displaced = await asyncio.gather(tasks[3], tasks[2])
            assert [answer.headers["x-roost-error"] for answer in displaced] == ["fleet_full"] * 2
            await roost.admin("POST", "/admin/replicas", {"url": more[0].url})
            admitted = (await tasks[0], await others[0])
            assert [answer.status for answer in admitted] == [200, 200]
            await until_waiting(roost, 2)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)


async def test_a_request_of_higher_priority_goes_first_and_its_body_passes_untouched() -> None:
    async with small() as roost, replicas(1, device_tokens=500) as more:
        plain, urgent = session("plain"), session("urgent", field_given=("priority", 7))
        async with waiting(roost, plain, urgent) as (first, second):
            await roost.admin("POST", "/admin/replicas", {"url": more[0].url})
            assert (await second).replica == more[0].id
            assert not first.done()
        (received,) = [each for each in more[0].seen if each.path == PATHS[urgent.dialect]]
        assert received.body == urgent.body()


async def test_a_client_that_leaves_the_queue_frees_its_seat() -> None:
    async with small(queue_max=1) as roost:
        leaver = session("leaver")
        async with Client.to(roost.port) as client:
            headers = "".join(f"{name}: {value}\r\n" for name, value in leaver.headers.items())
            await client.post(leaver.body(), headers=headers, path=PATHS[leaver.dialect])
            await until_waiting(roost, 1)
            assert (await ask(roost, session("other"))).status == 503
        await until_waiting(roost, 0)
        async with waiting(roost, session("other")):
            pass


async def test_a_stopping_router_sends_the_waiting_away() -> None:
    waiter = session("new")
    headers = "".join(f"{name}: {value}\r\n" for name, value in waiter.headers.items())
    loads = {"num_running_reqs": 1}
    async with replicas(1, device_tokens=ROOM_TOKENS, loads=loads) as fleet, AsyncExitStack() as stack:
        async with running(settings(fleet), fleet) as roost:
            for number in range(2):
                await roost.turn(session(f"old {number}"))
            await until_busy(roost)
            client = await stack.enter_async_context(Client.to(roost.port))
            await client.post(waiter.body(), headers=headers, path=PATHS[waiter.dialect])
            await until_waiting(roost, 1)
        answer = await client.answer()
    assert (answer.status, answer.headers[b"x-roost-error"]) == (503, b"fleet_full")
    assert b"retry-after" in answer.headers


async def test_how_full_the_fleet_is_can_be_read() -> None:
    async with small() as roost:

        async def told() -> bool:
            return 0.7 < await sample(roost, "roost_kv_live_share", fleet="default") <= 1.0

        await roost.until(told)
