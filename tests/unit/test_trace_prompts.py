"""Prompts: shared blocks are shared bytes and nothing more, and messages grow as a conversation does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.domain.turn import Dialect
from simulations import workload
from simulations.measure_cache import InfiniteCache
from simulations.prompt import BYTES_PER_TOKEN, BlockTexts, Message, Prompt, Role, TreePrompts
from simulations.prompt_dialects import DIALECTS, body
from simulations.trace import Kind, Ref, Run, Session, Trace, Tree, Turn
from simulations.trace_files import load

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "traces"


def common(one: str, other: str) -> int:
    """Characters two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prompts_of(tree: Tree, block_tokens: int, texts: BlockTexts, *, global_blocks: bool = False) -> dict[Ref, Prompt]:
    made = TreePrompts(tree, block_tokens, global_blocks=global_blocks, texts=texts)
    refs = [Ref(session.id, turn.index) for session in tree.sessions for turn in session.turns]
    return {ref: made.prompt(ref) for ref in refs}


def turn(index: int, tokens: int, keep: int = 0, add: tuple[Run, ...] = (), kind: Kind = Kind.TOOL) -> Turn:
    base = Ref("a", index - 1) if index else None
    return Turn(index, kind, tokens, 15, base, keep, add, (base,) if base else (), 0.0)


def session(*turns: Turn, head_tokens: int = 0) -> Tree:
    return Tree((Session("a", turns, None, "h" if head_tokens else None, head_tokens),))


@st.composite
def histories(draw: st.DrawFn) -> Tree:
    """A session whose turns grow, rewind, stay and shrink, with ids that stand for prefixes."""
    fresh = 1
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 8))):
        whole = turns[-1].prompt_tokens // 10 if turns else 0
        keep = draw(st.sampled_from([whole, whole, max(whole - 1, 0), draw(st.integers(0, whole))]))
        added = draw(st.integers(0, 6))
        tokens = max((keep + added) * 10 + draw(st.integers(0, 9)), 1)
        runs = (Run(fresh, added),) if added else ()
        fresh += added
        kind = draw(st.sampled_from([Kind.TOOL, Kind.HUMAN]))
        turns.append(turn(index, tokens, keep, runs, kind))
    return session(*turns, head_tokens=draw(st.sampled_from([0, 10, 30])))


def blocks(prompt: Prompt) -> list[tuple[str, int]]:
    return [(space, number) for space, first, size in prompt.spans for number in range(first, first + size)]


@given(histories(), st.sampled_from([1, 4, 10]))
def test_two_prompts_share_the_bytes_of_the_blocks_they_share(tree: Tree, sent_block_tokens: int) -> None:
    """Whatever the history: as many leading blocks in common, as many leading blocks of text, and then they part."""
    made = list(prompts_of(tree, 10, BlockTexts(0, sent_block_tokens)).values())
    size = sent_block_tokens * BYTES_PER_TOKEN
    for one in made:
        assert len(one.text) == max(one.tokens * BYTES_PER_TOKEN, 3)
        for other in made:
            mine, others = blocks(one), blocks(other)
            same = next((n for n, pair in enumerate(zip(mine, others, strict=False)) if pair[0] != pair[1]), None)
            shared = common(one.text, other.text)
            if same is None:
                assert shared >= min(len(mine), len(others)) * size
            else:
                assert same * size <= shared
                assert shared < (same + 1) * size or sent_block_tokens == 1  # one word may be another's by chance


@given(histories())
def test_messages_are_the_text_and_a_turn_begins_with_what_it_keeps(tree: Tree) -> None:
    """Messages put together are the prompt's text; those wholly inside what is shared are word for word the base's."""
    made = prompts_of(tree, 10, BlockTexts(0, 10))
    for prompt in made.values():
        told = prompt.messages
        spoken = [message for message in told if message.text != "ok "]
        assert "".join(message.text for message in spoken) == (prompt.text if prompt.tokens else "")
        assert told[-1].role in (Role.USER, Role.TOOL)
        assert all(message.role is not Role.SYSTEM for message in told[1:])
        for before, after in pairwise(told):
            assert (after.role is Role.TOOL) == before.calls_tool
            assert (before.role is Role.ASSISTANT) != (after.role is Role.ASSISTANT) or before.role is Role.SYSTEM
        if prompt.base is None:
            continue
        place = 0
        for mine, others in zip(told, made[prompt.base].messages, strict=False):
            place += 0 if others.text == "ok " else len(others.text)
            if place > prompt.shared_tokens * BYTES_PER_TOKEN:
                break
            assert mine == others


def test_a_growing_session_only_appends_messages() -> None:
    """Turn by turn: the whole of the last prompt, what the assistant said, what the tool or the human answered."""
    tree = session(
        turn(0, 57, add=(Run(1, 5),)),
        turn(1, 93, 5, (Run(6, 4),)),
        turn(2, 99, 9),
        turn(3, 131, 9, (Run(10, 4),), Kind.HUMAN),
        head_tokens=23,
    )
    made = prompts_of(tree, 10, BlockTexts(0, 10))
    first, second, third, fourth = (made[Ref("a", n)] for n in range(4))
    assert [(m.role, len(m.text) // 4) for m in first.messages] == [(Role.SYSTEM, 20), (Role.USER, 37)]
    assert second.messages[:2] == first.messages
    assert [(m.role, len(m.text) // 4, m.calls_tool) for m in second.messages[2:]] == [
        (Role.ASSISTANT, 15, True),
        (Role.TOOL, 21, False),
    ]
    assert second.shared_tokens == 57
    # The third's few tokens fill no block and nobody knows what they share: the message they are in changes.
    assert third.shared_tokens == 90
    assert third.messages[:3] == second.messages[:3]
    assert fourth.messages[: len(third.messages) - 1] == third.messages[:-1]
    assert fourth.messages[-1].role is Role.USER


def test_a_few_blocks_taken_back_change_their_message_in_place() -> None:
    tree = session(turn(0, 100, add=(Run(1, 10),)), turn(1, 140, 9, (Run(20, 5),)))
    made = prompts_of(tree, 10, BlockTexts(0, 10))
    before, after = made[Ref("a", 0)].messages, made[Ref("a", 1)].messages
    assert [len(m.text) // 4 for m in after] == [100, 15, 25]
    assert after[0].text[:360] == before[0].text[:360]
    assert after[0].text != before[0].text


def test_a_compacted_history_begins_anew_behind_its_head() -> None:
    tree = session(turn(0, 400, add=(Run(1, 40),)), turn(1, 90, 3, (Run(90, 6),)), head_tokens=30)
    after = prompts_of(tree, 10, BlockTexts(0, 10))[Ref("a", 1)].messages
    assert [(m.role, len(m.text) // 4) for m in after] == [(Role.SYSTEM, 30), (Role.USER, 60)]


def test_heads_are_shared_across_trees_and_other_ids_are_not() -> None:
    """Ids of a trace with local blocks mean nothing elsewhere; a head of the same name does."""
    texts = BlockTexts(0, 10)
    first = Tree((Session("a", (turn(0, 50, add=(Run(1, 5),)),), None, "h", 20),))
    other = Tree((Session("b", (turn(0, 50, add=(Run(1, 5),)),), None, "h", 20),))
    one = prompts_of(first, 10, texts)[Ref("a", 0)]
    two = prompts_of(other, 10, texts)[Ref("b", 0)]
    assert common(one.text, two.text) // 40 == 2
    everywhere = [
        prompts_of(each, 10, texts, global_blocks=True)[Ref(name, 0)].text
        for each, name in ((first, "a"), (other, "b"))
    ]
    assert everywhere[0] == everywhere[1]


def test_another_seed_shares_nothing() -> None:
    tree = session(turn(0, 100, add=(Run(1, 10),)))
    one, two = (prompts_of(tree, 10, BlockTexts(seed, 10))[Ref("a", 0)].text for seed in (0, 1))
    assert common(one, two) < 40


def test_a_prompt_without_ids_is_its_own() -> None:
    """A trace that knows only lengths gives prompts of these lengths that share nothing."""
    tree = Tree((Session("a", (turn(0, 105),)), Session("b", (turn(0, 105),))))
    one, two = prompts_of(tree, 10, BlockTexts(0, 10)).values()
    assert one.tokens == two.tokens == 105
    assert common(one.text, two.text) < 40


def roles(value: Any) -> list[str]:
    return [each["role"] for each in value]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_says_the_same_words(dialect: Dialect) -> None:
    """A body is a streaming request that holds the prompt's words in order and asks for the trace's output length."""
    tree = session(turn(0, 57, add=(Run(1, 5),)), turn(1, 93, 5, (Run(6, 4),)), head_tokens=20)
    prompt = prompts_of(tree, 10, BlockTexts(0, 10))[Ref("a", 1)]
    sent = body(dialect, prompt, "m", ignore_eos=True)
    asked = json.loads(sent)
    assert asked["stream"] is True
    for message in prompt.messages:
        assert message.text.encode() in sent
    match dialect:
        case Dialect.CHAT:
            assert roles(asked["messages"]) == ["system", "user", "assistant", "tool"]
            assert asked["messages"][2]["tool_calls"][0]["id"] == asked["messages"][3]["tool_call_id"]
            assert (asked["max_tokens"], asked["ignore_eos"], asked["model"]) == (15, True, "m")
        case Dialect.MESSAGES:
            assert asked["system"] == prompt.messages[0].text
            assert roles(asked["messages"]) == ["user", "assistant", "user"]
            called, answered = asked["messages"][1]["content"][1], asked["messages"][2]["content"][0]
            assert called["id"] == answered["tool_use_id"]
            assert asked["max_tokens"] == 15
        case Dialect.RESPONSES:
            assert asked["instructions"] == prompt.messages[0].text
            assert [item["type"] for item in asked["input"]] == [
                "message",
                "message",
                "function_call",
                "function_call_output",
            ]
            assert asked["max_output_tokens"] == 15
        case Dialect.COMPLETIONS:
            assert (asked["prompt"], asked["max_tokens"]) == (prompt.text, 15)
        case _:
            assert (asked["text"], asked["sampling_params"]["max_new_tokens"]) == (prompt.text, 15)
    plain = json.loads(body(dialect, prompt, "m", ignore_eos=False))
    assert "ignore_eos" not in json.dumps(plain)


def test_an_empty_message_says_something() -> None:
    """No API takes an empty text: a turn that adds nothing still says a word."""
    tree = session(turn(0, 50, add=(Run(1, 5),)), turn(1, 50, 5))
    told = prompts_of(tree, 10, BlockTexts(0, 10))[Ref("a", 1)].messages
    assert told[1:] == (Message(Role.ASSISTANT, "ok ", True), Message(Role.TOOL, "ok ", False))


def infinite_rate(trace: Trace, trees: int, sent_block_tokens: int) -> float:
    cache, texts = InfiniteCache(), BlockTexts(0, sent_block_tokens)
    hit = sent = 0
    for tree in trace.trees[:trees]:
        for prompt in prompts_of(tree, trace.block_tokens, texts, global_blocks=trace.global_blocks).values():
            hit += cache.send(prompt)
            sent += prompt.tokens
    return hit / sent


def test_the_workloads_infinite_hit_rate_is_near_the_published_one() -> None:
    """96.3 % of published input tokens hit inside their session."""
    assert 0.95 < infinite_rate(workload.trace(seed=2, count=60), 60, 1) < 0.985


@pytest.mark.skipif(not RECORDED.is_dir(), reason="recorded traces are not here")
def test_recorded_sessions_hit_as_often_as_their_new_tokens_say() -> None:
    """Blocks sent again make up what the trace says is not new, within its blocks' grain."""
    trace = load(RECORDED / "weka_dev.satrace.jsonl.xz")
    new = [
        (turn.prompt_tokens - turn.keep * 64, turn.prompt_tokens)
        for tree in trace.trees[:20]
        for each in tree.sessions
        for turn in each.turns
    ]
    told = 1 - sum(n for n, _ in new) / sum(n for _, n in new)
    assert infinite_rate(trace, 20, 1) == pytest.approx(told, abs=0.02)
