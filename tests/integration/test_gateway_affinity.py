"""Every branch lives on one replica, however its session is named, whichever router it speaks to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from router.domain.turn import Dialect
from router.settings import Settings
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Gate, Replica, Visit, replicas
from tests.integration.roosts import Answer, Roost, running, settings_for, shared_store

NAMINGS = ("header", "field", "none")


@asynccontextmanager
async def two_routers(settings: Settings, fleet: list[Replica]) -> AsyncIterator[tuple[Roost, Roost]]:
    """Two routers that share a store."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(settings, fleet))
        second = await stack.enter_async_context(running(settings, fleet))
        yield first, second


def sharing(fleet: list[Replica], url: str, name: str) -> Settings:
    """Settings of routers that share a store; each test has keys of its own."""
    return settings_for(fleet, shared_store(url, name))


def named(number: int, naming: str, dialect: Dialect) -> Conversation:
    """A conversation whose session stands in a header, in the body or nowhere."""
    name = f"{dialect.value} {number}"
    conversation = Conversation(name, dialect, stream=number % 2 == 0, size_bytes=3000)
    if naming == "header":
        conversation.header = (("Modal-Session-Id", "X-Claude-Code-Session-Id", "session_id")[number % 3], name)
    elif naming == "field":
        fields = (("prompt_cache_key", name), ("user", name), ("metadata", {"user_id": f'{{"session_id":"{name}"}}'}))
        conversation.field_given = fields[number % 3]
    return conversation


def home_of(answer: Answer, fleet: list[Replica]) -> Replica:
    """The replica that gave the answer."""
    return next(each for each in fleet if each.id == answer.replica)


@pytest.mark.parametrize("naming", NAMINGS)
async def test_twenty_interleaved_sessions_stay_where_they_began(naming: str) -> None:
    """Six turns each, all dialects, four at a time."""
    async with replicas(4) as fleet, running(settings_for(fleet), fleet) as roost:
        sessions = [named(number, naming, DIALECTS[number % 5]) for number in range(20)]
        homes: dict[str, set[str]] = {each.name: set() for each in sessions}
        tokens: dict[str, set[str]] = {each.name: set() for each in sessions}

        async def turn(each: Conversation) -> None:
            answer = await roost.turn(each)
            homes[each.name].add(answer.replica)
            tokens[each.name].add(answer.session)
            each.grow()

        for _ in range(6):
            for start in range(0, len(sessions), 4):
                await asyncio.gather(*map(turn, sessions[start : start + 4]))
        assert {len(home) for home in homes.values()} == {1}
        assert {len(token) for token in tokens.values()} == {1}
        assert len(set.union(*tokens.values())) == 20
        assert sorted(len(each.turns) for each in fleet) == [30, 30, 30, 30]


async def test_two_routers_that_share_a_store_send_a_branch_to_one_replica(valkey_url: str) -> None:
    """Turns alternate between them; a third begins only then and knows all."""
    async with replicas(3) as fleet:
        settings = sharing(fleet, valkey_url, "alternate")
        async with two_routers(settings, fleet) as routers:
            sessions = [named(number, NAMINGS[number % 3], DIALECTS[number % 5]) for number in range(15)]
            homes: dict[str, set[str]] = {each.name: set() for each in sessions}
            for number in range(6):
                for each in sessions:
                    homes[each.name].add((await routers[number % 2].turn(each)).replica)
                    each.grow()
        async with running(settings, fleet) as restarted:
            for each in sessions:
                answer = await restarted.turn(each)
                homes[each.name].add(answer.replica)
                assert answer.reason == "home"
        assert {len(home) for home in homes.values()} == {1}


@pytest.mark.parametrize("naming", NAMINGS)
async def test_first_turns_that_race_through_both_routers_make_one_binding(valkey_url: str, naming: str) -> None:
    """Twenty sessions' first turns, each sent to both routers twice at once: one branch, one replica, and it stays."""
    async with replicas(3) as fleet, two_routers(sharing(fleet, valkey_url, f"race-{naming}"), fleet) as routers:
        sessions = [named(number, naming, DIALECTS[number % 5]) for number in range(20)]
        gate = Gate()
        for replica in fleet:
            replica.script = gate
        racing = [asyncio.create_task(routers[copy % 2].turn(each)) for each in sessions for copy in range(4)]
        await gate.waiting(80)
        gate.open()
        answers = await asyncio.gather(*racing)
        for number, each in enumerate(sessions):
            copies = answers[4 * number : 4 * number + 4]
            assert len({answer.replica for answer in copies}) == 1
            assert len({answer.session for answer in copies}) == 1
            each.grow()
            assert (await routers[number % 2].turn(each)).replica == copies[0].replica


async def test_a_crowd_of_copies_of_a_first_turn_is_one_branch(valkey_url: str) -> None:
    """Ten at once may be too many for one replica, but they are one branch, and in the end it has one home."""
    async with replicas(3) as fleet, two_routers(sharing(fleet, valkey_url, "crowd"), fleet) as routers:
        gate = Gate()
        for replica in fleet:
            replica.script = gate
        asked = named(1, "header", Dialect.MESSAGES)
        racing = [asyncio.create_task(routers[index % 2].turn(asked)) for index in range(10)]
        await gate.waiting(10)
        gate.open()
        await asyncio.gather(*racing)
        decisions = [decision for router in routers for decision in await router.decisions()]
        assert len({decision["branch"] for decision in decisions}) == 1
        homes = set()
        for number in range(4):
            asked.grow()
            homes.add((await routers[number % 2].turn(asked)).replica)
        assert len(homes) == 1


async def test_what_one_router_has_in_flight_the_other_counts(valkey_url: str) -> None:
    """All turns through one router; new sessions through the other avoid the busy replica (C13)."""
    gate = Gate()
    async with replicas(2) as fleet, two_routers(sharing(fleet, valkey_url, "counts"), fleet) as (first, second):
        await first.admin("POST", f"/admin/replicas/{fleet[1].id}/cordon")
        fleet[0].script = gate
        busy = [asyncio.create_task(first.turn(Conversation(f"busy {n}", size_bytes=9000))) for n in range(6)]
        await gate.waiting(6)
        await first.admin("POST", f"/admin/replicas/{fleet[1].id}/undrain")
        answers = [await second.turn(Conversation(f"new {number}")) for number in range(4)]
        assert {answer.replica for answer in answers} == {fleet[1].id}
        gate.open()
        await asyncio.gather(*busy)


async def test_sessions_that_begin_alike_are_served_each_and_stay() -> None:
    """Ten sessions ask the same first question (best of ten, evaluations): each has its own branch from the start."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        sessions = [Conversation("the same", header=("x-session-id", str(number))) for number in range(10)]
        first = await asyncio.gather(*map(roost.turn, sessions))
        assert len({answer.session for answer in first}) == 10
        homes = [answer.replica for answer in first]
        for number, each in enumerate(sessions):
            each.grow()
            each.said[1] = f"answer {number}"
        assert [(await roost.turn(each)).replica for each in sessions] == homes
        for _ in range(2):
            for each in sessions:
                each.grow()
            assert [(await roost.turn(each)).replica for each in sessions] == homes


async def test_the_same_request_again_is_served_again() -> None:
    """An agent repeats a turn whose answer it lost: now, later, while it still runs, and after the branch went on."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("again", header=("x-session-id", "again"))
        old = Conversation("again", header=("x-session-id", "again"))
        home = (await roost.turn(asked)).replica
        assert (await roost.turn(asked)).replica == home
        asked.grow()
        gate = Gate()
        for replica in fleet:
            replica.script = gate
        twice = [asyncio.create_task(roost.turn(asked)) for _ in range(2)]
        await gate.waiting(2)
        older = asyncio.create_task(roost.turn(old))
        await gate.waiting(3)
        gate.open()
        assert [answer.replica for answer in await asyncio.gather(*twice)] == [home, home]
        await older
        assert (await roost.turn(old)).status == 200
        asked.grow()
        assert (await roost.turn(asked)).replica == home


async def test_a_session_whose_home_died_moves_once() -> None:
    """C53: the next turn succeeds elsewhere, says so, and stays there."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("orphan")
        home = home_of(await roost.turn(asked), fleet)
        await home.stop()
        asked.grow()
        moved = await roost.turn(asked)
        assert moved.replica != home.id
        assert moved.reason == "home_gone"
        for _ in range(3):
            asked.grow()
            again = await roost.turn(asked)
            assert (again.replica, again.reason) == (moved.replica, "home")


async def test_a_turn_finds_its_way_past_a_replica_that_dies_before_its_head() -> None:
    """C03: the retry keeps the session, and later turns stay with the replica that served it."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("unlucky", header=("x-session-id", "unlucky"))
        home = home_of(await roost.turn(asked), fleet)

        async def die(visit: Visit) -> None:
            visit.reset()

        healthy, home.script = home.script, die
        asked.grow()
        answer = await roost.turn(asked)
        assert (answer.replica != home.id, answer.reason) == (True, "home_gone")
        home.script = healthy
        asked.grow()
        assert (await roost.turn(asked)).replica == answer.replica


async def test_a_full_replica_spills_one_turn_and_keeps_its_branch() -> None:
    """503 is what SGLang says when its queue is full: the turn goes elsewhere, the next comes home."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("spilled")
        home = home_of(await roost.turn(asked), fleet)

        async def full(visit: Visit) -> None:
            home.script = healthy
            await visit.answer(503, b'{"object":"error","message":"The request queue is full."}')

        healthy, home.script = home.script, full
        asked.grow()
        spilled = await roost.turn(asked)
        assert (spilled.replica != home.id, spilled.reason) == (True, "spill")
        asked.grow()
        back = await roost.turn(asked)
        assert (back.replica, back.reason) == (home.id, "home")


# What SGLang 0.5.23 sends after its 200 when its queue is full, per dialect.
REFUSALS = {
    Dialect.CHAT: b'data: {"error": {"object": "error", "message": "The request queue is full.", '
    b'"type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}\n\ndata: [DONE]\n\n',
    Dialect.MESSAGES: b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":'
    b'{"input_tokens":0,"output_tokens":0}}}\n\nevent: error\ndata: {"type":"error","error":'
    b'{"type":"overloaded_error","message":"The request queue is full."}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    Dialect.RESPONSES: b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"},'
    b'"sequence_number":0}\n\nevent: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1",'
    b'"status":"failed","error":{"code":"server_error","message":"The request queue is full."}},'
    b'"sequence_number":1}\n\n',
}


@pytest.mark.parametrize("dialect", REFUSALS, ids=lambda dialect: dialect.value)
async def test_a_refusal_inside_a_stream_spills_the_turn_unseen(dialect: Dialect) -> None:
    """SGLang answers 200 before its scheduler has seen the turn; the client sees the other replica's stream only."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("inside", dialect, stream=True)
        home = home_of(await roost.turn(asked), fleet)

        async def full(visit: Visit) -> None:
            home.script = healthy
            await visit.begin()
            await visit.chunk(REFUSALS[dialect])
            await visit.end()

        healthy, home.script = home.script, full
        asked.grow()
        spilled = await roost.turn(asked)
        assert (spilled.replica != home.id, spilled.reason) == (True, "spill")
        assert b"queue is full" not in spilled.body
        asked.grow()
        assert (await roost.turn(asked)).replica == home.id


async def test_a_head_waits_for_a_refusal_for_a_moment_only() -> None:
    """Where another replica could take the turn; the client gets the head though no output comes."""
    go_on = asyncio.Event()

    async def silent(visit: Visit) -> None:
        await visit.begin()
        await go_on.wait()
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    async with (
        replicas(2, script=silent) as fleet,
        running(settings_for(fleet), fleet) as roost,
        Client.to(roost.port) as client,
    ):
        await client.post(Conversation("silent", stream=True).body(), path="/v1/chat/completions")
        assert (await client.head()).status == 200
        go_on.set()
        assert await client.chunk() == b"data: [DONE]\n\n"


async def test_where_all_are_full_the_engines_refusal_passes() -> None:
    """The last one tried has nobody to yield to: what it says inside its stream is the client's to read."""

    async def full(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(REFUSALS[Dialect.CHAT])
        await visit.end()

    async with replicas(2, script=full) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("all full", stream=True)
        answer = await roost.request("POST", PATHS[Dialect.CHAT], asked.body(), asked.headers)
        assert (answer.status, answer.body) == (200, REFUSALS[Dialect.CHAT])
        assert [len(each.turns) for each in fleet] == [1, 1]


async def test_a_fleet_that_is_full_says_so_in_the_engines_words() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:

        async def full(visit: Visit) -> None:
            await visit.answer(503, b"full", [("Retry-After", "7")])

        for each in fleet:
            each.script = full
        asked = Conversation("refused")
        answer = await roost.request("POST", PATHS[Dialect.CHAT], asked.body(), asked.headers)
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (503, b"full", "7")
        assert [len(each.turns) for each in fleet] == [1, 1]
