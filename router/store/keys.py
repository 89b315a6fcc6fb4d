"""Every key of the store, in one table.

`<base>` is `{prefix}:{<fleet>}:v2:` where the braces around the fleet's name are part of the key: Redis Cluster hashes
only what stands between them, so all keys of a fleet share one slot and one script may touch them all.

| key                 | type   | holds                                                    | TTL                        |
|---------------------|--------|----------------------------------------------------------|----------------------------|
| `{prefix}:schema`   | string | version of this table that the keys follow               | none                       |
| `<base>load`        | hash   | replica id → packed `Load`, incarnation, life's number   | none; goes with the member |
| `<base>beliefs`     | hash   | replica id → packed `Beliefs`, opaque to the scripts     | none; goes with the member |
| `<base>lives`       | string | counts load entries ever begun: the next life's number   | none                       |
| `<base>leases`      | zset   | lease id, scored with the Unix ms at which it expires    | none; swept by `fetch`     |
| `<base>held`        | hash   | lease id → what it holds, of which life and branch       | none; swept by `fetch`     |
| `<base>members`     | hash   | replica id → `Member` as JSON                            | none                       |
| `<base>version`     | string | counts changes of the membership                         | none                       |
| `<base>reports`     | hash   | replica id → Unix ms of expiry, raw report               | longest of its reports     |
| `<base>b:<hash>`    | string | boundary: id of the branch that has it among its tips    | `branch_ttl_s` of acquire  |
| `<base>n:<branch>`  | string | packed `Branch`                                          | `branch_ttl_s`, last write |
| `<base>s:<session>` | string | packed `Session`: its home and newest heads              | `branch_ttl_s` of acquire  |
| `<base>r:<id>`      | string | stored response: packed `Binding` of its replica         | `branch_ttl_s` of settle   |

Hashes of boundaries are their 16 raw bytes, and ids of branches and sessions that are hexadecimal are halved likewise
(`router.store.codec.pack_id`): a live session is mostly boundary keys. With one branch, two residues and seven
boundaries it takes 1.5 KB in Valkey 9.1 and 2.1 KB in Redis 7.0; every boundary more takes 0.17 and 0.2 KB
(`python -m tests.bench.state`).

Scripts get every key that the caller can know as KEYS, `<base>load` always first. They derive, under the same hash tag,
what only the store knows: the branch of a boundary or lease, the boundaries that a branch gives up.
"""

from __future__ import annotations

from router.store.codec import pack_hash, pack_id

__all__ = [
    "HEADS_KEPT",
    "RESIDUES_KEPT",
    "SCHEMA",
    "SWEEP_MAX",
    "FleetKeys",
    "key_type",
    "schema_key",
]

SCHEMA = "2"
"""Version of this table. Change it with any change here or in `codec` that an older router would misread."""

_PART = b"}:v%b:" % SCHEMA.encode()
"""Between a fleet's name and the rest of its keys: whatever an older Roost left there is not met."""

HEADS_KEPT = 8
"""Heads a session remembers (count), newest first."""

RESIDUES_KEPT = 4
"""Residues a branch remembers (count), newest first."""

SWEEP_MAX = 500
"""Expired leases one `fetch` gives back at most, so that a router's death blocks the store for a few ms at a time."""


def schema_key(prefix: str) -> bytes:
    """The key that says which schema the keys under `prefix` follow."""
    return f"{prefix}:schema".encode()


_TYPES = {
    b"load": b"hash",
    b"beliefs": b"hash",
    b"leases": b"zset",
    b"held": b"hash",
    b"members": b"hash",
    b"reports": b"hash",
    b"permits": b"zset",  # of a tenant: `router.store.permits`
}


def key_type(key: bytes) -> bytes:
    """The type that a key of the table has, as Redis' TYPE names it."""
    return _TYPES.get(key.rpartition(_PART)[2], b"string")


class FleetKeys:
    """The keys of one fleet, as bytes ready to send. Braces in its name are escaped: they would end the hash tag."""

    __slots__ = ("base", "beliefs", "held", "leases", "lives", "load", "members", "reports", "version")

    def __init__(self, prefix: str, fleet: str) -> None:
        if not fleet:
            raise ValueError("a fleet needs a name: without one its keys would share no hash tag")
        name = fleet.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.base = f"{prefix}:{{{name}".encode() + _PART
        self.load = self.base + b"load"
        self.beliefs = self.base + b"beliefs"
        self.lives = self.base + b"lives"
        self.leases = self.base + b"leases"
        self.held = self.base + b"held"
        self.members = self.base + b"members"
        self.version = self.base + b"version"
        self.reports = self.base + b"reports"

    def boundary(self, boundary_hash: str) -> bytes:
        """Key of a boundary."""
        return self.base + b"b:" + pack_hash(boundary_hash)

    def branch(self, branch_id: str) -> bytes:
        """Key of a branch."""
        return self.base + b"n:" + pack_id(branch_id)

    def session(self, session_id: str) -> bytes:
        """Key of a session."""
        return self.base + b"s:" + pack_id(session_id)

    def response(self, response_id: str) -> bytes:
        """Key of a stored response."""
        return self.base + b"r:" + response_id.encode()
