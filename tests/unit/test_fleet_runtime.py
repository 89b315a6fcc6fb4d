"""A fleet as one router sees it: shared membership, its own look at each replica, and the snapshot of both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from router.contract import REPORT_TTL_S, Phase, Report, encode_report
from router.discovery.observation import WANTS_KEY, Failure, Observation
from router.domain.errors import UpstreamUnreachable
from router.domain.replica import Capacity, Fleet, Profile, Standing
from router.domain.session import Binding
from router.domain.shared import Ask, Claim, Member, View
from router.lifecycle.fleet import RECORD_TRIES, FleetRuntime, FleetSpec, replica_id
from router.lifecycle.health import Ejection
from router.lifecycle.watch import FOREIGN_WINDOW
from tests.fakes import DOWN, FLEET, LIFE, SILENT, UP, FakeClock, FakeProber, FakeStore, Gate, prompt, stage, url_of

BEAT_S = 0.01
"""Probe interval of fleets that run; the clock of their decisions stands still all the same."""

REFUSED = UpstreamUnreachable("nobody listens")


class Watch:
    """Routers over one store, and what their probes see."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = FakeStore(self.clock, Gate())
        self.prober = FakeProber()

    def router(self, *urls: str) -> FleetRuntime:
        return FleetRuntime(
            FleetSpec(FLEET, replicas=urls, probe_interval_s=BEAT_S), self.store, self.prober, self.clock
        )

    async def view(self) -> View:
        return await self.store.fetch(FLEET, Ask(session=None))


async def one_replica() -> tuple[Watch, FleetRuntime]:
    watch = Watch()
    fleet = watch.router("http://r0:1")
    await fleet.enrol()
    return watch, fleet


async def look(fleet: FleetRuntime, *seen: Observation, member: str = "r0:1") -> None:
    """The probe's rounds, as its loop makes them."""
    for each in seen:
        fleet.observed(member, each)
        await fleet._record(member)


async def test_a_router_is_not_ready_before_it_has_looked_at_all_replicas() -> None:
    """A restarted router that asked whoever answered first would take the homes it has not looked at yet for gone, and
    move their branches (seed 12 of the simulation). A replica that joins later is not waited for.
    """
    watch = Watch()
    fleet = watch.router("http://r0:1", "http://r1:1")
    await fleet.enrol()
    await look(fleet, UP, member="r0:1")
    assert not fleet.ready()
    await look(fleet, SILENT, member="r1:1")
    assert fleet.ready()
    await watch.store.put_member(FLEET, Member("r2:1", "http://r2:1", "admin"))
    await fleet.refresh()
    assert fleet.ready()


async def test_who_did_not_meet_the_gap_between_two_lives_does_not_write_the_old_one_over_the_new() -> None:
    """A replica that dies and is back between two probes is found by one router; the other's slow facts are old."""
    watch, fleet = await one_replica()
    old, new = replace(UP, incarnation="old"), replace(UP, incarnation="new")
    await look(fleet, old)
    member = fleet.member("r0:1")
    assert member is not None
    await watch.store.put_member(FLEET, replace(member, incarnation="new"))
    await fleet.refresh()
    await look(fleet, old)
    (kept,) = (await watch.store.members(FLEET)).members
    assert kept.incarnation == "new"
    again = fleet.watch.of("r0:1").health.last_look
    assert again is not None
    assert again.restart_suspected, "the next look asks for the slow facts"
    await look(fleet, new)
    assert fleet.watch.of("r0:1").health.last_look == new


async def test_a_member_that_was_not_looked_at_is_known_by_what_another_router_recorded() -> None:
    """A store that was away while replicas joined, and is back: their branches stay (seed 100772540)."""
    watch, fleet = await one_replica()
    await look(fleet, UP)
    await watch.store.put_member(FLEET, Member("r1:1", "http://r1:1", "admin", incarnation="life"))
    await watch.store.put_member(FLEET, Member("r2:1", "http://r2:1", "admin"))
    await fleet.refresh()
    seen = {each.id: (each.healthy, each.unseen) for each in fleet.snapshot(await watch.view()).replicas}
    assert seen == {"r0:1": (True, False), "r1:1": (False, True), "r2:1": (False, False)}
    await look(fleet, SILENT, member="r1:1")
    assert not any(each.unseen for each in fleet.snapshot(await watch.view()).replicas)


async def test_a_router_without_configured_replicas_looks_at_all_that_are_on_record_too() -> None:
    """Asked whether it is ready before it has read the membership, it has not looked at everybody."""
    watch = Watch()
    for number in range(2):
        await watch.store.put_member(FLEET, Member(f"r{number}:1", url_of(number), "admin"))
    fleet = watch.router()
    assert not fleet.ready()
    await fleet.refresh()
    await look(fleet, UP, member="r0:1")
    assert not fleet.ready()
    await look(fleet, UP, member="r1:1")
    assert fleet.ready()


async def test_a_replica_on_record_that_reports_no_more_keeps_no_router_from_being_ready() -> None:
    """An operator cordoned it, so it is on record; its agent has stopped, and nobody probes who reports."""
    watch = Watch()
    await watch.store.put_member(FLEET, Member("a:1", "http://a:1", "report", standing=Standing.CORDONED))
    fleet = watch.router("http://r0:1")
    await fleet.enrol()
    await look(fleet, UP)
    assert fleet.ready()


# --- membership -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [("http://h:1", "h:1"), ("http://h:1/", "h:1"), ("https://h/a/b", "h_a_b"), ("h:1", "h:1")],
)
def test_a_replica_is_named_by_host_port_and_path(url: str, name: str) -> None:
    assert replica_id(url) == name


async def test_enrolling_adds_configured_replicas_and_removes_those_no_longer_configured() -> None:
    watch = Watch()
    await watch.store.put_member(FLEET, Member("old:1", "http://old:1", "config"))
    await watch.store.put_member(FLEET, Member("extra:1", "http://extra:1", "admin"))
    await watch.store.put_member(FLEET, Member("r0:1", "http://r0:1", "config", standing=Standing.CORDONED))
    fleet = watch.router("http://r0:1", "http://r1:1")
    await fleet.enrol()
    assert {member.id: member.standing for member in fleet.members} == {
        "extra:1": Standing.SERVING,
        "r0:1": Standing.CORDONED,  # what an operator said outlives a restart of the router
        "r1:1": Standing.SERVING,
    }
    assert fleet.version == (await watch.view()).membership_version


async def test_a_change_is_seen_by_its_version_and_read_by_a_refresh() -> None:
    watch, fleet = await one_replica()
    await watch.store.put_member(FLEET, Member("r1:1", "http://r1:1", "admin"))
    assert (await watch.view()).membership_version != fleet.version
    await fleet.refresh()
    assert (await watch.view()).membership_version == fleet.version
    assert {member.id for member in fleet.members} == {"r0:1", "r1:1"}
    await watch.store.remove_member(FLEET, "r0:1")
    await fleet.refresh()
    assert fleet.member("r0:1") is None
    assert fleet.watch.find("r0:1") is None


async def test_before_the_store_answers_the_configured_replicas_stand() -> None:
    watch = Watch()
    watch.store.away = True
    fleet = watch.router("http://r0:1")
    running = asyncio.create_task(fleet.run())
    await wait_for(watch.prober, "http://r0:1")
    assert fleet.ready()
    watch.store.away = False
    await until(lambda: fleet.version > 0)
    await stop(running)


async def test_a_running_fleet_probes_newcomers_and_no_longer_those_removed() -> None:
    watch = Watch()
    fleet = watch.router("http://r0:1")
    running = asyncio.create_task(fleet.run())
    await wait_for(watch.prober, "http://r0:1")
    await watch.store.put_member(FLEET, Member("r1:1", "http://r1:1", "admin"))
    await wait_for(watch.prober, "http://r1:1")
    assert fleet.healthy("r1:1")
    await watch.store.remove_member(FLEET, "r0:1")
    await until(lambda: fleet.member("r0:1") is None)
    before = watch.prober.looks["http://r0:1"]
    await wait_for(watch.prober, "http://r1:1", further=3)
    assert watch.prober.looks["http://r0:1"] <= before + 1  # one look may have been under way
    assert not fleet.healthy("r0:1")
    await stop(running)


async def test_a_member_removed_and_added_again_is_probed_on() -> None:
    """Its loop may have found it gone and ended before anyone saw it come back."""
    watch = Watch()
    fleet = watch.router("http://r0:1")
    await fleet.enrol()
    fleet._start_probes()
    (member,) = fleet.members
    await watch.store.remove_member(FLEET, member.id)
    await fleet.refresh()
    (ended,) = fleet._probes.values()
    await asyncio.wait([ended])
    await watch.store.put_member(FLEET, member)
    await fleet.refresh()
    fleet._start_probes()
    (probing,) = fleet._probes.values()
    await wait_for(watch.prober, member.url)
    await stop(probing)


async def test_a_running_fleet_asks_the_store_once_a_beat() -> None:
    """Its own reading of the membership is no news that would make it read again."""
    watch = Watch()
    fleet = FleetRuntime(FleetSpec(FLEET, probe_interval_s=3_600.0), watch.store, watch.prober, watch.clock)
    running = asyncio.create_task(fleet.run())
    await until(lambda: "fetch" in watch.store.calls)
    for _ in range(100):
        await asyncio.sleep(0)
    assert watch.store.calls.count("fetch") == 1
    await fleet.refresh()
    await until(lambda: watch.store.calls.count("fetch") == 2)
    await stop(running)


async def wait_for(prober: FakeProber, url: str, further: int = 2) -> None:
    """Until a replica has been looked at so often from now on."""
    wanted = prober.looks[url] + further
    while prober.looks[url] < wanted:
        prober.looked.clear()
        await prober.looked.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Until a condition holds, asked again whenever a beat has passed."""
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(BEAT_S / 10)
    raise AssertionError("never came true")


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.wait([running])
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("probe ")] == []


# --- health -----------------------------------------------------------------------------------------------------------


async def test_a_replica_nobody_has_seen_is_not_ready() -> None:
    _, fleet = await one_replica()
    assert not fleet.healthy("r0:1")
    assert not fleet.healthy("unheard of")


async def test_the_log_says_once_that_a_replica_is_not_ready_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """From the first look on: who gives a wrong URL reads it, and is not told again every second."""
    caplog.set_level(logging.INFO, "roost.fleet")
    _, fleet = await one_replica()
    for seen in (replace(DOWN, problems=("/ready: refused",)), DOWN, UP, UP, replace(UP, ready=False)):
        fleet.observed("r0:1", seen)
    fleet.watch.unreachable("r0:1", REFUSED)
    fleet.observed("r0:1", UP)
    assert [record.getMessage().removeprefix("replica r0:1 of fleet ") for record in caplog.records] == [
        f"{FLEET} is not ready: /ready: refused",
        f"{FLEET} is ready",
        f"{FLEET} is not ready: it says so",
        f"{FLEET} is back on probation: one turn at a time until one has said something",
    ]


async def test_a_replica_that_wants_a_key_is_told_once_with_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    """It is ready, and every turn would be a 401: a router that is put before replicas with --api-key says so."""
    caplog.set_level(logging.WARNING, "roost.fleet")
    _, fleet = await one_replica()
    fleet.observed("r0:1", UP)
    assert not caplog.records
    wanting = replace(UP, problems=(f"/v1/loads: HTTP 401{WANTS_KEY}",))
    for seen in (wanting, wanting, UP, wanting):
        fleet.observed("r0:1", seen)
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in ("r0:1", FLEET, "auth.replica_key_file", "client_credentials"))


async def test_a_refused_connection_says_enough_and_the_next_good_probe_brings_the_replica_back() -> None:
    _, fleet = await one_replica()
    for refusal in (DOWN, Observation(failure=Failure.UNRESOLVED, was_ready=True)):
        fleet.observed("r0:1", UP)
        assert fleet.healthy("r0:1")
        fleet.observed("r0:1", refusal)
        assert not fleet.healthy("r0:1")
    fleet.observed("r0:1", UP)
    fleet.watch.unreachable("r0:1", REFUSED)
    assert not fleet.healthy("r0:1")
    fleet.observed("r0:1", UP)
    assert fleet.healthy("r0:1")


@pytest.mark.parametrize("failure", [Failure.TIMEOUT, Failure.RESET, Failure.NONSENSE])
async def test_one_missed_probe_says_nothing_and_two_do(failure: Failure) -> None:
    _, fleet = await one_replica()
    missed = Observation(failure=failure, was_ready=True)
    fleet.observed("r0:1", UP)
    fleet.observed("r0:1", missed)
    assert fleet.healthy("r0:1")
    fleet.observed("r0:1", UP)
    fleet.observed("r0:1", missed)
    assert fleet.healthy("r0:1")
    fleet.observed("r0:1", missed)
    assert not fleet.healthy("r0:1")


async def test_silence_takes_no_refusal_back() -> None:
    """A host that goes away refuses at first and is silent then: only an answer brings it back."""
    _, fleet = await one_replica()
    fleet.observed("r0:1", UP)
    fleet.watch.unreachable("r0:1", REFUSED)
    fleet.observed("r0:1", Observation(failure=Failure.TIMEOUT, was_ready=True))
    assert not fleet.healthy("r0:1")
    fleet.observed("r0:1", UP)
    assert fleet.healthy("r0:1")


async def test_busy_is_not_dead() -> None:
    """A replica in a long prefill answers no probe; while bytes of its turns flow it is alive."""
    watch, fleet = await one_replica()
    fleet.observed("r0:1", UP)
    for _ in range(20):
        fleet.observed("r0:1", SILENT)
        fleet.watch.bytes_came("r0:1")
        watch.clock.at_s += 1
        assert fleet.healthy("r0:1")
    watch.clock.at_s += Ejection().silent_s
    assert not fleet.healthy("r0:1")


async def test_a_replica_that_says_it_is_not_ready_is_not() -> None:
    _, fleet = await one_replica()
    fleet.observed("r0:1", replace(UP, ready=False))
    assert not fleet.healthy("r0:1")
    fleet.observed("r0:1", replace(UP, ready=None))  # no SGLang: reachable is all there is to go by
    assert fleet.healthy("r0:1")


async def test_a_fleet_is_ready_while_a_new_branch_could_be_placed() -> None:
    watch, fleet = await one_replica()
    assert not fleet.ready()
    fleet.observed("r0:1", UP)
    assert fleet.ready()
    await watch.store.put_member(FLEET, Member("r0:1", "http://r0:1", "config", standing=Standing.CORDONED))
    await fleet.refresh()
    assert not fleet.ready()


# --- reports ----------------------------------------------------------------------------------------------------------


def report(phase: Phase = Phase.READY, replica: str = "a:1", incarnation: str = "x") -> Report:
    return Report(
        replica=replica,
        url=f"http://{replica}",
        incarnation=incarnation,
        phase=phase,
        models=["m"],
        device_tokens=500_000,
        host_tokens=1_000,
        max_running=7,
        phase_since_s=42.0,
    )


async def reported(watch: Watch, fleet: FleetRuntime, raw: bytes, reporter: str = "a:1") -> Fleet:
    await watch.store.put_report(FLEET, reporter, raw, REPORT_TTL_S)
    await fleet.refresh()
    return fleet.snapshot(await watch.view())


async def test_a_replica_that_reports_is_a_member_while_its_report_lives() -> None:
    watch = Watch()
    fleet = watch.router()
    (replica,) = (await reported(watch, fleet, encode_report(report()))).replicas
    assert (replica.id, replica.url, replica.incarnation, replica.joined_at_s) == ("a:1", "http://a:1", "x", 42.0)
    assert replica.capacity == Capacity(500_000, 1_000, 7)
    assert replica.healthy
    assert fleet.models() == ("m",)
    watch.clock.at_s += REPORT_TTL_S + 1
    await fleet.refresh()
    assert fleet.members == ()


@pytest.mark.parametrize("phase", list(Phase))
async def test_the_phase_a_replica_reports_is_its_health(phase: Phase) -> None:
    watch = Watch()
    fleet = watch.router()
    (replica,) = (await reported(watch, fleet, encode_report(report(phase)))).replicas
    assert replica.healthy == (phase is Phase.READY)
    assert replica.standing is (Standing.DRAINING if phase is Phase.DRAINING else Standing.SERVING)


async def test_a_refusal_counts_against_a_report_until_every_older_report_has_expired() -> None:
    """Who only reports is not probed, so no good probe would ever bring it back."""
    watch = Watch()
    fleet = watch.router()
    await reported(watch, fleet, encode_report(report()))
    fleet.watch.unreachable("a:1", REFUSED)
    assert not fleet.healthy("a:1")
    watch.clock.at_s += REPORT_TTL_S - 1
    await reported(watch, fleet, encode_report(report()))
    assert not fleet.healthy("a:1")
    watch.clock.at_s += 1
    assert fleet.healthy("a:1")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xff\x00", "not a report"),
        (b'{"version":1}', "not a report"),
        (encode_report(report()).replace(b'"replica"', b'"version":99,"replica"'), "report version 99"),
        (encode_report(report(replica="b:1")), "another replica"),
        (encode_report(report()).replace(b"http://a:1", b"a:1"), "url"),
        (encode_report(report()).replace(b"http://a:1", b"http://[a:1"), "url"),
        (encode_report(report()).replace(b"http://a:1", b"http://a:99999"), "url"),
        (encode_report(report()).replace(b"http://a:1", b"http://" + b"a" * 300), "url"),
        (encode_report(report(incarnation="x" * 256)), "not a report"),
        (encode_report(report(incarnation="")), "not a report"),
        (encode_report(report()).replace(b'"max_running":7', b'"max_running":-7'), "not a report"),
    ],
)
async def test_a_report_that_cannot_be_used_is_a_problem_and_no_member(raw: bytes, said: str) -> None:
    watch, fleet = await one_replica()
    fleet.observed("r0:1", UP)
    await reported(watch, fleet, raw)
    assert said in fleet.problems["a:1"]
    assert [member.id for member in fleet.members] == ["r0:1"]
    assert fleet.healthy("r0:1")
    await reported(watch, fleet, encode_report(report()))
    assert fleet.problems == {}
    await reported(watch, fleet, raw)
    watch.clock.at_s += REPORT_TTL_S + 1
    await fleet.refresh()
    assert fleet.problems == {}


async def test_what_was_odd_in_a_probe_is_told_until_a_probe_is_fine() -> None:
    _, fleet = await one_replica()
    fleet.observed("r0:1", replace(UP, problems=("odd", "strange")))
    await fleet.refresh()
    assert fleet.problems == {"r0:1": "odd; strange"}
    fleet.observed("r0:1", UP)
    assert fleet.problems == {}


# --- lives ------------------------------------------------------------------------------------------------------------


def lived(lives: int) -> Observation:
    """A replica that shows nothing that tells its lives apart, after so many restarts noticed."""
    return replace(UP, lives=lives)


async def incarnation(watch: Watch) -> str:
    (member,) = (await watch.store.members(FLEET)).members
    return member.incarnation


async def test_the_engines_own_incarnation_is_recorded() -> None:
    watch, fleet = await one_replica()
    await look(fleet, replace(UP, incarnation="abc", device_tokens=9, host_tokens=3, max_running=2, models=("m",)))
    (member,) = (await watch.store.members(FLEET)).members
    assert member.incarnation == "abc"
    assert member.capacity == Capacity(9, 3, 2)
    assert member.models == fleet.models() == ("m",)
    assert member.joined_at_s == watch.clock.now_s()
    watch.clock.at_s += 5
    await look(fleet, replace(UP, incarnation="abc"), replace(UP, ready=False, incarnation="def"))
    assert (await watch.store.members(FLEET)).members == (member,)  # a life begins to count once it is ready


async def test_a_life_begins_by_the_stores_clock() -> None:
    """Decisions measure a newcomer's slow start with it, so a router's own clock must not write into it."""
    watch = Watch()
    own = FakeClock()
    own.at_s = watch.clock.at_s + 3_600
    fleet = FleetRuntime(FleetSpec(FLEET, replicas=("http://r0:1",)), watch.store, watch.prober, own)
    await fleet.enrol()
    await look(fleet, UP)
    (member,) = (await watch.store.members(FLEET)).members
    assert member.joined_at_s == watch.clock.now_s()


async def test_without_engine_facts_a_noticed_restart_begins_the_next_life_once() -> None:
    watch, fleet = await one_replica()
    await look(fleet, lived(0))
    assert await incarnation(watch) == "life-0"
    version = fleet.version
    await look(fleet, lived(0), lived(0))
    assert fleet.version == version
    await look(fleet, lived(1), lived(1), lived(1))
    assert await incarnation(watch) == "life-1"
    await look(fleet, lived(3))
    assert await incarnation(watch) == "life-2"


@pytest.mark.parametrize("second_has_refreshed", [False, True])
async def test_a_restart_that_two_routers_notice_is_one_new_life(*, second_has_refreshed: bool) -> None:
    watch, one = await one_replica()
    two = watch.router("http://r0:1")
    await two.enrol()
    for router in (one, two):
        await look(router, lived(0))
    await look(one, lived(1))
    if second_has_refreshed:
        await two.refresh()
    await look(two, lived(1), lived(1))
    await look(one, lived(1))
    assert await incarnation(watch) == "life-1"
    await look(two, lived(2))
    await look(one, lived(2))
    assert await incarnation(watch) == "life-2"


async def test_a_router_that_comes_later_takes_the_life_that_is_recorded() -> None:
    watch, one = await one_replica()
    await look(one, lived(0), lived(1))
    two = watch.router("http://r0:1")
    await two.enrol()
    await look(two, lived(0))
    assert await incarnation(watch) == "life-1"


async def test_a_restart_noticed_while_the_store_is_away_is_recorded_when_it_is_back() -> None:
    watch, fleet = await one_replica()
    await look(fleet, lived(0))
    watch.store.away = True
    await look(fleet, lived(1), lived(1))
    watch.store.away = False
    await look(fleet, lived(1))
    assert await incarnation(watch) == "life-1"


async def test_recording_a_life_keeps_what_an_operator_said_meanwhile() -> None:
    watch, fleet = await one_replica()
    await look(fleet, lived(0))
    (member,) = fleet.members
    await watch.store.put_member(FLEET, replace(member, standing=Standing.DRAINING))
    await look(fleet, lived(1))
    (member,) = fleet.members
    assert (member.standing, member.incarnation) == (Standing.DRAINING, "life-1")


@pytest.mark.parametrize("rivals", [1, 3, 50])
async def test_what_an_operator_says_at_the_same_moment_is_never_undone_by_a_probe(rivals: int) -> None:
    """The record is read, and written over by others before the probe's finding is: compared and set, tried again."""
    watch, fleet = await one_replica()
    await look(fleet, lived(0))
    store, word = watch.store, iter([Standing.CORDONED, Standing.DRAINING] * 50)
    put, left = store.put_member, [rivals]

    async def raced(name: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None) -> bool:
        if expected is not None and left[0]:
            left[0] -= 1
            (now,) = (await store.members(FLEET)).members
            await put(FLEET, replace(now, standing=next(word)))
        return await put(name, member, only_if_absent=only_if_absent, expected=expected)

    setattr(store, "put_member", raced)  # noqa: B010 (a method is not assigned to, says mypy)
    await look(fleet, lived(1))
    (member,) = (await store.members(FLEET)).members
    assert member.standing in (Standing.CORDONED, Standing.DRAINING)
    assert member.incarnation == ("life-1" if rivals < RECORD_TRIES else "life-0")
    left[0] = 0
    await look(fleet, lived(1))  # what was left undone, the next probe does
    (member,) = (await store.members(FLEET)).members
    assert (member.standing is not Standing.SERVING, member.incarnation) == (True, "life-1")


async def test_a_replica_that_only_reports_is_recorded_by_the_first_word_of_an_operator() -> None:
    watch = Watch()
    fleet = watch.router()
    await reported(watch, fleet, encode_report(report()))
    (member,) = fleet.members
    assert await fleet.put(replace(member, standing=Standing.CORDONED), over=member)
    assert not await fleet.put(replace(member, standing=Standing.DRAINING), over=member)  # read before that
    (now,) = fleet.members
    assert now.standing is Standing.CORDONED


# --- the snapshot -----------------------------------------------------------------------------------------------------


async def test_the_snapshot_has_no_load_of_another_life() -> None:
    world = await stage(1)
    await world.serve(prompt("a " * 8_000))
    view = await world.store.fetch(FLEET, Ask(session=None))
    (before,) = world.fleet.snapshot(view).replicas
    assert before.load.admitted_tokens > 0
    (member,) = world.fleet.members
    await world.store.put_member(FLEET, replace(member, incarnation="life-1"))
    await world.fleet.refresh()
    (after,) = world.fleet.snapshot(view).replicas
    assert after.incarnation == "life-1"
    assert (after.load.admitted_tokens, after.load.crowd) == (0, 0.0)


async def test_room_that_nobody_tells_comes_from_the_profile() -> None:
    profile = Profile(device_tokens=11, host_tokens=22, max_running=33)
    world = await stage(1, profile=profile)
    (replica,) = world.fleet.snapshot(await world.store.fetch(FLEET, Ask(session=None))).replicas
    assert replica.capacity == Capacity(11, 22, 33)
    await look(world.fleet, replace(UP, device_tokens=5))
    (replica,) = world.fleet.snapshot(await world.store.fetch(FLEET, Ask(session=None))).replicas
    assert replica.capacity == Capacity(5, 22, 33)


def busy(running: int, waiting_tokens: int = 0) -> Observation:
    return replace(UP, running=running, waiting=0, waiting_uncached_tokens=waiting_tokens)


async def foreign(watch: Watch, fleet: FleetRuntime) -> tuple[int, int]:
    (replica,) = fleet.snapshot(await watch.view()).replicas
    return replica.foreign_in_flight, replica.foreign_prefill_tokens


async def test_other_traffic_counts_once_it_has_persisted() -> None:
    watch, fleet = await one_replica()
    assert await foreign(watch, fleet) == (0, 0)
    for _ in range(FOREIGN_WINDOW - 1):
        fleet.observed("r0:1", busy(5, 900))
        assert await foreign(watch, fleet) == (0, 0)
    fleet.observed("r0:1", busy(4, 800))
    assert await foreign(watch, fleet) == (4, 800)  # the least of the window
    fleet.observed("r0:1", busy(0))
    assert await foreign(watch, fleet) == (0, 0)


def claim(number: int) -> Claim:
    """A turn at r0 that some router holds."""
    return Claim(
        lease=f"l{number}",
        replica="r0:1",
        incarnation=LIFE,
        prefill_tokens=500,
        locked_tokens=1_000,
        branch=f"b{number}",
        session="s",
        version=None,
        home=Binding("r0:1", LIFE),
        tip=None,
        tips=(),
        weight=1.0,
        text_bytes=0,
        crowd_half_life_s=300.0,
    )


async def test_turns_of_any_router_are_no_other_traffic() -> None:
    watch, fleet = await one_replica()
    for number in range(3):
        await watch.store.acquire(FLEET, claim(number))
    for _ in range(FOREIGN_WINDOW):
        await foreign(watch, fleet)
        fleet.observed("r0:1", busy(5, 1_700))
    assert await foreign(watch, fleet) == (2, 200)


async def test_a_long_turn_of_a_quiet_fleet_is_no_other_traffic() -> None:
    """No turn has been placed here since it began elsewhere: the loads are read again at each beat."""
    watch = Watch()
    fleet = watch.router(url_of(0))
    await fleet.enrol()
    await foreign(watch, fleet)
    await watch.store.acquire(FLEET, claim(0))
    watch.prober.shows[url_of(0)] = busy(1, 500)
    running = asyncio.create_task(fleet.run())
    await wait_for(watch.prober, url_of(0), further=FOREIGN_WINDOW + 2)
    assert await foreign(watch, fleet) == (0, 0)
    await stop(running)


async def test_while_the_store_is_away_nothing_is_taken_for_other_traffic() -> None:
    world = await stage(1)
    world.store.away = True
    for number in range(FOREIGN_WINDOW + 1):
        await world.serve(prompt(f"{number}"))
        world.fleet.observed("r0:1", busy(9))
    world.store.away = False
    (replica,) = world.fleet.snapshot(await world.store.fetch(FLEET, Ask(session=None))).replicas
    assert replica.foreign_in_flight == 0
