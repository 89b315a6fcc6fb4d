"""How records are packed into Redis strings. `scripts/prelude.lua` reads and writes the same formats.

All numbers are little-endian; every record begins with the byte 1. *text* is one length byte and that many bytes.

    load      in_flight u32, prefill i64, locked i64, admitted i64, crowd f64, live f64, crowd_at f64, life u32;
              incarnation: the rest
    beliefs   eight f64 in the order of `Beliefs`' fields
    lease     life u32, prefill i64, locked i64; replica text, branch text
    branch    version, turns, in_flight, tokens, text_bytes, live, inherited: u32 each; weight f64, active_at f64;
              session text, home replica text, home incarnation text;
              count u8 of tips, each hash 16 bytes, text_bytes u32;
              count u8 of residues, each replica text, incarnation text, tokens u32, admitted_mark i64
    session   home replica text, home incarnation text (both empty: unbound);
              count u8 of heads, each hash 16 bytes, branch text
    binding   replica text, incarnation text
    report    Unix ms of expiry i64; raw report: the rest

Whatever does not parse to its last byte, or holds an impossible number, counts as absent: unpacking then returns None.
A hand's edit or another version's leftovers must never fail a turn.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import astuple, fields
from typing import Any

from router.domain.replica import Beliefs, Capacity, Load, Standing
from router.domain.session import Binding, Boundary, Branch, Residue, Session
from router.domain.shared import Member

__all__ = [
    "pack_beliefs",
    "pack_binding",
    "pack_boundaries",
    "pack_hash",
    "pack_id",
    "pack_member",
    "short",
    "unpack_beliefs",
    "unpack_binding",
    "unpack_branch",
    "unpack_id",
    "unpack_load",
    "unpack_member",
    "unpack_report",
    "unpack_session",
]

_FORMAT = 1
_HASH_BYTES = 16
_TEXT_MAX = 255
_HEX = re.compile(r"(?:[0-9a-f]{2})+")
_LOAD = struct.Struct("<BIqqqdddI")
_BELIEFS = struct.Struct(f"<B{len(fields(Beliefs))}d")
_BRANCH = struct.Struct("<BIIIIIIIdd")
_BOUNDARY = struct.Struct(f"<{_HASH_BYTES}sI")
_RESIDUE = struct.Struct("<Iq")
_REPORT = struct.Struct("<Bq")
_MALFORMED = (struct.error, ValueError, IndexError, KeyError, TypeError, AttributeError)


def pack_hash(boundary_hash: str) -> bytes:
    """The 16 bytes of a boundary hash; ValueError for anything but 32 hex digits."""
    raw = bytes.fromhex(boundary_hash)
    if len(raw) != _HASH_BYTES:
        raise ValueError(f"a boundary hash has {2 * _HASH_BYTES} hex digits, not {len(boundary_hash)}")
    return raw


def pack_id(text: str) -> bytes:
    """An id as bytes: NUL and half as many bytes where it is lower-case hexadecimal, else itself."""
    if _HEX.fullmatch(text):
        return b"\0" + bytes.fromhex(text)
    if text.startswith("\0"):
        raise ValueError("an id must not begin with NUL")
    return text.encode()


def unpack_id(raw: bytes) -> str:
    """The id that `pack_id` packed."""
    return raw[1:].hex() if raw.startswith(b"\0") else raw.decode()


def short(raw: bytes) -> bytes:
    """`raw` itself, which has a place behind a length byte; ValueError where it has more than 255 bytes."""
    if len(raw) > _TEXT_MAX:
        raise ValueError(f"ids in the store have at most {_TEXT_MAX} bytes, not {len(raw)}")
    return raw


def pack_boundaries(boundaries: tuple[Boundary, ...]) -> bytes:
    """Boundaries one after another, as a branch record holds its tips."""
    if len(boundaries) > _TEXT_MAX:
        raise ValueError(f"a branch keeps at most {_TEXT_MAX} boundaries, not {len(boundaries)}")
    return b"".join([_BOUNDARY.pack(bytes.fromhex(tip.hash), tip.text_bytes) for tip in boundaries])


def unpack_load(raw: bytes) -> tuple[Load, str] | None:
    """A load entry and its incarnation."""
    try:
        tag, in_flight, prefill, locked, admitted, crowd, live, crowd_at_s, _life = _LOAD.unpack_from(raw)
        incarnation = raw[_LOAD.size :].decode()
    except _MALFORMED:
        return None
    if tag != _FORMAT or min(prefill, locked, admitted) < 0 or not all(map(_sane, (crowd, live, crowd_at_s))):
        return None
    return Load(in_flight, prefill, locked, admitted, crowd, crowd_at_s, live), incarnation


def pack_beliefs(beliefs: Beliefs) -> bytes:
    """Beliefs as they are stored."""
    return _BELIEFS.pack(_FORMAT, *astuple(beliefs))


def unpack_beliefs(raw: bytes) -> Beliefs | None:
    """Beliefs as they were stored."""
    try:
        tag, *numbers = _BELIEFS.unpack(raw)
    except _MALFORMED:
        return None
    return Beliefs(*numbers) if tag == _FORMAT and all(map(_sane, numbers)) else None


def unpack_branch(branch_id: str, raw: bytes) -> Branch | None:
    """A branch record."""
    try:
        tag, version, turns, in_flight, tokens, text_bytes, live, inherited, weight, active_at_s = _BRANCH.unpack_from(
            raw
        )
        if tag != _FORMAT or not (_sane(weight) and _sane(active_at_s)):
            return None
        session, at = _text(raw, _BRANCH.size)
        home, at = _binding(raw, at)
        end = at + 1 + raw[at] * _BOUNDARY.size
        tips = tuple([Boundary(h.hex(), size) for h, size in _BOUNDARY.iter_unpack(raw[at + 1 : end])])
        if len(tips) != raw[at]:
            return None
        residues, at = [], end + 1
        for _ in range(raw[end]):
            where, at = _binding(raw, at)
            residues.append(Residue(where.replica, where.incarnation, *_RESIDUE.unpack_from(raw, at)))
            at += _RESIDUE.size
        if at != len(raw):
            return None
        return Branch(
            id=branch_id,
            session=unpack_id(session),
            home=home,
            version=version,
            turns=turns,
            in_flight=in_flight,
            tokens=tokens,
            text_bytes=text_bytes,
            weight=weight,
            active_at_s=active_at_s,
            live_tokens=live,
            inherited_tokens=inherited,
            tips=tips,
            residues=tuple(residues),
        )
    except _MALFORMED:
        return None


def unpack_session(session_id: str, raw: bytes) -> Session | None:
    """A session record."""
    try:
        home, at = _binding(raw, 1)
        heads, count, at = [], raw[at], at + 1
        for _ in range(count):
            branch, after = _text(raw, at + _HASH_BYTES)
            heads.append((raw[at : at + _HASH_BYTES].hex(), unpack_id(branch)))
            at = after
    except _MALFORMED:
        return None
    if raw[0] != _FORMAT or at != len(raw):
        return None
    return Session(session_id, home if home.replica else None, tuple(heads))


def pack_binding(binding: Binding) -> bytes:
    """A binding as a record of its own."""
    replica, incarnation = short(binding.replica.encode()), short(binding.incarnation.encode())
    return b"%c%c%b%c%b" % (_FORMAT, len(replica), replica, len(incarnation), incarnation)


def unpack_binding(raw: bytes) -> Binding | None:
    """A binding from a record of its own."""
    try:
        binding, at = _binding(raw, 1)
    except _MALFORMED:
        return None
    return binding if raw[0] == _FORMAT and at == len(raw) else None


def unpack_report(raw: bytes) -> bytes:
    """The raw report within a report record; that it is one, the script has seen."""
    return raw[_REPORT.size :]


def pack_member(member: Member) -> bytes:
    """A member as JSON, so that an operator can read it; equal members give equal bytes."""
    capacity = member.capacity
    return json.dumps(
        {
            "id": member.id,
            "url": member.url,
            "source": member.source,
            "standing": member.standing.value,
            "incarnation": member.incarnation,
            "capacity": capacity and [capacity.device_tokens, capacity.host_tokens, capacity.max_running],
            "joined_at_s": member.joined_at_s,
            "models": list(member.models),
        },
        separators=(",", ":"),
    ).encode()


def unpack_member(replica_id: bytes, raw: bytes) -> Member | None:
    """A member from its JSON."""
    try:
        found: dict[str, Any] = json.loads(raw)
        room = None if found["capacity"] is None else Capacity(*map(int, found["capacity"]))
        if room is not None and (min(room.device_tokens, room.host_tokens) < 0 or room.max_running < 1):
            return None
        member = Member(
            id=_str(found["id"]),
            url=_str(found["url"]),
            source=_str(found["source"]),
            standing=Standing(found["standing"]),
            incarnation=_str(found["incarnation"]),
            capacity=room,
            joined_at_s=float(found["joined_at_s"]),
            models=tuple(map(_str, found["models"])),
        )
    except _MALFORMED:
        return None
    return member if member.id.encode() == replica_id and _sane(member.joined_at_s) else None


def _text(raw: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + raw[at]
    if end > len(raw):
        raise ValueError("cut short")
    return raw[at + 1 : end], end


def _binding(raw: bytes, at: int) -> tuple[Binding, int]:
    replica, at = _text(raw, at)
    incarnation, at = _text(raw, at)
    return Binding(replica.decode(), incarnation.decode()), at


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _sane(number: float) -> bool:
    return 0.0 <= number < math.inf
