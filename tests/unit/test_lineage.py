"""Which branch a turn continues or forks from, by which boundaries later turns find it, and its size in tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.domain.session import Boundary, Branch, Session
from router.domain.shared import View
from router.domain.turn import Facts
from router.placement.cost import Tuning, rates_of
from router.placement.decide import turn_of
from router.placement.lineage import (
    ASKED_MAX,
    NEWEST_TIPS,
    OWN_BOUNDARIES,
    Lineage,
    apart,
    ask_for,
    heads_of,
    kept_tips,
    own,
    trace,
)
from router.placement.scope import record_key
from tests.fakes import prompt, unread
from tests.fleet_world import fleet, replica

FEW = settings(max_examples=200, deadline=None)
SYSTEM = 1
"""Boundaries of the system prompt at the beginning of every chain here."""


def view(
    branch: Branch | None = None, depth: int | None = None, head: Branch | None = None, *, keyed: bool = True
) -> View:
    """What the store says of a prompt whose boundary `depth` from its end is known; a keyed turn asks for each boundary
    as its session's own first.
    """
    met = depth if depth is None or not keyed else 2 * depth + 1
    return View(0.0, 0, {}, {}, {}, branch=branch, depth=met, head_branch=head, session=Session("s"))


def branch_of(facts: Facts, **changes: object) -> Branch:
    """The branch as it is after a turn with those facts."""
    came = trace(facts, view(), "t")
    plain = Branch(came.branch, came.session, version=1, turns=1, tips=(facts.chain[-1],))
    return replace(plain, **changes)  # type: ignore[arg-type]


FIRST = prompt("one")
NEXT = prompt("one", "reply", "two")
LATER = prompt("one", "reply", "two", "reply", "three")
MINE = FIRST.session or ""


# --- continuation, fork, new ------------------------------------------------------------------------------------------


def test_nothing_known_is_a_new_branch_that_every_router_names_alike() -> None:
    one, two = trace(FIRST, view(), "turn 1"), trace(FIRST, view(), "turn 2")
    assert one == two
    assert (one.known, one.parent, one.shared_bytes, one.fork) == (None, None, 0, True)
    assert one.session == FIRST.session
    assert trace(NEXT, view(), "turn 1").branch != one.branch
    assert trace(prompt("one", session="t"), view(), "turn 1").branch != one.branch


def test_a_keyless_conversation_is_a_session_of_its_own() -> None:
    one, two = (trace(prompt(text, session=None), view(), "t") for text in ("one", "two"))
    assert one.session != two.session
    assert one.session == trace(prompt("one", session=None), view(), "u").session


def test_a_turn_continues_an_idle_branch_from_any_boundary() -> None:
    known = branch_of(NEXT, tips=(NEXT.chain[-1], FIRST.chain[-1]))
    came = trace(LATER, view(known, depth=2), "t")
    assert (came.branch, came.known, came.parent, came.fork) == (known.id, known, known, False)
    assert came.shared_bytes == NEXT.chain[-1].text_bytes
    rewound = prompt("one", "another reply", "another two")
    came = trace(rewound, view(known, depth=2), "t")
    assert came.known == known
    assert came.shared_bytes == FIRST.chain[-1].text_bytes


def test_a_busy_branch_is_continued_from_its_tip_and_forked_from_further_back() -> None:
    busy = branch_of(NEXT, tips=(NEXT.chain[-1], FIRST.chain[-1]), in_flight=1)
    assert trace(LATER, view(busy, depth=2), "t").known == busy
    fork = trace(prompt("one", "another reply", "another two"), view(busy, depth=2), "t")
    assert (fork.known, fork.parent, fork.fork) == (None, busy, True)
    assert fork.shared_bytes == FIRST.chain[-1].text_bytes
    assert fork.branch != busy.id
    assert fork.session == busy.session


def test_a_prompt_sent_again_continues_its_branch_though_that_is_busy() -> None:
    busy = branch_of(FIRST, tips=(NEXT.chain[-1], FIRST.chain[-1]), in_flight=1)
    assert trace(FIRST, view(busy, depth=0), "t").known == busy


def test_a_boundary_of_another_session_is_forked() -> None:
    other = branch_of(prompt("one", session="other"), tips=(FIRST.chain[-1],))
    fork = trace(NEXT, view(other, depth=2), "t")
    assert (fork.known, fork.parent, fork.session) == (None, other, NEXT.session)
    assert fork.keeps_tip


def test_where_another_session_has_this_very_prompt_each_finds_its_own_branch_again() -> None:
    """The boundary is the other's; this session's branch has it as its own, and is found by it first."""
    other = branch_of(prompt("one", session="other"), tips=(FIRST.chain[-1],))
    came = trace(FIRST, view(other, depth=0), "turn 1")
    assert came.tip is not None
    assert came.tip == own(FIRST.chain[-1], MINE)
    assert came.branch != other.id
    mine = Branch(came.branch, came.session, version=1, turns=1, tips=(came.tip,))
    asked = ask_for(NEXT).boundaries
    assert asked.index(came.tip.hash) == asked.index(FIRST.chain[-1].hash) - 1
    again = trace(NEXT, replace(view(mine, depth=2), depth=asked.index(came.tip.hash)), "turn 2")
    assert again.known == mine
    assert again.tip == NEXT.chain[-1]
    resent = trace(FIRST, replace(view(mine), branch=mine, depth=0), "turn 3")
    assert (resent.known, resent.tip) == (mine, came.tip)


def test_a_keyless_turn_takes_whatever_branch_its_prompt_leads_to() -> None:
    known = branch_of(prompt("one", session="named"), tips=(FIRST.chain[-1],))
    came = trace(prompt("one", "reply", "two", session=None), view(known, depth=2, keyed=False), "t")
    assert (came.known, came.session) == (known, known.session)


def test_a_compacted_history_shares_its_sessions_head() -> None:
    old = branch_of(FIRST)
    came = trace(prompt("summary of it all"), view(head=old), "t")
    assert (came.known, came.parent) == (None, old)
    assert came.shared_bytes == FIRST.chain[SYSTEM - 1].text_bytes


def test_prompts_that_were_not_read_are_branches_named_by_their_turn() -> None:
    one, two = trace(unread(), view(), "turn 1"), trace(unread(), view(), "turn 2")
    assert one.branch != two.branch
    assert one.session == two.session == unread().session
    assert one.tip is None
    assert kept_tips(one, 16) == ()


def test_apart_is_a_new_branch_with_the_same_parent() -> None:
    known = branch_of(FIRST)
    came = apart(trace(NEXT, view(known, depth=2), "t"), "t")
    assert (came.known, came.parent, came.fork, came.keeps_tip) == (None, known, True, False)
    assert came.branch != known.id
    assert came.shared_bytes == FIRST.chain[-1].text_bytes


def test_the_store_is_asked_from_the_end_of_the_prompt_backwards() -> None:
    ask = ask_for(LATER)
    expected = [each for boundary in reversed(LATER.chain) for each in (own(boundary, MINE), boundary)]
    assert ask.boundaries == tuple(boundary.hash for boundary in expected)
    keyless = prompt("one", session=None)
    assert ask_for(keyless).boundaries == tuple(boundary.hash for boundary in reversed(keyless.chain))
    assert ask.head == LATER.chain[SYSTEM - 1].hash
    assert LATER.session is not None
    assert ask.session == record_key(LATER.tenant, LATER.session)
    assert ask_for(unread()).boundaries == ()
    assert ask_for(unread()).head is None


# --- the turn in tokens -----------------------------------------------------------------------------------------------


def size(facts: Facts, came: Lineage) -> tuple[int, int]:
    turn = turn_of("t", facts, came, rates_of(fleet(replica(0))), Tuning(), 0)
    return turn.prompt_tokens, turn.shared_tokens


def test_only_what_was_added_to_a_counted_prompt_is_estimated() -> None:
    """0.25 tokens a byte is the prior; the branch's own prompt had far more."""
    tip = NEXT.chain[-1]
    known = branch_of(NEXT, tokens=5_000, text_bytes=tip.text_bytes)
    added = LATER.chain[-1].text_bytes - tip.text_bytes
    assert size(LATER, trace(LATER, view(known, depth=2), "t")) == (5_000 + int(added * 0.25), 5_000)


def test_a_branch_that_was_rewound_is_not_taken_for_short() -> None:
    """Its newest prompt was its first again; the turn continues from further on, which is estimated."""
    met, first = NEXT.chain[-1], FIRST.chain[-1]
    known = branch_of(FIRST, tokens=900, text_bytes=first.text_bytes, tips=(first, met))
    _, shared = size(LATER, trace(LATER, view(known, depth=2), "t"))
    assert shared == 900 + int((met.text_bytes - first.text_bytes) * 0.25)


def test_a_rewind_shares_less_than_the_branch_had() -> None:
    first = FIRST.chain[-1]
    known = branch_of(LATER, tokens=9_000, text_bytes=LATER.chain[-1].text_bytes, tips=(LATER.chain[-1], first))
    again = prompt("one", "another reply", "another two")
    _, shared = size(again, trace(again, view(known, depth=2), "t"))
    assert shared == int(first.text_bytes * 0.25)


# --- the boundaries a branch keeps ------------------------------------------------------------------------------------


def came(branch: Branch | None, tip: Boundary | None, side_tip: Boundary | None = None) -> Lineage:
    """A turn of `branch` that ends at `tip`."""
    return Lineage("b", "s", branch, branch, 0, tip, side_tip)


@pytest.mark.parametrize("limit", [1, 2, 5, 16])
@FEW
@given(growth=st.lists(st.integers(1, 50_000), min_size=1, max_size=60))
def test_kept_tips_are_few_newest_first_and_distinct(limit: int, growth: list[int]) -> None:
    """A conversation of any length: the newest tip leads, order is kept, nothing is there twice."""
    branch = Branch("b", "s")
    total = 0
    for number, grown in enumerate(growth):
        total += grown
        tip = Boundary(f"{number:032x}", total)
        tips = kept_tips(came(branch, tip), limit)
        assert tips[0] == tip
        assert len(tips) <= limit
        order = [each.text_bytes for each in tips]
        assert order == sorted(order, reverse=True)
        assert len({each.hash for each in tips}) == len(tips)
        assert set(tips[1:]) <= set(branch.tips)
        if limit > NEWEST_TIPS + 1:
            assert tips[-1].hash == f"{0:032x}"  # the first prompt of a conversation stays known
            assert {each.hash for each in tips} >= {f"{n:032x}" for n in range(max(0, number - 3), number + 1)}
        branch = replace(branch, tips=tips)


@FEW
@given(at=st.integers(0, 9))
def test_a_tip_that_comes_again_moves_to_the_front(at: int) -> None:
    tips = tuple(Boundary(f"{number:032x}", 100 * number) for number in range(10, 0, -1))
    kept = kept_tips(came(Branch("b", "s", tips=tips), tips[at]), 16)
    assert kept == (tips[at], *tips[:at], *tips[at + 1 :])


def test_without_a_tip_of_its_own_a_branch_keeps_what_it_has() -> None:
    tips = (Boundary("a" * 32, 9), Boundary("b" * 32, 5))
    assert kept_tips(came(Branch("b", "s", tips=tips), None), 16) == tips


def test_another_last_message_continues_the_branch_it_shares_all_else_with() -> None:
    """Many questions to one long context: met where the last message begins, by its own session only."""
    first = trace(NEXT, view(), "t")
    assert first.side_tip == own(NEXT.chain[-2], MINE)
    tips = kept_tips(first, 16)
    assert tips == (NEXT.chain[-1], first.side_tip)
    idle = Branch(first.branch, first.session, version=1, turns=1, tips=tips)
    asked = prompt("one", "reply", "quite another question")
    depth = ask_for(asked).boundaries.index(tips[1].hash)
    again = trace(asked, replace(view(idle), depth=depth), "t")
    assert (again.known, again.shared_bytes) == (idle, NEXT.chain[-2].text_bytes)
    busy = trace(asked, replace(view(replace(idle, in_flight=1)), depth=depth), "t")
    assert (busy.known, busy.shared_bytes) == (None, NEXT.chain[-2].text_bytes)
    other = prompt("one", "reply", "quite another question", session="other")
    assert tips[1].hash not in ask_for(other).boundaries
    assert trace(prompt("one", "reply", "two", session=None), view(), "t").side_tip is None


def test_a_first_question_has_no_side_tip() -> None:
    """All before it is the system prompt, which says nothing of the conversation."""
    assert trace(FIRST, view(), "t").side_tip is None


def test_the_store_is_asked_for_the_deepest_boundaries_only() -> None:
    long = prompt(*(f"message {number}" for number in range(301)))
    asked = ask_for(long).boundaries
    assert len(asked) == ASKED_MAX + OWN_BOUNDARIES
    for depth, expected in enumerate(asked):
        assert (
            expected in (long.chain[-1 - depth // 2].hash, own(long.chain[-1 - depth // 2], MINE).hash) or depth >= 32
        )
    known = Branch("b", long.session or "", tips=(long.chain[-41],))
    met = trace(long, replace(view(known), depth=asked.index(long.chain[-41].hash)), "t")
    assert met.shared_bytes == long.chain[-41].text_bytes


def test_a_session_that_another_tenant_names_has_a_record_of_its_own() -> None:
    """However a tenant came by another's session, be it by forging the seal of `x-roost-session`: what it asks for and
    what it writes goes by its own scope."""
    mine, theirs = replace(LATER, tenant="mine"), replace(LATER, tenant="theirs")
    assert mine.session == theirs.session
    assert heads_of(mine) != heads_of(theirs)
    assert ask_for(replace(mine, refers_to="r")).response_id != ask_for(replace(theirs, refers_to="r")).response_id
