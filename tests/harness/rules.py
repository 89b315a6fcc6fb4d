"""What must hold for a harness behind a router: pure functions over what was recorded, which return what is wrong."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal

from tests.harness.rig import MockTurn
from tests.harness.wire import Body, End, Exchange

__all__ = [
    "Attempt",
    "Labelled",
    "attempts",
    "broken_orders",
    "crowded_subagents",
    "errors",
    "labelled",
    "moves",
    "retries_differ",
    "unequal_bodies",
]

Kind = Literal["main", "sub", "side"]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A turn and the branch it belongs to by the harness's own word, or by its content; never by Roost's."""

    branch: str
    kind: Kind
    """side: shares no prompt with the others (title, memory extraction), so it may go anywhere."""
    mock: str
    started_s: float
    ended_s: float


def labelled(harness: str, turns: Sequence[MockTurn]) -> list[Labelled]:
    """The branch of each turn."""
    systems: dict[str, str] = {}
    lengths: dict[str, int] = {}
    compactions: Counter[str] = Counter()
    found = []
    for turn in turns:
        branch, kind = _own_word(harness, turn)
        if not turn.body.get("tools"):
            branch, kind = f"{branch}/side", "side"
        elif harness == "qwen" and kind == "main" and systems.setdefault(branch, _system(turn)) != _system(turn):
            # The memory extraction: a main turn by its messages, with another system prompt.
            branch, kind = "memory", "side"
        elif kind == "main":
            # A conversation that shrinks was compacted: what goes on is another prompt, so another branch.
            length = len(_messages(turn))
            compactions[branch] += length < lengths.get(branch, 0)
            lengths[branch] = length
            branch += "'" * compactions[branch]
        found.append(Labelled(branch, kind, turn.mock, turn.exchange.started_s, turn.exchange.ended_s))
    return found


def _own_word(harness: str, turn: MockTurn) -> tuple[str, Kind]:
    headers = turn.headers
    if harness.startswith("claude"):
        agent = headers.get("x-claude-code-agent-id")
        return (agent, "sub") if agent else ("main", "main")
    if harness == "codex":
        return headers["thread-id"], "sub" if "x-openai-subagent" in headers else "main"
    if harness == "opencode":
        return headers["x-session-id"], "sub" if "x-parent-session-id" in headers else "main"
    if turn.role.startswith("sub"):
        return turn.role, "sub"
    return "main", "main"


def _messages(turn: MockTurn) -> list[Any]:
    messages: list[Any] = turn.body.get("messages") or turn.body.get("input") or []
    return messages


def _system(turn: MockTurn) -> str:
    return json.dumps(_messages(turn)[:1])


def moves(turns: Iterable[Labelled]) -> dict[str, list[str]]:
    """Branches that were on more than one mock, with the mocks in order."""
    seen: dict[str, list[str]] = defaultdict(list)
    for turn in turns:
        if turn.kind != "side":
            seen[turn.branch].append(turn.mock)
    return {branch: mocks for branch, mocks in seen.items() if len(set(mocks)) > 1}


def crowded_subagents(turns: Iterable[Labelled]) -> tuple[int, list[tuple[str, str]]]:
    """How many pairs of subagents began while the other's first turn ran, and those of them that share a mock."""
    firsts: dict[str, Labelled] = {}
    for turn in turns:
        if turn.kind == "sub":
            firsts.setdefault(turn.branch, turn)
    at_once = [
        (one, other)
        for one, other in combinations(firsts.values(), 2)
        if one.started_s < other.ended_s and other.started_s < one.ended_s
    ]
    return len(at_once), [(one.branch, other.branch) for one, other in at_once if one.mock == other.mock]


def unequal_bodies(front: Sequence[Exchange], back: Sequence[Exchange]) -> list[str]:
    """Model requests whose bodies, in either direction, differ between the two ends.

    Exchanges are paired by path and request digest. What an end has that was cut short must be the other's beginning.
    """
    wrong = []
    sent, got = _by_request(front), _by_request(back)
    for key in sent.keys() | got.keys():
        ours, theirs = sent.get(key, []), got.get(key, [])
        what = f"{key[0]} {key[1][:12]}"
        if len(ours) != len(theirs):
            wrong.append(f"{what}: {len(ours)} times at the client, {len(theirs)} times at the replicas")
            continue
        left = list(theirs)
        for one in ours:
            match = next((other for other in left if _same_answer(one, other)), None)
            if match is None:
                wrong.append(f"{what}: no answer of a replica is what the client got ({one.response.length} bytes)")
            else:
                left.remove(match)
    return sorted(wrong)


def _by_request(exchanges: Iterable[Exchange]) -> dict[tuple[str, str], list[Exchange]]:
    found: dict[tuple[str, str], list[Exchange]] = defaultdict(list)
    for each in exchanges:
        if each.method == "POST":
            found[each.target, each.request.sha256].append(each)
    return found


def _same_answer(one: Exchange, other: Exchange) -> bool:
    if one.status != other.status:
        return False
    if one.response.sha256 == other.response.sha256:
        return True
    cut = one.end is not End.COMPLETE or other.end is not End.COMPLETE
    return cut and _begins(*sorted((one.response, other.response), key=lambda body: body.length))


def _begins(short: Body, long: Body) -> bool:
    """Whether the shorter one's whole events are the longer one's first events."""
    return long.events[: len(short.events)] == short.events


def broken_orders(done: Sequence[str], printed: str) -> list[str]:
    """Of the texts that must be printed in this order, those that are not."""
    at = 0
    missing = []
    for text in done:
        found = printed.find(text, at)
        if found < 0:
            missing.append(text)
        else:
            at = found + len(text)
    return missing


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request as the client saw it end, and the seconds until it tried again."""

    outcome: str
    """A status from 400 on; `broken`: cut or reset; `unfinished`: ended properly without its last event; `whole`."""
    pause_s: float | None


def attempts(front: Sequence[Exchange]) -> list[Attempt]:
    """The client's attempts, one after the other."""
    posts = [each for each in front if each.method == "POST"]
    pauses = [after.started_s - before.ended_s for before, after in pairwise(posts)]
    return [Attempt(_outcome(each), pause) for each, pause in zip(posts, [*pauses, None], strict=True)]


def _outcome(each: Exchange) -> str:
    if each.status is not None and each.status >= 400:
        return str(each.status)
    if each.response.terminal:
        return "whole"
    return "unfinished" if each.end is End.COMPLETE else "broken"


def retries_differ(direct: Sequence[Attempt], through: Sequence[Attempt], tolerance_s: float) -> list[str]:
    """How the attempts through the router differ from those without, beyond what is allowed.

    Allowed: a replica that hangs up before a byte may look like a 502 or 503, and the client may then try again sooner.
    """
    if len(direct) != len(through):
        outcomes = [[each.outcome for each in side] for side in (direct, through)]
        return [f"{len(direct)} attempts without the router, {len(through)} with it: {outcomes[0]}, {outcomes[1]}"]
    wrong = []
    for n, (one, other) in enumerate(zip(direct, through, strict=True), 1):
        softened = one.outcome == "broken" and other.outcome in ("502", "503")
        if one.outcome != other.outcome and not softened:
            wrong.append(f"attempt {n}: {one.outcome} without the router, {other.outcome} with it")
        if one.pause_s is None or other.pause_s is None or one.outcome == "whole":
            continue
        later = other.pause_s - one.pause_s
        if later > tolerance_s or (later < -tolerance_s and not softened):
            wrong.append(f"attempt {n} ({one.outcome}): next after {one.pause_s:.1f} s, with it {other.pause_s:.1f} s")
    return wrong


def errors(front: Sequence[Exchange]) -> list[str]:
    """Model requests that the client did not get a whole and good answer to."""
    return [
        f"{each.target}: {each.status}, {each.end}"
        for each in front
        if each.method == "POST" and (each.status != 200 or not _whole(each))
    ]


def _whole(each: Exchange) -> bool:
    return each.end is End.COMPLETE or each.response.terminal
