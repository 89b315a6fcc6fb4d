"""A replica that dies in the middle of an answer: said in the dialect, and never taken for the end."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.replicas import DIALECTS, PATHS, Visit, events, replicas, whole
from tests.integration.roosts import running, settings_for

TERMINAL = (b"[DONE]", b"message_stop", b"response.completed")

Death = Callable[[Visit], Awaitable[None]]


async def reset(visit: Visit) -> None:
    visit.reset()


async def close(visit: Visit) -> None:
    visit.close()


async def nonsense(visit: Visit) -> None:
    await visit.send(b"zzz not a chunk size\r\n")
    visit.close()


async def cut_event(visit: Visit) -> None:
    await visit.chunk(b'data: {"half": ')
    visit.reset()


DEATHS: list[Death] = [reset, close, nonsense, cut_event]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_that_breaks_ends_in_an_error_of_its_dialect(dialect: Dialect, death: Death) -> None:
    """An error event, then no clean end; nothing is sent twice, nothing stays in flight, the next turn is served."""

    async def dying(visit: Visit) -> None:
        await visit.begin()
        for event in events(dialect, "resp_x", 10, ["a", "b", "c"])[:3]:
            await visit.chunk(event)
        await death(visit)

    async with replicas(1, script=dying) as (replica,), running(settings_for([replica]), [replica]) as roost:
        asked = Conversation("doomed", dialect)
        answer = await roost.watch(asked)
        assert answer.status == 200
        assert not answer.complete
        assert not any(mark in answer.body for mark in TERMINAL)
        assert len(replica.turns) == 1
        _says_broken(dialect, answer.body)
        await roost.idle()
        assert (await roost.decisions())[0]["came_true"]["end"] == "upstream_broken"
        replica.script = healthy
        assert (await roost.turn(asked)).status == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_after_a_death_in_the_middle_the_next_turn_finds_another_home(dialect: Dialect) -> None:
    """The replica that broke the stream is gone: the branch moves once, and stays where it was served."""

    async def dying(visit: Visit) -> None:
        await visit.begin()
        for event in events(dialect, "resp_x", 10, ["a", "b", "c"])[:3]:
            await visit.chunk(event)
        visit.reset()

    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("bereft", dialect)
        first = await roost.turn(asked)
        home = next(each for each in fleet if each.id == first.replica)
        home.script = dying
        asked.grow()
        broken = await roost.watch(asked)
        assert (broken.status, broken.complete) == (200, False)
        await home.stop()
        again = await roost.turn(asked)
        assert (again.replica != home.id, again.reason) == (True, "home_gone")
        asked.grow()
        assert (await roost.turn(asked)).replica == again.replica


async def healthy(visit: Visit) -> None:
    await visit.reply()


def _says_broken(dialect: Dialect, body: bytes) -> None:
    """The last event is an error that a client of the dialect understands."""
    last = body.rstrip(b"\n").split(b"\n\n")[-1]
    told = json.loads(last.split(b"data: ", 1)[1])
    match dialect:
        case Dialect.MESSAGES:
            assert last.startswith(b"event: error\n")
            assert (told["type"], set(told["error"])) == ("error", {"type", "message"})
        case Dialect.RESPONSES:
            assert last.startswith(b"event: response.failed\n")
            assert told["response"]["status"] == "failed"
            assert told["response"]["id"] == "resp_x"
            assert told["sequence_number"] == 3
        case _:
            assert "error" in told
    assert body.endswith(b"\n\n")


async def test_agents_that_do_better_without_words_get_none() -> None:
    """Qwen Code and Claude Code retry a bare break; the connection simply breaks for them."""

    async def dying(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(b"data: {}\n\n")
        visit.reset()

    async with replicas(1, script=dying) as fleet, running(settings_for(fleet), fleet) as roost:
        for agent in ("QwenCode/0.24.4 (linux)", "claude-cli/2.1.332 (external)"):
            answer = await roost.watch(Conversation("agent", header=("user-agent", agent)))
            assert (answer.body, answer.complete) == (b"data: {}\n\n", False)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_reply_of_given_length_that_breaks_is_cut_short(dialect: Dialect) -> None:
    """Without a stream there is no room for words: the client sees fewer bytes than it was promised."""

    async def dying(visit: Visit) -> None:
        body = whole(dialect, "resp_x", 10)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await visit.send(head.encode() + body[:-5])
        visit.reset()

    async with replicas(1, script=dying) as (replica,), running(settings_for([replica]), [replica]) as roost:
        asked = Conversation("short", dialect, stream=False)
        answer = await roost.watch(asked)
        assert (answer.status, answer.complete) == (200, False)
        replica.script = healthy
        await roost.turn(asked)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_replica_that_dies_before_its_head_is_a_502_in_the_dialect(dialect: Dialect) -> None:
    """After all were tried. The client reads no address and nothing of the replica's."""

    async def dying(visit: Visit) -> None:
        visit.reset()

    async with replicas(2, script=dying) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("refused", dialect)
        answer = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
        assert (answer.status, answer.headers["x-roost-error"]) == (502, "upstream_broken")
        told = json.loads(answer.body)
        assert "127.0.0.1" not in told["error"]["message"]
        assert (told.get("type") == "error") == (dialect is Dialect.MESSAGES)
        assert all(replica.turns for replica in fleet)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_without_a_replica_turns_are_refused_with_a_time_to_come_again(dialect: Dialect) -> None:
    async with replicas(1) as (replica,), running(settings_for([replica]), [replica]) as roost:
        await replica.stop()
        asked = Conversation("early", dialect)
        answer = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
        assert answer.status in (502, 503)
        again = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
        assert (again.status, again.headers["x-roost-error"]) == (503, "no_replica")
        assert int(again.headers["retry-after"]) >= 1
        ready = await roost.request("GET", "/readyz")
        assert ready.status == 503
        await replica.start()
        await roost.knows([replica])
        assert (await roost.request("GET", "/readyz")).status == 200
        await roost.turn(asked)


async def test_the_engines_own_error_event_passes_as_it_is_and_counts_as_an_error() -> None:
    """SGLang says a full queue in a stream with status 200: what it said goes through, byte by byte."""
    said = b'data: {"error":{"message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}\n\n'

    async def full(visit: Visit) -> None:
        await visit.begin()
        await visit.chunk(said)
        await visit.chunk(b"data: [DONE]\n\n")
        await visit.end()

    async with replicas(1, script=full) as fleet, running(settings_for(fleet), fleet) as roost:
        answer = await roost.turn(Conversation("full"))
        assert answer.body == said + b"data: [DONE]\n\n"
        await roost.idle()
        assert (await roost.decisions())[0]["came_true"]["end"] == "upstream_error"


async def test_a_stored_response_whose_holder_is_away_is_a_502_and_asked_of_nobody_else() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        answer = await roost.turn(Conversation("kept", Dialect.RESPONSES))
        await roost.idle()
        holder, other = sorted(fleet, key=lambda replica: replica.id != answer.replica)
        await holder.stop()
        got = await roost.request("GET", f"/v1/responses/resp_{holder.port}_0")
        assert (got.status, got.headers["x-roost-error"]) == (502, "upstream_unreachable")
        assert other.seen == []
