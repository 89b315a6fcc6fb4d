"""The store in Redis or Valkey: every method one script, every script one round trip.

The contract is `router.store.memory`'s; the keys are in `router.store.keys`, the scripts in `scripts/`. Scripts take
the time from the server, so that all routers share one clock. Redis 7.0 is enough; scripts use no command younger
than that.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

import hiredis

from router.domain.errors import StoreForeign, StoreUnavailable
from router.domain.session import Binding
from router.ports import Acquired, Ask, Claim, Lease, Member, Membership, Settlement, Stale, View
from router.store import codec
from router.store.address import Command
from router.store.keys import HEADS_KEPT, RESIDUES_KEPT, SCHEMA, SWEEP_MAX, FleetKeys, key_type, schema_key
from router.store.topology import topology_of
from router.store.wire import CONNECT_TIMEOUT_S

__all__ = ["RedisStore", "Script", "load_scripts"]

_CLAIM = struct.Struct("<qqqqqIddqqIIBd")
_SETTLEMENT = struct.Struct("<IIqq")
_LEASE = struct.Struct("<qq")

_T = TypeVar("_T")


class Script:
    """A Lua script and the hash by which a server knows it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()


@cache
def load_scripts() -> Mapping[str, Script]:
    """The scripts by name, each behind the common prelude."""
    folder = files(__package__) / "scripts"
    scripts = [entry for entry in folder.iterdir() if entry.name.endswith(".lua")]
    texts = {entry.name.removesuffix(".lua"): entry.read_text() for entry in scripts}
    prelude = texts.pop("prelude")
    return {name: Script(prelude + text) for name, text in texts.items()}


class _Cache(Generic[_T]):
    """Records of a hash as last parsed, since most have not changed when they are read again."""

    __slots__ = ("_parse", "_seen", "_values")

    def __init__(self, parse: Callable[[bytes], _T | None]) -> None:
        self._parse = parse
        self._seen: dict[bytes, bytes] = {}
        self._values: dict[str, _T] = {}

    def read(self, flat: list[bytes]) -> dict[str, _T]:
        """The records that parse, by field name; `flat` has names and values by turns."""
        seen, values = self._seen, self._values
        names = flat[::2]
        for name, raw in zip(names, flat[1::2], strict=True):
            if seen.get(name) != raw:
                seen[name] = raw
                value = self._parse(raw)
                if value is None:
                    values.pop(_text(name), None)
                else:
                    values[_text(name)] = value
        if len(seen) != len(names):
            for name in seen.keys() - set(names):
                del seen[name]
                values.pop(_text(name), None)
        return dict(values)


class _Fleet:
    """A fleet's keys and what was last read of its replicas."""

    __slots__ = ("beliefs", "keys", "loads")

    def __init__(self, prefix: str, fleet: str) -> None:
        self.keys = FleetKeys(prefix, fleet)
        self.loads = _Cache(codec.unpack_load)
        self.beliefs = _Cache(codec.unpack_beliefs)


class RedisStore:
    """`Store` over one pipelined connection a server.

    `timeout_s` bounds every call; what takes longer raises `StoreUnavailable`, though the script may still run. That is
    safe: a lease that nobody renews expires, and a settlement may be repeated. The password files are read at every
    connection. `scripts` lets tests set the clock. Raises ValueError for a URL that is none of `router.store.url`.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "roost",
        timeout_s: float = 0.05,
        username: str | None = None,
        password_file: Path | None = None,
        sentinel_password_file: Path | None = None,
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        if not prefix or "{" in prefix or "}" in prefix:
            raise ValueError(f"a key prefix needs a character and no braces, not {prefix!r}")
        self._prefix = prefix
        self._scripts = load_scripts() if scripts is None else scripts
        self._topology = topology_of(
            url, username=username, password_file=password_file, sentinel_password_file=sentinel_password_file
        )
        self._timeout_s = timeout_s
        self._opened = False
        self._fleets: dict[str, _Fleet] = {}

    async def open(self) -> None:
        """Connect and claim the schema; see `Store.open`. The first time, no turn waits for it: it may take longer."""
        patience_s = self._timeout_s if self._opened else max(self._timeout_s, CONNECT_TIMEOUT_S)
        self._opened = True
        key, due = schema_key(self._prefix), asyncio.get_running_loop().time() + patience_s
        await self._call(("SET", key, SCHEMA, "NX"), [key], due)
        found = await self._call(("GET", key), [key], due)
        if found != SCHEMA.encode():
            raise StoreForeign(
                f"store {self._topology.label}: {key.decode()} says schema {found!r}, and this Roost writes "
                f"{SCHEMA!r}; give it another key prefix, or delete the keys {self._prefix}:* when no router of that "
                "version runs"
            )

    async def close(self) -> None:
        """Close the connections."""
        await self._topology.close()

    async def fetch(self, fleet: str, ask: Ask) -> View:
        """See `Store.fetch`."""
        at = self._fleet(fleet)
        keys = [at.keys.load, at.keys.beliefs, at.keys.leases, at.keys.held, at.keys.version]
        if ask.session is not None:
            keys.append(at.keys.session(ask.session))
        if ask.response_id is not None:
            keys.append(at.keys.response(ask.response_id))
        boundary, unhex = at.keys.base + b"b:", bytes.fromhex
        keys += [boundary + unhex(each) for each in ask.boundaries]
        head = b"" if ask.head is None else codec.pack_hash(ask.head)
        reply = await self._run(
            "fetch", keys, int(ask.session is not None), int(ask.response_id is not None), head, SWEEP_MAX
        )
        seconds, micros, version, loads, beliefs, depth, branch_id, raw, head_id, head_raw, session, binding = reply
        lives = at.loads.read(loads)
        branch = codec.unpack_branch(codec.unpack_id(branch_id), raw) if raw else None
        return View(
            now_s=_time_s(seconds, micros),
            membership_version=_count(version),
            loads={replica: life[0] for replica, life in lives.items()},
            incarnations={replica: life[1] for replica, life in lives.items()},
            beliefs=at.beliefs.read(beliefs),
            branch=branch,
            depth=None if branch is None else depth,
            head_branch=codec.unpack_branch(codec.unpack_id(head_id), head_raw) if head_raw else None,
            session=codec.unpack_session(ask.session, session) if ask.session is not None and session else None,
            response_replica=codec.unpack_binding(binding) if binding else None,
        )

    async def acquire(self, fleet: str, claim: Claim) -> Acquired | Stale:
        """See `Store.acquire`."""
        keys = self._fleet(fleet).keys
        branch, session = codec.short(codec.pack_id(claim.branch)), codec.short(codec.pack_id(claim.session))
        record = codec.short(codec.pack_id(claim.heads_of or claim.session))
        tips, boundary, bound = codec.pack_boundaries(claim.tips), keys.base + b"b:", claim.session_home
        named = [keys.load, keys.leases, keys.held, keys.lives, keys.base + b"n:" + branch, keys.base + b"s:" + record]
        named += [boundary + tips[at : at + 16] for at in range(0, len(tips), 20)]
        reply = await self._run(
            "acquire",
            named,
            claim.lease,
            _short(claim.replica),
            _short(claim.incarnation),
            branch,
            session,
            b"" if claim.tip is None else codec.pack_hash(claim.tip.hash),
            tips,
            b"" if claim.head is None else codec.pack_hash(claim.head),
            _short(claim.home.replica),
            _short(claim.home.incarnation),
            b"" if bound is None else _short(bound.replica),
            b"" if bound is None else _short(bound.incarnation),
            _CLAIM.pack(
                -1 if claim.version is None else claim.version,
                claim.prefill_tokens,
                claim.locked_tokens,
                -1 if claim.observed_in_flight is None else claim.observed_in_flight,
                claim.slack,
                claim.text_bytes,
                claim.weight,
                claim.crowd_half_life_s,
                _ms(claim.branch_ttl_s),
                _ms(claim.lease_ttl_s),
                claim.live_tokens,
                claim.inherited_tokens,
                claim.named,
                claim.live_half_life_s,
            ),
            HEADS_KEPT,
        )
        return Stale(reply.decode()) if isinstance(reply, bytes) else Acquired(reply[0], int(reply[1]))

    async def progress(self, fleet: str, lease: str) -> None:
        """See `Store.progress`."""
        keys = self._fleet(fleet).keys
        await self._run("progress", [keys.load, keys.held], lease)

    async def settle(self, fleet: str, settlement: Settlement) -> None:
        """See `Store.settle`."""
        keys, it = self._fleet(fleet).keys, settlement
        branch = codec.pack_id(it.branch)
        named = [keys.load, keys.beliefs, keys.leases, keys.held, keys.base + b"n:" + branch]
        binding = b""
        if it.response_id is not None:
            named.append(keys.response(it.response_id))
            binding = codec.pack_binding(Binding(it.replica, it.incarnation))
        await self._run(
            "settle",
            named,
            it.lease,
            _short(it.replica),
            _short(it.incarnation),
            branch,
            _SETTLEMENT.pack(it.tokens, it.prompt_tokens, it.admitted_tokens, _ms(it.branch_ttl_s)),
            b"" if it.beliefs is None else codec.pack_beliefs(it.beliefs),
            binding,
            RESIDUES_KEPT,
        )

    async def renew(self, fleet: str, leases: Sequence[Lease], lease_ttl_s: float) -> Sequence[str]:
        """See `Store.renew`."""
        keys = self._fleet(fleet).keys
        told: list[bytes | str] = []
        for lease in leases:
            branch = codec.short(codec.pack_id(lease.branch))
            numbers = _LEASE.pack(lease.prefill_tokens, lease.locked_tokens)
            told += [lease.id, _short(lease.replica), _short(lease.incarnation), branch, numbers]
        taken = await self._run("renew", [keys.load, keys.leases, keys.held, keys.lives], _ms(lease_ttl_s), *told)
        return [lease.decode() for lease in taken]

    async def members(self, fleet: str) -> Membership:
        """See `Store.members`."""
        keys = self._fleet(fleet).keys
        reply = await self._run("members", [keys.load, keys.members, keys.version, keys.reports])
        seconds, micros, version, members, reports = reply
        known = [codec.unpack_member(name, raw) for name, raw in _pairs(members)]
        return Membership(
            version=_count(version),
            now_s=_time_s(seconds, micros),
            members=tuple(sorted((member for member in known if member is not None), key=lambda member: member.id)),
            reports={_text(name): codec.unpack_report(raw) for name, raw in _pairs(reports)},
        )

    async def put_member(
        self, fleet: str, member: Member, *, only_if_absent: bool = False, expected: Member | None = None
    ) -> bool:
        """See `Store.put_member`."""
        keys = self._fleet(fleet).keys
        put = await self._run(
            "put_member",
            [keys.load, keys.members, keys.version],
            _short(member.id),
            codec.pack_member(member),
            int(only_if_absent),
            b"" if expected is None else codec.pack_member(expected),
        )
        return bool(put)

    async def remove_member(self, fleet: str, replica_id: str) -> bool:
        """See `Store.remove_member`."""
        keys = self._fleet(fleet).keys
        named = [keys.load, keys.members, keys.version, keys.beliefs]
        return bool(await self._run("remove_member", named, replica_id))

    async def put_report(self, fleet: str, replica_id: str, raw: bytes, ttl_s: float) -> None:
        """See `Store.put_report`."""
        keys = self._fleet(fleet).keys
        await self._run("put_report", [keys.load, keys.reports], _short(replica_id), raw, _ms(ttl_s))

    async def run_script(self, name: str, keys: list[bytes], *args: bytes | str | int) -> Any:
        """One of the scripts on keys of the caller's own, which share a hash tag: one round trip. Raises StoreError."""
        return await self._run(name, keys, *args)

    def _fleet(self, name: str) -> _Fleet:
        fleet = self._fleets.get(name)
        if fleet is None:
            fleet = self._fleets[name] = _Fleet(self._prefix, name)
        return fleet

    async def _run(self, name: str, keys: list[bytes], *args: bytes | str | int) -> Any:
        """Run a script: one round trip, or two where the server does not know it yet, or not any more."""
        script, due = self._scripts[name], asyncio.get_running_loop().time() + self._timeout_s
        try:
            return await self._topology.call(keys[0], ("EVALSHA", script.digest, len(keys), *keys, *args), due)
        except hiredis.ReplyError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise await self._translated(error, keys, due) from error
        # EVAL goes by its keys to the very server that said so, which remembers the script.
        return await self._call(("EVAL", script.text, len(keys), *keys, *args), keys, due)

    async def _call(self, command: Command, keys: list[bytes], due: float | None = None) -> Any:
        if due is None:
            due = asyncio.get_running_loop().time() + self._timeout_s
        try:
            return await self._topology.call(keys[0], command, due)
        except hiredis.ReplyError as error:
            raise await self._translated(error, keys, due) from error

    async def _translated(
        self, error: hiredis.ReplyError, keys: list[bytes], due: float
    ) -> StoreForeign | StoreUnavailable:
        """What an error reply means; for a wrong type, asks which of `keys` it was."""
        label = self._topology.label
        if not str(error).startswith("WRONGTYPE"):
            hint = " (a cluster: write redis+cluster://)" if str(error).startswith("MOVED") else ""
            return StoreUnavailable(f"store {label} refused: {error}{hint}")
        for key in keys:
            expected = key_type(key)
            found = await self._topology.call(key, ("TYPE", key), due)
            if found not in (b"none", expected):
                return StoreForeign(
                    f"store {label}: {key.decode(errors='backslashreplace')} holds a {found.decode()} where "
                    f"Roost keeps a {expected.decode()}: delete that key, or use another key prefix"
                )
        return StoreForeign(f"store {label}: {error}")


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _short(text: str) -> bytes:
    return codec.short(text.encode())


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _time_s(seconds: bytes, micros: bytes) -> float:
    return int(seconds) + int(micros) / 1_000_000


def _count(raw: bytes | None) -> int:
    """A counter; whatever is no whole number of zero or more counts as zero, as in the scripts."""
    return int(raw) if raw is not None and raw.isdigit() else 0


def _pairs(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
