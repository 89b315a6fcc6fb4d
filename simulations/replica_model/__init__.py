"""A discrete-event model of one SGLang replica, without I/O and without a clock of its own.

Used by the simulated engine, in scaled real time, and by virtual-time simulations of whole fleets. `replica` holds the
rules, `prefix_cache` the two-tier cache, `seats` the running batch, `timing` the formulas, `page_keys` the page keys.
"""

from simulations.replica_model.page_keys import chained, keys_of_bytes, keys_of_ids
from simulations.replica_model.replica import ReplicaModel
from simulations.replica_model.timing import faster
from simulations.replica_model.values import (
    Aborted,
    Counters,
    Event,
    Failed,
    Finished,
    FirstToken,
    Progress,
    Refused,
    ReplicaProfile,
    Request,
    Retracted,
    Snapshot,
    Started,
)

__all__ = [
    "Aborted",
    "Counters",
    "Event",
    "Failed",
    "Finished",
    "FirstToken",
    "Progress",
    "Refused",
    "ReplicaModel",
    "ReplicaProfile",
    "Request",
    "Retracted",
    "Snapshot",
    "Started",
    "chained",
    "faster",
    "keys_of_bytes",
    "keys_of_ids",
]
