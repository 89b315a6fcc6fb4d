"""Random histories: a store in Redis answers as the one in memory does, call by call."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router.domain.replica import Beliefs, Standing
from router.domain.session import Binding
from router.ports import Ask, Claim, Lease, Member, Settlement, Store
from tests.contracts.worlds import FLEET, World, boundary, memory_world, redis_world

CALLS = 300
BOUNDARIES = [boundary(number, 10 * number) for number in range(12)]
REPLICAS = ["r1", "r2", "r3"]
BRANCHES = ["b1", "b2", "ab12", "cd34"]
LEASES = [f"l{number}" for number in range(8)]

Call = Callable[[Store], Coroutine[Any, Any, Any]]


def _claim(dice: random.Random, versions: dict[str, int]) -> Claim:
    branch = dice.choice(BRANCHES)
    tips = tuple(dice.sample(BOUNDARIES, dice.randint(0, 4)))
    replica, incarnation = dice.choice(REPLICAS), dice.choice(["i1", "i1", "i1", "i2"])
    home = Binding(replica, incarnation) if dice.random() < 0.7 else Binding(dice.choice(REPLICAS), "i1")
    return Claim(
        lease=dice.choice(LEASES),
        replica=replica,
        incarnation=incarnation,
        prefill_tokens=dice.randint(0, 1000),
        locked_tokens=dice.randint(0, 1000),
        branch=branch,
        session=dice.choice(["s1", "0123ab"]),
        version=versions.get(branch) if dice.random() < 0.8 else None,
        home=home,
        tip=tips[0] if tips else None,
        tips=tips,
        weight=dice.random() * 10,
        text_bytes=dice.randint(0, 10_000),
        crowd_half_life_s=30.0,
        live_half_life_s=12.0,
        live_tokens=dice.randint(0, 100_000),
        inherited_tokens=dice.randint(0, 1000),
        named=dice.random() < 0.3,
        observed_in_flight=dice.choice([None, None, 0, 3]),
        slack=dice.choice([0, 1, 2]),
        head=dice.choice([None, *(each.hash for each in BOUNDARIES)]),
        session_home=dice.choice([None, home]),
        branch_ttl_s=dice.choice([20.0, 200.0, 2000.0]),
        lease_ttl_s=dice.choice([5.0, 50.0]),
    )


def _settlement(dice: random.Random) -> Settlement:
    return Settlement(
        lease=dice.choice(LEASES),
        replica=dice.choice(REPLICAS),
        incarnation=dice.choice(["i1", "i1", "i2"]),
        branch=dice.choice(BRANCHES),
        tokens=dice.choice([0, 10, 1000]),
        prompt_tokens=dice.choice([0, 9, 900]),
        admitted_tokens=dice.randint(0, 500),
        beliefs=dice.choice([None, Beliefs(dice.random(), dice.random())]),
        response_id=dice.choice([None, "resp_1", "resp_2"]),
        branch_ttl_s=dice.choice([20.0, 200.0, 2000.0]),
    )


def _lease(dice: random.Random, name: str) -> Lease:
    incarnation = dice.choice(["i1", "i1", "i2"])
    return Lease(
        name, dice.choice(REPLICAS), incarnation, dice.choice([0, 70]), dice.randint(0, 1000), dice.choice(BRANCHES)
    )


def _ask(dice: random.Random) -> Ask:
    return Ask(
        session=dice.choice([None, "s1", "0123ab"]),
        boundaries=tuple(each.hash for each in dice.sample(BOUNDARIES, dice.randint(0, 12))),
        head=dice.choice([None, *(each.hash for each in BOUNDARIES)]),
        response_id=dice.choice([None, "resp_1", "resp_2"]),
    )


def _membership_call(dice: random.Random) -> Call:
    replica = dice.choice(REPLICAS)
    kind = dice.randrange(4)
    if kind == 0:
        member = Member(replica, f"http://{replica}", "admin", standing=dice.choice(list(Standing)))
        absent = dice.random() < 0.5
        return lambda store: store.put_member(FLEET, member, only_if_absent=absent)
    if kind == 1:
        return lambda store: store.remove_member(FLEET, replica)
    if kind == 2:
        raw, ttl_s = dice.randbytes(5), dice.choice([5.0, 50.0])
        return lambda store: store.put_report(FLEET, replica, raw, ttl_s)
    return lambda store: store.members(FLEET)


def _call(dice: random.Random, versions: dict[str, int]) -> Call:
    kind = dice.random()
    if kind < 0.45:
        claim = _claim(dice, versions)
        return lambda store: store.acquire(FLEET, claim)
    if kind < 0.7:
        settlement = _settlement(dice)
        return lambda store: store.settle(FLEET, settlement)
    if kind < 0.8:
        lease = dice.choice(LEASES)
        return lambda store: store.progress(FLEET, lease)
    if kind < 0.85:
        leases, ttl_s = [_lease(dice, name) for name in dice.sample(LEASES, 3)], dice.choice([1.0, 30.0])
        return lambda store: store.renew(FLEET, leases, ttl_s)
    return _membership_call(dice)


async def _history(dice: random.Random, one: World, other: World) -> dict[str, int]:
    """Runs the same calls on both, and looks at both after each; returns how often each kind of answer came."""
    answers: dict[str, int] = {}
    for step in range(CALLS):
        if dice.random() < 0.1:
            passed_s = dice.choice([0.0625, 3.0, 20.0, 100.0])
            await one.advance(passed_s)
            await other.advance(passed_s)
        everything = Ask("s1", tuple(each.hash for each in BOUNDARIES))
        view = await one.store.fetch(FLEET, everything)
        assert await other.store.fetch(FLEET, everything) == view, f"step {step}"
        versions = {view.branch.id: view.branch.version} if view.branch is not None else {}
        call = _call(dice, versions)
        expected, got = await call(one.store), await call(other.store)
        assert got == expected, f"step {step}"
        ask = _ask(dice)
        expected_view, got_view = await one.store.fetch(FLEET, ask), await other.store.fetch(FLEET, ask)
        assert got_view == expected_view, f"step {step}"
        for load in expected_view.loads.values():
            assert min(load.in_flight, load.prefill_tokens, load.locked_tokens, load.crowd, load.live_tokens) >= 0
        name = type(expected).__name__
        answers[name] = answers.get(name, 0) + 1
    await one.advance(100.0)
    await other.advance(100.0)
    for world in (one, other):
        loads = (await world.store.fetch(FLEET, Ask(None))).loads
        assert all((at.in_flight, at.prefill_tokens, at.locked_tokens) == (0, 0, 0) for at in loads.values())
    return answers


@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("seed", range(6))
async def test_a_store_answers_as_the_reference_does(request: pytest.FixtureRequest, kind: str, seed: int) -> None:
    """Over random histories with lost leases, restarts, races and expiry; when all leases are over nothing counts."""
    url = request.getfixturevalue(f"{kind}_url")
    async with memory_world() as reference, redis_world(url) as world:
        answers = await _history(random.Random(seed), reference, world)
    assert answers["Acquired"] > 10, "a history that acquires nothing tests nothing"
    assert answers["Stale"] > 10
