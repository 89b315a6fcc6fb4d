"""Leases: what is in flight is what was acquired and neither settled nor expired, to the token.

The ledger follows the store's contract (`router.store.memory`, "Leases" and "Lives") from the calls it carries out, and
compares each `fetch`, which gives back what has expired before it reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from router.domain.replica import Load
from router.store.keys import SWEEP_MAX
from simulations.seen import (
    Breach,
    Claimed,
    Died,
    Event,
    Fetched,
    Flushed,
    MemberRemoved,
    Progressed,
    Quiet,
    Renewed,
    Settled,
    StoreFailed,
)

__all__ = ["LeasesAddUp", "NothingLeftToExpire"]

_JUMP_S: Final = 0.001


@dataclass(slots=True)
class _Life:
    """What a replica's load must be."""

    incarnation: str
    in_flight: int = 0
    prefill_tokens: int = 0
    locked_tokens: int = 0
    admitted_tokens: int = 0
    agreed: Load | None = None
    """The store's word that was found right, until something here changes."""


@dataclass(slots=True)
class _Lease:
    life: _Life
    prefill_tokens: int
    locked_tokens: int
    expires_ms: int


def _until_ms(now_s: float, ttl_s: float) -> int:
    return int(now_s * 1000) + max(1, round(ttl_s * 1000))


@dataclass
class LeasesAddUp:
    """In-flight turns, waiting prefill and locked tokens in the store equal the leases held, never negative; nothing is
    held once all is quiet; a life's counter of admitted tokens never falls.
    """

    rule: str = "leases add up"
    source: str = "placement.md, Shared state; architecture.md, what was acquired is always settled"
    _lives: dict[str, _Life] = field(default_factory=dict)
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _due: list[tuple[int, str]] = field(default_factory=list)

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {
            Claimed: self._claimed,
            Progressed: self._progressed,
            Settled: self._settled,
            Renewed: self._renewed,
            Fetched: self._fetched,
            MemberRemoved: self._removed,
            Flushed: self._flushed,
            Quiet: self._quiet,
        }

    def _claimed(self, _: float, event: Claimed) -> None:
        claim = event.claim
        if event.stale is not None:
            return
        if claim.lease in self._leases:
            raise Breach(self.rule, f"lease {claim.lease} was acquired twice")
        life = self._lives.get(claim.replica)
        if life is None or life.incarnation != claim.incarnation:
            life = self._lives[claim.replica] = _Life(claim.incarnation)
        until_ms = _until_ms(event.now_s, claim.lease_ttl_s)
        self._take(claim.lease, life, claim.prefill_tokens, claim.locked_tokens, until_ms)

    def _take(self, name: str, life: _Life, prefill_tokens: int, locked_tokens: int, until_ms: int) -> None:
        life.agreed = None
        life.in_flight += 1
        life.prefill_tokens += prefill_tokens
        life.locked_tokens += locked_tokens
        self._leases[name] = _Lease(life, prefill_tokens, locked_tokens, until_ms)
        heapq.heappush(self._due, (until_ms, name))

    def _give_back(self, lease: _Lease) -> None:
        life = lease.life
        life.agreed = None
        life.in_flight -= 1
        life.prefill_tokens -= lease.prefill_tokens
        life.locked_tokens -= lease.locked_tokens

    def _progressed(self, _: float, event: Progressed) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None:
            lease.life.agreed = None
            lease.life.prefill_tokens -= lease.prefill_tokens
            lease.prefill_tokens = 0

    def _settled(self, _: float, event: Settled) -> None:
        lease = self._leases.pop(event.settlement.lease, None)
        if lease is not None:
            self._give_back(lease)

    def _renewed(self, at_s: float, event: Renewed) -> None:
        until_ms = _until_ms(event.now_s, event.ttl_s)
        for each in event.leases:
            lease = self._leases.get(each.id)
            if lease is not None:
                if each.id in event.taken:
                    raise Breach(self.rule, f"lease {each.id} was counted a second time by a renewal")
                if until_ms > lease.expires_ms:
                    lease.expires_ms = until_ms
                    heapq.heappush(self._due, (until_ms, each.id))
                if not each.prefill_tokens:
                    self._progressed(at_s, Progressed(event.router, event.now_s, each.id))
            elif each.id in event.taken:
                life = self._lives.setdefault(each.replica, _Life(each.incarnation))
                self._take(each.id, life, each.prefill_tokens, each.locked_tokens, until_ms)

    def _fetched(self, _: float, event: Fetched) -> None:
        view = event.view
        self._expire(int(view.now_s * 1000))
        lives, incarnations = self._lives, view.incarnations
        for replica, load in view.loads.items():
            life = lives.get(replica)
            if life is not None and load is life.agreed and incarnations[replica] == life.incarnation:
                continue  # the very same value as at the last reading, and no lease came or went
            if life is None:
                life = lives[replica] = _Life(incarnations[replica])
            if (
                load.in_flight != life.in_flight
                or load.prefill_tokens != life.prefill_tokens
                or load.locked_tokens != life.locked_tokens
                or incarnations[replica] != life.incarnation
            ):
                raise Breach(self.rule, f"the store says {load} of {replica} ({incarnations[replica]}), leases {life}")
            if load.admitted_tokens < life.admitted_tokens:
                raise Breach(self.rule, f"{replica} had admitted {life.admitted_tokens} tokens, now {load}")
            life.admitted_tokens, life.agreed = load.admitted_tokens, load
        if len(view.loads) != len(lives):
            raise Breach(self.rule, f"the store has no load of {sorted(lives.keys() - view.loads.keys())}")

    def _expire(self, now_ms: int) -> None:
        """Give back what is due, oldest first, as much as one fetch does."""
        due: list[tuple[int, str]] = []
        while self._due and self._due[0][0] <= now_ms and len(due) < SWEEP_MAX:
            until_ms, name = heapq.heappop(self._due)
            lease = self._leases.get(name)
            if lease is not None and lease.expires_ms == until_ms and (until_ms, name) not in due:
                due.append((until_ms, name))
        for _, name in due:
            self._give_back(self._leases.pop(name))

    def _removed(self, _: float, event: MemberRemoved) -> None:
        self._lives.pop(event.replica, None)

    def _flushed(self, _: float, __: Flushed) -> None:
        self._lives.clear()
        self._leases.clear()
        self._due.clear()

    def _quiet(self, _: float, event: Quiet) -> None:
        if any(event.held.values()) or any(event.under_way.values()):
            raise Breach(self.rule, f"routers still hold {event.held} and serve {event.under_way}")
        left = {replica: life for replica, life in self._lives.items() if life.in_flight or life.locked_tokens}
        if left or self._leases:
            raise Breach(self.rule, f"all is quiet and there are still {left} {sorted(self._leases)}")


@dataclass
class NothingLeftToExpire:
    """A lease whose router lives, and whose store has always answered it, is settled, never left to expire."""

    rule: str = "nothing is left to expire"
    source: str = "lifecycle/turn.py, what was acquired is always settled, on every path"
    _leases: dict[str, tuple[str, float, int]] = field(default_factory=dict)
    """Router, when it was taken, when it expires."""
    _over: dict[str, None] = field(default_factory=dict)
    """Settled before they were carried out as acquired."""
    _excused: dict[str, float] = field(default_factory=dict)
    """By router: when it died or its store last failed it."""
    _offset_s: float | None = None
    _excused_all_s: float = -1e9

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {
            Claimed: self._claimed,
            Settled: self._settled,
            Renewed: self._renewed,
            Fetched: self._fetched,
            Flushed: self._flushed,
            StoreFailed: self._failed,
            Died: self._failed,
        }

    def _clock(self, at_s: float, now_s: float) -> None:
        """Notice a store's clock that jumped: leases then expire for no one's fault."""
        offset_s = now_s - at_s
        if self._offset_s is not None and abs(offset_s - self._offset_s) > _JUMP_S:
            self._excused_all_s = at_s
        self._offset_s = offset_s

    def _claimed(self, at_s: float, event: Claimed) -> None:
        self._clock(at_s, event.now_s)
        if event.stale is None and event.claim.lease not in self._over:
            self._leases[event.claim.lease] = (event.router, at_s, _until_ms(event.now_s, event.claim.lease_ttl_s))

    def _settled(self, at_s: float, event: Settled) -> None:
        self._clock(at_s, event.now_s)
        if self._leases.pop(event.settlement.lease, None) is None:
            self._over[event.settlement.lease] = None

    def _renewed(self, at_s: float, event: Renewed) -> None:
        self._clock(at_s, event.now_s)
        until_ms = _until_ms(event.now_s, event.ttl_s)
        for each in event.leases:
            if each.id in self._leases:
                router, taken_s, before_ms = self._leases[each.id]
                self._leases[each.id] = (router, taken_s, max(before_ms, until_ms))

    def _fetched(self, at_s: float, event: Fetched) -> None:
        self._clock(at_s, event.view.now_s)
        now_ms = int(event.view.now_s * 1000)
        while self._leases:
            name, (router, taken_s, until_ms) = next(iter(self._leases.items()))
            if until_ms > now_ms:
                return  # the oldest; a renewed one keeps those behind it waiting, until it is settled
            del self._leases[name]
            if max(self._excused.get(router, -1e9), self._excused_all_s) < taken_s:
                raise Breach(self.rule, f"lease {name} of {router}, taken at {taken_s:.6f}, was left to expire")

    def _failed(self, at_s: float, event: Event) -> None:
        assert isinstance(event, StoreFailed | Died)
        self._excused[event.router] = at_s

    def _flushed(self, _: float, __: Flushed) -> None:
        self._leases.clear()
