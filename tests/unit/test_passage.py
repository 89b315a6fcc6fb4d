"""Requests that are no turns: to the least busy replica, again only where that is safe, stored ones to their holder."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from router.domain.errors import (
    NotPlaced,
    RoostError,
    StoreError,
    UpstreamBroken,
    UpstreamSilent,
    UpstreamUnreachable,
)
from router.domain.replica import Standing
from router.domain.session import Binding
from router.domain.shared import Settlement
from router.lifecycle.passage import Passages
from router.placement.scope import response_key
from router.ports import ForwardRequest
from tests.fakes import DOWN, FLEET, LIFE, SILENT, Answer, FakeDown, Stage, stage, url_of

JSON = ((b"Content-Type", b"application/json"),)
FINE = Answer(headers=JSON, chunks=(b'{"ok":', b"true}"))
REFUSED = Answer(error=UpstreamUnreachable("refused"))
RESET = Answer(error=UpstreamBroken("reset", answered=False))


def request(method: str = "POST") -> ForwardRequest:
    return ForwardRequest(method, "/v1/embeddings", (), b"{}")


def passages(world: Stage, retries: int = 2) -> Passages:
    world.upstream.otherwise = FINE
    return Passages(world.store, world.upstream, retries)


async def test_bytes_and_head_pass_as_they_came() -> None:
    world = await stage(1)
    down = FakeDown()
    await passages(world).serve(world.fleet, request(), down)
    assert down.head is not None
    assert (down.head.status, down.head.headers, down.data, down.ended) == (200, JSON, b'{"ok":true}', True)
    assert down.extra == ((b"x-roost-replica", b"r0:1"), (b"x-roost-reason", b"pass"))
    assert world.store.calls == []


async def test_each_goes_where_the_fewest_are_under_way() -> None:
    world = await stage(4)
    passing = passages(world)
    release = asyncio.Event()

    async def wait(_: str) -> None:
        await release.wait()

    world.upstream.before = wait
    tasks = [asyncio.create_task(passing.serve(world.fleet, request(), FakeDown())) for _ in range(12)]
    await world.gate.passed("sent", 12)
    assert set(Counter(world.upstream.sent).values()) == {3}
    tasks[0].cancel()  # whatever ends it, it is under way no longer
    await asyncio.wait([tasks[0]])
    left = world.upstream.sent[0]
    tasks.append(asyncio.create_task(passing.serve(world.fleet, request(), FakeDown())))
    await world.gate.passed("sent", 13)
    assert world.upstream.sent[-1] == left
    release.set()
    await asyncio.wait(tasks)


async def test_neither_unhealthy_nor_draining_replicas_are_asked() -> None:
    world = await stage(3)
    world.fleet.observed("r0:1", DOWN)
    (_, drained, _) = world.fleet.members
    await world.store.put_member(FLEET, replace(drained, standing=Standing.DRAINING))
    await world.fleet.refresh()
    for _ in range(3):
        await passages(world).serve(world.fleet, request(), FakeDown())
    assert set(world.upstream.sent) == {url_of(2)}
    world.fleet.observed("r2:1", DOWN)
    with pytest.raises(NotPlaced):
        await passages(world).serve(world.fleet, request(), FakeDown())


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_where_nobody_listened_another_is_asked(method: str) -> None:
    world = await stage(3)
    world.upstream.answers = {url_of(0): [REFUSED], url_of(1): [REFUSED]}
    down = FakeDown()
    await passages(world).serve(world.fleet, request(method), down)
    assert down.ended
    assert world.upstream.sent[-1] == url_of(2)
    assert not world.fleet.healthy("r0:1")


async def test_no_more_than_the_retries_are_asked() -> None:
    world = await stage(5)
    passing = passages(world, retries=1)
    world.upstream.otherwise = REFUSED
    with pytest.raises(UpstreamUnreachable):
        await passing.serve(world.fleet, request(), FakeDown())
    assert len(set(world.upstream.sent)) == len(world.upstream.sent) == 2


@pytest.mark.parametrize(("method", "asked"), [("GET", 2), ("HEAD", 2), ("POST", 1), ("DELETE", 1)])
async def test_after_a_reset_only_what_changes_nothing_is_sent_again(method: str, asked: int) -> None:
    world = await stage(2)
    passing = passages(world, retries=1)
    world.upstream.otherwise = RESET
    with pytest.raises(UpstreamBroken):
        await passing.serve(world.fleet, request(method), FakeDown())
    assert len(world.upstream.sent) == asked


@pytest.mark.parametrize("error", [UpstreamBroken("half a head", answered=True), UpstreamSilent("no head")])
async def test_what_may_be_running_is_not_sent_again(error: RoostError) -> None:
    world = await stage(2)
    passing = passages(world)
    world.upstream.otherwise = Answer(error=error)
    with pytest.raises(type(error)):
        await passing.serve(world.fleet, request("GET"), FakeDown())
    assert len(world.upstream.sent) == 1


@pytest.mark.parametrize(("method", "asked"), [("GET", 2), ("POST", 1)])
async def test_who_waits_at_a_lost_replica_is_told(method: str, asked: int) -> None:
    """Its connection notices nothing. What changes nothing is asked of another; what may, is an error."""
    world = await stage(2)
    passing, never = passages(world), asyncio.Event()

    async def hang(url: str) -> None:
        if url == url_of(0):
            await never.wait()

    world.upstream.before = hang
    down = FakeDown()
    task = asyncio.create_task(passing.serve(world.fleet, request(method), down))
    await world.gate.passed("sent")
    world.clock.at_s += 11
    for _ in range(2):
        world.fleet.observed("r0:1", SILENT)
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert isinstance(task.exception(), UpstreamBroken) == (asked == 1)
    assert len(world.upstream.sent) == asked
    assert down.ended == (asked == 2)
    assert not passing._under_way


async def test_what_acts_on_an_engine_waits_on_though_no_probe_is_answered() -> None:
    """It loads weights, say: an error would have its operator do it again."""
    world = await stage(2)
    passing, come = passages(world), asyncio.Event()

    async def hang(_: str) -> None:
        await come.wait()

    world.upstream.before = hang
    down = FakeDown()
    task = asyncio.create_task(passing.serve(world.fleet, request(), down, steers=True))
    await world.gate.passed("sent")
    world.clock.at_s += 11
    for _ in range(2):
        world.fleet.observed("r0:1", SILENT)
    for _ in range(5):
        await asyncio.sleep(0)
    come.set()
    await task
    assert down.ended


async def test_a_body_that_breaks_midway_is_raised_and_its_connection_closed() -> None:
    world = await stage(2)
    passing = passages(world)
    world.upstream.otherwise = replace(FINE, breaks=UpstreamBroken("reset"))
    down = FakeDown()
    with pytest.raises(UpstreamBroken):
        await passing.serve(world.fleet, request("GET"), down)
    assert down.started
    assert not down.ended
    assert world.upstream.exchanges[0].aborted


async def test_a_stored_response_is_asked_of_its_holder() -> None:
    """Also of one that is draining or missed its probes: nobody else has it."""
    world = await stage(3)
    passing = passages(world)
    await world.store.settle(FLEET, Settlement("l", "r1:1", LIFE, "b", response_id=response_key("mine", "resp")))
    found = await passing.holder([world.fleet], "mine", "resp")
    assert found == (world.fleet, Binding("r1:1", LIFE))
    assert await passing.holder([world.fleet], "mine", "unknown") is None
    assert await passing.holder([world.fleet], "theirs", "resp") is None
    world.fleet.observed("r1:1", DOWN)
    down = FakeDown()
    await passing.serve(world.fleet, request("GET"), down, Binding("r1:1", LIFE))
    assert world.upstream.sent == [url_of(1)]
    assert (b"x-roost-reason", b"stored") in down.extra


async def test_a_holder_that_is_dead_is_asked_once_and_nobody_else() -> None:
    """The others would say there is no such response, which is not true."""
    world = await stage(3)
    passing = passages(world, retries=5)
    world.upstream.otherwise = REFUSED
    with pytest.raises(UpstreamUnreachable):
        await passing.serve(world.fleet, request("GET"), FakeDown(), Binding("r1:1", LIFE))
    assert world.upstream.sent == [url_of(1)]


async def test_where_the_holder_has_left_the_fleet_any_replica_answers() -> None:
    world = await stage(2)
    down = FakeDown()
    await passages(world).serve(world.fleet, request("GET"), down, Binding("gone", LIFE))
    assert (b"x-roost-reason", b"pass") in down.extra


async def test_without_the_store_nobody_can_say_who_holds_a_response() -> None:
    """Which is not the same as that nobody does: with tenants it must not be asked of any replica then."""
    world = await stage(1)
    world.store.away = True
    with pytest.raises(StoreError):
        await passages(world).holder([world.fleet], "mine", "resp")


async def test_a_broadcast_reaches_all_and_relays_a_good_answer() -> None:
    world = await stage(4)
    passing = passages(world)
    world.upstream.answers = {url_of(0): [Answer(status=500)], url_of(1): [REFUSED]}
    down = FakeDown()
    await passing.broadcast([(world.fleet, request())], down)
    assert sorted(world.upstream.sent) == [url_of(number) for number in range(4)]
    assert down.head is not None
    assert (down.head.status, down.ended) == (200, True)
    assert sorted((each.ended, each.aborted) for each in world.upstream.exchanges) == [
        (False, True),
        (False, True),
        (True, False),
    ]


async def test_a_broadcast_that_fails_everywhere_says_how() -> None:
    world = await stage(2)
    passing = passages(world)
    world.upstream.otherwise = Answer(status=500, headers=JSON, chunks=(b"{}",))
    down = FakeDown()
    await passing.broadcast([(world.fleet, request())], down)
    assert down.head is not None
    assert down.head.status == 500
    world.upstream.otherwise = REFUSED
    with pytest.raises(UpstreamUnreachable):
        await passing.broadcast([(world.fleet, request())], FakeDown())
    for member in world.fleet.members:
        world.fleet.observed(member.id, DOWN)
    with pytest.raises(NotPlaced):
        await passing.broadcast([(world.fleet, request())], FakeDown())


async def test_a_broadcast_whose_client_leaves_keeps_no_connection() -> None:
    """One replica has answered, another has not: the answer that came is closed."""
    world = await stage(2)
    passing = passages(world)
    never = asyncio.Event()

    async def hang(url: str) -> None:
        if url == url_of(1):
            await never.wait()

    world.upstream.before = hang
    task = asyncio.create_task(passing.broadcast([(world.fleet, request())], FakeDown()))
    await world.gate.passed("head")
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert [exchange.aborted for exchange in world.upstream.exchanges] == [True]
