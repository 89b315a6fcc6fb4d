"""One fleet as this router sees it: shared membership, this router's own look at each replica, and the snapshot of
both.

Membership (who belongs, cordoned or draining, incarnation, capacity) is shared by all routers in the store and counted
by a version; a turn whose fetch shows another version reads it again before it decides. What a probe finds and what an
operator says is compared and set, so that neither undoes the other. Health is this router's own (`watch`, `health`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from router.contract import Phase, Report
from router.discovery.observation import Observation
from router.domain.errors import StoreError
from router.domain.replica import NO_BELIEFS, ZERO_LOAD, Beliefs, Capacity, Fleet, Load, Profile, Replica, Standing
from router.domain.shared import Ask, Member, Membership, View
from router.lifecycle.health import Ejection, State
from router.lifecycle.lives import Noticed, outdated, recorded, restored
from router.lifecycle.watch import Outside, Seen, Watch
from router.ports import Clock, Store

__all__ = ["FleetRuntime", "FleetSpec", "Prober", "replica_id"]

log = logging.getLogger("roost.fleet")

_Parts = tuple[Member, Report | None, State, Load, Beliefs | None, float, tuple[tuple[int, int], ...], bool]
"""All that a replica in a snapshot is made from, values all of them: record, report, state, load, beliefs, since when
it is counted a newcomer, what it runs for others by the last looks, and whether it reports what it had cached.
"""
RECORD_TRIES: Final = 5
"""Times a probe's finding is written before it is left to the next probe (count)."""


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
    ejection: Ejection = field(default_factory=Ejection)
    replica_key: bytes | None = field(default=None, repr=False)
    """The key that replicas ask for; requests carry it in place of the client's."""
    passes_credentials: bool = False
    """Whether the client's own key reaches replicas."""


def replica_id(url: str) -> str:
    """A replica's id from its URL: host and port, and the path if there is one. The same on every router."""
    return url.split("://", 1)[-1].strip("/").replace("/", "_")


class FleetRuntime:
    """Membership, health and snapshots of one fleet; `run` keeps them fresh until cancelled."""

    def __init__(
        self, spec: FleetSpec, store: Store, prober: Prober, clock: Clock, outside: Outside | None = None
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self._store = store
        self._prober = prober
        self._clock = clock
        self._outside = outside or Outside()
        configured = tuple(Member(replica_id(url), url, "config") for url in spec.replicas)
        self._membership = Membership(version=-1, now_s=0.0, members=configured)
        self._enrolled = False
        self._unrecorded = False
        """Whether the membership says what only this router has found."""
        self.watch = Watch(spec.name, spec.ejection, clock, self._outside)
        """What this router sees of the replicas."""
        self.watch.keep(configured)
        self._members: dict[str, Member] = {}
        self._made: dict[str, tuple[_Parts, Replica]] = {}
        """By member: the replica of the last snapshot, and what it was made from."""
        self._list_members()
        self._last_view: View | None = None
        self._looked_round = False
        """Whether every member of the beginning has been looked at once."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._refreshed = asyncio.Event()
        """Someone else read the membership again: there may be new members to probe."""

    # --- membership ---------------------------------------------------------------------------------------------------

    async def enrol(self) -> None:
        """Put the known members (at first the configured ones) into the shared membership where it lacks them, and take
        out those that configuration no longer names. Where it has lost them, a router that knew nothing yet may have
        been the first to write: then what is known here is restored.
        """
        configured = {replica_id(url) for url in self.spec.replicas}
        there = {member.id: member for member in (await self._store.members(self.name)).members}
        for member in there.values():
            if member.source == "config" and member.id not in configured:
                await self._store.remove_member(self.name, member.id)
        for member in self._membership.members:
            found = there.get(member.id)
            if found is None:
                await self._store.put_member(self.name, member, only_if_absent=True)
            elif self._enrolled and (mended := restored(found, member)) != found:
                await self._store.put_member(self.name, mended, expected=found)
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
        urls = {member.url for member in self.members}
        self._membership, self._unrecorded = membership, False
        self.watch.read(membership.reports)
        self._list_members()
        self.watch.keep(self.members)
        for url in urls - {member.url for member in self.members}:
            self._outside.left(url)
        self._refreshed.set()

    def _list_members(self) -> None:
        """Work out who the members are; to be done wherever the record or the reports have changed."""
        listed = {member.id: member for member in self._membership.members}
        for name, seen in self.watch.all().items():
            report = seen.health.report
            if report is not None and name not in listed:
                listed[name] = Member(report.replica, report.url, "report", models=tuple(report.models))
        self._members = listed
        self._made = {name: made for name, made in self._made.items() if name in listed}

    @property
    def members(self) -> tuple[Member, ...]:
        """Members by record, and replicas that only report."""
        return tuple(self._members.values())

    @property
    def version(self) -> int:
        """Version of the membership this router knows."""
        return self._membership.version

    def member(self, member_id: str) -> Member | None:
        """The member of that id."""
        return self._members.get(member_id)

    async def put(self, member: Member, over: Member) -> bool:
        """Write `member` over the record that was read as `over`; False where that has changed meanwhile.

        The membership is read again in any case.
        """
        if over in self._membership.members:
            put = await self._store.put_member(self.name, member, expected=over)
        else:  # it only reported so far
            put = await self._store.put_member(self.name, member, only_if_absent=True)
        await self.refresh()
        return put

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
        over = [member_id for member_id, task in self._probes.items() if task.done() or member_id not in present]
        for member_id in over:
            self._probes.pop(member_id).cancel()
        for member_id in [member_id for member_id in present if member_id not in self._probes]:
            self._probes[member_id] = asyncio.create_task(self._probe_loop(member_id), name=f"probe {member_id}")

    async def _probe_loop(self, member_id: str) -> None:
        while (member := self.member(member_id)) is not None:
            began_s, before = self._clock.monotonic_s(), self.watch.of(member_id).health.last_look
            self.observed(member_id, await self._prober.observe(member.url, before))
            await self._record(member_id)
            # A probe that waited for nothing is repeated at once: a replica's silence is noticed sooner.
            await asyncio.sleep(max(0.0, self.spec.probe_interval_s - (self._clock.monotonic_s() - began_s)))

    # --- what was seen ------------------------------------------------------------------------------------------------

    def observed(self, member_id: str, observation: Observation) -> None:
        """Take in one look at a replica."""
        self.watch.observed(member_id, observation, self._foreign_now(member_id, observation))

    def healthy(self, member_id: str) -> bool:
        """Whether turns may go there at all by this router's own view."""
        return self.watch.state(member_id).usable

    def usable(self) -> tuple[Member, ...]:
        """Members that may be asked what is no turn: not draining, and ejected ones only where all are."""
        states = [(member, self.watch.state(member.id)) for member in self.members]
        open_ones = [(m, s) for m, s in states if s.usable and m.standing is not Standing.DRAINING]
        trusted = tuple(member for member, state in open_ones if state is not State.EJECTED)
        return trusted or tuple(member for member, _ in open_ones)

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
        seen = self.watch.find(member_id)
        found = seen.health.observation if seen is not None else None
        if seen is None or found is None or not found.reachable or found.ready is False:
            return
        try:
            # Another router may have recorded it meanwhile, or an operator cordoned the replica: then once more, and
            # else at the next probe.
            if self._unrecorded:
                await self.refresh()
            for attempt in range(RECORD_TRIES):
                member = self.member(member_id)
                if member is None:
                    return
                if outdated(member, found, seen.noticed):
                    seen.health.doubt()
                    return
                now = recorded(member, found, seen.noticed, self.spec.profile, self._membership.now_s)
                if now == member:
                    seen.noticed = Noticed(found.lives, now.incarnation)
                    return
                if attempt == 0:
                    await self.refresh()
                else:
                    await self.put(now, member)
        except StoreError as error:
            log.debug("member %s not recorded: %s", member_id, error)
            self._record_here(member_id, seen.noticed, found)

    def _record_here(self, member_id: str, noticed: Noticed, found: Observation) -> None:
        """Without the store this router goes by what it found itself, so that what it binds is bound to the life that
        it saw; what the store records takes its place when that is back.
        """
        now_s = self._clock.now_s()
        members = tuple(
            recorded(member, found, noticed, self.spec.profile, now_s) if member.id == member_id else member
            for member in self._membership.members
        )
        if members != self._membership.members:
            self._membership = replace(self._membership, members=members)
            self._unrecorded = True
            self._list_members()

    # --- the snapshot -------------------------------------------------------------------------------------------------

    def latest(self) -> Fleet | None:
        """The fleet as last seen in the store; None while that is away."""
        return None if self._last_view is None else self.snapshot(self._last_view)

    def snapshot(self, view: View, *, blind: bool = False) -> Fleet:
        """The fleet as a decision reads it. `blind`: the store is away, and the view says nothing of loads."""
        self._last_view = None if blind else view
        now_s = self._clock.monotonic_s()
        replicas = tuple([self._replica(member, view, now_s, blind=blind) for member in self._members.values()])
        return Fleet(self.name, self.spec.profile, replicas, view.now_s)

    def _replica(self, member: Member, view: View, now_s: float, *, blind: bool) -> Replica:
        """A member in a snapshot: the same as in the last one where all that it is made from is the same, which most
        members are from one turn to the next.
        """
        seen = self.watch.of(member.id)
        health = seen.health
        report, look = health.report, health.observation
        incarnation = report.incarnation if report is not None else member.incarnation
        if blind:
            load = Load(in_flight=health.under_way)
        elif view.incarnations.get(member.id) == incarnation:
            load = view.loads.get(member.id, ZERO_LOAD)
        else:
            load = ZERO_LOAD
        joined_at_s = report.phase_since_s if report is not None else member.joined_at_s
        parts: _Parts = (
            member,
            report,
            health.state(now_s),
            load,
            view.beliefs.get(member.id),
            # Who is readmitted is ramped up as a newcomer is.
            max(joined_at_s, view.now_s - health.member_for_s(now_s)),
            seen.foreign,
            look is not None and look.cache_report is True,
        )
        made = self._made.get(member.id)
        if made is None or made[0] != parts:
            made = self._made[member.id] = (parts, self._replica_of(seen, parts))
        return made[1]

    def _replica_of(self, seen: Seen, parts: _Parts) -> Replica:
        member, report, state, load, beliefs, joined_at_s, _, reports_cache = parts
        standing = member.standing
        if report is not None and report.phase is Phase.DRAINING:
            standing = Standing.DRAINING
        foreign_in_flight, foreign_prefill_tokens = seen.foreign_now
        return Replica(
            id=member.id,
            url=member.url,
            incarnation=report.incarnation if report is not None else member.incarnation,
            capacity=self._room(member, report),
            standing=standing,
            healthy=state.usable,
            unseen=state is State.UNKNOWN and bool(member.incarnation),
            ejected=state is State.EJECTED,
            probation=state is State.PROBATION,
            joined_at_s=joined_at_s,
            load=load,
            beliefs=beliefs or NO_BELIEFS,
            models=member.models,
            foreign_in_flight=foreign_in_flight,
            foreign_prefill_tokens=foreign_prefill_tokens,
            reports_cache=reports_cache,
        )

    def _room(self, member: Member, report: Report | None) -> Capacity:
        profile = self.spec.profile
        if report is not None and report.device_tokens:
            return Capacity(report.device_tokens, report.host_tokens, report.max_running or profile.max_running)
        return member.capacity or Capacity(profile.device_tokens, profile.host_tokens, profile.max_running)

    # --- for readiness, models and the admin API ----------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a new branch could be placed now, by one who has looked at every replica there was at the start: to a
        router that has not, the homes it knows nothing of yet are gone, and it would move their branches.
        """
        if not self._looked_round and self.members:
            # One on record that only reported, and does no more, is looked at by nobody.
            looked_at = (m for m in self.members if m.source != "report")
            self._looked_round = all(self.watch.state(m.id) is not State.UNKNOWN for m in looked_at)
        return self._looked_round and any(m.standing is Standing.SERVING and self.healthy(m.id) for m in self.members)

    def models(self) -> tuple[str, ...]:
        """Names this fleet serves: configured ones, else what its replicas say."""
        if self.spec.models:
            return tuple(name for name in self.spec.models if name != "*") or self._discovered()
        return self._discovered()

    def context_length(self) -> int | None:
        """The longest context that every replica takes, tokens; None where none says."""
        looks = (seen.health.observation for seen in self.watch.all().values())
        return min((o.context_length for o in looks if o is not None and o.context_length is not None), default=None)

    def _discovered(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for member in self.members for name in member.models))

    @property
    def problems(self) -> dict[str, str]:
        """By replica id: what is wrong with what it says, for the admin API."""
        return {name: "; ".join(seen.problems) for name, seen in self.watch.all().items() if seen.problems}
