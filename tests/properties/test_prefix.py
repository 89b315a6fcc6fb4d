"""The message-boundary chain: blind to what no template renders, and to nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.session import Boundary
from router.domain.turn import Dialect
from router.placement.identity import Identity, Rules
from router.placement.prefix import CELL_BYTES, MEDIA_BYTES, Canon, chain_messages, chain_text, chain_token_ids, seed

Message = dict[str, Any]
DIALECTS = (Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES)
TEXT = st.text(min_size=1, max_size=20)
BLOCK = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries(
        {"type": st.just("tool_use"), "id": TEXT, "name": TEXT, "input": st.dictionaries(TEXT, TEXT)}
    ),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": TEXT, "content": TEXT}),
    st.fixed_dictionaries({"type": st.just("image"), "source": st.fixed_dictionaries({"data": TEXT})}),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXT | st.lists(BLOCK, min_size=1, max_size=3)},
    optional={
        "tool_calls": st.lists(
            st.fixed_dictionaries({"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}),
            min_size=1,
            max_size=2,
        ),
        "name": TEXT,
        "tool_call_id": TEXT,
    },
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=6)
DIALECT = st.sampled_from(DIALECTS)

quick = settings(max_examples=60, deadline=None)
identity = Identity(Rules((), ()))


def chain(dialect: Dialect, messages: list[Any], **body: Any) -> list[str]:
    """The boundaries of a request with these messages."""
    name = "input" if dialect is Dialect.RESPONSES else "messages"
    raw = json.dumps({"model": "m", name: messages, **body}).encode()
    return [boundary.hash for boundary in identity.facts(dialect, {}, raw).chain]


def marked(messages: list[Message], draw: Any) -> list[Message]:
    """The same prompt, written otherwise: what Claude Code and others do to their history between two turns."""
    found = []
    for message in copy.deepcopy(messages):
        content = message["content"]
        if isinstance(content, str) and draw(st.booleans()):
            message["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text" and draw(st.booleans()):
            message["content"] = content[0]["text"]
        if isinstance(message["content"], list):
            for block in message["content"]:
                if draw(st.booleans()):
                    block["cache_control"] = {"type": "ephemeral"}
                if draw(st.booleans()):
                    block["citations"] = None
            if draw(st.booleans()):
                message["content"].insert(0, {"type": "text", "text": ""})
        if draw(st.booleans()):
            message["refusal"] = None
        if draw(st.booleans()):
            message["cache_control"] = {"type": "ephemeral"}
        found.append(dict(sorted(message.items(), reverse=draw(st.booleans()))))
    return found


@quick
@given(DIALECT, MESSAGES, st.data())
def test_what_no_template_renders_does_not_count(
    dialect: Dialect, messages: list[Message], data: st.DataObject
) -> None:
    """Moved cache_control marks, a string or its one-block list, nulls, empty text, the order of a message's keys."""
    assert chain(dialect, marked(messages, data.draw)) == chain(dialect, messages)


@quick
@given(DIALECT, MESSAGES, st.data())
def test_a_visible_change_changes_all_boundaries_from_there_and_none_before(
    dialect: Dialect, messages: list[Message], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(messages) - 1))
    changed = copy.deepcopy(messages)
    message = changed[at]
    match data.draw(st.sampled_from(["role", "content", "more", "call"])):
        case "role":
            message["role"] = "user" if message["role"] != "user" else "assistant"
        case "content":
            text = message["content"]
            message["content"] = text + "!" if isinstance(text, str) else [*text, {"type": "text", "text": "!"}]
        case "more":
            message["reasoning_content"] = "hm"
        case _:
            message["tool_calls"] = [{"id": "new", "function": {"name": "f", "arguments": "{}"}}, {"id": "two"}, {}]
    before, after = chain(dialect, messages), chain(dialect, changed)
    assert after[:at] == before[:at]
    assert not set(after[at:]) & set(before)


@quick
@given(DIALECT, MESSAGES, MESSAGES)
def test_an_extended_prompt_begins_with_the_chain_it_extends(
    dialect: Dialect, messages: list[Message], more: list[Message]
) -> None:
    short, long = chain(dialect, messages), chain(dialect, [*messages, *more])
    assert long[: len(short)] == short
    assert len(long) == len(messages) + len(more)
    assert len(set(long)) == len(long)


@quick
@given(DIALECT, MESSAGES)
def test_dropping_swapping_and_doubling_messages_shows(dialect: Dialect, messages: list[Message]) -> None:
    whole = chain(dialect, messages)
    assert chain(dialect, [*messages, messages[-1]])[-1] not in whole
    if len(messages) > 1:
        assert chain(dialect, messages[1:])[-1:] != whole[-1:]
        swapped = chain(dialect, messages[::-1])
        if [json.dumps(each) for each in messages] != [json.dumps(each) for each in messages[::-1]]:
            assert swapped[-1] != whole[-1] or marked_alike(messages)


def marked_alike(messages: list[Message]) -> bool:
    """Whether the messages say the same in either order, once written alike."""
    plain = [
        {
            **each,
            "content": each["content"]
            if not (isinstance(each["content"], list) and all(block["type"] == "text" for block in each["content"]))
            else "\x1e".join(block["text"] for block in each["content"]),
        }
        for each in messages
    ]
    return plain == plain[::-1]


@quick
@given(MESSAGES, TEXT, st.sampled_from(["completed", "in_progress", None]))
def test_ids_and_status_of_responses_items_are_invisible(
    messages: list[Message], name: str, status: str | None
) -> None:
    """Codex gives the same items other ids in every thread."""
    told = [{**each, "type": "message", "id": f"{name}{n}", "status": status} for n, each in enumerate(messages)]
    plain = [{**each, "type": "message"} for each in messages]
    assert chain(Dialect.RESPONSES, told) == chain(Dialect.RESPONSES, plain)


@quick
@given(MESSAGES, TEXT)
def test_the_system_prompt_leads_the_chain(messages: list[Message], system: str) -> None:
    """Anthropic's `system`, as a string or its one block, and Responses' `instructions` are a system message."""
    as_text = chain(Dialect.MESSAGES, messages, system=system)
    blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    plain = chain(Dialect.MESSAGES, messages)
    assert len(as_text) == len(plain) + 1
    assert not set(as_text) & set(plain)
    assert chain(Dialect.MESSAGES, messages, system=blocks) == as_text
    assert chain(Dialect.CHAT, [{"role": "system", "content": system}, *messages]) == as_text
    told = chain(Dialect.RESPONSES, messages, instructions=system)
    assert len(told) == len(messages) + 1
    assert not set(told) & set(chain(Dialect.RESPONSES, messages))


@quick
@given(MESSAGES, st.lists(st.fixed_dictionaries({"name": TEXT}), min_size=1, max_size=3))
def test_tools_seed_the_chain(messages: list[Message], tools: list[dict[str, str]]) -> None:
    """Two tool sets share nothing; none, null, an empty list and `tool_choice: none` are the same."""
    plain = chain(Dialect.CHAT, messages)
    told = chain(Dialect.CHAT, messages, tools=tools)
    assert not set(told) & set(plain)
    assert chain(Dialect.CHAT, messages, tools=[{**each, "cache_control": {"a": 1}} for each in tools]) == told
    assert chain(Dialect.CHAT, messages, tools=[]) == chain(Dialect.CHAT, messages, tools=None) == plain
    assert chain(Dialect.CHAT, messages, tools=tools, tool_choice="none") == plain


@quick
@given(MESSAGES)
def test_tenants_and_models_share_no_boundary(messages: list[Message]) -> None:
    raw = [json.dumps(each).encode() for each in messages]
    chains = [
        {each.hash for each in chain_messages(seed(tenant, model, b""), 0, raw, Canon())}
        for tenant, model in (("a", "m"), ("b", "m"), ("a", "n"), ("", "am"), ("am", ""))
    ]
    assert sum(map(len, chains)) == len(set.union(*chains))


@quick
@given(st.lists(MESSAGE | st.integers() | TEXT | st.none() | st.lists(st.integers(), max_size=2), max_size=6))
def test_what_a_canon_remembers_changes_no_digest(messages: list[Any]) -> None:
    """A small memory that forgets all the time gives the same chain as a fresh one."""
    raw = [json.dumps(each).encode() for each in messages]
    small = Canon(size=2)
    for _ in range(3):
        assert chain_messages(b"s", 0, raw, small) == chain_messages(b"s", 0, raw, Canon())


# --- raw prompts -----------------------------------------------------------------------------------------------------

PIECES = st.lists(st.integers(0, 3 * CELL_BYTES), min_size=1, max_size=5)


def text_of(size: int, salt: int = 0) -> bytes:
    return bytes((n * 7 + n // 251 + salt) % 256 for n in range(size))


@quick
@given(st.integers(0, 5 * CELL_BYTES), st.integers(0, 5 * CELL_BYTES))
def test_a_text_that_extends_another_shares_all_its_full_cells(size: int, more: int) -> None:
    short, long = chain_text(b"s", text_of(size)), chain_text(b"s", text_of(size + more))
    if size >= CELL_BYTES:
        assert long[: len(short)] == short
        assert len(short) == size // CELL_BYTES
    assert all(boundary.text_bytes <= size + more for boundary in long)


@quick
@given(st.integers(1, 5 * CELL_BYTES), st.data())
def test_a_changed_byte_changes_all_cells_from_there_and_none_before(size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, size - 1))
    text = text_of(size)
    changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    before, after = chain_text(b"s", text), chain_text(b"s", changed)
    cell = at // CELL_BYTES
    assert after[:cell] == before[:cell]
    assert not {each.hash for each in after[cell:]} & {each.hash for each in before}


@quick
@given(st.lists(st.integers(-5, 200_000) | st.just(10**30), max_size=600), st.lists(st.integers(0, 9), max_size=300))
def test_token_ids_extend_as_text_does(ids: list[int], more: list[int]) -> None:
    short, long = chain_token_ids(b"s", ids), chain_token_ids(b"s", [*ids, *more])
    if 4 * len(ids) >= CELL_BYTES:
        assert long[: len(short)] == short


def test_conversations_behind_one_long_text_are_told_apart() -> None:
    """By what they say beyond it, once that fills a cell."""
    system = text_of(80_000)
    tips = {chain_text(b"s", system + text_of(2 * CELL_BYTES, salt))[-1].hash for salt in range(1, 17)}
    assert len(tips) == 16


def test_a_short_text_has_one_boundary() -> None:
    for size in (0, 1, CELL_BYTES - 1):
        assert len(chain_text(b"s", text_of(size))) == 1
    assert chain_text(b"s", b"a")[0] != chain_text(b"s", b"b")[0]
    assert isinstance(chain_text(b"s", b"")[0], Boundary)


def test_media_count_as_what_a_model_makes_of_them_and_are_told_apart() -> None:
    def chain(data: str) -> Any:
        source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        raw = json.dumps({"role": "user", "content": [source, {"type": "text", "text": "what is it?"}]}).encode()
        return chain_messages(seed("t", "m", b""), 0, [raw], Canon())

    one, same, other = chain("a" * 4_000_000), chain("a" * 4_000_000), chain("a" * 3_999_999 + "b")
    assert one == same
    assert one.hashes != other.hashes
    assert MEDIA_BYTES <= one.sizes[-1] < 2 * MEDIA_BYTES
