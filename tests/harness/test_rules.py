"""The checks themselves can fail: each finds the fault it is there for, and nothing in a run that is in order."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from tests.harness import rules
from tests.harness.rig import MockTurn
from tests.harness.rules import Attempt, Labelled
from tests.harness.wire import Body, End, Exchange


def body(*events: str, terminal: bool = True) -> Body:
    marks = tuple(hashlib.sha256("".join(events[: n + 1]).encode()).hexdigest() for n in range(len(events)))
    return Body(len("".join(events)), hashlib.sha256("".join(events).encode()).hexdigest(), marks, terminal)


def exchange(tap: str = "front", *, asked: str = "q", answered: Body | None = None, at_s: float = 0.0) -> Exchange:
    return Exchange(
        tap=tap,
        port=1,
        ordinal=0,
        method="POST",
        target="/v1/messages",
        request=body(asked),
        request_headers={},
        status=200,
        response=answered or body("a", "b"),
        response_headers={},
        started_s=at_s,
        head_s=at_s,
        ended_s=at_s + 1,
        end=End.COMPLETE,
        client_left_s=None,
    )


def turn(
    headers: dict[str, str], *, tools: bool = True, role: str = "main", system: str = "s", mock: str = "mock1"
) -> MockTurn:
    return MockTurn(
        mock=mock,
        seq=1,
        role=role,
        last_word=False,
        headers=headers,
        body={"tools": [{}] if tools else [], "messages": [{"content": system}]},
        exchange=exchange(mock),
    )


def sub(branch: str, mock: str, started_s: float) -> Labelled:
    return Labelled(branch, "sub", mock, started_s, started_s + 2)


def test_branches_follow_the_harness_own_ids() -> None:
    codex = [turn({"thread-id": "t1"}), turn({"thread-id": "t2", "x-openai-subagent": "collab_spawn"})]
    assert [(t.branch, t.kind) for t in rules.labelled("codex", codex)] == [("t1", "main"), ("t2", "sub")]
    claude = [turn({}), turn({"x-claude-code-agent-id": "a1"}), turn({}, tools=False)]
    kinds = [(t.branch, t.kind) for t in rules.labelled("claude_tui", claude)]
    assert kinds == [("main", "main"), ("a1", "sub"), ("main/side", "side")]
    opencode = [turn({"x-session-id": "s"}), turn({"x-session-id": "u", "x-parent-session-id": "s"})]
    assert [t.kind for t in rules.labelled("opencode", opencode)] == ["main", "sub"]


def test_branches_follow_content_where_there_are_no_ids() -> None:
    """Qwen Code's memory extraction has the main conversation's messages but another system prompt."""
    qwen = [turn({}), turn({}, role="subA"), turn({}, role="compact"), turn({}, system="memory")]
    kinds = [(t.branch, t.kind) for t in rules.labelled("qwen", qwen)]
    assert kinds == [("main", "main"), ("subA", "sub"), ("main", "main"), ("memory", "side")]


def test_a_conversation_that_shrinks_goes_on_as_another_branch() -> None:
    long, short = turn({}), turn({})
    long.body["messages"] = [{"content": "s"}] * 5
    assert [t.branch for t in rules.labelled("kimicode", [short, long, short, long])] == [
        "main",
        "main",
        "main'",
        "main'",
    ]


def test_a_branch_on_two_mocks_is_found() -> None:
    one, other = Labelled("main", "main", "mock1", 0, 1), Labelled("main", "main", "mock2", 2, 3)
    assert rules.moves([one, other]) == {"main": ["mock1", "mock2"]}
    assert rules.moves([one, one]) == {}
    assert rules.moves([replace(one, kind="side"), replace(other, kind="side")]) == {}


def test_subagents_together_are_found_only_if_they_run_at_once() -> None:
    assert rules.crowded_subagents([sub("A", "mock1", 0), sub("B", "mock1", 1)]) == (1, [("A", "B")])
    assert rules.crowded_subagents([sub("A", "mock1", 0), sub("B", "mock2", 1)]) == (1, [])
    assert rules.crowded_subagents([sub("A", "mock1", 0), sub("B", "mock1", 2)]) == (0, [])
    later = sub("A", "mock2", 10)
    assert rules.crowded_subagents([sub("A", "mock1", 0), later, sub("B", "mock1", 10)]) == (0, [])


def test_a_changed_body_is_found_in_either_direction() -> None:
    assert rules.unequal_bodies([exchange()], [exchange("mock1")]) == []
    assert len(rules.unequal_bodies([exchange()], [exchange("mock1", asked="other")])) == 2
    assert len(rules.unequal_bodies([exchange()], [exchange("mock1", answered=body("a", "c"))])) == 1
    assert len(rules.unequal_bodies([exchange()], [replace(exchange("mock1"), status=201)])) == 1


def test_a_lost_or_doubled_request_is_found() -> None:
    assert len(rules.unequal_bodies([exchange()], [])) == 1
    assert len(rules.unequal_bodies([exchange()], [exchange("mock1"), exchange("mock2")])) == 1


def test_the_same_request_twice_is_paired_by_its_answers() -> None:
    first, second = body("a"), body("b")
    front = [exchange(answered=first), exchange(answered=second)]
    back = [exchange("mock2", answered=second), exchange("mock1", answered=first)]
    assert rules.unequal_bodies(front, back) == []
    assert len(rules.unequal_bodies(front, [back[0], back[0]])) == 1


def test_a_stream_cut_short_must_be_a_beginning() -> None:
    cut = replace(exchange(answered=body("a", terminal=False)), end=End.CLIENT_CLOSED)
    assert rules.unequal_bodies([cut], [exchange("mock1")]) == []
    other = replace(exchange(answered=body("x", terminal=False)), end=End.CLIENT_CLOSED)
    assert len(rules.unequal_bodies([other], [exchange("mock1")])) == 1
    assert len(rules.unequal_bodies([replace(cut, end=End.COMPLETE)], [exchange("mock1")])) == 1


def test_errors_are_found() -> None:
    """Leaving after the last event is no error; an error status, a broken answer and one without its last event are."""
    assert rules.errors([exchange(), replace(exchange(), end=End.CLIENT_CLOSED)]) == []
    assert len(rules.errors([replace(exchange(), status=502)])) == 1
    assert len(rules.errors([replace(exchange(answered=body("a", terminal=False)), end=End.BROKEN)])) == 1


def test_words_must_come_in_order() -> None:
    assert rules.broken_orders(("a", "b", "a"), "a b a") == []
    assert rules.broken_orders(("a", "b", "a"), "a b") == ["a"]


def test_attempts_are_told_apart_by_what_the_client_saw() -> None:
    unfinished = body("a", terminal=False)
    front = [
        replace(exchange(at_s=0), status=429),
        replace(exchange(at_s=3, answered=unfinished), end=End.BROKEN),
        replace(exchange(at_s=6, answered=body(terminal=False)), status=None, end=End.BROKEN),
        exchange(at_s=8, answered=unfinished),
        exchange(at_s=9),
    ]
    outcomes = ["429", "broken", "broken", "unfinished", "whole"]
    assert [each.outcome for each in rules.attempts(front)] == outcomes
    assert [each.pause_s for each in rules.attempts(front)] == [2, 2, 1, 0, None]


def test_other_retries_are_found() -> None:
    direct = [Attempt("429", 2.0), Attempt("broken", 0.5), Attempt("whole", None)]
    assert rules.retries_differ(direct, direct, 1.5) == []
    assert len(rules.retries_differ(direct, direct[1:], 1.5)) == 1
    assert len(rules.retries_differ(direct, [Attempt("429", 0.1), *direct[1:]], 1.5)) == 1
    assert len(rules.retries_differ(direct, [Attempt("503", 2.0), *direct[1:]], 1.5)) == 1
    assert len(rules.retries_differ(direct, [direct[0], Attempt("unfinished", 0.5), direct[2]], 1.5)) == 1


def test_a_hang_up_may_become_a_502_that_is_retried_no_later() -> None:
    direct = [Attempt("broken", 4.0), Attempt("whole", None)]
    assert rules.retries_differ(direct, [Attempt("502", 0.5), Attempt("whole", None)], 1.5) == []
    assert len(rules.retries_differ(direct, [Attempt("502", 6.0), Attempt("whole", None)], 1.5)) == 1
