"""The built-in workload is the published one, by quantiles, and the same for one seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice

import pytest

from simulations import workload, workload_tables
from simulations.measure import percentile
from simulations.replay_order import Order
from simulations.trace import Kind, Ref, Run, Session, Trace, Tree, Turn, length
from simulations.workload import BLOCK_TOKENS, Shape
from simulations.workload_tables import Table

QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.99)


@pytest.fixture(scope="module")
def drawn() -> Trace:
    return workload.trace(seed=7, count=700)


def roots(trace: Trace) -> list[Session]:
    return [tree.sessions[0] for tree in trace.trees]


def followups(trace: Trace, kind: Kind) -> Iterable[Turn]:
    return (turn for root in roots(trace) for turn in root.turns[1:] if turn.kind is kind)


@pytest.mark.parametrize(
    ("name", "published", "mean"),
    [
        ("SESSION_TURNS", (18, 45, 94, 155, 329), 68.5),
        ("LOOP_TURNS", (1, 2, 4, 17, 66), 6.2),
        ("FIRST_TOKENS", (18_600, 24_500, 104_000, 259_000, 708_000), 91_000),
        ("NEW_TOOL_TOKENS", (376, 720, 1_670, 3_791, 16_700), 1_823),
        ("NEW_HUMAN_TOKENS", (368, 682, 1_956, 20_700, 222_000), 11_500),
        ("OUTPUT_TOKENS", (137, 216, 426, 898, 3_686), 440),
        ("GAP_TOOL_S", (5, 8, 19, 66, 606), 42),
        ("GAP_HUMAN_S", (39, 131, 470, 1_917, 15_050), 956),
    ],
)
def test_tables_hold_the_published_quantiles_and_come_near_the_mean(
    name: str, published: tuple[float, ...], mean: float
) -> None:
    """Each table has exactly the published quantiles; its mean, which the unpublished ends decide, is near."""
    table: Table = getattr(workload_tables, name)
    assert [table.at(q) for q in QUANTILES] == pytest.approx(published)
    assert sum(table.at((n + 0.5) / 20_000) for n in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.12)
    values = [table.at(n / 1000) for n in range(1001)]
    assert values == sorted(values)


def near(values: Iterable[float], published: tuple[float, ...], rel: float) -> bool:
    ordered = sorted(values)
    found = [percentile(ordered, q) for q in QUANTILES[: len(published)]]
    return found == pytest.approx(published, rel=rel)


def test_sessions_are_as_long_as_published(drawn: Trace) -> None:
    assert near((len(root.turns) for root in roots(drawn)), (18, 45, 94, 155), 0.2)


def test_prompts_are_as_long_as_published(drawn: Trace) -> None:
    """Nothing fits prompts to this: they follow from first prompts, growth, rewrites and lengths. p50 is 104k."""
    prompts = sorted(turn.prompt_tokens for root in roots(drawn) for turn in root.turns)
    assert percentile(prompts, 0.5) == pytest.approx(104_000, rel=0.15)
    at_fifty = sorted(root.turns[50].prompt_tokens for root in roots(drawn) if len(root.turns) > 50)
    assert percentile(at_fifty, 0.5) == pytest.approx(105_000, rel=0.2)


def test_growth_outputs_and_pauses_are_as_published(drawn: Trace) -> None:
    by_tool = list(followups(drawn, Kind.TOOL))
    by_human = list(followups(drawn, Kind.HUMAN))
    assert near((turn.prompt_tokens - turn.keep * BLOCK_TOKENS for turn in by_tool), (376, 720, 1_670, 3_791), 0.1)
    assert near((turn.prompt_tokens - turn.keep * BLOCK_TOKENS for turn in by_human), (368, 682, 1_956), 0.15)
    assert near((turn.output_tokens for turn in by_tool), (137, 216, 426, 898, 3_686), 0.15)
    assert near((turn.think_s or 0 for turn in by_tool), (5, 8, 19, 66, 606), 0.2)
    assert near((turn.think_s or 0 for turn in by_human), (39, 131, 470, 1_917), 0.15)
    assert 0.12 < len(by_human) / (len(by_human) + len(by_tool)) < 0.2  # 14.5 % are published


def test_rewrites_are_as_rare_as_published(drawn: Trace) -> None:
    """1.9 % of turns lose a tenth of the prefix before them, 0.45 % shrink it by two fifths."""
    pairs = [pair for root in roots(drawn) for pair in zip(root.turns, root.turns[1:], strict=False)]
    lost = sum(b.keep * BLOCK_TOKENS < 0.9 * a.prompt_tokens - BLOCK_TOKENS for a, b in pairs) / len(pairs)
    shrunk = sum(b.prompt_tokens < 0.6 * a.prompt_tokens for a, b in pairs) / len(pairs)
    assert 0.01 < lost < 0.03
    assert 0.002 < shrunk < 0.01


def test_heads_are_shared_as_published(drawn: Trace) -> None:
    """In 773 sessions there were 367 pairs of tools and system prompt and 83 tools; here are 700."""
    heads = [root.turns[0].add[:2] for root in roots(drawn)]
    assert 0.40 < len(set(heads)) / len(heads) < 0.55
    assert 0.06 < len({tools for tools, _ in heads}) / len(heads) < 0.16
    assert 12_000 < percentile(sorted(root.head_tokens for root in roots(drawn)), 0.5) < 17_000


def test_copies_and_subagents_are_what_was_declared() -> None:
    """Without the overlay nobody spawns; with it the parent's next turn waits for the last turn of each."""
    plain = workload.trace(seed=3, count=300)
    copies = [session for tree in plain.trees for session in tree.sessions[1:]]
    assert all(session.turns[0].kind is Kind.HUMAN for session in copies)
    assert all(session.turns[0].base == session.parent for session in copies)
    assert 1 <= len(copies) <= 30  # 4.2 % of 300
    fanned = workload.trace(seed=3, count=20, shape=Shape(fan_out_share=0.05))
    agents = [session for tree in fanned.trees for session in tree.sessions if session.turns[0].kind is Kind.SPAWN]
    assert agents
    for tree in fanned.trees:
        sessions = {session.id: session for session in tree.sessions}
        for agent in tree.sessions:
            if agent.turns[0].kind is Kind.SPAWN:
                assert agent.parent is not None
                assert agent.turns[0].after == (agent.parent,)
                waits = sessions[agent.parent.session].turns[agent.parent.turn + 1].after
                assert Ref(agent.id, len(agent.turns) - 1) in waits
                assert 4 <= len(agent.turns) <= 24
                assert 9_000 <= agent.turns[0].prompt_tokens <= 12_000


@pytest.mark.parametrize("context_tokens", [60_000, 262_144])
def test_every_turn_fits_and_its_blocks_add_up(context_tokens: int) -> None:
    """Prompt and output fit the context, and what is kept and added makes the prompt's whole blocks."""
    shape = Shape(context_tokens=context_tokens, fan_out_share=0.02)
    for tree in workload.trace(seed=1, count=40, shape=shape).trees:
        sessions = {session.id: session for session in tree.sessions}
        for session in tree.sessions:
            assert session.peak_tokens <= context_tokens
            for turn in session.turns:
                assert turn.keep + length(turn.add) == turn.prompt_tokens // BLOCK_TOKENS
                assert turn.output_tokens >= 1
                if turn.base is not None:
                    base = sessions[turn.base.session].turns[turn.base.turn]
                    assert turn.keep <= base.prompt_tokens // BLOCK_TOKENS


def test_the_same_seed_draws_the_same_sessions() -> None:
    """The stream is a function of its seed, and a longer one begins with the shorter."""
    assert tuple(islice(workload.trees(5), 10)) == workload.trace(5, 10).trees
    assert workload.trace(5, 3).trees != workload.trace(6, 3).trees


def test_the_order_in_which_turns_are_looked_at_changes_none_of_them() -> None:
    """They are drawn late, and a replay looks at them as completions come in."""
    shape = Shape(fan_out_share=0.05)
    forwards = list(islice(workload.trees(5, shape), 12))
    looked_at = [session.turns[len(session.turns) // 2] for tree in forwards for session in tree.sessions]
    backwards = list(islice(workload.trees(5, shape), 12))
    for tree in reversed(backwards):
        for session in reversed(tree.sessions):
            assert session.turns[-1].index == len(session.turns) - 1
    assert backwards == forwards
    assert looked_at == [session.turns[len(session.turns) // 2] for tree in backwards for session in tree.sessions]
    ids = [range(run.first, run.first + run.size) for tree in forwards for each in tree.sessions for run in new(each)]
    assert sum(map(len, ids)) == len(set(chain.from_iterable(ids)))


def new(session: Session) -> Iterable[Run]:
    """The blocks that no other session has."""
    heads = {run for run in session.turns[0].add if run.first >= 1 << 60}
    return (run for turn in session.turns for run in turn.add if run not in heads)


@pytest.mark.parametrize("seed", range(4))
def test_turns_go_in_the_same_order_however_late_they_are_looked_at(seed: int) -> None:
    """`Order` looks at a stepwise session one turn ahead; as values, the same turns are all entered at once."""
    drawn = next(tree for tree in workload.trees(seed, Shape(fan_out_share=0.05)) if len(tree.sessions) > 3)
    whole = Tree(tuple(replace(each, turns=tuple(each.turns), stepwise=False) for each in drawn.sessions))
    late, early, dice = Order(drawn), Order(whole), random.Random(seed)
    waiting = late.begin()
    assert sorted(waiting) == sorted(early.begin())
    played = 0
    while waiting:
        ref = waiting.pop(dice.randrange(len(waiting)))
        played += 1
        assert late.pause_s(ref) == early.pause_s(ref)
        released = late.complete(ref)
        assert sorted(released) == sorted(early.complete(ref))
        waiting += released
    assert played == drawn.turn_count
