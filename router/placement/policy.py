"""`roost` and the named baselines: each ranks the eligible replicas, best first.

A policy is a pure function of one `Choice`. Ties break by rendezvous hash of the turn id, so that every router breaks
them alike and equal replicas share equally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Final

from xxhash import xxh3_64_intdigest

from router.domain.decision import Cost
from router.domain.replica import Fleet, Replica
from router.domain.session import Binding, Residue
from router.domain.turn import Turn
from router.placement.cost import Rates, Tuning, cost, crowd_now
from router.placement.filters import is_home

__all__ = ["POLICIES", "Choice", "Policy", "rendezvous_weight"]

BOUNDED_LOAD_FACTOR: Final = 1.25
"""In-flight turns a replica may have over the fleet's mean (Mirrokni et al. 2018, consistent hashing with bounded
loads)."""
SPILL_FACTOR: Final = 2.0
SPILL_MARGIN: Final = 4
"""`session_sticky` leaves a home that has more than twice the mean in flight plus this many."""
TIE_S: Final = 0.001
"""Costs closer than this are equal: estimates are not better."""


@dataclass(frozen=True, slots=True)
class Choice:
    """All that a policy may look at."""

    turn: Turn
    branch: str
    home: Binding | None
    session_home: Binding | None
    residues: tuple[Residue, ...]
    eligible: tuple[Replica, ...]
    fleet: Fleet
    rates: Rates
    tuning: Tuning


Policy = Callable[[Choice], tuple[Cost, ...]]


def rendezvous_weight(key: str, replica_id: str) -> int:
    """Highest random weight hashing (Thaler & Ravishankar 1998): the same on every router."""
    return xxh3_64_intdigest(f"{key}\x1f{replica_id}".encode())


def _costs(choice: Choice) -> dict[str, Cost]:
    home = choice.home
    there = choice.fleet.get(home.replica) if home is not None else None
    bound_to = there.id if there is not None and is_home(there, home) else None
    turn, residues, rates, fleet, tuning = choice.turn, choice.residues, choice.rates, choice.fleet, choice.tuning
    return {
        replica.id: cost(
            turn, residues, replica, rates, fleet, tuning, bound_elsewhere=bound_to not in (None, replica.id)
        )
        for replica in choice.eligible
    }


def _ranked(choice: Choice, score: Callable[[Replica], tuple[float, ...]]) -> tuple[Cost, ...]:
    """Order by score, then by rendezvous; costs ride along for the explanation."""
    costs = _costs(choice)
    order = sorted(
        choice.eligible, key=lambda replica: (score(replica), -rendezvous_weight(choice.turn.id, replica.id))
    )
    return tuple(costs[replica.id]._replace(score=score(replica)[0]) for replica in order)


def roost(choice: Choice) -> tuple[Cost, ...]:
    """Least seconds."""
    turn = choice.turn.id
    return tuple(
        sorted(
            _costs(choice).values(),
            key=lambda each: (round(each.total_s / TIE_S), -rendezvous_weight(turn, each.replica)),
        )
    )


def round_robin(choice: Choice) -> tuple[Cost, ...]:
    """One after the other."""
    order = {replica.id: index for index, replica in enumerate(choice.eligible)}
    count = len(order)
    return _ranked(choice, lambda replica: ((order[replica.id] - choice.turn.sequence) % count,))


def least_inflight(choice: Choice) -> tuple[Cost, ...]:
    """Fewest turns in flight, over all routers."""
    return _ranked(choice, lambda replica: (replica.load.in_flight + replica.foreign_in_flight,))


def rendezvous(choice: Choice) -> tuple[Cost, ...]:
    """Hash of the session."""
    return _ranked(choice, lambda replica: (-rendezvous_weight(choice.turn.session, replica.id),))


def bounded_load(choice: Choice) -> tuple[Cost, ...]:
    """Hash of the session, past replicas above 1.25 times the mean in flight."""
    total = sum(replica.load.in_flight for replica in choice.eligible) + 1
    limit = ceil(BOUNDED_LOAD_FACTOR * total / len(choice.eligible))
    return _ranked(
        choice,
        lambda replica: (
            float(replica.load.in_flight + 1 > limit),
            -float(rendezvous_weight(choice.turn.session, replica.id)),
        ),
    )


def session_sticky(choice: Choice) -> tuple[Cost, ...]:
    """The session's home; new sessions to the fewest live sessions, and past a home that is far busier than the
    rest.
    """
    mean = sum(replica.load.in_flight for replica in choice.eligible) / len(choice.eligible)

    def score(replica: Replica) -> tuple[float, ...]:
        crowd = crowd_now(replica.load, choice.fleet.now_s, choice.tuning.crowd_half_life_s)
        if is_home(replica, choice.session_home) and replica.load.in_flight <= SPILL_FACTOR * mean + SPILL_MARGIN:
            return (0.0, 0.0, 0.0)
        if choice.session_home is None:
            return (1.0, crowd, float(replica.load.in_flight))
        return (1.0, float(replica.load.in_flight), crowd)

    return _ranked(choice, score)


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "roost": roost,
        "round_robin": round_robin,
        "least_inflight": least_inflight,
        "rendezvous": rendezvous,
        "bounded_load": bounded_load,
        "session_sticky": session_sticky,
    }
)
