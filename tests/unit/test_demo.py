"""What the demo plays, counts, says and draws: pure."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any

import pytest
from rich.console import Console

from simulations.demo.cast import AGENTS, ROOT_TURNS, Cast, shortened, starts_subagents
from simulations.demo.lookout import ReplicaSight, Sight, sight_of
from simulations.demo.programme import Compared
from simulations.demo.screen import WIDTH, Frame, Reason, Row, Totals, bar, plain, render
from simulations.demo.story import CAPTION_CHARS, Act, Scene, caption
from simulations.demo.tally import FIRST, Placements, Seats, Spread, samples, spread_of
from simulations.demo.theatre import EXIT_FAILED, verdict
from simulations.measure import TurnResult
from simulations.trace import Kind, Ref, Run, Session, Tree, Turn

HEIGHT = 30
COMPARED = tuple(
    Compared(name, 12_345, 0, 0.875, 0.895, 0.08, 12.83, 10.24, 1_234)
    for name in ("roost", "round_robin", "session_sticky")
)


# --- the cast ---------------------------------------------------------------------------------------------------------


def test_one_seed_gives_one_cast() -> None:
    """And another seed another."""
    first, again, other = (list(islice(Cast(seed), 12)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_fan_out_comes_when_asked_for_and_the_others_keep_their_order() -> None:
    plain_cast, asked = Cast(7), Cast(7)
    expected = list(islice(plain_cast, 30))
    got = list(islice(asked, 3))
    asked.ask_for_fan_out()
    spread = next(asked)
    got += islice(asked, 26)
    assert spread is asked.fan_out
    assert starts_subagents(spread) == 0
    assert AGENTS[0] <= sum(each.parent == Ref(spread.id, 0) for each in spread.sessions) <= AGENTS[1]
    assert got == [tree for tree in expected if tree != spread][:29]
    assert len({tree.id for tree in asked.played}) == len(asked.played)


def test_sessions_are_short_and_nobody_waits_for_turns_that_are_gone() -> None:
    for tree in islice(Cast(3), 40):
        assert len(tree.sessions[0].turns) <= ROOT_TURNS
        known = {Ref(session.id, turn.index) for session in tree.sessions for turn in session.turns}
        for session in tree.sessions:
            for turn in session.turns:
                assert set(turn.after) <= known
                assert turn.base is None or turn.base in known


def test_shortening_keeps_the_subagents_that_are_waited_for() -> None:
    whole = family()
    assert [session.id for session in shortened(whole, 2).sessions] == ["s", "s/a", "s/b"]
    assert [session.id for session in shortened(whole, 1).sessions] == ["s"]


# --- the sums ---------------------------------------------------------------------------------------------------------


def test_samples_add_up_by_label() -> None:
    """Other metrics, comments and histogram series of the same name's beginning are left alone."""
    text = (
        "# TYPE m_total counter\n"
        'm_total{replica="a:1",why="x, \\"y\\""} 2.0\n'
        'm_total{replica="a:1",why="z"} 3\n'
        'm_total{replica="b:2"} 1e3\n'
        "m_total_created 7\n"
        "bare 4.5\n"
    )
    assert samples(text, "m_total", "replica") == {"a:1": 5.0, "b:2": 1000.0}
    assert samples(text, "m_total") == {"": 1005.0}
    assert samples(text, "bare") == {"": 4.5}
    assert samples(text, "nothing", "replica") == {}


def test_seats_follow_sessions_until_their_last_turn() -> None:
    seats = Seats()
    seats.enter(family())
    for session, number, replica, ttft_s in (("s", 0, "A", 1.0), ("s/a", 0, "B", 2.0), ("s/b", 0, "B", 4.0)):
        seats.take(result(session, number, replica, ttft_s))
    assert seats.sessions() == {"A": 1, "B": 2}
    seats.take(result("s/a", 1, "A", 3.0))  # its last
    assert seats.sessions() == {"A": 1, "B": 1}
    assert seats.ttft_p50_s("A") == 2.0
    assert seats.ttft_p50_s("B") == 3.0
    assert seats.ttft_p50_s("C") is None
    seats.take(result("s", 1, None, None))
    assert seats.sessions() == {"A": 1, "B": 1}


def decision(
    turn: str, replica: str, *, branch: str = "b", session: str = "s", reason: str = "home", at_s: float = 0.0
) -> dict[str, Any]:
    costs = {"A": {"prefill_s": 0.5}, "B": {"prefill_s": 2.0, "move_s": 9.0}, "E": {"prefill_s": 2.0, "crowd_s": 3.0}}
    terms = ("wait_s", "prefill_s", "decode_s", "others_s", "eviction_s", "move_s", "crowd_s", "ramp_s")
    return {
        "turn": turn,
        "attempt": 1,
        "session": session,
        "branch": branch,
        "replica": replica,
        "reason": reason,
        "at_s": at_s,
        "prompt_tokens": 1000,
        "predicted_cached_tokens": 900,
        "candidates": [
            {"replica": name, **dict.fromkeys(terms, 0.0), **cost, "total_s": sum(cost.values())}
            for name, cost in costs.items()
        ],
    }


def test_decisions_count_once_however_often_they_are_seen() -> None:
    placements = Placements()
    told = [decision("2", "A", at_s=2.0), decision("1", "A", reason="new", at_s=1.0)]
    placements.take(told, {"A"})
    placements.take(told, {"A"})
    assert placements.reasons == {"new": 1, "home": 1}
    assert placements.moves == 0
    [home, new] = placements.recent(4)
    assert (home.reason, new.reason) == ("home", "new")
    assert (home.cost_s, home.other, home.other_s, home.because) == (0.5, "E", 5.0, "crowd")


def test_what_a_join_moves_and_whom_it_gets() -> None:
    """Old branches that go to the newcomer count while their home is well; new sessions count by where they began."""
    placements = Placements()
    placements.take([decision(f"o{n}", "A", branch=f"o{n}", session=f"o{n}", reason="new") for n in range(3)], {"A"})
    placements.join("E", 10.0)
    assert placements.old_branches == 3
    after = [
        decision("1", "E", branch="n1", session="n1", reason="new", at_s=10.0),
        decision("2", "E", branch="n1", session="n1", at_s=11.0),  # it stays there: no new session
        decision("3", "A", branch="n2", session="n2", reason="new", at_s=12.0),
        decision("4", "E", branch="f", session="o0", reason="fork", at_s=13.0),  # a subagent of an old session
        decision("5", "A", branch="o0", session="o0", at_s=14.0),
        decision("6", "E", branch="o1", session="o1", reason="rebind", at_s=15.0),
        decision("7", "E", branch="o1", session="o1", at_s=16.0),  # moved once
    ]
    placements.take(after[::-1], {"A", "E"})
    assert (placements.moved_by_join, placements.moves) == (1, 1)
    assert (placements.newcomer_new_sessions, placements.new_sessions_after_join) == (1, 2)
    placements.take([decision("8", "E", branch="o2", session="o2", reason="home_gone", at_s=17.0)], {"E"})
    assert placements.moved_by_join == 1  # its home had gone
    more = [decision(f"x{n}", "E", branch=f"x{n}", session=f"x{n}", reason="new", at_s=18.0) for n in range(FIRST)]
    placements.take(more, {"A", "E"})
    assert placements.newcomer_of_first == FIRST - 1
    assert placements.newcomer_new_sessions == FIRST + 1


def test_a_spread_counts_turns_that_had_kv_to_stay_with() -> None:
    """First turns tell where a subagent began; a compacted history is no turn that could have stayed."""
    results = [
        result("s", 0, "A"),
        result("s/a", 0, "A"),
        result("s/b", 0, "B"),
        result("s/a", 1, "A"),
        result("s/b", 1, "C"),
        result("s", 1, "B"),  # the root is no subagent
    ]
    assert spread_of(shortened(family(), 2), results) == Spread("s", 2, {"A": 1, "B": 1}, later_turns=2, stayed=1)
    compacted = shortened(family(keep=1), 2)
    assert spread_of(compacted, results) == Spread("s", 2, {"A": 1, "B": 1}, later_turns=0, stayed=0)


def test_a_replica_is_read_from_what_router_and_engine_tell() -> None:
    engine = "\n".join(
        f'sglang:{name}{{model_name="m"}} {value}'
        for name, value in (
            ("num_running_reqs", 2),
            ("num_queue_reqs", 1),
            ("kv_used_tokens", 100),
            ("kv_evictable_tokens", 600),
            ("kv_available_tokens", 300),
        )
    )
    listed = {"id": "a:1", "standing": "serving", "healthy": True, "incarnation": "i", "load": {"in_flight": 4}}
    seen = sight_of(listed, engine, 2_000.0, 1_500.0)
    assert seen == ReplicaSight("a:1", "serving", 4, 3, 100, 600, 300, 2_000, 1_500)
    assert seen.hit_rate == 0.75
    assert sight_of(listed, engine, 0.0, 0.0).hit_rate is None
    for change, phase in (
        ({"standing": "draining"}, "draining"),
        ({"healthy": False, "incarnation": ""}, "joining"),
        ({"healthy": False}, "down"),
    ):
        assert sight_of({**listed, **change}, engine, 0.0, 0.0).phase == phase


@pytest.mark.parametrize(("router", "leases", "engine"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_nothing_is_in_flight_only_if_all_accounts_say_so(router: int, leases: int, engine: int) -> None:
    replica = ReplicaSight("a", "serving", leases, engine, 0, 0, 1, 0, 0)
    assert Sight((replica,), router, ()).in_flight == 1


@pytest.mark.parametrize(
    ("figures", "code"),
    [((5, 0, 0), 0), ((5, 1, 0), EXIT_FAILED), ((5, 0, 1), EXIT_FAILED), ((0, 0, 0), EXIT_FAILED)],
)
def test_only_a_clean_story_exits_with_zero(figures: tuple[int, int, int], code: int) -> None:
    assert verdict(dict(zip(("turns", "errors", "in_flight_after"), figures, strict=True))) == code


# --- the caption ------------------------------------------------------------------------------------------------------

NAMES = {"a:1": "A", "b:2": "B", "c:3": "C", "d:4": "D"}
WIDE = Spread("s00053", 6, {"a:1": 1, "b:2": 1, "c:3": 2, "d:4": 2}, 123, 123)


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        (Scene(Act.ARRIVE), "Four simulated replicas are up"),
        (Scene(Act.ARRIVE, sessions=3, reasons={"new": 3}), "3 sessions came; each new one goes where"),
        (
            Scene(Act.ARRIVE, sessions=30, reasons={"new": 30, "home": 98, "rebind": 2}),
            "98 of their 100 later turns went home",
        ),
        (Scene(Act.FAN_OUT), "The next session to begin will start subagents"),
        (Scene(Act.FAN_OUT, spread=Spread("s1", 5, {}, 0, 0)), "s1 begins; after its first turn it starts 5 subagents"),
        (Scene(Act.FAN_OUT, spread=Spread("s1", 5, {"b:2": 1}, 0, 0), names=NAMES), "after its first turn it starts 5"),
        (
            Scene(Act.FAN_OUT, spread=Spread("s1", 5, {"a:1": 1, "b:2": 1}, 0, 0), names=NAMES),
            "s1's 5 subagents spread (1@A 1@B): all on one",
        ),
        (Scene(Act.FAN_OUT, spread=WIDE, names=NAMES), "123 of 123 later turns stayed with their own KV"),
        (Scene(Act.JOIN), "A fifth replica starts"),
        (Scene(Act.JOIN, newcomer="E", old_branches=112), "E has joined, empty. 0 of 112 old branches moved there"),
        (
            Scene(Act.JOIN, newcomer="E", new_sessions=10, newcomer_sessions=9, old_branches=112),
            "E joined, empty, and took 9 of 10 new sessions; 0 of 112 old branches moved there",
        ),
        (
            Scene(
                Act.JOIN, newcomer="E", new_sessions=133, newcomer_sessions=40, newcomer_of_first=10, old_branches=512
            ),
            "E took 10 of the first 10 new sessions, 40 of 133 in all; 0 of 512 old branches moved there",
        ),
        (Scene(Act.COMPARE, compared=COMPARED[:1], policies=3), "1 of 3 policies played so far"),
        (Scene(Act.COMPARE, compared=COMPARED, policies=3), "roost 10.24 s, round_robin 10.24 s"),
        (Scene(Act.ENCORE), "Ctrl-C"),
    ],
)
def test_the_caption_says_what_was_counted_in_one_line(scene: Scene, said: str) -> None:
    line = caption(scene)
    assert said in line
    assert "\n" not in line
    assert len(line) <= CAPTION_CHARS


# --- the screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "drawn"),
    [
        ((0, 0, 0), (0, 0, 10)),
        ((50, 50, 0), (5, 5, 0)),
        ((1, 0, 999_999), (1, 0, 9)),
        ((1, 999_998, 1), (1, 8, 1)),
        ((333, 333, 334), (4, 3, 3)),
    ],
)
def test_a_bar_is_always_full_and_hides_nothing(parts: tuple[int, int, int], drawn: tuple[int, int, int]) -> None:
    assert bar(*parts, chars=10) == drawn


def full_frame() -> Frame:
    """As much as ever is on the screen."""
    row = Row("A", "draining", 64, 100_000, 500_000, 157_000, 123, 0.987, 12.34)
    reason = Reason("home_gone", "s00123", "E", 123_456, 120_000, 123.4, "D", 234.5, "others")
    return Frame(
        where="http://127.0.0.1:54321 (port 8080 is taken)  admin http://127.0.0.1:54322",
        about="256 agent sessions, simulated kimi-k2.6 replicas (4 × B200 each), 10 × as fast; seconds are theirs",
        clock="1234 s",
        act=Act.COMPARE.value,
        caption="x" * CAPTION_CHARS,
        rows=[row] * 4 + [Row("E", "joining", 0, 0, 0, 757_000, 0, None, None, newcomer=True)],
        totals=Totals(12_345, 0, 0.875, 0.895, 12, 0.28, 13.32, (("home", 10_000), ("new", 1_000), ("rebind", 12))),
        recent=[reason] * 4,
        compared=COMPARED,
    )


def test_everything_fits_a_terminal_of_100_by_30() -> None:
    """Nothing wraps and nothing is cut, but the end of a long reason."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    assert isinstance(console.file, io.StringIO)
    console.print(render(full_frame()))
    lines = console.file.getvalue().splitlines()
    assert len(lines) < HEIGHT
    text = "\n".join(lines)
    for whole in (
        "x" * CAPTION_CHARS,
        "seconds are theirs",
        "12.34 s",
        "E new",
        "p99 13.32 s",
        "session_sticky",
        "1,234",
    ):
        assert whole in text
    assert sum("s00123" in line for line in lines) == 4
    assert [line.strip() for line in lines if len(line.strip()) == 1] == []


def test_plain_lines_have_no_control_codes() -> None:
    line = plain(full_frame())
    assert line.isprintable()
    assert len(line) <= 110


# --- made up ----------------------------------------------------------------------------------------------------------


def family(keep: int = 4) -> Tree:
    """A root of two turns, the second of which waits for two subagents of two turns each; a copy nobody waits for."""

    def session(name: str, parent: Ref | None, waits: tuple[Ref, ...] = ()) -> Session:
        first = Turn(0, Kind.SPAWN if parent else Kind.START, 256, 9, None, 0, (Run(0, 4),), (), 0.0)
        base = Ref(name, 0)
        second = Turn(1, Kind.TOOL, 320, 9, base, keep, (Run(9, 5 - keep),), (base, *waits), 0.0)
        return Session(name, (first, second), parent, head_tokens=64)

    start = Ref("s", 0)
    root = session("s", None, (Ref("s/a", 1), Ref("s/b", 1)))
    return Tree((root, session("s/a", start), session("s/b", start), session("s/copy", start)))


def result(session: str, turn: int, replica: str | None, ttft_s: float | None = 1.0) -> TurnResult:
    return TurnResult(Ref(session, turn), 0.0, 320, 256, 1.0, ttft_s, replica=replica)
