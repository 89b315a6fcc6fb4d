"""The health of one replica: the machine, told by a script of what was seen and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import isinf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.contract import REPORT_TTL_S, Phase, Report
from router.discovery.observation import Failure, Observation
from router.domain.errors import UpstreamBroken, UpstreamError, UpstreamSilent, UpstreamUnreachable
from router.domain.outcome import End
from router.lifecycle.health import Ejection, Health, State, Verdict, verdict_on
from router.lifecycle.lost import Waiters
from tests.fakes import DOWN, SILENT, UP

RULES = Ejection(failures=3, base_s=5.0, max_s=60.0, silent_s=10.0)
OK, BAD, NEITHER = Verdict.SUCCESS, Verdict.FAULT, Verdict.NEITHER
UNREADY = replace(UP, ready=False)
NEVER_READY = Observation(failure=Failure.TIMEOUT)


class Case:
    """A machine and its time."""

    def __init__(self) -> None:
        self.health = Health(RULES)
        self.now_s = 1_000.0

    def after(self, seconds: float) -> Case:
        self.now_s += seconds
        return self

    def see(self, *looks: Observation) -> Case:
        for look in looks:
            self.health.observed(look, self.now_s)
        return self

    def refused(self) -> Case:
        self.health.refused(self.now_s)
        return self

    def unanswered(self) -> Case:
        self.health.unanswered(self.now_s)
        return self

    def bytes(self) -> Case:
        self.health.bytes_came(self.now_s)
        return self

    def spoke(self) -> Case:
        self.health.turn_spoke(self.now_s, self.now_s)
        return self

    def turns(self, *verdicts: Verdict, began_s_ago: float = 0.0, may_eject: bool = True) -> Case:
        for verdict in verdicts:
            self.health.turn_began(self.now_s)
            self.health.turn_ended(verdict, self.now_s - began_s_ago, self.now_s, may_eject=may_eject)
        return self

    def out(self) -> Case:
        """Ejected for its turns."""
        return self.see(UP).turns(BAD, BAD, BAD)

    @property
    def state(self) -> State:
        return self.health.state(self.now_s)


Story = Callable[[Case], Case]

STORIES: list[tuple[str, Story, State]] = [
    ("nobody has looked", lambda c: c, State.UNKNOWN),
    ("it answers", lambda c: c.see(UP), State.WELL),
    ("it says it is not ready", lambda c: c.see(UNREADY), State.UNREADY),
    ("one that is not ready and misses a probe is not ready", lambda c: c.see(UP, UNREADY, SILENT), State.UNREADY),
    ("nor is it while bytes flow", lambda c: c.see(UP, UNREADY, SILENT, SILENT, SILENT).bytes(), State.UNREADY),
    ("nobody ever listened", lambda c: c.see(DOWN), State.DEAD),
    ("it never answered", lambda c: c.see(NEVER_READY), State.DEAD),
    ("a newcomer that was waited for is a member at once", lambda c: c.see(DOWN, UNREADY, UP), State.WELL),
    ("a probe is refused", lambda c: c.see(UP, DOWN), State.DEAD),
    ("a turn is refused", lambda c: c.see(UP).refused(), State.DEAD),
    ("silence takes no refusal back", lambda c: c.see(UP).refused().see(SILENT), State.DEAD),
    ("bytes take no refusal back", lambda c: c.see(UP).refused().bytes(), State.DEAD),
    ("one missed probe says nothing", lambda c: c.see(UP, SILENT), State.WELL),
    ("two do", lambda c: c.see(UP, SILENT, SILENT), State.DEAD),
    ("an answer between them counts", lambda c: c.see(UP, SILENT, UP, SILENT), State.WELL),
    ("a connection in vain is a missed probe", lambda c: c.see(UP, SILENT).unanswered(), State.DEAD),
    ("two of them are two", lambda c: c.see(UP).unanswered().unanswered(), State.DEAD),
    ("one is one", lambda c: c.see(UP).unanswered(), State.WELL),
    ("connections in vain while bytes flow", lambda c: c.see(UP).bytes().unanswered().unanswered(), State.WELL),
    ("busy is not dead", lambda c: c.see(UP).bytes().after(9).see(SILENT, SILENT, SILENT), State.WELL),
    ("bytes of long ago are none", lambda c: c.see(UP).bytes().see(SILENT, SILENT).after(11), State.DEAD),
    ("dead, and back", lambda c: c.see(UP, DOWN, UP), State.PROBATION),
    ("dead, warming, and back", lambda c: c.see(UP, DOWN, UNREADY, UP), State.PROBATION),
    ("dead unseen by anyone, and back", lambda c: c.see(UP, SILENT, SILENT).see(UP), State.PROBATION),
    ("not ready for a while is no ejection", lambda c: c.see(UP, UNREADY, UP), State.WELL),
    ("two turns failed", lambda c: c.see(UP).turns(BAD, BAD), State.WELL),
    ("three in a row", lambda c: c.see(UP).turns(BAD, BAD, BAD), State.EJECTED),
    ("a success between", lambda c: c.see(UP).turns(BAD, BAD, OK, BAD, BAD), State.WELL),
    ("what says nothing ends no row", lambda c: c.see(UP).turns(BAD, BAD, NEITHER, BAD), State.EJECTED),
    ("what says nothing is no failure", lambda c: c.see(UP).turns(*[NEITHER] * 9), State.WELL),
    ("the fleet cannot do without it", lambda c: c.see(UP).turns(BAD, BAD, BAD, BAD, may_eject=False), State.WELL),
    (
        "but may later",
        lambda c: c.see(UP).turns(BAD, BAD, BAD, may_eject=False).turns(BAD),
        State.EJECTED,
    ),
    ("good probes do not readmit", lambda c: c.out().after(4).see(UP, UP), State.EJECTED),
    ("out, its time over", lambda c: c.out().after(5), State.PROBATION),
    ("out, and then dead", lambda c: c.out().see(DOWN), State.DEAD),
    ("out, dead and back", lambda c: c.out().see(DOWN, UP), State.PROBATION),
    ("out, and it says it is not ready", lambda c: c.out().see(UNREADY), State.UNREADY),
    ("a success on probation", lambda c: c.out().after(5).turns(OK), State.WELL),
    ("a failure on probation", lambda c: c.out().after(5).turns(BAD), State.EJECTED),
    ("nothing said on probation", lambda c: c.out().after(5).turns(NEITHER), State.PROBATION),
    ("a success from before says nothing", lambda c: c.out().after(6).turns(OK, began_s_ago=7), State.PROBATION),
    ("nor does a failure from before", lambda c: c.out().after(6).turns(BAD, began_s_ago=7), State.PROBATION),
    ("nor one too many", lambda c: c.out().after(5).turns(BAD, may_eject=False), State.PROBATION),
    ("a success while out, for want of others", lambda c: c.out().after(1).turns(OK), State.WELL),
    ("failures while out", lambda c: c.out().after(1).turns(BAD, BAD).after(4), State.PROBATION),
    ("probation that nobody tries", lambda c: c.out().after(5).see(UP).after(59), State.PROBATION),
    ("ends some time", lambda c: c.out().after(5).see(UP).after(60), State.WELL),
]  # fmt: skip


@pytest.mark.parametrize(("story", "state"), [each[1:] for each in STORIES], ids=[each[0] for each in STORIES])
def test_what_is_told_makes_the_state(story: Story, state: State) -> None:
    assert story(Case()).state is state


def test_a_turn_under_way_keeps_a_replica_on_probation() -> None:
    """It may hang there for as long as it likes: no second one follows."""
    case = Case().out().after(5).see(UP)
    case.health.turn_began(case.now_s)
    assert case.after(600).state is State.PROBATION
    case.health.turn_ended(OK, case.now_s - 500, case.now_s, may_eject=True)
    assert case.state is State.WELL


def test_its_first_output_ends_probation_and_not_that_of_a_turn_from_before() -> None:
    """An answer may take many minutes to end, and one turn at a time would be all that a replica gets till then."""
    case = Case().out().after(5).see(UP)
    case.health.turn_began(case.now_s)
    states = []
    for began_s in (case.now_s - 60, case.now_s):
        case.health.turn_spoke(began_s, case.now_s)
        states.append(case.state)
    assert case.health.member_for_s(case.now_s) == 0
    case.health.turn_ended(BAD, case.now_s, case.now_s, may_eject=True)
    states.append(case.state)
    assert states == [State.PROBATION, State.WELL, State.EJECTED], "until one has succeeded, one failure is enough"


def test_each_repeat_is_longer_and_good_standing_forgets_them() -> None:
    case = Case().out()
    waits = []
    for _ in range(6):
        waits.append(case.health.out_for_s(case.now_s))
        case.after(waits[-1]).turns(BAD)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    case.after(60).turns(OK)
    assert case.state is State.WELL
    assert case.health.member_for_s(case.now_s) == 0.0
    case.after(5 * RULES.max_s).turns(BAD, BAD, BAD)  # seven out, five forgotten
    assert case.health.out_for_s(case.now_s) == 20.0
    assert Case().see(UP).health.member_for_s(0.0) == float("inf")


def test_out_for_is_told_of_the_ejected_only() -> None:
    case = Case().out()
    assert case.health.out_for_s(case.now_s) == 5.0
    assert case.after(6).health.out_for_s(case.now_s) == 0.0
    assert isinf(Case().health.member_for_s(0.0))


LOST: list[tuple[str, Story, bool]] = [
    ("dead by silence, and nothing heard for long", lambda c: c.see(UP).after(10).see(SILENT, SILENT), True),
    ("not long enough", lambda c: c.see(UP).after(9).see(SILENT, SILENT), False),
    ("a byte came lately", lambda c: c.see(UP).after(9).bytes().after(9).see(SILENT, SILENT), False),
    ("a byte came long ago", lambda c: c.see(UP).bytes().after(10).see(SILENT, SILENT), True),
    ("refused, and quiet", lambda c: c.see(UP).after(10).see(DOWN), True),
    ("refused, while its streams go on: it leaves in order", lambda c: c.see(UP).after(9).bytes().see(DOWN), False),
    ("one missed probe", lambda c: c.see(UP).after(20).see(SILENT), False),
    ("not ready", lambda c: c.see(UP).after(20).see(UNREADY), False),
    ("well", lambda c: c.see(UP).after(20), False),
]  # fmt: skip


@pytest.mark.parametrize(("story", "lost"), [each[1:] for each in LOST], ids=[each[0] for each in LOST])
def test_a_replica_is_lost_once_nothing_has_been_heard_of_it_for_long(story: Story, *, lost: bool) -> None:
    case = story(Case())
    assert case.health.lost(case.now_s) is lost


BROKEN, UNANSWERED = UpstreamBroken("x"), UpstreamBroken("x", answered=False)
LONG, NOBODY = UpstreamSilent("x"), UpstreamUnreachable("x")

VERDICTS: list[tuple[str, End, int | None, UpstreamError | None, Verdict]] = [
    ("a good end", End.COMPLETE, 200, None, OK),
    ("broken before its head", End.UNREACHED, None, UNANSWERED, BAD),
    ("nonsense for a head", End.UNREACHED, None, BROKEN, BAD),
    ("broken mid-stream", End.UPSTREAM_BROKEN, 200, BROKEN, BAD),
    *((f"answered {status}", End.UPSTREAM_ERROR, status, None, BAD) for status in (500, 502, 504)),
    *((f"answered {status}", End.UPSTREAM_ERROR, status, None, NEITHER) for status in (503, 429, 501, 529)),
    *((f"answered {status}", End.REJECTED, status, None, NEITHER) for status in (400, 401, 404, 413, 422)),
    ("an error in its stream that says nothing", End.UPSTREAM_ERROR, 200, None, NEITHER),
    ("refused: told otherwise", End.UNREACHED, None, NOBODY, NEITHER),
    ("the client left", End.CLIENT_GONE, 200, None, NEITHER),
    ("the client left early", End.CLIENT_GONE, None, None, NEITHER),
    ("a stream that ended without its last event", End.UPSTREAM_BROKEN, 200, None, NEITHER),
]


@pytest.mark.parametrize(("end", "status", "error", "said"), [v[1:] for v in VERDICTS], ids=[v[0] for v in VERDICTS])
@pytest.mark.parametrize("flows", [False, True])
def test_what_the_end_of_a_turn_says_of_its_replica(
    end: End, status: int | None, error: UpstreamError | None, said: Verdict, *, flows: bool
) -> None:
    assert verdict_on(end, status, error, flows=flows) is said


@pytest.mark.parametrize("end", [End.UNREACHED, End.UPSTREAM_BROKEN])
def test_a_long_wait_is_held_against_a_replica_only_where_nothing_flows(end: End) -> None:
    """A first byte that does not come while others' bytes do is a long prefill, or a long queue."""
    assert verdict_on(end, None, LONG, flows=True) is NEITHER
    assert verdict_on(end, None, LONG, flows=False) is BAD


def test_who_only_reports_goes_by_its_report() -> None:
    case = Case()
    report = Report(replica="a", url="http://a", incarnation="x", phase=Phase.READY)
    case.health.report = report
    assert case.state is State.WELL
    assert case.refused().state is State.DEAD
    assert case.after(REPORT_TTL_S).state is State.PROBATION
    assert case.turns(OK).state is State.WELL
    assert case.turns(BAD, BAD, BAD).state is State.EJECTED


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.READY])
def test_a_phase_other_than_ready_is_not_ready(phase: Phase) -> None:
    case = Case().see(UP)
    case.health.report = Report(replica="a", url="http://a", incarnation="x", phase=phase)
    assert case.state is State.UNREADY


steps = st.one_of(
    st.sampled_from([UP, UNREADY, SILENT, DOWN]).map(lambda look: ("see", look)),
    st.sampled_from(["refused", "unanswered", "bytes", "spoke"]).map(lambda name: (name, None)),
    st.sampled_from([OK, BAD, NEITHER]).map(lambda verdict: ("turns", verdict)),
    st.floats(0, 70).map(lambda seconds: ("after", seconds)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=60))
def test_whatever_happens_a_replica_that_answers_and_serves_is_well_in_the_end(story: list[tuple[str, object]]) -> None:
    """No state is a trap, and asking changes nothing: a twin that is asked after each step ends in the same state.

    But for bytes, which come by the thousand and are only noted: a silence that nobody asked about did not happen.
    """
    case, asked = Case(), Case()
    for name, given_ in story:
        if name == "bytes":
            _ = case.state
        for each in (case, asked):
            getattr(each, name)(*(() if given_ is None else (given_,)))
        before = asked.state
        assert asked.state is before
    assert case.state is asked.state
    case.see(UP).after(RULES.max_s).turns(OK)
    assert case.state is State.WELL


def test_a_turn_that_found_nobody_listening_speaks_for_a_new_life() -> None:
    """An engine that dies and is back between two probes has lost its KV all the same."""
    case = Case().see(UP)
    told = [case.health.last_look]
    told += [case.refused().health.last_look, case.see(UP).health.last_look]
    case.health.doubt()
    told += [case.health.last_look, case.see(UP).health.last_look]
    assert told == [UP, replace(UP, restart_suspected=True), UP, replace(UP, restart_suspected=True), UP]


def test_probation_that_nobody_tried_is_over_for_the_turn_that_comes_then() -> None:
    """Whether or not anybody asked for the state in between."""
    case = Case().see(UP, DOWN, UP).after(RULES.max_s)
    assert case.turns(BAD).state is State.WELL


# --- those who wait ---------------------------------------------------------------------------------------------------


async def test_who_waits_at_a_lost_replica_is_told_and_others_are_not() -> None:
    waiters = Waiters()

    async def wait(replica: str) -> None:
        async with waiters.waiting(replica):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(wait(replica)) for replica in ("a", "a", "b")]
    await asyncio.sleep(0)
    assert waiters.give_up("a") == 2
    assert waiters.give_up("a") == 0
    for each in tasks[:2]:
        with pytest.raises(UpstreamBroken, match="no sign of life") as told:
            await each
        assert not told.value.answered
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert tasks[2].cancelled()
    assert waiters.give_up("b") == 0


async def test_an_error_within_the_waiting_is_nobody_elses() -> None:
    waiters = Waiters()
    for error in (TimeoutError("its own"), UpstreamBroken("its own")):
        with pytest.raises(type(error), match="its own"):
            async with waiters.waiting("a"):
                raise error
    async with waiters.waiting("a"):
        pass
    assert waiters.give_up("a") == 0
