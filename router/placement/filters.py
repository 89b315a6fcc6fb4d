"""Who may take a turn at all, and who of these first."""

from __future__ import annotations

from collections.abc import Collection

from router.domain.replica import Fleet, Replica, Standing
from router.domain.session import Binding

__all__ = ["eligible", "is_home", "may_take", "takes_its_own"]


def is_home(replica: Replica, home: Binding | None) -> bool:
    """Whether `replica`, in its present incarnation, is where `home` points."""
    return home is not None and home.replica == replica.id and home.incarnation == replica.incarnation


def takes_its_own(replica: Replica, home: Binding | None) -> bool:
    """Whether `replica` is that home and goes on serving those who live there, ejected or not."""
    draining = replica.standing is Standing.DRAINING
    return (replica.healthy or replica.unseen) and not draining and is_home(replica, home)


def may_take(fleet: Fleet, home: Binding | None, tried: Collection[str]) -> tuple[Replica, ...]:
    """Healthy replicas not yet tried for this turn; a cordoned one, and one that was not looked at yet, only for the
    branches that live there; a draining one never.
    """
    serving = Standing.SERVING
    return tuple(
        [
            replica
            for replica in fleet.replicas
            if replica.id not in tried
            and ((replica.healthy and replica.standing is serving) or takes_its_own(replica, home))
        ]
    )


def eligible(fleet: Fleet, home: Binding | None, tried: Collection[str]) -> tuple[Replica, ...]:
    """Of those that may take the turn: the ones in good standing, and the ones on probation that have no turn.

    A doubtful replica is better than none: where these are all, first those on probation that have one, then the
    ejected.
    """
    allowed = may_take(fleet, home, tried)
    trusted = tuple([replica for replica in allowed if not replica.ejected and not _on_trial(replica)])
    if trusted:
        return trusted
    return tuple(replica for replica in allowed if not replica.ejected) or allowed


def _on_trial(replica: Replica) -> bool:
    """Whether the one turn that a replica on probation may have is under way."""
    return replica.probation and replica.load.in_flight > 0
