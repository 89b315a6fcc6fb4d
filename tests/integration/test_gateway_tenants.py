"""Two API keys never meet, whatever they send."""

from __future__ import annotations

import pytest

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation
from tests.integration.replicas import DIALECTS, replicas
from tests.integration.roosts import running, settings_for


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_id_and_prompt_under_two_keys_are_two_sessions(dialect: Dialect) -> None:
    """They share neither session nor branch: what one has said is unknown under the other's key."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        mine, yours, nobodys = (
            Conversation("same", dialect, header=("x-session-id", "same"), key=key) for key in ("sk-1", "sk-2", None)
        )
        answers = [await roost.turn(each) for each in (mine, yours, nobodys)]
        assert len({answer.session for answer in answers}) == 3
        assert [answer.reason for answer in answers] == ["new", "new", "new"]
        decisions = await roost.decisions()
        assert len({each["branch"] for each in decisions}) == 3
        assert [each["shared_tokens"] for each in decisions] == [0, 0, 0]
        mine.grow()
        assert (await roost.turn(mine)).session == answers[0].session


async def test_keyless_clients_of_two_tenants_share_nothing() -> None:
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        mine, yours = (Conversation("same", key=key) for key in ("sk-1", "sk-2"))
        assert (await roost.turn(mine)).reason == "new"
        assert (await roost.turn(yours)).reason == "new"


async def test_an_api_key_is_known_in_either_header() -> None:
    """`Authorization: Bearer` and `x-api-key`: the same key is the same tenant."""
    async with replicas(2) as fleet, running(settings_for(fleet), fleet) as roost:
        asked = Conversation("same", Dialect.MESSAGES, header=("x-session-id", "s"), key="sk-1")
        first = await roost.turn(asked)
        asked.key, asked.header = None, ("x-api-key", "sk-1")
        asked.field_given = ("metadata", {"user_id": "s"})
        assert (await roost.turn(asked)).session == first.session


async def test_the_returned_session_names_that_session_again_for_its_tenant_only() -> None:
    """`x-roost-session` sent back continues the session; under another key it is just another id."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        mine = Conversation("mine", header=("x-session-id", "raw"), key="sk-1")
        first = await roost.turn(mine)
        other = Conversation("other", header=("x-roost-session", first.session), key="sk-1")
        assert (await roost.turn(other)).session == first.session
        stolen = Conversation("stolen", header=("x-roost-session", first.session), key="sk-2")
        theirs = await roost.turn(stolen)
        assert theirs.session.split("-")[0] != first.session.split("-")[0]
        forged = Conversation("forged", header=("x-roost-session", first.session[:-1] + "0x"), key="sk-1")
        assert (await roost.turn(forged)).session != first.session


async def test_a_keyless_conversation_goes_on_by_the_session_it_was_given() -> None:
    """A client that compacts its history and sends the header back is still at home in its session."""
    async with replicas(3) as fleet, running(settings_for(fleet), fleet) as roost:
        first = await roost.turn(Conversation("long", system="s" * 9000))
        compacted = Conversation("short", system="s" * 9000, header=("x-roost-session", first.session))
        answer = await roost.turn(compacted)
        assert answer.session == first.session
