"""What routers can have seen of replicas: the excuse, or the lack of one, for a decision that treats one as gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from router.domain.replica import Standing
from simulations.seen import (
    Flushed,
    Headed,
    MemberPut,
    MemberRemoved,
    Probed,
    UpEnded,
)

__all__ = ["Wellness"]

_FAR_BACK_S: Final = -1e9
_LONG_S: Final = 150.0
"""A sign of illness excuses a router this long: out for a minute at most, on probation for another, and some grace."""
_NEWS_S: Final = 60.0
"""Nor need it know yet what was recorded of a replica this lately."""
_FAILED: Final = frozenset({"upstream_unreachable", "upstream_broken", "upstream_timeout"})


@dataclass
class Wellness:
    """An onlooker that judges nothing; others ask it."""

    rule: str = ""
    source: str = ""
    _ill_at_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """By router and URL."""
    _well_at_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _any_ill_at_s: dict[str, float] = field(default_factory=dict)
    _any_well_at_s: dict[str, float] = field(default_factory=dict)
    _lives: dict[str, str] = field(default_factory=dict)
    """By URL: the incarnation seen last, by whomever."""
    _standing: dict[str, tuple[Standing, float, Standing]] = field(default_factory=dict)
    """By replica: standing, since when, and the one before."""
    _incarnations: dict[str, str] = field(default_factory=dict)
    _changed_at_s: dict[str, float] = field(default_factory=dict)
    """By replica: when its record last changed."""
    _removed_ones: set[str] = field(default_factory=set)
    """Taken out of the fleet, and not put back."""

    def watches(self) -> Mapping[type, Callable[..., None]]:
        """See `Onlooker`."""
        return {
            Probed: self._probed,
            Headed: self._headed,
            UpEnded: self._up_ended,
            MemberPut: self._put,
            MemberRemoved: self._removed,
            Flushed: self._flushed,
        }

    def _probed(self, at_s: float, event: Probed) -> None:
        seen = event.observation
        changed = (
            seen.incarnation is not None and self._lives.setdefault(event.url, seen.incarnation) != seen.incarnation
        )
        if changed and seen.incarnation is not None:
            self._lives[event.url] = seen.incarnation
            self._any_ill_at_s[event.url] = at_s
        if not seen.reachable or seen.ready is False:
            self._ill(at_s, event.router, event.url)
        else:
            self._well_at_s[event.router, event.url] = self._any_well_at_s[event.url] = at_s

    def _headed(self, at_s: float, event: Headed) -> None:
        if event.status >= 500:
            self._ill(at_s, event.router, event.url)

    def _up_ended(self, at_s: float, event: UpEnded) -> None:
        if event.how in _FAILED:
            self._ill(at_s, event.router, event.url)

    def _ill(self, at_s: float, router: str, url: str) -> None:
        self._ill_at_s[router, url] = self._any_ill_at_s[url] = at_s

    def _put(self, at_s: float, event: MemberPut) -> None:
        member = event.member
        if not event.put:
            return
        self._removed_ones.discard(member.id)
        before = self._standing.get(member.id, (Standing.SERVING, _FAR_BACK_S, Standing.SERVING))
        if before[0] is not member.standing:
            self._standing[member.id] = (member.standing, at_s, before[0])
            self._changed_at_s[member.id] = at_s
        if self._incarnations.get(member.id) != member.incarnation:
            self._incarnations[member.id] = member.incarnation
            self._changed_at_s[member.id] = at_s

    def _removed(self, at_s: float, event: MemberRemoved) -> None:
        self._standing.pop(event.replica, None)
        self._removed_ones.add(event.replica)
        self._changed_at_s[event.replica] = at_s

    def _flushed(self, at_s: float, _: Flushed) -> None:
        for replica in self._standing:
            self._changed_at_s[replica] = at_s

    # --- what others ask ----------------------------------------------------------------------------------------------

    def well(self, at_s: float, router: str, url: str, replica: str, incarnation: str) -> bool:
        """Whether that router has had no reason at all, for a while, to think this life of the replica gone. One that
        has not looked yet goes by what anybody has seen.
        """
        looked = (router, url) in self._well_at_s
        ill_s = self._ill_at_s.get((router, url), _FAR_BACK_S) if looked else _FAR_BACK_S
        anybody_s = self._any_ill_at_s.get(url, _FAR_BACK_S)
        return (
            at_s - max(ill_s, anybody_s) > _LONG_S
            and at_s - self._any_well_at_s.get(url, _FAR_BACK_S) < _LONG_S
            and at_s - self._changed_at_s.get(replica, _FAR_BACK_S) > _NEWS_S
            and self._lives.get(url) == incarnation
            and replica not in self._removed_ones
            and self._standing.get(replica, (Standing.SERVING, 0.0, None))[0] is not Standing.DRAINING
        )

    def ill_lately(self, at_s: float, router: str, url: str) -> bool:
        """Whether that router has seen a sign of illness there."""
        return at_s - self._ill_at_s.get((router, url), _FAR_BACK_S) <= _LONG_S

    def standing(self, replica: str, before_s: float) -> Standing:
        """What the store said of it at a time, as far as the latest change and the one before go."""
        standing, since_s, before = self._standing.get(replica, (Standing.SERVING, _FAR_BACK_S, Standing.SERVING))
        return standing if before_s > since_s else before
