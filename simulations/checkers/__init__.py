"""Invariants: rules that hold in every run, whatever goes wrong in it.

A checker is an `Onlooker`: it sees the events of `simulations.seen` and raises `Breach`. It knows nothing of scenarios,
faults or the world; what excuses a router must be something that router has seen. Each says its rule in its docstring
and where the rule is from in `source`.

    leases    what is in flight is what is held
    passing   where a turn is sent, what comes back, that it ends
    placing   where turns go, and why
    outage    what holds without the store
    wellness  judges nothing: what routers can have seen of replicas
"""

from __future__ import annotations

from typing import Protocol

from simulations.checkers.leases import LeasesAddUp, NothingLeftToExpire
from simulations.checkers.outage import KnownStay, PlacedSoon, UnknownAlike
from simulations.checkers.passing import BytesPass, EveryTurnEnds, OneStoryEach, TriedSafely
from simulations.checkers.placing import BelievesNoMore, BranchesStay, BurstsSpread, NoNewBranchThere, TenantsApart
from simulations.checkers.wellness import Wellness
from simulations.seen import Onlooker

__all__ = ["Checker", "all_checkers"]


class Checker(Onlooker, Protocol):
    """An onlooker with a rule."""

    rule: str
    source: str


def all_checkers() -> list[Checker]:
    """New ones for one run, in the order in which they are to see events."""
    wellness = Wellness()
    return [
        wellness,
        EveryTurnEnds(wellness),
        LeasesAddUp(),
        NothingLeftToExpire(),
        TriedSafely(),
        BytesPass(),
        OneStoryEach(),
        NoNewBranchThere(wellness),
        BranchesStay(wellness),
        TenantsApart(),
        BelievesNoMore(),
        BurstsSpread(),
        KnownStay(wellness),
        UnknownAlike(),
        PlacedSoon(),
    ]
