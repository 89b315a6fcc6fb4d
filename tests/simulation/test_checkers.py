"""The checkers can fail: each of these mutants of Roost, or of its world, is caught by the rule that forbids it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

import pytest

from router.discovery.observation import Observation
from router.domain.decision import Cost, Residency
from router.domain.errors import UpstreamBroken
from router.domain.replica import Fleet, Replica
from router.domain.session import Binding, Branch, Residue
from router.domain.shared import Acquired, Ask, Claim, Member, Settlement, Stale, View
from router.lifecycle import placing, settling
from router.lifecycle.opening import Opening
from router.lifecycle.remembered import Remembered
from router.placement import cost, decide, filters, policy, residency
from router.placement.policy import Choice
from router.store import memory
from simulations.checkers.wellness import Wellness
from simulations.faults import Fault, Kind
from simulations.seen import MemberPut, MemberRemoved, Probed
from simulations.simulate import Report, simulate
from simulations.world import Scenario, World, network
from simulations.world.storage import SharedStore

CALM = Scenario(seed=7, replicas=4, routers=2, turns=150, seats=16, leaving=0.0, keyless=0.0, think_max_s=5.0)


def failed(scenario: Scenario, store: type[SharedStore] = SharedStore) -> Report:
    """The scenario's run, which must have broken a rule."""
    report = simulate(scenario, make=lambda given, watching: World(given, watching, store=store))
    assert report.failure is not None, "no checker noticed"
    return report


def rule(scenario: Scenario, store: type[SharedStore] = SharedStore) -> str:
    """The rule that the scenario's run broke."""
    failure = failed(scenario, store).failure
    assert failure is not None
    return failure.rule


def faulty(*faults: Fault) -> Scenario:
    """The calm scenario with these."""
    return replace(CALM, faults=faults)


def test_without_a_mutation_every_rule_holds() -> None:
    """Else the others would prove nothing."""
    report = simulate(CALM)
    assert report.failure is None
    assert report.played is not None
    assert report.played.tally.given_up == 0
    assert report.played.tally.by_end.keys() <= {"complete", "left"}


def test_a_store_that_loses_a_settlement() -> None:
    """Its count stays up."""

    class Forgetful(SharedStore):
        settled = 0

        async def settle(self, fleet: str, settlement: Settlement) -> None:
            self.settled += 1
            if self.settled != 40:
                await super().settle(fleet, settlement)

    assert rule(CALM, Forgetful) == "leases add up"


def test_a_store_that_counts_a_turn_twice() -> None:
    """Its count is too high from the beginning."""

    class Double(SharedStore):
        async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
            acquired = await super().acquire(fleet, claim)
            if isinstance(acquired, Acquired):
                await super().acquire(fleet, replace(claim, lease=f"{claim.lease}-again", version=acquired.version))
            return acquired

    assert rule(CALM, Double) == "leases add up"


def test_a_store_in_which_leases_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead router held haunts the fleet."""
    monkeypatch.setattr(memory, "_sweep", lambda *_: None)
    crash = Fault(20.0, Kind.ROUTER_CRASH, "a", 30.0)
    assert rule(faulty(crash)) == "leases add up"


def test_a_router_that_forgets_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry would hide it."""
    settle, dice = settling.Settling._settlement, random.Random(1)

    def lost(self: settling.Settling, *args: object) -> Settlement:
        done: Settlement = settle(self, *args)  # type: ignore[arg-type]
        return replace(done, lease="another") if dice.random() < 0.05 else done

    monkeypatch.setattr(settling.Settling, "_settlement", lost)
    assert rule(CALM) == "nothing is left to expire"


def test_an_upstream_that_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that was refused is not sent there again."""
    eligible = filters.eligible

    def anyone(fleet: Fleet, home: Binding | None, tried: Collection[str]) -> tuple[Replica, ...]:
        return eligible(fleet, home, ())

    monkeypatch.setattr(decide, "eligible", anyone)
    assert rule(faulty(Fault(10.0, Kind.FULL, "r0", 60.0))) == "tried safely"


def test_a_policy_that_moves_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn goes where it costs least."""
    dice = random.Random(1)

    def drunk(choice: Choice) -> tuple[Cost, ...]:
        return tuple(sorted(policy.roost(choice), key=lambda _: dice.random()))

    monkeypatch.setattr(decide, "POLICIES", {**policy.POLICIES, "roost": drunk})
    assert rule(CALM) == "branches stay"


def test_a_policy_without_hysteresis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move costs something."""

    def restless(choice: Choice) -> tuple[Cost, ...]:
        costs = [cost._replace(move_s=0.0, prefill_s=0.0) for cost in policy.roost(choice)]
        return tuple(sorted(costs, key=lambda cost: cost.total_s))

    monkeypatch.setattr(decide, "POLICIES", {**policy.POLICIES, "roost": restless})
    assert rule(CALM) == "branches stay"


def test_a_binding_that_ignores_the_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted replica is not home."""

    def same(replica: Replica, home: Binding | None) -> bool:
        return home is not None and home.replica == replica.id

    for module in (decide, filters, policy):
        monkeypatch.setattr(module, "is_home", same)
    assert rule(faulty(*(Fault(20.0, Kind.CRASH, f"r{number}", 5.0) for number in range(4)))) == "branches stay"


def test_a_cordon_that_nobody_heeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """New branches stay away."""
    monkeypatch.setattr(filters, "may_take", _whoever)
    monkeypatch.setattr(decide, "may_take", _whoever)
    assert rule(faulty(Fault(5.0, Kind.CORDON, "r1", 300.0))) == "no new branch there"


def _whoever(fleet: Fleet, home: Binding | None, tried: Collection[str]) -> tuple[Replica, ...]:
    return tuple(replica for replica in fleet.replicas if replica.healthy and replica.id not in tried)


def test_bytes_that_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the opening of a stream has kept goes to the client."""
    opened = Opening.open

    def forgetful(self: Opening) -> None:
        self._kept.clear()
        opened(self)

    monkeypatch.setattr(Opening, "open", forgetful)
    assert rule(CALM) == "bytes pass"


def test_a_broken_stream_that_ends_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client must be able to tell."""
    relay = network._Exchange.relay

    async def swallowing(self: network._Exchange, receive: Callable[[bytes], None]) -> None:
        with suppress(UpstreamBroken):
            await relay(self, receive)

    monkeypatch.setattr(network._Exchange, "relay", swallowing)
    assert rule(faulty(*(Fault(12.0, Kind.RESET, f"r{number}") for number in range(4)))) == "bytes pass"


def test_a_turn_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets an end."""

    async def endless(self: network._Exchange) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(network._Exchange, "_ended", endless)
    assert rule(replace(CALM, turns=20, duration_s=60.0, longest_s=60.0)) == "every turn ends"


def test_an_error_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients get errors that have a name."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(placing, "rates_of", broken)
    assert rule(CALM) == "every turn ends"


def test_a_router_that_forgets_its_branches_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the store known branches stay."""
    monkeypatch.setattr(Remembered, "recall", lambda *_: None)
    cuts = [Fault(80.0, Kind.STORE_CUT, router, 60.0) for router in "ab"]
    assert rule(replace(faulty(*cuts), turns=400)) == "known branches stay"


def test_routers_that_place_unknown_turns_each_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that cannot talk agree."""
    dice = random.Random(1)
    monkeypatch.setattr(placing, "_root", lambda *_: f"{dice.random()}")
    cuts = [Fault(1.0, Kind.STORE_CUT, router, 100.0) for router in "ab"]
    assert rule(replace(faulty(*cuts), fan_out=0.0, replicas=4)) == "unknown turns go alike"


def test_branches_that_do_not_see_each_other_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst spreads."""
    monkeypatch.setattr(memory, "_stale", _never_for_load(memory._stale))
    quiet = replace(CALM, seats=1, bursts=2, think_max_s=60.0, turns=100, fan_out=0.0)
    assert rule(quiet) == "bursts spread"


def _never_for_load(stale: Callable[..., str | None]) -> Callable[..., str | None]:
    def patched(*args: object) -> str | None:
        why = stale(*args)
        return None if why == "load" else why

    return patched


def test_a_beginning_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end has its start."""
    monkeypatch.setattr(placing, "TurnStarted", lambda *_: None)
    assert rule(CALM) == "one story each"


def test_a_replica_that_was_taken_out_is_not_well_until_it_is_put_back() -> None:
    """Seed 134937979: a client thought for a minute, and its branch's home had been removed meanwhile."""
    wellness = Wellness()
    watch = wellness.watches()
    member = Member("r0", "http://r0", "admin", incarnation="life")
    seen = Observation(reachable=True, ready=True, incarnation="life")
    watch[MemberPut](0.0, MemberPut("a#0", 0.0, member, put=True))
    watch[Probed](200.0, Probed("a#0", "http://r0", seen))
    assert wellness.well(210.0, "a#0", "http://r0", "r0", "life")
    watch[MemberRemoved](211.0, MemberRemoved("a#0", 211.0, "r0"))
    assert not wellness.well(300.0, "a#0", "http://r0", "r0", "life")
    watch[MemberPut](301.0, MemberPut("a#0", 301.0, member, put=True))
    watch[Probed](365.0, Probed("a#0", "http://r0", seen))
    assert wellness.well(372.0, "a#0", "http://r0", "r0", "life")


def test_a_store_that_mixes_tenants_up() -> None:
    """It answers a question about one prompt with whatever branch it was last asked for."""

    class Mixed(SharedStore):
        last: Branch | None = None

        async def fetch(self, fleet: str, ask: Ask) -> View:
            view = await super().fetch(fleet, ask)
            if view.branch is not None:
                self.last = view.branch
            elif self.last is not None and ask.boundaries:
                view = replace(view, branch=self.last, depth=0)
            return view

    assert rule(CALM, Mixed) == "tenants apart"


def test_a_belief_that_nothing_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the branch shares with the prompt cannot be cached."""
    believed = residency.residency

    def more(residues: tuple[Residue, ...], at: Replica, shared_tokens: int) -> Residency:
        held = believed(residues, at, shared_tokens)
        return replace(held, device_tokens=held.device_tokens + 1 if held.device_tokens else 0)

    monkeypatch.setattr(cost, "residency", more)
    assert rule(CALM) == "believes no more"


def test_a_router_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the store does, a turn is not kept waiting for its place."""
    fetch = placing.Placing._fetch

    async def late(self: placing.Placing, fleet: str, ask: Ask) -> View:
        await asyncio.sleep(6.0)
        return await fetch(self, fleet, ask)

    monkeypatch.setattr(placing.Placing, "_fetch", late)
    assert rule(CALM) == "placed soon"
