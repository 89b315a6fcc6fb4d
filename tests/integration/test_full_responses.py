"""A full queue as `/v1/responses` says it without a stream, HTTP 400 with "503: " in front, and other 400s."""

from __future__ import annotations

import json

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.replicas import PATHS, Replica, Visit, replicas
from tests.integration.roosts import Roost, running, settings_for


def refusal(message: str) -> bytes:
    """SGLang 0.5.23's body (entrypoints/openai/serving_responses.py)."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": 400}
    return json.dumps({"error": error}).encode()


FULL = refusal("503: The request queue is full.")


class Says:
    """A script that answers 400 with this."""

    def __init__(self, body: bytes, *, chunked: bool = False) -> None:
        self.body = body
        self.chunked = chunked

    async def __call__(self, visit: Visit) -> None:
        if not self.chunked:
            await visit.answer(400, self.body)
            return
        await visit.send(b"HTTP/1.1 400 No\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await visit.chunk(self.body)
        await visit.end()


async def ask(roost: Roost, asked: Conversation) -> tuple[int, bytes, str]:
    answer = await roost.request("POST", PATHS[asked.dialect], asked.body(), asked.headers)
    return answer.status, answer.body, answer.replica


async def home_and_other(roost: Roost, asked: Conversation, fleet: list[Replica]) -> tuple[Replica, Replica]:
    home = (await roost.turn(asked)).replica
    asked.grow()
    first, second = sorted(fleet, key=lambda replica: replica.id != home)
    return first, second


@pytest.mark.parametrize(
    "message", ["The request queue is full.", "The request is aborted by a higher priority request."]
)
async def test_a_full_home_spills_the_turn_and_gets_the_next(message: str) -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("full", Dialect.RESPONSES, stream=False)
        home, other = await home_and_other(roost, asked, fleet)
        speak, home.script = home.script, Says(refusal(f"503: {message}"))
        status, _, replica = await ask(roost, asked)
        assert (status, replica) == (200, other.id)
        home.script = speak
        asked.grow()
        assert (await roost.turn(asked)).replica == home.id


async def test_when_all_are_full_the_last_refusal_passes_as_it_came() -> None:
    async with replicas(2, script=Says(FULL)) as fleet, running(settings_for(fleet), fleet) as roost:
        status, body, _ = await ask(roost, Conversation("full", Dialect.RESPONSES, stream=False))
        assert (status, body) == (400, FULL)
        assert sum(len(each.turns) for each in fleet) == 2


@pytest.mark.parametrize(
    "says",
    [
        Says(refusal("The input is too long.")),
        Says(refusal("no such thing as '503: The request queue is full.'")),
        Says(refusal("503: something else")),
        Says(b"503: The request queue is full."),
        Says(b"{"),
        Says(b""),
        Says(refusal("503: The request queue is full." + " " * 5000)),
        Says(FULL, chunked=True),
    ],
    ids=["too long", "quoted", "another 503", "no JSON", "half", "empty", "long", "chunked"],
)
async def test_what_is_no_such_refusal_passes_as_it_came_and_is_tried_once(says: Says) -> None:
    async with replicas(2, script=says) as fleet, running(settings_for(fleet), fleet) as roost:
        status, body, _ = await ask(roost, Conversation("wrong", Dialect.RESPONSES, stream=False))
        assert (status, body) == (400, says.body)
        assert sum(len(each.turns) for each in fleet) == 1


async def test_other_dialects_say_it_by_the_status() -> None:
    """A 400 of theirs is the client's, whatever it says."""
    async with replicas(2, script=Says(FULL)) as fleet, running(settings_for(fleet), fleet) as roost:
        assert (await ask(roost, Conversation("chat", stream=False)))[0] == 400
        assert sum(len(each.turns) for each in fleet) == 1
