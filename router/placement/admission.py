"""Whether a new session may begin: a fleet whose live KV no longer fits thrashes, so newcomers wait before it does.

Every branch counts, at its home, the tokens it wants kept there, halved every `live_half_life_s` since its last turn
(`Load.live_tokens`). Where their sum nears the room of the replicas that may take a new branch, each further session
would push out KV that a running one is about to ask for again: all of them then prefill instead of decoding. So
sessions that are running go on, with their forks and subagents, and new ones wait at the door
(`router.lifecycle.waiting`).

What many sessions share (a harness' tools and system prompt) counts once for each, since no session knows of the
others, and the tokens of an agent that has ended count until they have decayed: so the limit is somewhat above 1. What
a fork shares with the branch it came from, at the same replica, counts once. Most prompts that come without a session's
name are never followed by another; they count in full from their second turn on. And where nothing runs anywhere,
nobody waits, whatever is remembered of sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from router.domain.replica import Fleet, Load, Standing
from router.domain.session import Binding
from router.domain.shared import View
from router.domain.turn import Facts, Turn
from router.placement.cost import Tuning, decay
from router.placement.lineage import Lineage

__all__ = ["Occupancy", "admits", "begins_session", "live_now", "live_share", "need_of", "occupancy", "retry_after_s"]

_NEED_SHARE_MAX: Final = 0.5
"""A prompt asks for at most this share of what is allowed: a larger one would wait until nothing else lived."""
_UNNAMED_SHARE: Final = 8
"""The first turn of a conversation without a name counts an eighth of its tokens: it may be the only one."""
_RETRY_LEAST_S: Final = 5.0
_RETRY_MOST_S: Final = 30.0
"""The SDKs of OpenAI and Anthropic heed a Retry-After of up to 60 s."""
_TOKENS_MAX: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a fleet's live branches want kept, and what there is room for; tokens."""

    live_tokens: float
    room_tokens: int
    idle: bool = False
    """No turn runs anywhere, as far as leases and engines tell."""

    @property
    def share(self) -> float:
        """Live tokens per token of room; 0 for a fleet without room, which admission does not judge."""
        return self.live_tokens / self.room_tokens if self.room_tokens > 0 else 0.0


def live_now(load: Load, now_s: float, half_life_s: float) -> float:
    """KV tokens that the live branches bound to a replica want kept, at `now_s`."""
    return decay(load.live_tokens, now_s - load.crowd_at_s, half_life_s)


def occupancy(fleet: Fleet, tuning: Tuning) -> Occupancy:
    """The fleet's live tokens and its room for them.

    Room is on the replicas that may take a new branch, device and host. A cordoned replica keeps its branches, so
    neither counts; those of one that drains or died will ask for room elsewhere as they speak, so they do.
    """
    live, room, idle = 0.0, 0, True
    for replica in fleet.replicas:
        idle = idle and not replica.load.in_flight and not replica.foreign_in_flight
        if replica.standing is Standing.CORDONED and replica.healthy:
            continue
        live += live_now(replica.load, fleet.now_s, tuning.live_half_life_s)
        if replica.standing is Standing.SERVING and replica.healthy and not replica.ejected:
            room += replica.capacity.device_tokens + replica.capacity.host_tokens
    return Occupancy(live, room, idle)


def begins_session(facts: Facts, lineage: Lineage, view: View) -> bool:
    """Whether the turn begins a session that nothing is known of; only such turns may be asked to wait.

    A session with an id is known by its record; one without by its prompt, which must extend, or fork from, a known
    one by more than tools and system prompt: these are common to all sessions of a harness.
    """
    if lineage.known is not None or view.response_replica is not None:
        return False
    if facts.session is not None:
        forks_own = lineage.parent is not None and lineage.parent.session == facts.session
        return view.session is None and not forks_own
    return view.branch is None


def need_of(turn: Turn) -> int:
    """KV tokens that a new session brings."""
    return max(0, turn.prompt_tokens - turn.shared_tokens)


def admits(need_tokens: int, seen: Occupancy, limit: float) -> bool:
    """Whether a new session that needs so much may begin, at `limit` live tokens per token of room (0: always)."""
    allowed = limit * seen.room_tokens
    return allowed <= 0 or seen.idle or seen.live_tokens + min(need_tokens, _NEED_SHARE_MAX * allowed) <= allowed


def live_share(turn: Turn, lineage: Lineage, home: Binding, *, named: bool) -> tuple[int, int]:
    """What the branch counts in its home's live tokens from this turn on, and what it inherits there from the branch
    it forked from (which counts that already). `named`: the client gave its session a name.
    """
    inherited = 0
    if lineage.known is not None:
        inherited = lineage.known.inherited_tokens if lineage.known.home == home else 0
    elif lineage.parent is not None and lineage.parent.home == home:
        inherited = turn.shared_tokens
    share = max(0, turn.prompt_tokens - inherited)
    if lineage.known is None and not named:
        share //= _UNNAMED_SHARE
    return min(share, _TOKENS_MAX), min(inherited, _TOKENS_MAX)


def retry_after_s(turn_id: str, pressure: float) -> float:
    """When a refused client should ask again: later the more are waiting (`pressure`: 0 to 1), and spread by the turn's
    id over half to one and a half times that, so that those who were refused together do not return together.
    """
    mean_s = _RETRY_LEAST_S + (_RETRY_MOST_S - _RETRY_LEAST_S) * min(1.0, max(0.0, pressure))
    dice = int.from_bytes(blake2b(turn_id.encode(), digest_size=4, person=b"roost-retry").digest(), "little") / 2**32
    return mean_s * (0.5 + dice)
