"""Tenant and session of a request, wherever a client names them and however badly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.domain.errors import MalformedRequest
from router.domain.turn import Dialect, Facts
from router.placement.identity import (
    ANONYMOUS,
    BOUNDARIES_MAX,
    Identity,
    Rules,
    session_key,
    session_token,
    tenant_of,
)
from router.settings import Settings

DEFAULTS = Settings().identity
RULES = Rules(DEFAULTS.session_headers, DEFAULTS.session_fields)
TURNS = [each for each in Dialect if each is not Dialect.OTHER]
identity = Identity(RULES)


def facts(body: Any = None, dialect: Dialect = Dialect.CHAT, **headers: str) -> Facts:
    """The facts of a request; header names are written with underscores for dashes."""
    raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    named = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}
    return identity.facts(dialect, named, raw)


# --- headers ---------------------------------------------------------------------------------------------------------


def test_the_first_configured_header_that_is_present_names_the_session() -> None:
    """In the order of the defaults, from an operator's own to what each harness sends."""
    given = {name.encode(): f"id of {name}".encode() for name in RULES.session_headers if name != "x-roost-session"}
    for name in list(given):
        found = identity.facts(Dialect.CHAT, given, b"{}")
        assert found.session_source == name.decode()
        assert found.session == session_key(ANONYMOUS, given[name])
        del given[name]
    assert identity.facts(Dialect.CHAT, given, b"{}").session is None


def test_an_operators_header_comes_first() -> None:
    assert RULES.session_headers[0] == "modal-session-id"


@pytest.mark.parametrize(
    ("harness", "headers", "source"),
    [
        ("Claude Code", {"x_claude_code_session_id": "u"}, "x-claude-code-session-id"),
        ("OpenCode", {"x_session_affinity": "ses_1", "x_session_id": "ses_1"}, "x-session-id"),
        ("Codex", {"session_id": "u", "thread_id": "t", "x_client_request_id": "t"}, "session-id"),
        ("pi", {"x_session_affinity": "u", "x_client_request_id": "u"}, "x-session-affinity"),
        ("goose", {"goose_session_id": "g"}, "goose-session-id"),
        ("none", {"x_client_request_id": "r", "x_request_id": "r"}, "none"),
    ],
)
def test_what_each_harness_sends_is_known(harness: str, headers: dict[str, str], source: str) -> None:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    assert identity.facts(Dialect.CHAT, named, b"{}").session_source == source


def test_a_header_with_an_underscore_is_known_too() -> None:
    """pi 0.73 sends `session_id`."""
    assert identity.facts(Dialect.CHAT, {b"session_id": b"u"}, b"{}").session_source == "session_id"


def test_an_empty_header_counts_as_absent() -> None:
    found = identity.facts(Dialect.CHAT, {b"modal-session-id": b"", b"x-session-id": b"s"}, b"{}")
    assert found.session_source == "x-session-id"


def test_a_header_beats_every_body_field() -> None:
    found = facts({"prompt_cache_key": "p", "user": "u"}, x_smg_routing_key="k")
    assert found.session_source == "x-smg-routing-key"


@pytest.mark.parametrize(
    "value", [b"x" * 100_000, b"\xff\xfe\x00", b"  spaced  ", b"a\tb", "☃".encode(), b"{}", b"-", b"a-b"]
)
def test_malformed_ids_are_hashed_as_they_are(value: bytes) -> None:
    """Never refused, never kept raw; space around an id does not count."""
    for name in (b"x-session-id", b"x-roost-session"):
        found = identity.facts(Dialect.CHAT, {name: value}, b"{}")
        assert found.session == session_key(ANONYMOUS, value.strip())
        assert len(found.session or "") == 24


# --- body fields -----------------------------------------------------------------------------------------------------

CLAUDE = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "inner"})


@pytest.mark.parametrize(
    ("body", "source", "raw"),
    [
        (
            {"prompt_cache_key": "p", "metadata": {"user_id": "m"}, "session_id": "s", "user": "u"},
            "prompt_cache_key",
            "p",
        ),
        ({"metadata": {"user_id": "m"}, "session_id": "s", "user": "u"}, "metadata.user_id", "m"),
        ({"session_id": "s", "user": "u"}, "session_id", "s"),
        ({"user": "u"}, "user", "u"),
        ({"metadata": {"user_id": CLAUDE}}, "metadata.user_id", "inner"),
        ({"metadata": {"user_id": '{"session_id": 5}'}}, "metadata.user_id", '{"session_id": 5}'),
        ({"metadata": {"user_id": '{"session_id": ""}'}}, "metadata.user_id", '{"session_id": ""}'),
        ({"metadata": {"user_id": "{broken"}}, "metadata.user_id", "{broken"),
        ({"metadata": {"user_id": "{}"}}, "metadata.user_id", "{}"),
        ({"user": 17}, "user", "17"),
        ({"prompt_cache_key": "", "user": "u"}, "user", "u"),
        ({"prompt_cache_key": None, "user": "u"}, "user", "u"),
        ({"prompt_cache_key": ["p"], "user": "u"}, "user", "u"),
        ({"prompt_cache_key": True, "user": "u"}, "user", "u"),
        ({"metadata": "m", "user": "u"}, "user", "u"),
        ({"metadata": {"user_id": {"a": 1}}, "user": "u"}, "user", "u"),
        ({"metadata": {"other": 1}, "user": "u"}, "user", "u"),
        ({"user": "a\ud800"}, "user", "a\ufffd"),
    ],
)
@pytest.mark.parametrize("dialect", TURNS)
def test_the_first_field_with_a_usable_value_names_the_session(
    dialect: Dialect, body: dict[str, Any], source: str, raw: str
) -> None:
    """Claude Code hides its id in a JSON string; what is malformed counts as absent, or as it stands."""
    found = facts(body, dialect)
    assert (found.session_source, found.session) == (source, session_key(ANONYMOUS, raw.encode()))


def test_claude_codes_header_and_field_name_the_same_session() -> None:
    """A client that loses its headers on the way keeps its session."""
    by_field = facts({"metadata": {"user_id": CLAUDE}}, Dialect.MESSAGES)
    assert facts({}, Dialect.MESSAGES, x_claude_code_session_id="inner").session == by_field.session


def test_no_id_is_no_session() -> None:
    found = facts({"model": "m", "messages": []})
    assert (found.session, found.session_source) == (None, "none")


def test_fields_with_odd_names_can_be_configured() -> None:
    odd = Identity(Rules((), ("class", "a-b.c", "model", "messages")))
    body = json.dumps({"class": "k", "model": "m"}).encode()
    assert odd.facts(Dialect.CHAT, {}, body).session_source == "class"
    assert odd.facts(Dialect.CHAT, {}, b'{"a-b":{"c":"x"},"model":"m"}').session_source == "a-b.c"
    assert odd.facts(Dialect.CHAT, {}, b'{"model":"m"}').session_source == "model"


# --- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "same_as"),
    [
        ({b"authorization": b"Bearer sk-1"}, b"sk-1"),
        ({b"authorization": b"bearer  sk-1 "}, b"sk-1"),
        ({b"x-api-key": b"sk-1"}, b"sk-1"),
        ({b"authorization": b"Bearer sk-1", b"x-api-key": b"sk-2"}, b"sk-1"),
        ({b"authorization": b"Bearer ", b"x-api-key": b"sk-2"}, b"sk-2"),
        ({b"authorization": b"Basic abc"}, b"Basic abc"),
    ],
)
def test_the_api_key_is_the_tenant(headers: dict[bytes, bytes], same_as: bytes) -> None:
    assert tenant_of(headers) == tenant_of({b"x-api-key": same_as})


@pytest.mark.parametrize(
    "headers", [{}, {b"authorization": b""}, {b"x-api-key": b"  "}, {b"authorization": b"Bearer "}]
)
def test_without_a_key_the_tenant_is_nobody(headers: dict[bytes, bytes]) -> None:
    assert tenant_of(headers) == ANONYMOUS


def test_a_tenant_tells_nothing_of_its_key() -> None:
    found = identity.facts(Dialect.CHAT, {b"x-api-key": b"sk-secret", b"x-session-id": b"raw"}, b"{}")
    assert "secret" not in found.tenant
    assert "raw" not in repr(found)


def test_one_id_under_two_keys_is_two_sessions() -> None:
    sessions = {
        identity.facts(Dialect.CHAT, {b"x-api-key": key, b"x-session-id": b"same"}, b"{}").session
        for key in (b"1", b"2")
    }
    assert len(sessions) == 2


def test_a_returned_session_names_itself_again_for_its_tenant_only() -> None:
    tenant = tenant_of({b"x-api-key": b"sk-1"})
    session = session_key(tenant, b"raw")
    token = session_token(tenant, session).encode()

    def named(key: bytes, value: bytes) -> str | None:
        return identity.facts(Dialect.CHAT, {b"x-api-key": key, b"x-roost-session": value}, b"{}").session

    assert named(b"sk-1", token) == session
    assert named(b"sk-1", b" " + token + b" ") == session
    assert named(b"sk-2", token) not in (session, None)
    assert named(b"sk-1", token[:-1]) not in (session, None)
    assert named(b"sk-1", session.encode() + b"-") not in (session, None)
    assert named(b"sk-1", session.encode()) not in (session, None)


@pytest.mark.parametrize("forged", ["planted", "", "A" * 24, "0" * 24 + "\n", "0" * 23, "0" * 30_000])
def test_a_seal_makes_no_session_of_what_is_no_key(forged: str) -> None:
    """A tenant without a keys file can compute its seal: what it seals would stand in logs and decisions as it is."""
    tenant = tenant_of({b"x-api-key": b"sk-1"})
    headers = {b"x-api-key": b"sk-1", b"x-roost-session": session_token(tenant, forged).encode()}
    session = identity.facts(Dialect.CHAT, headers, b"{}").session
    assert session is not None
    assert session != forged
    assert len(session) == 24


# --- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", TURNS)
@pytest.mark.parametrize(
    ("given", "streamed"), [(True, True), (False, False), ("true", False), (1, False), (None, False)]
)
def test_only_true_asks_for_a_stream(dialect: Dialect, given: object, streamed: bool) -> None:
    assert facts({"stream": given}, dialect).stream is streamed
    assert facts({}, dialect).stream is False


def test_a_response_is_stored_unless_it_is_not_to_be() -> None:
    assert facts({}, Dialect.RESPONSES).stores_response
    assert facts({"store": True}, Dialect.RESPONSES).stores_response
    assert not facts({"store": False}, Dialect.RESPONSES).stores_response
    assert not facts({"store": True}, Dialect.CHAT).stores_response


def test_a_response_that_is_continued_is_named_in_responses_only() -> None:
    assert facts({"previous_response_id": "resp_1"}, Dialect.RESPONSES).refers_to == "resp_1"
    assert facts({"previous_response_id": 5}, Dialect.RESPONSES).refers_to is None
    assert facts({"previous_response_id": "resp_1"}, Dialect.CHAT).refers_to is None


@pytest.mark.parametrize(
    ("dialect", "body", "limit"),
    [
        (Dialect.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (Dialect.CHAT, {"max_tokens": 5}, 5),
        (Dialect.RESPONSES, {"max_output_tokens": 9}, 9),
        (Dialect.MESSAGES, {"max_tokens": "5"}, None),
        (Dialect.MESSAGES, {"max_tokens": -5}, None),
        (Dialect.MESSAGES, {"max_tokens": 10**12}, None),
        (Dialect.GENERATE, {"sampling_params": {"max_new_tokens": 11}, "max_tokens": 5}, 11),
        (Dialect.GENERATE, {"sampling_params": [1]}, None),
        (Dialect.GENERATE, {}, None),
    ],
)
def test_the_output_limit_is_read_where_the_dialect_has_it(dialect: Dialect, body: Any, limit: int | None) -> None:
    assert facts(body, dialect).max_output_tokens == limit


@pytest.mark.parametrize("dialect", TURNS)
def test_a_body_that_is_no_object_is_refused_without_an_excerpt(dialect: Dialect) -> None:
    for body in (b"[]", b"17", b"null", b'"secret"', b"secret", b'{"secret":', b"{" * 5000, b"\xff"):
        with pytest.raises(MalformedRequest) as caught:
            facts(body, dialect)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("dialect", TURNS)
def test_an_empty_or_compressed_body_is_not_looked_into(dialect: Dialect) -> None:
    for body, encoded in ((b"", False), (b"\x1f\x8b garbage", True)):
        found = identity.facts(dialect, {b"x-session-id": b"s"}, body, encoded=encoded)
        assert (len(found.chain), found.model, found.session_source) == (0, None, "x-session-id")


def test_other_paths_tell_their_model_where_they_can() -> None:
    assert facts({"model": "m", "input": "x"}, Dialect.OTHER).model == "m"
    for body in (b"not json", b"{broken", b'{"model":5}', b'["m"]', b'{"model":""}'):
        assert facts(body, Dialect.OTHER).model is None


def test_leading_system_messages_are_the_head() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    developer = {"role": "developer", "content": "d"}
    assert facts({"messages": [system, developer, user, system]}).head == 2
    assert facts({"messages": [user]}).head == 0
    assert facts({"system": "s", "messages": [user]}, Dialect.MESSAGES).head == 1
    assert facts({"instructions": "s", "input": [developer, user]}, Dialect.RESPONSES).head == 2
    assert facts({"messages": [system]}).head == 1


def test_a_very_long_history_keeps_its_deepest_boundaries() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(BOUNDARIES_MAX + 50)]
    whole = facts({"messages": messages})
    assert len(whole.chain) == BOUNDARIES_MAX
    assert whole.head == 0
    longer = facts({"messages": [*messages, {"role": "user", "content": "more"}]})
    assert longer.chain[:-1] == whole.chain[1:]


def test_a_string_input_is_one_user_message() -> None:
    """`input: "hi"` and a list with that one message are the same prompt."""
    one = facts({"input": "hi"}, Dialect.RESPONSES)
    assert one.chain == facts({"input": [{"role": "user", "content": "hi"}]}, Dialect.RESPONSES).chain
    assert len(one.chain) == 1


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"half \ud83d", "half \ufffd"),
        (r"\udE00 half", "\ufffd half"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d", "\\ud83d"),
        (r"\\\ud83d", "\\\ufffd"),
    ],
)
def test_half_a_character_is_read_as_an_unknown_one(written: str, read: str) -> None:
    """JavaScript clients write it where they cut a text in an emoji; the rest of the body is read as ever."""
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"user":"u"}' % written.encode()
    found = facts(body)
    assert (found.model, found.session_source) == ("m", "user")
    if "\ufffd" in read:
        assert found.chain == facts({"model": "m", "messages": [{"role": "user", "content": read}]}).chain


@pytest.mark.parametrize(
    ("given", "read"), [(7, 7), (-3, -3), (0, 0), ("7", None), (1.5, None), (None, None), (10**12, None)]
)
def test_a_priority_is_read_where_it_is_a_number(given: object, read: int | None) -> None:
    """SGLang's own field; anything else is the engine's to judge."""
    assert facts({"messages": [], "priority": given}).priority == read


def test_a_subagent_with_a_session_of_its_own_names_its_parents() -> None:
    """As the parent itself is known by, for the same tenant."""
    parent = facts({"messages": []}, x_session_id="ses_parent")
    child = facts({"messages": []}, x_session_id="ses_child", x_parent_session_id="ses_parent")
    assert child.parent == parent.session != child.session
    assert parent.parent is None


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES])
def test_a_prompt_names_no_session(dialect: Dialect) -> None:
    """Settings refuse it; were it configured all the same, the field counts as absent."""
    identity = Identity(Rules((), ("messages", "input", "input.0", "user")))
    asked = b'{"messages":[{"role":"user","content":"a"}],"input":[{"role":"user","content":"a"}],"user":"u"}'
    assert identity.facts(dialect, {}, asked).session_source == "user"
    assert identity.facts(dialect, {}, b'{"messages":[],"input":[]}').session is None


def test_a_looked_up_tenant_takes_the_place_of_the_key() -> None:
    identity = Identity(Rules(("x-session-id",), ()))
    headers = {b"x-api-key": b"one", b"x-session-id": b"s"}
    one = identity.facts(Dialect.CHAT, headers, b"{}", scope="scope")
    other = identity.facts(Dialect.CHAT, {**headers, b"x-api-key": b"two"}, b"{}", scope="scope")
    assert (one.tenant, one.session) == (other.tenant, other.session) == ("scope", one.session)
    assert identity.facts(Dialect.CHAT, headers, b"{}").session != one.session


@pytest.mark.parametrize(
    ("given", "steers"),
    [
        (b"{}", False),
        (b'{"session_params":null}', False),
        (b'{"session_params":{"id":"x"}}', True),
        (b'{"bootstrap_host":"h"}', True),
        (b'{"bootstrap_room":[1]}', True),
        (b'{"messages":5,"bootstrap_port":1}', True),
        (b'{"messages":[{"session_params":{"id":"x"}}]}', False),
    ],
)
def test_fields_that_reach_into_an_engine_are_seen(given: bytes, steers: bool) -> None:
    for dialect in (Dialect.CHAT, Dialect.GENERATE):
        assert Identity(Rules((), ())).facts(dialect, {}, given).steers_engine is steers
