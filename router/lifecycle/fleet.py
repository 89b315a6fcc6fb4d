"""One fleet as this router sees it: shared membership, this router's own look at each replica, and the snapshot of
both.

Membership (who belongs, cordoned or draining, incarnation, capacity) is shared by all routers in the store and counted
by a version; a turn whose fetch shows another version reads it again before it decides. Health is this router's own: a
replica is healthy while it is reachable and says it is ready.

Busy is not dead. A replica whose probes fail keeps its turns as long as bytes flow from it, and one missed probe alone
says nothing; a refused connection says enough at once, and the next good probe brings the replica back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from router.contract import REPORT_TTL_S, Phase, Report, decode_report
from router.discovery.observation import Failure, Observation
from router.domain.errors import StoreError
from router.domain.replica import ZERO_LOAD, Beliefs, Capacity, Fleet, Profile, Replica, Standing
from router.domain.shared import Ask, Member, Membership, View
from router.ports import Clock, Store

__all__ = ["FleetRuntime", "FleetSpec", "Prober", "ReplicaHealth", "replica_id"]

log = logging.getLogger("roost.fleet")

FAILED_PROBES_MAX: Final = 2
"""Probes in a row that must fail before a silent replica is unhealthy."""
ALIVE_BY_BYTES_S: Final = 10.0
"""A replica that sent response bytes this recently is alive, whatever its probes say."""
FOREIGN_WINDOW: Final = 3
"""Polls over which turns beyond our leases must persist to count as other traffic; less is a matter of timing."""


class Prober(Protocol):
    """Looks at one replica."""

    async def observe(self, url: str, previous: Observation | None) -> Observation:
        """One look; never raises for what the replica does."""
        ...


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A fleet as configured."""

    name: str
    models: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    policy: str = "roost"
    profile: Profile = field(default_factory=Profile)
    repairs: tuple[str, ...] = ()
    admission: float = 0.0
    """Live tokens per token of KV room up to which new sessions are let in at once; 0: no limit."""
    probe_interval_s: float = 1.0


@dataclass(slots=True)
class ReplicaHealth:
    """This router's own view of one replica."""

    observation: Observation | None = None
    failed_probes: int = 0
    refused: bool = False
    refused_at_s: float = 0.0
    """Monotonic time at which a turn was refused."""
    last_bytes_s: float = -1e9
    """Monotonic time of the last response byte."""
    foreign: tuple[tuple[int, int], ...] = ()
    """Newest (turns, waiting tokens) beyond our leases, per poll."""
    report: Report | None = None
    bad_report: str | None = None
    """Why what its agent says cannot be used."""
    lives: int = 0
    """Lives noticed when `life` was recorded."""
    life: str = ""
    told_ready: bool | None = None
    """What the log last said of it."""


def replica_id(url: str) -> str:
    """A replica's id from its URL: host and port, and the path if there is one. The same on every router."""
    return url.split("://", 1)[-1].strip("/").replace("/", "_")


class FleetRuntime:
    """Membership, health and snapshots of one fleet; `run` keeps them fresh until cancelled."""

    def __init__(self, spec: FleetSpec, store: Store, prober: Prober, clock: Clock) -> None:
        self.spec = spec
        self.name = spec.name
        self._store = store
        self._prober = prober
        self._clock = clock
        configured = tuple(Member(replica_id(url), url, "config") for url in spec.replicas)
        self._membership = Membership(version=-1, now_s=0.0, members=configured)
        self._enrolled = False
        self._health: dict[str, ReplicaHealth] = {member.id: ReplicaHealth() for member in configured}
        self._last_view: View | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._refreshed = asyncio.Event()
        """Someone else read the membership again: there may be new members to probe."""

    # --- membership ---------------------------------------------------------------------------------------------------

    async def enrol(self) -> None:
        """Put the known members (at first the configured ones) into the shared membership where it lacks them, and take
        out those that configuration no longer names.
        """
        configured = {replica_id(url) for url in self.spec.replicas}
        for member in (await self._store.members(self.name)).members:
            if member.source == "config" and member.id not in configured:
                await self._store.remove_member(self.name, member.id)
        for member in self._membership.members:
            await self._store.put_member(self.name, member, only_if_absent=True)
        self._enrolled = True
        self._take(await self._store.members(self.name))

    async def refresh(self) -> None:
        """Read the shared membership again and probe whoever is new.

        A store that does not know the members yet, or has lost them (its version went back: it was restarted empty, or
        flushed), is told them first.
        """
        found = await self._store.members(self.name)
        if not self._enrolled or found.version < self._membership.version:
            await self.enrol()
        else:
            self._take(found)

    def _take(self, membership: Membership) -> None:
        self._membership = membership
        self._read_reports(membership.reports)
        present = {member.id for member in self.members}
        for gone in [name for name, health in self._health.items() if name not in present and not health.bad_report]:
            self._health.pop(gone)
        for member in self.members:
            self._health.setdefault(member.id, ReplicaHealth())
        self._refreshed.set()

    @property
    def members(self) -> tuple[Member, ...]:
        """Members by record, and replicas that only report."""
        recorded = {member.id for member in self._membership.members}
        reported = [
            Member(report.replica, report.url, "report", models=tuple(report.models))
            for health_id, health in self._health.items()
            if (report := health.report) is not None and health_id not in recorded
        ]
        return (*self._membership.members, *reported)

    @property
    def version(self) -> int:
        """Version of the membership this router knows."""
        return self._membership.version

    def member(self, member_id: str) -> Member | None:
        """The member of that id."""
        return next((member for member in self.members if member.id == member_id), None)

    def _read_reports(self, reports: Mapping[str, bytes]) -> None:
        for health in self._health.values():
            health.report = health.bad_report = None
        for reporter, raw in reports.items():
            health = self._health.setdefault(reporter, ReplicaHealth())
            report = decode_report(raw)
            if isinstance(report, str):
                health.bad_report = report
            elif report.replica != reporter:
                health.bad_report = "the report speaks of another replica than the one it was filed under"
            else:
                health.report = report

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Enrol, then probe every member and follow the membership until cancelled.

        While the store is away the membership last known, at first the configured one, stands.
        """
        try:
            while True:
                try:
                    await self.refresh()
                    self._last_view = await self._store.fetch(self.name, Ask(session=None))
                except StoreError as error:
                    self._last_view = None
                    log.debug("membership of %s not read: %s", self.name, error)
                self._refreshed.clear()  # its own reading is no news
                self._start_probes()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.spec.probe_interval_s):
                        await self._refreshed.wait()
        finally:
            for task in self._probes.values():
                task.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _start_probes(self) -> None:
        present = {member.id: member for member in self.members if member.source != "report"}
        # A loop has ended where its member was away for a moment, removed and added again.
        ended = {member_id for member_id, task in self._probes.items() if task.done()}
        for member_id in (self._probes.keys() - present.keys()) | ended:
            self._probes.pop(member_id).cancel()
        for member_id in present.keys() - self._probes.keys():
            self._probes[member_id] = asyncio.create_task(self._probe_loop(member_id), name=f"probe {member_id}")

    async def _probe_loop(self, member_id: str) -> None:
        while (member := self.member(member_id)) is not None:
            health = self._health.setdefault(member_id, ReplicaHealth())
            self.observed(member_id, await self._prober.observe(member.url, health.observation))
            await self._record(member_id)
            await asyncio.sleep(self.spec.probe_interval_s)

    # --- what was seen ------------------------------------------------------------------------------------------------

    def observed(self, member_id: str, observation: Observation) -> None:
        """Take in one look at a replica."""
        health = self._health.setdefault(member_id, ReplicaHealth())
        health.observation = observation
        health.failed_probes = 0 if observation.reachable else health.failed_probes + 1
        # Silence takes no refusal back: a host that has gone refuses at first and is silent then.
        refuses = observation.failure in (Failure.REFUSED, Failure.UNRESOLVED)
        health.refused = not observation.reachable and (health.refused or refuses)
        health.foreign = (*health.foreign, self._foreign_now(member_id, observation))[-FOREIGN_WINDOW:]
        now = self.healthy(member_id)
        if now is health.told_ready:
            return
        health.told_ready = now
        if now:
            log.info("replica %s of fleet %s is ready", member_id, self.name)
        else:
            why = "; ".join(observation.problems) or "it says so"
            log.warning("replica %s of fleet %s is not ready: %s", member_id, self.name, why)

    def refused_connection(self, member_id: str) -> None:
        """A turn found nobody listening: unhealthy until a probe says otherwise."""
        health = self._health.get(member_id)
        if health is not None:
            health.refused = True
            health.refused_at_s = self._clock.monotonic_s()

    def bytes_came(self, member_id: str) -> None:
        """A response byte came: the replica is alive."""
        health = self._health.get(member_id)
        if health is not None:
            health.last_bytes_s = self._clock.monotonic_s()

    def healthy(self, member_id: str) -> bool:
        """Whether turns may go there by this router's own view."""
        health = self._health.get(member_id)
        if health is None:
            return False
        if health.report is not None:
            return health.report.phase is Phase.READY and not self._refuses(health)
        seen = health.observation
        if seen is None or health.refused:
            return False
        if seen.reachable:
            return seen.ready is not False
        if self._clock.monotonic_s() - health.last_bytes_s < ALIVE_BY_BYTES_S:
            return True
        return seen.was_ready and health.failed_probes < FAILED_PROBES_MAX

    def _refuses(self, health: ReplicaHealth) -> bool:
        """Whether a refusal still counts against a report.

        Who only reports is not probed, so it is taken back once every report from before the refusal has expired: an
        agent that still says ready then has seen it.
        """
        if health.observation is not None:
            return health.refused
        return health.refused and self._clock.monotonic_s() - health.refused_at_s < REPORT_TTL_S

    def _foreign_now(self, member_id: str, seen: Observation) -> tuple[int, int]:
        """Turns and waiting tokens that the engine reports beyond all routers' leases."""
        if seen.running is None or self._last_view is None:
            return 0, 0
        ours = self._last_view.loads.get(member_id, ZERO_LOAD)
        turns = seen.running + (seen.waiting or 0) - ours.in_flight
        tokens = (seen.waiting_uncached_tokens or 0) - ours.prefill_tokens
        return max(0, turns), max(0, tokens)

    async def _record(self, member_id: str) -> None:
        """Share what a probe found that all routers must agree on: incarnation, capacity, models."""
        health = self._health.get(member_id)
        seen = health.observation if health is not None else None
        if health is None or seen is None or not seen.reachable or seen.ready is False:
            return
        try:
            found = self._found(member_id, seen, health)
            if found is not None and found != self.member(member_id):
                await self.refresh()  # another router may have recorded it, or an operator cordoned the replica
                found = self._found(member_id, seen, health)
                if found is not None and found != self.member(member_id):
                    await self._store.put_member(self.name, found)
                    await self.refresh()
        except StoreError as error:
            log.debug("member %s not recorded: %s", member_id, error)
            return
        if found is not None:
            health.lives, health.life = seen.lives, found.incarnation

    def _found(self, member_id: str, seen: Observation, health: ReplicaHealth) -> Member | None:
        """The member's record as it should be after this observation; None where it is no member any more."""
        member = self.member(member_id)
        if member is None:
            return None
        incarnation = _incarnation(member, seen, health)
        return replace(
            member,
            incarnation=incarnation,
            capacity=self._capacity(seen) or member.capacity,
            models=seen.models or member.models,
            # By the store's clock, which decisions measure its slow start with; `_record` has just read it.
            joined_at_s=member.joined_at_s if incarnation == member.incarnation else self._membership.now_s,
        )

    def _capacity(self, seen: Observation) -> Capacity | None:
        if seen.device_tokens is None:
            return None
        profile = self.spec.profile
        return Capacity(
            device_tokens=seen.device_tokens,
            host_tokens=seen.host_tokens if seen.host_tokens is not None else profile.host_tokens,
            max_running=seen.max_running or profile.max_running,
        )

    # --- the snapshot -------------------------------------------------------------------------------------------------

    def latest(self) -> Fleet | None:
        """The fleet as last seen in the store; None while that is away."""
        return None if self._last_view is None else self.snapshot(self._last_view)

    def snapshot(self, view: View, *, blind: bool = False) -> Fleet:
        """The fleet as a decision reads it. `blind`: the store is away, and the view says nothing of loads."""
        self._last_view = None if blind else view
        replicas = tuple(self._replica(member, view) for member in self.members)
        return Fleet(self.name, self.spec.profile, replicas, view.now_s)

    def _replica(self, member: Member, view: View) -> Replica:
        health = self._health.get(member.id)
        report = health.report if health is not None else None
        incarnation = report.incarnation if report is not None else member.incarnation
        standing = member.standing
        if report is not None and report.phase is Phase.DRAINING:
            standing = Standing.DRAINING
        same_life = view.incarnations.get(member.id) == incarnation
        foreign = health.foreign if health is not None and len(health.foreign) == FOREIGN_WINDOW else ()
        return Replica(
            id=member.id,
            url=member.url,
            incarnation=incarnation,
            capacity=self._room(member, report),
            standing=standing,
            healthy=self.healthy(member.id),
            joined_at_s=report.phase_since_s if report is not None else member.joined_at_s,
            load=view.loads.get(member.id, ZERO_LOAD) if same_life else ZERO_LOAD,
            beliefs=view.beliefs.get(member.id) or Beliefs(),
            models=member.models,
            foreign_in_flight=min((turns for turns, _ in foreign), default=0),
            foreign_prefill_tokens=min((tokens for _, tokens in foreign), default=0),
            reports_cache=health is not None
            and health.observation is not None
            and health.observation.cache_report is True,
        )

    def _room(self, member: Member, report: Report | None) -> Capacity:
        profile = self.spec.profile
        if report is not None and report.device_tokens:
            return Capacity(report.device_tokens, report.host_tokens, report.max_running or profile.max_running)
        return member.capacity or Capacity(profile.device_tokens, profile.host_tokens, profile.max_running)

    # --- for readiness, models and the admin API ----------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a new branch could be placed now."""
        return any(m.standing is Standing.SERVING and self.healthy(m.id) for m in self.members)

    def models(self) -> tuple[str, ...]:
        """Names this fleet serves: configured ones, else what its replicas say."""
        if self.spec.models:
            return tuple(name for name in self.spec.models if name != "*") or self._discovered()
        return self._discovered()

    def context_length(self) -> int | None:
        """The longest context that every replica takes, tokens; None where none says."""
        seen = (health.observation for health in self._health.values())
        return min((o.context_length for o in seen if o is not None and o.context_length is not None), default=None)

    def _discovered(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for member in self.members for name in member.models))

    @property
    def problems(self) -> dict[str, str]:
        """By replica id: what is wrong with what it says, for the admin API."""
        return {name: "; ".join(problems) for name, health in self._health.items() if (problems := _problems(health))}

    def health(self, member_id: str) -> ReplicaHealth | None:
        """This router's own view of one replica."""
        return self._health.get(member_id)


def _incarnation(member: Member, seen: Observation, health: ReplicaHealth) -> str:
    """The life that is being lived there. Where the engine shows nothing that tells its lives apart, a restart that
    this router noticed begins the next numbered one, unless another router has recorded it already.
    """
    if seen.incarnation is not None:
        return seen.incarnation
    known = member.incarnation or "life-0"
    if seen.lives > health.lives and known == health.life:
        number = known.removeprefix("life-")
        known = f"life-{int(number) + 1 if number.isdigit() else 1}"
    return known


def _problems(health: ReplicaHealth) -> tuple[str, ...]:
    seen = health.observation.problems if health.observation is not None else ()
    return seen if health.bad_report is None else (health.bad_report, *seen)
