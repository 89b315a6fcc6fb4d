"""The formats traces come in, read from lines without any I/O.

`satrace/1`
    A header `{format, source, licence, block_size, clock, hash_scope}`, then one turn a line: `sid`, `psid`, `ptn`,
    `turn`, `t`, `think`, `kind`, `after`, `in`, `out`, `shr`, `shr_tok`, `base`, `keep`, `add`. `after` left out
    means the session's previous turn, for a session's first turn its parent's.
Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release)
    `{timestamp, input_length, output_length, hash_ids}`, milliseconds, one row a request and no sessions. A request
    whose prompt extends the newest prompt of a session is taken for that session's next turn.
Multi-turn (AIPerf, Dynamo's mooncake_trace)
    The same with `session_id`; a session's later rows hold `delay` (ms after the previous completion) in place of
    `timestamp`, and `input_length` and `hash_ids` of what the turn appends. What the server said before is part of the
    prompt, too; here it takes blocks of its own, `output_length` long.

The last id of a Mooncake row may stand for a block that is not full. Only whole blocks are kept here. Where no think
time is recorded, but two send times are, their difference takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Final, TypeVar

import msgspec

from simulations.trace import Kind, Ref, Run, Session, Trace, TraceError, Tree, Turn, length

__all__ = ["compact", "read"]

_BLOCK_TOKENS: Final = (512, 256, 128, 64, 32, 16, 1024)
"""Tried in this order where a format does not tell its block size; 512 is Mooncake's."""
_OWN_IDS: Final = 1 << 40
"""Ids of blocks that a trace has no ids for begin here, beyond any real one."""
_KINDS: Final = {str(kind): kind for kind in Kind}
_Shape = TypeVar("_Shape")


def read(lines: Iterable[str | bytes]) -> Trace:
    """The trace these lines hold, in whichever format. Raises TraceError, which names the first bad line."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise TraceError("the trace is empty")
    kind = _decoded(_kind, *first)
    if kind.format is not None:
        if kind.format != "satrace/1":
            raise TraceError(f"unknown format {kind.format!r}", first[0])
        return _satrace(_decoded(_header, *first), numbered)
    if kind.input_length is None:
        raise TraceError("neither a satrace/1 header nor a Mooncake row (no input_length)", first[0])
    rows = [(number, _decoded(_row, number, line)) for number, line in chain([first], numbered)]
    if all(row.session_id is not None for _, row in rows):
        return _multi_turn(rows)
    return _mooncake([row for _, row in rows], _block_tokens(rows))


def compact(runs: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """The same blocks in as few runs as their order allows."""
    merged: list[Run] = []
    for first, count in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = Run(merged[-1].first, merged[-1].size + count)
        elif count:
            merged.append(Run(first, count))
    return tuple(merged)


def _decoded(decode: Callable[[str | bytes], _Shape], number: int, line: str | bytes) -> _Shape:
    try:
        return decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(str(error), number) from None


def _trees(sessions: Iterable[Session]) -> tuple[Tree, ...]:
    """Sessions grouped with the root they grew out of, in order of appearance. Parents come before children."""
    root_of: dict[str, str] = {}
    grouped: dict[str, list[Session]] = {}
    for session in sessions:
        root = session.id if session.parent is None else root_of[session.parent.session]
        root_of[session.id] = root
        grouped.setdefault(root, []).append(session)
    return tuple(Tree(tuple(group)) for group in grouped.values())


# --- satrace/1 ---------------------------------------------------------------------------------------------


class _Kind(msgspec.Struct):
    format: str | None = None
    input_length: int | None = None


class _Header(msgspec.Struct):
    block_size: int
    clock: str = "session"
    hash_scope: str = "tree"
    source: str = ""
    licence: str = ""


class _Turn(msgspec.Struct, rename={"prompt": "in"}):
    sid: str
    turn: int
    prompt: int
    out: int
    psid: str | None = None
    ptn: int | None = None
    t: float | None = None
    think: float | None = None
    kind: str = "other"
    after: list[tuple[str, int]] | None = None
    base: int = -1
    keep: int = 0
    add: list[tuple[int, int]] = []
    shr: str | None = None
    shr_tok: int = 0


_kind = msgspec.json.Decoder(_Kind).decode
_header = msgspec.json.Decoder(_Header).decode
_turn = msgspec.json.Decoder(_Turn).decode


@dataclass(slots=True)
class _Growing:
    """A session while its rows come in."""

    first: _Turn
    turns: list[Turn] = field(default_factory=list)
    at_s: float | None = None
    """When its newest turn was sent."""


def _satrace(header: _Header, numbered: Iterator[tuple[int, str | bytes]]) -> Trace:
    if header.block_size < 1:
        raise TraceError("block_size must be positive", 1)
    growing: dict[str, _Growing] = {}
    for number, line in numbered:
        row = _decoded(_turn, number, line)
        session = growing.get(row.sid)
        if session is None:
            session = growing[row.sid] = _Growing(row)
        session.turns.append(_checked(row, session, growing, number))
        session.at_s = row.t
    sessions = (
        Session(sid, tuple(each.turns), _parent(each.first), each.first.shr, each.first.shr_tok)
        for sid, each in growing.items()
    )
    shared_clock, global_blocks = header.clock == "trace", header.hash_scope == "trace"
    return Trace(_trees(sessions), header.block_size, global_blocks, shared_clock, header.source, header.licence)


def _parent(row: _Turn) -> Ref | None:
    return None if row.psid is None else Ref(row.psid, row.ptn or 0)


def _checked(row: _Turn, session: _Growing, growing: dict[str, _Growing], number: int) -> Turn:
    """The row as a turn. Raises TraceError for what no later step could make sense of."""
    if row.turn != len(session.turns):
        raise TraceError(f"turn {row.turn} of {row.sid} follows {len(session.turns)} turns", number)
    if row.prompt < 1 or row.out < 0 or row.keep < 0 or any(count < 0 for _, count in row.add):
        raise TraceError(f"a count of {row.sid} turn {row.turn} is out of range", number)
    if not -1 <= row.base < row.turn:
        raise TraceError(f"base {row.base} of {row.sid} turn {row.turn} is no earlier turn", number)
    if row.turn == 0 and row.psid is not None and row.psid not in growing:
        raise TraceError(f"parent {row.psid} of {row.sid} has not been seen", number)
    after: tuple[Ref, ...]
    if row.after is not None:
        after = tuple(Ref(*each) for each in row.after)
    elif row.turn:
        after = (Ref(row.sid, row.turn - 1),)
    else:
        parent = _parent(row)
        after = () if parent is None else (parent,)
    think_s = row.think
    if think_s is None and row.t is not None and session.at_s is not None:
        think_s = max(row.t - session.at_s, 0.0)
    return Turn(
        index=row.turn,
        kind=_KINDS.get(row.kind, Kind.OTHER),
        prompt_tokens=row.prompt,
        output_tokens=row.out,
        base=None if row.base < 0 else Ref(row.sid, row.base),
        keep=row.keep,
        add=tuple(Run(*each) for each in row.add),
        after=after,
        think_s=think_s,
        at_s=row.t,
    )


# --- Mooncake's rows, with and without sessions ------------------------------------------------------------------


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct):
    input_length: _Count
    output_length: _Count
    hash_ids: list[int] = []
    timestamp: float | None = None
    delay: float | None = None
    session_id: str | int | None = None


_row = msgspec.json.Decoder(_Row).decode


def _block_tokens(rows: Sequence[tuple[int, _Row]]) -> int:
    """The block size with which every row has as many ids as its length fills, a last partial one included or not."""
    for size in _BLOCK_TOKENS:
        if all(row.input_length // size <= len(row.hash_ids) <= -(-row.input_length // size) for _, row in rows):
            return size
    for number, row in rows:
        if not any(
            row.input_length // size <= len(row.hash_ids) <= -(-row.input_length // size) for size in _BLOCK_TOKENS
        ):
            raise TraceError(f"{len(row.hash_ids)} hash_ids do not cover {row.input_length} tokens", number)
    raise TraceError("hash_ids of no one block size")


@dataclass(slots=True)
class _Chain:
    """A session rebuilt from Mooncake's rows."""

    id: str
    whole: list[int]
    """Ids of its newest prompt."""
    turns: list[Turn] = field(default_factory=list)


def _mooncake(rows: Sequence[_Row], block_tokens: int) -> Trace:
    tips: dict[int, _Chain] = {}
    chains: list[_Chain] = []
    for row in rows:
        whole = row.hash_ids[: row.input_length // block_tokens]
        at_s = None if row.timestamp is None else row.timestamp / 1000
        found = next((tips[each] for each in reversed(whole) if each in tips), None)
        if found is None or whole[: len(found.whole)] != found.whole:
            found = _Chain(f"r{len(chains):05d}", [])
            chains.append(found)
        elif found.whole:
            del tips[found.whole[-1]]
        before = found.turns[-1] if found.turns else None
        gap_s = None if before is None or before.at_s is None or at_s is None else max(at_s - before.at_s, 0.0)
        found.turns.append(
            Turn(
                index=len(found.turns),
                kind=Kind.START if before is None else Kind.OTHER,
                prompt_tokens=max(row.input_length, 1),
                output_tokens=row.output_length,
                base=None if before is None else Ref(found.id, before.index),
                keep=len(found.whole),
                add=compact((each, 1) for each in whole[len(found.whole) :]),
                after=() if before is None else (Ref(found.id, before.index),),
                think_s=gap_s,
                at_s=at_s,
            )
        )
        found.whole = whole
        if whole:
            tips[whole[-1]] = found
    sessions = (Session(each.id, tuple(each.turns)) for each in chains)
    return Trace(_trees(sessions), block_tokens, global_blocks=True, shared_clock=True)


def _multi_turn(rows: Sequence[tuple[int, _Row]]) -> Trace:
    block_tokens = _block_tokens(rows)
    turns: dict[str, list[Turn]] = {}
    fresh = _OWN_IDS
    for _, row in rows:
        sid = str(row.session_id)
        session = turns.setdefault(sid, [])
        before = session[-1] if session else None
        prompt_tokens = row.input_length
        add = [(each, 1) for each in row.hash_ids]
        blocks = 0
        if before is not None:
            prompt_tokens += before.prompt_tokens + before.output_tokens
            blocks = before.prompt_tokens // block_tokens
            said = max(prompt_tokens // block_tokens - blocks - len(add), 0)
            add.insert(0, (fresh, said))
            fresh += said
        runs = compact(add)
        session.append(
            Turn(
                index=len(session),
                kind=Kind.START if before is None else Kind.OTHER,
                prompt_tokens=max(prompt_tokens, 1),
                output_tokens=row.output_length,
                base=None if before is None else Ref(sid, before.index),
                keep=blocks,
                add=_head(runs, max(prompt_tokens, 1) // block_tokens - blocks),
                after=() if before is None else (Ref(sid, before.index),),
                think_s=None if row.delay is None else row.delay / 1000,
                at_s=None if row.timestamp is None else row.timestamp / 1000,
            )
        )
    sessions = (Session(sid, tuple(session)) for sid, session in turns.items())
    return Trace(_trees(sessions), block_tokens, global_blocks=True, shared_clock=True)


def _head(runs: Sequence[Run], blocks: int) -> tuple[Run, ...]:
    """The first `blocks` blocks of these."""
    kept: list[Run] = []
    for first, count in runs:
        taken = min(count, blocks - length(kept))
        if taken <= 0:
            break
        kept.append(Run(first, taken))
    return tuple(kept)
