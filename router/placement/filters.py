"""Who may take a turn at all."""

from __future__ import annotations

from collections.abc import Collection

from router.domain.replica import Fleet, Replica, Standing
from router.domain.session import Binding

__all__ = ["eligible", "is_home"]


def is_home(replica: Replica, home: Binding | None) -> bool:
    """Whether `replica`, in its present incarnation, is where `home` points."""
    return home is not None and home.replica == replica.id and home.incarnation == replica.incarnation


def eligible(fleet: Fleet, home: Binding | None, tried: Collection[str]) -> tuple[Replica, ...]:
    """Healthy replicas not yet tried for this turn; a cordoned one only for the branches that live there, a draining
    one never.
    """
    return tuple(
        replica
        for replica in fleet.replicas
        if replica.healthy
        and replica.id not in tried
        and (replica.standing is Standing.SERVING or (replica.standing is Standing.CORDONED and is_home(replica, home)))
    )
