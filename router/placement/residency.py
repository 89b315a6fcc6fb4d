"""What a replica is believed to hold of a branch.

A replica counts the KV tokens newly written in its life (`Load.admitted_tokens`). A branch remembers, for each replica
incarnation that served it, how many tokens it left and the counter at that moment (`Residue`). Tokens admitted since
then estimate the LRU stack distance: what still fits on the device, beside what running turns add, is on the device;
what fits on device plus host is on the host (HiCache); the rest is gone. LRU eviction takes leaves first, so a prefix
goes last. Corrected by what the engine reports (`Beliefs.residency_factor`) and void with the incarnation.
"""

from __future__ import annotations

from router.domain.decision import Residency
from router.domain.replica import Replica
from router.domain.session import Residue

__all__ = ["NOTHING", "pushed_out", "residency"]

NOTHING = Residency()


def residency(residues: tuple[Residue, ...], replica: Replica, shared_tokens: int) -> Residency:
    """Tokens of a prompt that `replica` need not compute, at most `shared_tokens`."""
    for residue in residues:
        if residue.replica == replica.id and residue.incarnation == replica.incarnation:
            return _still_held(residue, replica, shared_tokens)
    return NOTHING


def _still_held(residue: Residue, replica: Replica, shared_tokens: int) -> Residency:
    since = max(0, replica.load.admitted_tokens - residue.admitted_mark)
    device_room = replica.capacity.device_tokens - replica.load.locked_tokens - since
    all_room = device_room + replica.capacity.host_tokens
    factor = replica.beliefs.residency_factor
    held = int(min(residue.tokens, shared_tokens) * factor)
    device = max(0, min(held, device_room))
    return Residency(device, max(0, min(held, all_room) - device))


def pushed_out(replica: Replica, new_tokens: int) -> int:
    """Tokens that writing `new_tokens` evicts for good: none while the replica's caches have never been full."""
    capacity = replica.capacity
    room = capacity.device_tokens + capacity.host_tokens - replica.load.admitted_tokens
    return 0 if room >= new_tokens else max(0, new_tokens - max(0, room))
