"""What goes wrong, and when: a schedule drawn from a seed, as plain values.

A schedule knows nothing of the world but names; `simulations.world` makes it happen. Every fault ends by itself after
`for_s` seconds, so dropping any of them leaves a schedule that still makes sense: that is how a failing seed is made
smaller. A fault's place in the schedule is its number, which a command line can drop again.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["REPLICA_KINDS", "ROUTER_KINDS", "Fault", "Kind", "drawn", "kinds_of"]


class Kind(StrEnum):
    """What goes wrong. Where it says nothing else, `subject` is a replica."""

    CRASH = "crash"
    """Connections are reset, nobody listens; a new incarnation comes up when the fault ends."""
    HANG = "hang"
    """Stopped: it accepts and says nothing, probes hang; then goes on where it was."""
    SLOW = "slow"
    """Takes `amount` times as long."""
    REFUSE = "refuse"
    """Nobody listens, while running turns go on."""
    FULL = "full"
    """Refuses turns: its queue is full, told by a status or inside the stream."""
    RESET = "reset"
    """Running streams break; the replica lives on with its KV."""
    CUT = "cut"
    """`subject` is `router/replica`: nothing passes between them."""
    STORE_CUT = "store_cut"
    """`subject` is a router: its store refuses."""
    STORE_SLOW = "store_slow"
    """`subject` is a router: each way to its store takes up to `amount` seconds."""
    STORE_HANG = "store_hang"
    """`subject` is a router: its store is silent, and carries some of the calls out in the end."""
    STORE_LOSSY = "store_lossy"
    """`subject` is a router: questions and answers get lost, each with the probability `amount`."""
    STORE_FLUSH = "store_flush"
    """The store is emptied. No subject."""
    STORE_CLOCK = "store_clock"
    """The store's wall clock jumps by `amount` seconds. No subject."""
    ROUTER_CRASH = "router_crash"
    """`subject` is a router: its tasks vanish without settling anything; it starts again when the fault ends."""
    ROUTER_CLOCK = "router_clock"
    """`subject` is a router: its wall clock jumps by `amount` seconds."""
    JOIN = "join"
    """A new replica joins."""
    DRAIN = "drain"
    """It is drained, stopped when the fault ends, and removed."""
    CORDON = "cordon"
    """It takes no new branches until the fault ends."""


ROUTER_KINDS: Final = frozenset(
    {Kind.STORE_CUT, Kind.STORE_SLOW, Kind.STORE_HANG, Kind.STORE_LOSSY, Kind.ROUTER_CRASH, Kind.ROUTER_CLOCK}
)
"""Those that happen to a router."""
REPLICA_KINDS: Final = frozenset(
    {Kind.CRASH, Kind.HANG, Kind.SLOW, Kind.REFUSE, Kind.FULL, Kind.RESET, Kind.DRAIN, Kind.CORDON}
)
"""Those that happen to a replica of the first hour."""

_LASTS_S: Final = {
    Kind.CRASH: (3.0, 90.0),
    Kind.HANG: (1.0, 60.0),
    Kind.SLOW: (5.0, 120.0),
    Kind.REFUSE: (1.0, 20.0),
    Kind.FULL: (0.5, 20.0),
    Kind.RESET: (0.0, 0.0),
    Kind.CUT: (1.0, 60.0),
    Kind.STORE_CUT: (0.5, 40.0),
    Kind.STORE_SLOW: (1.0, 40.0),
    Kind.STORE_HANG: (0.5, 40.0),
    Kind.STORE_LOSSY: (1.0, 40.0),
    Kind.STORE_FLUSH: (0.0, 0.0),
    Kind.STORE_CLOCK: (0.0, 0.0),
    Kind.ROUTER_CRASH: (0.5, 40.0),
    Kind.ROUTER_CLOCK: (0.0, 0.0),
    Kind.JOIN: (0.0, 0.0),
    Kind.DRAIN: (5.0, 60.0),
    Kind.CORDON: (5.0, 60.0),
}
"""Seconds, fewest and most; drawn so that short ones are as likely as long ones."""
_AMOUNT: Final = {
    Kind.SLOW: (2.0, 20.0),
    Kind.STORE_SLOW: (0.005, 0.1),
    Kind.STORE_LOSSY: (0.05, 0.5),
    Kind.STORE_CLOCK: (-30.0, 30.0),
    Kind.ROUTER_CLOCK: (-100_000.0, 100_000.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    kind: Kind
    subject: str = ""
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        told = f"{self.at_s:.3f}s {self.kind.value}"
        told += f" {self.subject}" if self.subject else ""
        told += f" for {self.for_s:.3f}s" if self.for_s else ""
        return told + (f" by {self.amount:.4g}" if self.amount else "")


def kinds_of(names: str) -> tuple[Kind, ...]:
    """`all`, `none`, or names with commas between. Raises ValueError for an unknown one."""
    if names == "all":
        return tuple(Kind)
    return () if names == "none" else tuple(Kind(name.strip()) for name in names.split(","))


def drawn(
    seed: int,
    kinds: Collection[Kind],
    *,
    replicas: Sequence[str],
    routers: Sequence[str],
    until_s: float,
    mean_gap_s: float,
) -> tuple[Fault, ...]:
    """Faults of these kinds, in order of time; no two routers are down at once, nor is more than half the fleet."""
    dice = random.Random(f"faults/{seed}")  # noqa: S311 (a schedule needs no secrecy)
    faults: list[Fault] = []
    chosen = [kind for kind in Kind if kind in kinds]
    at_s = 0.0
    while chosen and (at_s := at_s + dice.expovariate(1 / mean_gap_s)) < until_s:
        kind = dice.choice(chosen)
        shortest_s, longest_s = _LASTS_S[kind]
        for_s = shortest_s * (longest_s / shortest_s) ** dice.random() if longest_s else 0.0
        least, most = _AMOUNT.get(kind, (0.0, 0.0))
        fault = Fault(
            round(at_s, 3),
            kind,
            _subject(dice, kind, replicas, routers),
            round(for_s, 3),
            round(dice.uniform(least, most), 4),
        )
        if not _too_much(fault, faults, len(replicas)):
            faults.append(fault)
    return tuple(faults)


def _subject(dice: random.Random, kind: Kind, replicas: Sequence[str], routers: Sequence[str]) -> str:
    replica, router = dice.choice(replicas), dice.choice(routers)
    if kind is Kind.CUT:
        return f"{router}/{replica}"
    if kind in ROUTER_KINDS:
        return router
    return replica if kind in REPLICA_KINDS else ""


_TAKES_OUT: Final = frozenset({Kind.CRASH, Kind.HANG, Kind.REFUSE, Kind.FULL, Kind.DRAIN, Kind.CORDON, Kind.CUT})


def _too_much(fault: Fault, before: Sequence[Fault], replicas: int) -> bool:
    """Whether this one would leave too little standing, or happen to a drained replica, which is there no more."""
    standing = [each for each in before if each.at_s + each.for_s > fault.at_s]
    if fault.kind is Kind.ROUTER_CRASH:
        return any(each.kind is Kind.ROUTER_CRASH for each in standing)
    drained = {each.subject for each in before if each.kind is Kind.DRAIN}
    if fault.subject in drained:
        return True
    if fault.kind not in _TAKES_OUT:
        return False
    out = {each.subject.rpartition("/")[2] for each in standing if each.kind in _TAKES_OUT} | drained
    return len(out | {fault.subject.rpartition("/")[2]}) > replicas // 2
