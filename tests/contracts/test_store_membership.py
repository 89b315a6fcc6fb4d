"""Membership, beliefs and reports."""

from __future__ import annotations

import json
from dataclasses import replace

from router.domain.replica import Beliefs, Capacity, Standing
from router.ports import Member
from router.store.codec import pack_member
from tests.contracts.worlds import FLEET, START_S, Fleet, World, boundary, claim, settlement

R1 = Member("r1", "http://10.0.0.1:30000", "config")
R2 = Member(
    id="r2",
    url="http://[fd00::1]:30000",
    source="report",
    standing=Standing.DRAINING,
    incarnation="i9",
    capacity=Capacity(750_000, 2_000_000, 32),
    joined_at_s=1_700_000_000.123456,
    models=("kimi", "kimi-k2"),
)


async def test_members_are_read_as_they_were_put(world: World) -> None:
    assert await world.store.put_member(FLEET, R2)
    assert await world.store.put_member(FLEET, R1)
    membership = await world.store.members(FLEET)
    assert membership.members == (R1, R2)
    assert membership.now_s == START_S
    assert membership.version == 2


async def test_the_version_counts_changes_and_only_changes(world: World, fleet: Fleet) -> None:
    await world.store.put_member(FLEET, R1)
    await world.store.put_member(FLEET, R1)
    assert (await fleet.look()).membership_version == 1
    await world.store.put_member(FLEET, replace(R1, standing=Standing.CORDONED))
    assert (await fleet.look()).membership_version == 2
    assert not await world.store.remove_member(FLEET, "unknown")
    assert (await fleet.look()).membership_version == 2
    assert await world.store.remove_member(FLEET, "r1")
    assert (await world.store.members(FLEET)).version == 3
    assert (await world.store.members(FLEET)).members == ()


async def test_a_member_that_is_there_is_left_where_asked_so(world: World) -> None:
    assert await world.store.put_member(FLEET, R1, only_if_absent=True)
    assert not await world.store.put_member(FLEET, replace(R1, source="admin"), only_if_absent=True)
    assert (await world.store.members(FLEET)).members == (R1,)
    assert (await world.store.members(FLEET)).version == 1


async def test_a_put_that_expects_a_record_writes_only_over_that_one(world: World) -> None:
    """Compare and set: a probe's finding and an operator's word, read from one record, cannot undo each other."""
    assert not await world.store.put_member(FLEET, replace(R2, incarnation="i10"), expected=R2)
    await world.store.put_member(FLEET, R2)
    (read,) = (await world.store.members(FLEET)).members
    cordoned, found = replace(read, standing=Standing.CORDONED), replace(read, incarnation="i10", joined_at_s=1.1)
    assert await world.store.put_member(FLEET, cordoned, expected=read)
    assert not await world.store.put_member(FLEET, found, expected=read)
    membership = await world.store.members(FLEET)
    assert (membership.members, membership.version) == ((cordoned,), 2)
    both = replace(found, standing=Standing.CORDONED)
    assert await world.store.put_member(FLEET, both, expected=cordoned)
    assert await world.store.put_member(FLEET, both, expected=both)
    assert (await world.store.members(FLEET)).version == 3
    others = (
        replace(both, capacity=None),
        replace(both, models=("kimi",)),
        replace(both, joined_at_s=1.2),
        replace(both, url="http://other"),
    )
    for other in others:
        assert not await world.store.put_member(FLEET, cordoned, expected=other)
    assert (await world.store.members(FLEET)).members == (both,)


async def test_a_record_is_compared_by_what_it_says_and_not_by_its_spelling(world: World) -> None:
    """A hand, or another version with a field more, may have written it."""
    if world.has_server:
        spelt = json.loads(pack_member(R2)) | {"later": [1]}
        await world.raw.hset(f"roost:{{{FLEET}}}:v2:members", R2.id, json.dumps(spelt, indent=1, sort_keys=True))
    else:
        await world.store.put_member(FLEET, R2)
    assert (await world.store.members(FLEET)).members == (R2,)
    assert await world.store.put_member(FLEET, replace(R2, incarnation="i10"), expected=R2)
    assert (await world.store.members(FLEET)).members == (replace(R2, incarnation="i10"),)


async def test_removing_a_member_forgets_its_load_and_beliefs(world: World, fleet: Fleet) -> None:
    await world.store.put_member(FLEET, R1)
    await fleet.win(claim("l1", "b1", boundary(1)))
    await fleet.settle(settlement(beliefs=Beliefs(prefill_rate=5.0)))
    await world.store.remove_member(FLEET, "r1")
    view = await fleet.look()
    assert not view.loads
    assert not view.incarnations
    assert not view.beliefs


async def test_the_last_beliefs_win(fleet: Fleet) -> None:
    beliefs = Beliefs(1.5, 2.5, 0.02, 3.5, 0.25, 4.5, 0.875, 0.1)
    for number, told in enumerate([Beliefs(prefill_rate=5.0), beliefs, None]):
        await fleet.win(claim(f"l{number}", f"b{number}"))
        await fleet.settle(settlement(f"l{number}", f"b{number}", beliefs=told))
    assert (await fleet.look()).beliefs == {"r1": beliefs}


async def test_a_report_is_there_until_its_time_is_up(world: World) -> None:
    raw = bytes(range(256)) * 20
    await world.store.put_report(FLEET, "r1", raw, 10.0)
    await world.store.put_report(FLEET, "r2", b"", 5.0)
    assert (await world.store.members(FLEET)).reports == {"r1": raw, "r2": b""}
    await world.advance(5.0)
    assert (await world.store.members(FLEET)).reports == {"r1": raw}
    await world.store.put_report(FLEET, "r1", b"newer", 10.0)
    await world.advance(9.0)
    assert (await world.store.members(FLEET)).reports == {"r1": b"newer"}
    await world.advance(1.0)
    membership = await world.store.members(FLEET)
    assert membership.reports == {}
    assert membership.version == 0
