"""A turn through its life: what was acquired is settled whatever happens, and it is tried elsewhere only where safe."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from router.domain.decision import Reason
from router.domain.errors import NotPlaced, RoostError, UpstreamBroken, UpstreamSilent, UpstreamUnreachable
from router.domain.outcome import End
from router.domain.replica import Standing
from router.domain.session import Boundary
from router.domain.shared import Claim, Member, Settlement
from router.domain.turn import Facts
from router.lifecycle.placing import Limits
from router.placement.scope import response_key
from router.telemetry.events import TurnFinished
from tests.fakes import FLEET, LIFE, UP, Answer, Stage, prompt, stage, tokens, unread, url_of

LONG = "word " * 4_000
"""Enough text for its prefill to be counted as waiting."""
REFUSED = Answer(error=UpstreamUnreachable("refused"))
FULL = Answer(status=503, headers=((b"Content-Type", b"application/json"),), chunks=(b'{"error":{"message":"full"}}',))


async def ends(world: Stage, facts: Facts, error: type[RoostError] | None = None) -> End:
    """Serve one turn, expect that error, see all settled, and say how its last attempt ended."""
    if error is None:
        await world.serve(facts)
    else:
        with pytest.raises(error):
            await world.serve(facts)
    await world.settled()
    return world.events.finished[-1].outcome.end


def answer_everywhere(world: Stage, answer: Answer) -> None:
    world.upstream.otherwise = answer


# --- how a turn ends --------------------------------------------------------------------------------------------------


async def test_a_clean_end_records_what_the_engine_counted() -> None:
    world = await stage()
    answer_everywhere(world, tokens(prompt=5_000, cached=0, words=30))
    assert await ends(world, prompt(LONG)) is End.COMPLETE
    down = world.served[0]
    assert down.ended
    assert down.data == b"".join(world.upstream.otherwise.chunks)
    assert down.extra == ((b"x-reason", b"new"),)
    (branch,) = world.store.branches().values()
    assert branch.tokens == 5_000
    assert branch.residues[0].tokens == 5_030
    assert world.store.loads()[world.replica_of()].admitted_tokens == 5_030
    assert world.store.calls == ["fetch", "acquire", "progress", "settle"]


async def test_the_undisturbed_path_asks_the_store_twice_before_the_request_goes_out() -> None:
    world = await stage()
    await world.serve(prompt("a"))
    steps = world.gate.steps
    assert steps[: steps.index("sent")] == ["fetch asked", "fetch done", "acquire asked", "acquire done"]
    assert world.recent.newest(1)[0].store_calls == 2


async def test_an_error_status_is_relayed_and_leaves_nothing_behind() -> None:
    world = await stage()
    answer_everywhere(world, Answer(status=400, headers=FULL.headers, chunks=(b'{"error":{"message":"too long"}}',)))
    assert await ends(world, prompt(LONG)) is End.REJECTED
    assert world.served[0].head is not None
    assert world.served[0].head.status == 400
    (branch,) = world.store.branches().values()
    assert branch.residues == ()
    assert world.store.loads()[world.replica_of()].admitted_tokens == 0


async def test_an_error_event_in_a_stream_is_an_error() -> None:
    world = await stage()
    broken = (*tokens(done=False).chunks, b'data: {"error":{"message":"aborted","code":500}}\n\n')
    answer_everywhere(world, Answer(chunks=broken))
    assert await ends(world, prompt(LONG)) is End.UPSTREAM_ERROR


async def test_a_longer_prompt_that_failed_counts_in_the_estimate_of_the_next() -> None:
    """The claim has moved the branch's text on, so its tokens follow by estimate; the engine's count then mends it."""
    world = await stage()
    answer_everywhere(world, tokens(prompt=5_000))
    await world.serve(prompt(LONG))
    answer_everywhere(world, Answer(status=400, headers=FULL.headers, chunks=(b"{}",)))
    assert await ends(world, prompt(LONG, "ok", LONG)) is End.REJECTED
    failed = world.recent.newest(1)[0].turn
    assert failed.prompt_tokens > 9_000
    (branch,) = world.store.branches().values()
    assert branch.tokens == failed.prompt_tokens
    await world.serve(prompt(LONG, "ok", LONG))
    again = world.recent.newest(1)[0].turn
    assert again.prompt_tokens == failed.prompt_tokens


async def test_a_lease_locks_what_its_turn_adds() -> None:
    """What it reuses is in the cache already, and a prefix that several turns share is there once."""
    world = await stage()
    answer_everywhere(world, tokens(prompt=5_000, cached=0))
    await world.serve(prompt(LONG))
    await world.settled()
    await world.serve(prompt(LONG, "ok", "next"))
    placed, turn = world.recent.newest(1)[0].placed, world.recent.newest(1)[0].turn
    assert placed.cached_tokens >= 5_000
    assert world.store.claims[-1].locked_tokens == turn.prompt_tokens - placed.cached_tokens + turn.output_tokens


async def test_a_replica_that_refuses_is_left_and_the_branch_moves() -> None:
    """Nobody listened at its home: the turn is served elsewhere, the home is unhealthy and the branch bound anew."""
    world = await stage()
    await world.serve(prompt(LONG))
    home = world.replica_of()
    world.upstream.answers[f"http://{home}"] = [REFUSED]
    assert await ends(world, prompt(LONG, "ok", "next")) is End.COMPLETE
    first, second = world.events.finished[-2:]
    assert (first.outcome.end, first.replica, first.attempt) == (End.UNREACHED, home, 1)
    assert (second.reason, second.attempt) == (Reason.HOME_GONE, 2)
    assert second.replica != home
    assert not world.fleet.healthy(home)
    (branch,) = world.store.branches().values()
    assert branch.home is not None
    assert branch.home.replica == second.replica


async def test_when_all_refuse_the_client_is_told_so() -> None:
    world = await stage(2)
    answer_everywhere(world, REFUSED)
    assert await ends(world, prompt(LONG), UpstreamUnreachable) is End.UNREACHED
    assert sorted(world.upstream.sent) == [url_of(0), url_of(1)]
    assert not world.served[0].started


async def test_at_most_retries_further_replicas_are_tried_and_never_one_twice() -> None:
    world = await stage(5, limits=Limits(retries=2))
    answer_everywhere(world, REFUSED)
    assert await ends(world, prompt(LONG), UpstreamUnreachable) is End.UNREACHED
    assert len(world.upstream.sent) == len(set(world.upstream.sent)) == 3


async def test_a_connection_that_breaks_before_any_byte_is_tried_elsewhere() -> None:
    world = await stage()
    world.upstream.answers[url_of(0)] = [Answer(error=UpstreamBroken("reset", answered=False))]
    for number in range(6):
        assert await ends(world, prompt(f"{number}", session=f"s{number}")) is End.COMPLETE
    assert world.upstream.sent.count(url_of(0)) >= 1
    assert world.upstream.sent.count(url_of(1)) == 6


@pytest.mark.parametrize(
    "error", [UpstreamBroken("half a head", answered=True), UpstreamSilent("no head")], ids=["answered", "silent"]
)
async def test_a_turn_that_may_be_running_is_not_sent_again(error: RoostError) -> None:
    world = await stage()
    answer_everywhere(world, Answer(error=error))
    assert await ends(world, prompt(LONG), type(error)) is End.UNREACHED
    assert len(world.upstream.sent) == 1


@pytest.mark.parametrize("error", [UpstreamBroken("reset"), UpstreamSilent("stalled")], ids=["broken", "silent"])
async def test_a_stream_that_breaks_midway_is_raised_not_repeated(error: RoostError) -> None:
    world = await stage()
    answer_everywhere(world, replace(tokens(done=False), breaks=error))
    assert await ends(world, prompt(LONG), type(error)) is End.UPSTREAM_BROKEN
    down = world.served[0]
    assert down.started
    assert not down.ended
    assert down.data == b"".join(tokens(done=False).chunks)
    assert len(world.upstream.sent) == 1


async def test_a_full_home_spills_the_turn_and_keeps_the_binding() -> None:
    world = await stage()
    answer_everywhere(world, tokens(prompt=5_000, cached=0))
    await world.serve(prompt(LONG))
    home = world.replica_of()
    world.upstream.answers[f"http://{home}"] = [FULL]
    assert await ends(world, prompt(LONG, "ok", "next")) is End.COMPLETE
    assert world.events.finished[-1].reason is Reason.SPILL
    assert world.fleet.healthy(home)
    (branch,) = world.store.branches().values()
    assert branch.home is not None
    assert branch.home.replica == home
    world.upstream.answers.clear()
    assert await ends(world, prompt(LONG, "ok", "next", "ok", "more")) is End.COMPLETE
    assert (world.events.finished[-1].reason, world.replica_of()) == (Reason.HOME, home)


async def test_a_new_branch_that_finds_a_replica_full_lives_where_it_was_served() -> None:
    """It left nothing at the full one that it could return to."""
    world = await stage()
    world.upstream.answers[url_of(0)] = [FULL]
    for number in range(6):
        assert await ends(world, prompt(f"{number}", session=f"s{number}")) is End.COMPLETE
    assert world.upstream.sent.count(url_of(0)) >= 1
    assert Reason.SPILL not in {event.reason for event in world.events.finished}
    for branch in world.store.branches().values():
        assert branch.home is not None
        assert branch.home.replica == "r1:1"


async def test_when_all_are_full_the_last_503_is_relayed_as_it_came() -> None:
    world = await stage()
    answer_everywhere(world, FULL)
    assert await ends(world, prompt(LONG)) is End.UPSTREAM_ERROR
    down = world.served[0]
    assert down.head is not None
    assert (down.head.status, down.head.headers, down.data) == (503, FULL.headers, FULL.chunks[0])
    assert down.ended
    assert sorted(world.upstream.sent) == [url_of(0), url_of(1)]


@pytest.mark.parametrize(("answer", "error"), [(FULL, None), (REFUSED, UpstreamUnreachable)], ids=["full", "refuses"])
async def test_the_continuation_of_a_stored_response_is_asked_of_its_holder_only(
    answer: Answer, error: type[RoostError] | None
) -> None:
    """Elsewhere it is unknown: a refusal that the client may repeat would become an error that it may not."""
    world = await stage()
    await world.serve(prompt("a"))
    holder = world.replica_of()
    asked = replace(prompt("other"), refers_to="resp_1")
    stored = response_key(asked.tenant, "resp_1")
    await world.store.settle(FLEET, Settlement("l", holder, LIFE, "b", response_id=stored))
    answer_everywhere(world, answer)
    await ends(world, asked, error)
    last = world.events.finished[-1]
    assert (last.replica, last.reason, last.attempt) == (holder, Reason.STORED, 1)
    if error is None:
        assert world.served[-1].head is not None
        assert world.served[-1].head.status == 503


async def test_a_turn_whose_prompt_cannot_be_read_is_served_and_tried_elsewhere_too() -> None:
    """A compressed body has no chain: it is a branch of its own, at each replica it is tried on."""
    world = await stage()
    world.upstream.answers[url_of(0)] = [REFUSED]
    for session in ("a", "b", "c", "d", None):
        world.fleet.observed("r0:1", UP)
        assert await ends(world, unread(session)) is End.COMPLETE
    assert world.upstream.sent.count(url_of(0)) >= 1


# --- the client leaves ------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_end_is_gone_and_the_engine_stops() -> None:
    world = await stage()
    await cancelled_at(world, prompt(LONG), "chunk")
    assert world.events.finished[-1].outcome.end is End.CLIENT_GONE
    assert world.upstream.exchanges[-1].aborted


async def test_leaving_after_the_terminal_event_is_success() -> None:
    """Codex closes its connection right after the last event."""
    world = await stage()
    await cancelled_at(world, prompt(LONG), "end")
    assert world.events.finished[-1].outcome.end is End.COMPLETE


async def cancelled_at(world: Stage, facts: Facts, step: str) -> None:
    """Serve a turn whose client leaves at the last step of that name."""
    probe = await stage()
    probe.upstream.answers, probe.upstream.otherwise = world.upstream.answers, world.upstream.otherwise
    await probe.serve(facts)
    last = max(number for number, name in enumerate(probe.gate.steps, 1) if name == step)
    await serve_and_cancel(world, facts, (last,))


async def serve_and_cancel(world: Stage, facts: Facts, at: tuple[int, ...]) -> None:
    """Serve a turn that is cancelled at those steps."""
    world.gate.victim = asyncio.create_task(world.serve(facts))
    world.gate.cancel_at = at
    await asyncio.wait([world.gate.victim])
    await world.settled()


SCENES = ("plain", "refused, then elsewhere", "full, then elsewhere", "broken midway", "store answers lost")


def set_scene(world: Stage, scene: str) -> None:
    answer_everywhere(world, tokens(prompt=5_000, cached=100))
    match scene:
        case "refused, then elsewhere":
            world.upstream.otherwise = REFUSED
            world.upstream.answers = {url_of(2): [tokens()]}
        case "full, then elsewhere":
            world.upstream.otherwise = FULL
            world.upstream.answers = {url_of(2): [tokens()]}
        case "broken midway":
            answer_everywhere(world, replace(tokens(done=False), breaks=UpstreamBroken("reset")))
        case "store answers lost":
            world.store.lose_answers.update(acquire=1)


@pytest.mark.parametrize("scene", SCENES)
async def test_cancelled_at_any_step_everything_is_given_back(scene: str) -> None:
    """Wherever a turn stands when its client leaves: at every await of the store, the replica and the settling."""
    facts = prompt(LONG)
    for step in range(1, await steps_of(facts, scene) + 1):
        world = await stage(3)
        set_scene(world, scene)
        await serve_and_cancel(world, facts, (step,))


@pytest.mark.parametrize("scene", SCENES)
async def test_cancelled_twice_everything_is_given_back(scene: str) -> None:
    """The second cancellation meets the settling, or whatever else the turn does after the first."""
    facts = prompt(LONG)
    for step in range(1, await steps_of(facts, scene) + 1):
        for later in (1, 2, 3):
            world = await stage(3)
            set_scene(world, scene)
            await serve_and_cancel(world, facts, (step, step + later))


async def steps_of(facts: Facts, scene: str) -> int:
    """How many steps that scene has undisturbed."""
    world = await stage(3)
    set_scene(world, scene)
    try:
        await world.serve(facts)
    except RoostError:
        assert scene == "broken midway"
    await world.settled()
    return len(world.gate.steps)


async def test_waiting_for_the_settling_may_be_given_up_without_cutting_it() -> None:
    world = await stage()
    task = asyncio.create_task(world.serve(prompt(LONG)))
    await world.gate.passed("settle asked")
    waiting = asyncio.create_task(world.turns.drained())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting, task])
    await world.settled()
    assert task.exception() is None


async def test_a_lease_whose_claim_overtook_its_release_is_not_renewed_and_expires() -> None:
    """The claim of a cancelled turn may reach the store after what gives it back; nobody renews it."""
    world = await stage()
    await serve_and_cancel(world, prompt(LONG), (3,))
    (late,) = world.store.claims
    await world.store.acquire(FLEET, late)
    world.clock.at_s += late.lease_ttl_s + 1
    await world.serve(prompt("another", session="t"))
    await world.settled()


async def test_a_turn_whose_end_cannot_be_told_is_renewed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while a turn is settled, its lease expires as if its router had died."""
    world = await stage()

    def fail(event: object) -> None:
        match event:
            case TurnFinished():
                raise RuntimeError("nobody hears it")

    monkeypatch.setattr(world.events, "emit", fail)
    with pytest.raises(RuntimeError, match="nobody hears it"):
        await world.serve(prompt("a"))
    assert world.leases.count == 0


async def test_turns_that_are_under_way_are_counted() -> None:
    world = await stage()
    task = asyncio.create_task(world.serve(prompt("a")))
    await asyncio.sleep(0)
    assert world.turns.under_way == 1
    await task
    assert world.turns.under_way == 0


# --- the store moves, or is away --------------------------------------------------------------------------------------


async def test_a_claim_whose_answer_is_lost_holds_the_place_and_gives_it_back() -> None:
    """It may have been carried out, as here: the turn goes where the store believes it to be."""
    world = await stage()
    world.store.lose_answers.update(acquire=1)
    assert await ends(world, prompt(LONG)) is End.COMPLETE
    assert world.events.finished[-1].blind
    assert world.store.calls == ["fetch", "acquire", "progress", "settle"]
    (claim,) = world.store.claims
    assert claim.replica == world.replica_of()


async def test_a_question_whose_answer_is_lost_is_asked_again() -> None:
    """One lost answer is no store that is away: a branch that another router placed is still found."""
    world = await stage(5)
    await world.serve(prompt(LONG))
    home = world.replica_of()
    other = await stage(5, store=world.store, ids="other")
    world.store.lose_answers.update(fetch=1)
    await other.serve(prompt(LONG, "ok", "next"))
    await other.settled()
    assert (other.replica_of(), other.events.finished[-1].blind) == (home, False)
    assert world.store.calls[:3] == ["fetch", "fetch", "acquire"]


async def test_when_nothing_can_be_claimed_the_turn_gives_up_after_its_attempts() -> None:
    world = await stage(limits=Limits(attempts=5))
    world.store.stale = "branch"
    with pytest.raises(NotPlaced, match="kept changing"):
        await world.serve(prompt(LONG))
    await world.settled()
    assert Counter(world.store.calls) == {"fetch": 5, "acquire": 5}
    assert world.upstream.sent == []


async def test_a_raced_tip_is_decided_again_and_continues_the_rivals_branch() -> None:
    world = await stage()

    async def rival(claim: Claim) -> None:
        world.store.rival = None
        await world.store.acquire(FLEET, replace(claim, lease="rival"))

    world.store.rival = rival
    await world.serve(prompt(LONG))
    first, _, again = world.store.claims
    assert (first.version, again.version) == (None, 1)
    assert again.branch == first.branch
    assert world.recent.newest(1)[0].store_calls == 4


async def test_a_branch_whose_version_moved_is_decided_again() -> None:
    world = await stage()
    await world.serve(prompt(LONG))

    async def rival(claim: Claim) -> None:
        world.store.rival = None
        tip = Boundary("ab" * 16, 99)
        await world.store.acquire(FLEET, replace(claim, lease="rival", tip=tip, tips=(tip, *claim.tips[1:])))

    world.store.rival = rival
    await world.serve(prompt(LONG, "ok", "next"))
    seen, _, again = world.store.claims[-3:]
    assert seen.version == 1
    assert again.version is None  # the branch is busy with another continuation: this one forks
    assert again.branch != seen.branch


async def test_a_replica_taken_meanwhile_is_decided_again() -> None:
    """A new branch was to go to an idle replica; by the time of its claim another turn had gone there."""
    world = await stage()

    async def rival(claim: Claim) -> None:
        world.store.rival = None
        other = replace(claim, lease="rival", branch="rival", session="rival", tip=None, tips=())
        await world.store.acquire(FLEET, other)

    world.store.rival = rival
    await world.serve(prompt(LONG))
    seen, _, again = world.store.claims
    assert seen.observed_in_flight == 0
    assert again.replica != seen.replica


async def test_whoever_loses_every_race_gets_a_branch_of_its_own() -> None:
    """The last decision asks for what no rival can have taken, however fast they are."""
    world = await stage(limits=Limits(attempts=3))
    await world.serve(prompt(LONG))
    rivals = 0

    async def rival(claim: Claim) -> None:
        nonlocal rivals
        if claim.lease.startswith("rival") or claim.tip is None:
            return
        rivals += 1
        await world.store.acquire(FLEET, replace(claim, lease=f"rival{rivals}", observed_in_flight=None))

    world.store.rival = rival
    await world.serve(prompt(LONG))  # again the tip of the branch: every claim is for its next version
    mine = [claim for claim in world.store.claims if not claim.lease.startswith("rival")]
    assert [claim.version for claim in mine[1:]] == [1, 2, None]
    assert (mine[-1].tip, mine[-1].tips) == (None, ())


async def test_a_membership_that_changed_is_read_again_before_the_decision() -> None:
    world = await stage()
    for member in world.fleet.members:
        if member.id == "r0:1":
            await world.store.put_member(FLEET, replace(member, standing=Standing.DRAINING))
    await world.store.put_member(FLEET, Member("r9:1", "http://r9:1", "admin", incarnation=LIFE))
    for number in range(6):
        await world.serve(prompt(f"{number}", session=f"s{number}"))
    assert {event.replica for event in world.events.started} == {"r1:1"}  # r9 has not been seen yet
    assert world.store.calls.count("members") == 1


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize(("turns", "replicas"), [(32, 4), (100, 10)])
async def test_new_sessions_at_once_spread_evenly(routers: int, turns: int, replicas: int) -> None:
    """Each step of each turn interleaved with all others, on one router or two: equal replicas are at most 2 apart."""
    first = await stage(replicas)
    worlds = [first] + [await stage(replicas, store=first.store, ids=f"router{n}") for n in range(1, routers)]
    release = asyncio.Event()
    for world in worlds:
        world.upstream.before = lambda _: _wait(release)
    tasks = [
        asyncio.create_task(worlds[n % routers].serve(prompt(f"{n} {LONG}", session=f"s{n}"))) for n in range(turns)
    ]
    await first.gate.passed("sent", turns)
    counts = Counter(event.replica for world in worlds for event in world.events.started)
    assert len(counts) == replicas
    assert max(counts.values()) - min(counts.values()) <= 2
    release.set()
    await asyncio.gather(*tasks)
    for world in worlds:
        await world.turns.drained()
    await first.settled()


async def _wait(release: asyncio.Event) -> None:
    await release.wait()


@pytest.mark.parametrize("session", ["s", None])
async def test_the_same_first_prompt_ten_times_at_once_makes_one_branch(session: str | None) -> None:
    world = await stage(4)
    await asyncio.gather(*(world.serve(prompt(LONG, session=session)) for _ in range(10)))
    await world.settled()
    (branch,) = world.store.branches().values()
    assert branch.turns == 10
    assert max(record.store_calls for record in world.recent.newest(10)) <= 4  # who loses a race does not race again


async def test_the_same_prompt_in_another_session_is_served() -> None:
    """Two agents of one tenant are given the same task: each session has its branch, and both go on."""
    world = await stage()
    for session in ("one", "two", "one", "two"):
        assert await ends(world, prompt(LONG, session=session)) is End.COMPLETE
    assert world.recent.newest(1)[0].store_calls == 2
    for session in ("one", "two"):
        assert await ends(world, prompt(LONG, f"I am {session}", "go on", session=session)) is End.COMPLETE
        assert world.recent.newest(1)[0].store_calls == 2
    world.upstream.answers[url_of(0)] = [REFUSED]
    for number in range(4):
        world.fleet.observed("r0:1", UP)
        assert await ends(world, prompt(LONG, session=f"more {number}")) is End.COMPLETE


async def test_a_prompt_sent_again_while_its_branch_has_moved_on_is_served() -> None:
    """Another run of the same keyless task begins while the first is in the midst of its own."""
    world = await stage()
    await world.serve(prompt(LONG, session=None))
    release = asyncio.Event()
    world.upstream.before = lambda _: _wait(release)
    running = asyncio.create_task(world.serve(prompt(LONG, "ok", "next", session=None)))
    await world.gate.passed("sent", 2)
    again = asyncio.create_task(world.serve(prompt(LONG, session=None)))
    await world.gate.passed("sent", 3)
    release.set()
    await asyncio.gather(running, again)
    await world.settled()
    assert world.recent.newest(1)[0].store_calls == 2


# --- without the store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["s", None])
async def test_without_the_store_every_router_places_alike_and_sticks(session: str | None) -> None:
    """By session, or by the first message after the system prompt; so a conversation stays put as it grows."""
    one, two = await stage(5), await stage(5)
    placed = set()
    for world in (one, two):
        world.store.away = True
        said: list[str] = ["task 7"]
        for _ in range(5):
            assert await ends(world, prompt(*said, session=session)) is End.COMPLETE
            placed.add(world.replica_of())
            said += ["answer", "more"]
        assert all(event.blind for event in world.events.finished)
    assert len(placed) == 1


async def test_without_the_store_known_branches_stay_where_they_were() -> None:
    """Placed by cost, which is not where the hash would send them, they stay there while the store is away."""
    world = await stage(5)
    homes = {}
    for number in range(10):
        await world.serve(prompt(f"task {number}", session=f"s{number}"))
        homes[number] = world.replica_of()
    await world.settled()
    world.store.away = True
    for number, home in homes.items():
        for said in (["answer", "more"], ["answer", "more", "again", "more still"]):
            await world.serve(prompt(f"task {number}", *said, session=f"s{number}"))
            assert world.replica_of() == home
            assert world.events.started
    assert world.events.finished[-1].blind
    assert world.events.finished[-1].reason is Reason.HOME


async def test_without_the_store_conversations_with_one_system_prompt_spread() -> None:
    world = await stage(4)
    world.store.away = True
    for number in range(40):
        await world.serve(prompt(f"task {number}", session=None))
    assert len(Counter(event.replica for event in world.events.started)) == 4


async def test_without_the_store_a_dead_replica_is_passed_over() -> None:
    world = await stage(3)
    world.store.away = True
    world.upstream.answers = {url_of(0): [REFUSED], url_of(1): [REFUSED]}
    for number in range(6):
        assert await ends(world, prompt(f"{number}", session=f"s{number}")) is End.COMPLETE
    assert {event.replica for event in world.events.finished if event.outcome.end is End.COMPLETE} == {"r2:1"}


async def test_without_store_and_replicas_a_turn_is_refused() -> None:
    world = await stage(1)
    world.store.away = True
    world.fleet.watch.unreachable("r0:1", UpstreamUnreachable("refused"))
    with pytest.raises(NotPlaced, match="no replica of fleet fleet is ready"):
        await world.serve(prompt("a"))


async def test_a_settlement_that_fails_costs_no_turn_and_its_lease_expires() -> None:
    world = await stage()

    async def lose_the_store(_: str) -> None:
        world.store.away = True

    world.upstream.before = lose_the_store
    down = await world.serve(prompt(LONG))
    await world.turns.drained()
    assert down.ended
    assert world.leases.count == 0
    world.upstream.before, world.store.away = None, False
    (claim,) = world.store.claims
    world.clock.at_s += claim.lease_ttl_s + 1
    await world.serve(prompt("next", session="t"))
    await world.settled()


async def test_two_settlements_of_one_lease_count_once() -> None:
    world = await stage()
    await world.serve(prompt(LONG))
    await world.settled()
    (claim,) = world.store.claims
    await world.store.settle(FLEET, Settlement(claim.lease, claim.replica, claim.incarnation, claim.branch))
    await world.settled()
