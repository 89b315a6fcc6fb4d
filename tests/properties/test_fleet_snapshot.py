"""A snapshot keeps the replicas of the one before where nothing has changed: it must equal one made from nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.contract import REPORT_TTL_S, Phase, Report, encode_report
from router.discovery.observation import Observation
from router.domain.errors import UpstreamBroken, UpstreamUnreachable
from router.domain.outcome import End
from router.domain.replica import ZERO_LOAD, Beliefs, Capacity, Fleet, Load, Replica, Standing
from router.domain.session import Binding
from router.domain.shared import Ask, Claim, Member, Settlement, View
from router.lifecycle.fleet import FleetRuntime, FleetSpec
from router.lifecycle.health import State
from router.lifecycle.watch import FOREIGN_WINDOW, Seen
from router.store.memory import MemoryStore
from tests.fakes import DOWN, FLEET, SILENT, UP, FakeClock, FakeProber

IDS = ("r0:1", "r1:1", "r2:1")
LOOKS = (
    UP,
    DOWN,
    SILENT,
    replace(UP, incarnation="second", cache_report=True),
    replace(UP, device_tokens=1000, models=("m",), cache_report=True),
    replace(UP, cache_report=True),
    replace(UP, running=5, waiting=1, waiting_uncached_tokens=700),
    Observation(reachable=True, ready=False, was_ready=True),
)
ENDS = (End.COMPLETE, End.UPSTREAM_BROKEN, End.CLIENT_GONE)

replicas = st.sampled_from(IDS)
steps = st.one_of(
    st.tuples(st.just("look"), replicas, st.sampled_from(LOOKS)),
    st.tuples(st.just("back"), replicas, st.none()),
    st.tuples(st.just("turn"), replicas, st.sampled_from(ENDS)),
    st.tuples(st.just("claim"), replicas, st.booleans()),
    st.tuples(st.just("unreachable"), replicas, st.booleans()),
    st.tuples(st.just("put"), replicas, st.sampled_from(Standing)),
    st.tuples(st.just("report"), replicas, st.sampled_from(Phase)),
    st.tuples(st.just("remove"), replicas, st.none()),
    st.tuples(st.just("record here"), replicas, st.sampled_from(LOOKS)),
    st.tuples(st.just("time"), replicas, st.sampled_from((0.5, 3.0, 6.0, 70.0, -3.0))),
    st.tuples(st.just("blind"), replicas, st.none()),
)


@dataclass
class Clock(FakeClock):
    """Its wall clock may go back, the other not."""

    at_s: float = 1_000_000.0
    passed_s: float = 0.0

    def monotonic_s(self) -> float:
        """Seconds since the beginning."""
        return self.passed_s

    def go(self, by_s: float) -> None:
        """Time passes, or the wall clock is set back."""
        self.at_s += by_s
        self.passed_s += max(0.0, by_s)


class World:
    """One router, and a store that another writes to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        spec = FleetSpec(FLEET, replicas=tuple(f"http://{name}" for name in IDS[:2]))
        self.fleet = FleetRuntime(spec, self.store, FakeProber(), self.clock)
        self.count = 0

    async def do(self, what: str, name: str, given: Any) -> None:
        """One step."""
        fleet = self.fleet
        match what:
            case "look":
                await self.look(name, given)
            case "back":
                for look in (UP, DOWN, UP):
                    await self.look(name, look)
                await self.do("turn", name, End.COMPLETE)
            case "turn":
                seen = fleet.watch.turn_began(name)
                error = UpstreamBroken("broke", answered=True) if given is End.UPSTREAM_BROKEN else None
                fleet.watch.turn_ended(name, seen, given, 200, error, self.clock.monotonic_s())
            case "unreachable":
                fleet.watch.unreachable(name, UpstreamUnreachable("nobody", refused=given))
            case "time":
                self.clock.go(given)
            case "blind":
                fleet.snapshot(View(self.clock.now_s(), fleet.version, {}, {}, {}), blind=True)
            case "record here":
                if (there := fleet.watch.find(name)) is not None:
                    fleet._record_here(name, there.noticed, given)
            case _:
                await self.record(what, name, given)

    async def record(self, what: str, name: str, given: Any) -> None:
        """Something is written into the store, and read half of the times."""
        fleet, store = self.fleet, self.store
        match what:
            case "claim":
                await self.claim(name, settled=given)
            case "put":
                known = fleet.member(name) or Member(name, f"http://{name}", "admin")
                await store.put_member(FLEET, replace(known, standing=given))
            case "report":
                report = Report(
                    replica=name, url=f"http://{name}", incarnation="told", phase=given, device_tokens=self.count % 3
                )
                await store.put_report(FLEET, name, encode_report(report), REPORT_TTL_S)
            case _:
                await store.remove_member(FLEET, name)
        if self.count % 2:
            await fleet.refresh()

    async def look(self, name: str, seen: Observation) -> None:
        """As often as it takes until nothing of what was seen before counts."""
        for _ in range(FOREIGN_WINDOW):
            self.fleet.observed(name, seen)
        await self.fleet._record(name)

    async def claim(self, name: str, *, settled: bool) -> None:
        """A turn of some router is counted there; perhaps it ends."""
        self.count += 1
        member = self.fleet.member(name)
        life = member.incarnation if member is not None else ""
        lease = branch = f"b{self.count}"
        claim = Claim(lease, name, life, 10, 20, branch, "s", None, Binding(name, life), None, (), 1.0, 0, 300.0)
        await self.store.acquire(FLEET, claim)
        if settled:
            learned = Beliefs(prefill_rate=1.0 * self.count, prefill_weight=1.0)
            await self.store.settle(FLEET, Settlement(lease, name, life, branch, 30, 10, 30, learned))

    async def check(self, *, blind: bool) -> None:
        """Twice the same, and the same as the rule says."""
        view = await self.store.fetch(FLEET, Ask(session=None))
        now_s = self.clock.monotonic_s()
        assert self.fleet.members == members(self.fleet)
        expected = Fleet(
            FLEET,
            self.fleet.spec.profile,
            tuple(plain(self.fleet, member, view, now_s, blind=blind) for member in members(self.fleet)),
            view.now_s,
        )
        assert self.fleet.snapshot(view, blind=blind) == expected
        assert self.fleet.snapshot(view, blind=blind) == expected


def members(fleet: FleetRuntime) -> tuple[Member, ...]:
    """Members by record, then replicas that only report."""
    known = fleet._membership.members
    names = {member.id for member in known}
    reports = [(name, seen.health.report) for name, seen in fleet.watch.all().items()]
    told = [
        Member(it.replica, it.url, "report", models=tuple(it.models))
        for name, it in reports
        if it is not None and name not in names
    ]
    return (*known, *told)


def plain(fleet: FleetRuntime, member: Member, view: View, now_s: float, *, blind: bool) -> Replica:
    """A replica in a snapshot, from nothing."""
    seen: Seen = fleet.watch.of(member.id)
    health, report = seen.health, seen.health.report
    state = health.state(now_s)
    life = member.incarnation if report is None else report.incarnation
    load = view.loads.get(member.id, ZERO_LOAD) if view.incarnations.get(member.id) == life else ZERO_LOAD
    profile = fleet.spec.profile
    room = member.capacity or Capacity(profile.device_tokens, profile.host_tokens, profile.max_running)
    if report is not None and report.device_tokens:
        room = Capacity(report.device_tokens, report.host_tokens, report.max_running or profile.max_running)
    steady = seen.foreign if len(seen.foreign) == FOREIGN_WINDOW else ((0, 0),)
    joined_at_s = member.joined_at_s if report is None else report.phase_since_s
    look = health.observation
    return Replica(
        id=member.id,
        url=member.url,
        incarnation=life,
        capacity=room,
        standing=Standing.DRAINING if report is not None and report.phase is Phase.DRAINING else member.standing,
        healthy=state in (State.WELL, State.PROBATION, State.EJECTED),
        ejected=state is State.EJECTED,
        probation=state is State.PROBATION,
        unseen=state is State.UNKNOWN and member.incarnation != "",
        joined_at_s=max(joined_at_s, view.now_s - health.member_for_s(now_s)),
        load=Load(in_flight=health.under_way) if blind else load,
        beliefs=view.beliefs.get(member.id) or Beliefs(),
        models=member.models,
        foreign_in_flight=min(turns for turns, _ in steady),
        foreign_prefill_tokens=min(tokens for _, tokens in steady),
        reports_cache=look is not None and look.cache_report is True,
    )


@settings(max_examples=150, deadline=None)
@example(taken=[("look", "r0:1", UP), ("look", "r0:1", replace(UP, running=5))], blind=False)
@example(taken=[("look", "r0:1", UP), ("look", "r0:1", replace(UP, cache_report=True))], blind=False)
@example(
    taken=[("look", "r0:1", UP), ("time", "r0:1", 6.0), ("back", "r0:1", None), ("time", "r0:1", -3.0)], blind=False
)
@given(taken=st.lists(steps, min_size=1, max_size=40), blind=st.booleans())
def test_a_snapshot_is_what_one_made_from_nothing_would_be(taken: list[tuple[str, str, Any]], blind: bool) -> None:
    """After whatever was seen, said, recorded and placed, and however much time has passed."""

    async def run() -> None:
        world = World()
        await world.fleet.enrol()
        for what, name, given_ in taken:
            await world.do(what, name, given_)
            await world.check(blind=blind)
            await world.check(blind=False)

    asyncio.run(run())


async def test_what_has_not_changed_is_not_made_again() -> None:
    """Else the rest of this file would test nothing."""
    world = World()
    await world.fleet.enrol()
    for name in IDS[:2]:
        await world.do("look", name, UP)
    view = await world.store.fetch(FLEET, Ask(session=None))
    first = world.fleet.snapshot(view).replicas
    await world.claim(IDS[0], settled=False)
    second = world.fleet.snapshot(await world.store.fetch(FLEET, Ask(session=None))).replicas
    assert second[0].load.in_flight == 1
    assert second[1] is first[1]
