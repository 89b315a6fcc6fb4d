"""The decision: a pure function of the turn, its lineage, the fleet and the policy. Same snapshot, same answer, on
every router.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from router.domain.decision import Cost, Decision, Placed, Reason, Refused
from router.domain.replica import Fleet, Replica
from router.domain.session import Binding, Residue
from router.domain.turn import Facts, Turn
from router.placement.cost import Rates, Tuning, crowd_now, decay, rates_of
from router.placement.filters import eligible, is_home, may_take
from router.placement.lineage import Lineage
from router.placement.policy import POLICIES, Choice

__all__ = ["Tried", "decide", "turn_of"]

Tried = Mapping[str, Literal["busy", "gone"]]
"""Replicas that failed this turn: `busy` keeps its branches (the turn spills), `gone` loses this one (it rebinds)."""


def turn_of(turn_id: str, facts: Facts, lineage: Lineage, rates: Rates, tuning: Tuning, sequence: int) -> Turn:
    """The turn in tokens. Where the branch's newest prompt was counted by the engine, only what was added is
    estimated.
    """
    total_bytes = lineage.tip.text_bytes if lineage.tip is not None else 0
    shared_bytes = lineage.shared_bytes
    known = lineage.known
    if known is not None and known.tokens and known.text_bytes and shared_bytes >= known.text_bytes:
        shared = known.tokens + int((shared_bytes - known.text_bytes) * rates.tokens_per_byte)
    else:
        shared = int(shared_bytes * rates.tokens_per_byte)
    prompt = shared + int((total_bytes - shared_bytes) * rates.tokens_per_byte)
    output = tuning.expected_output_tokens
    if facts.max_output_tokens is not None:
        output = min(output, facts.max_output_tokens)
    return Turn(turn_id, lineage.session, max(1, prompt), max(1, output), shared, lineage.fork, sequence)


def decide(
    turn: Turn,
    lineage: Lineage,
    fleet: Fleet,
    policy: str,
    tuning: Tuning,
    *,
    session_home: Binding | None = None,
    only: Binding | None = None,
    tried: Tried | None = None,
    rates: Rates | None = None,
) -> Decision:
    """Place the turn, or refuse it.

    `only`: the replica that must take it if it may, since it alone holds a stored response that the turn names, or
    since nothing is known of the others. `rates`: the fleet's, where the caller has worked them out already.
    """
    tried = tried or {}
    home = lineage.known.home if lineage.known is not None else None
    candidates = eligible(fleet, home, tried)
    reason: Reason | None = None
    if only is not None:
        # A cordon keeps new branches out, and a stored response is continued, not begun; nor has anyone else got it,
        # however doubtful its holder is.
        holders = tuple(replica for replica in may_take(fleet, only, tried) if is_home(replica, only))
        if holders:
            candidates, reason = holders, None if only == home else Reason.STORED
    if not candidates:
        return Refused(_why(fleet, tried))
    choice = Choice(
        turn=turn,
        branch=lineage.branch,
        home=home,
        session_home=session_home,
        residues=lineage.parent.residues if lineage.parent is not None else (),
        eligible=_spared(candidates, lineage, fleet, tuning),
        fleet=fleet,
        rates=rates if rates is not None else rates_of(fleet),
        tuning=tuning,
    )
    ranked = POLICIES[policy](choice)
    best = fleet.get(ranked[0].replica)
    if best is None:
        raise LookupError(f"policy {policy} ranked a replica outside the fleet")
    if reason is None:
        reason = _reason(policy, lineage, home, best, candidates, fleet, tried)
    return _placed(turn, best, reason, home, ranked, choice.residues)


def _spared(candidates: tuple[Replica, ...], lineage: Lineage, fleet: Fleet, tuning: Tuning) -> tuple[Replica, ...]:
    """The replicas without the crowd share of a branch whose place the new one takes: an idle one of its own session
    that began with the same tools and system prompt, as a history does that was compacted.
    """
    parent = lineage.parent
    if lineage.known is not None or parent is None or parent.in_flight or parent.session != lineage.session:
        return candidates
    share = decay(parent.weight, fleet.now_s - parent.active_at_s, tuning.crowd_half_life_s)

    def spared(replica: Replica) -> Replica:
        if not is_home(replica, parent.home):
            return replica
        crowd = max(0.0, crowd_now(replica.load, fleet.now_s, tuning.crowd_half_life_s) - share)
        return replace(replica, load=replace(replica.load, crowd=crowd, crowd_at_s=fleet.now_s))

    return tuple(map(spared, candidates))


def _reason(
    policy: str,
    lineage: Lineage,
    home: Binding | None,
    best: Replica,
    candidates: tuple[Replica, ...],
    fleet: Fleet,
    tried: Tried,
) -> Reason:
    if lineage.known is None:
        return Reason.NEW if lineage.parent is None else Reason.FORK
    if home is None:
        return Reason.HOME_GONE
    if is_home(best, home):
        return Reason.HOME
    if any(is_home(replica, home) for replica in candidates):
        return Reason.REBIND if policy == "roost" else Reason.POLICY
    # A home on probation that has its one turn is busy as a full one is.
    waits = any(is_home(replica, home) and replica.probation for replica in may_take(fleet, home, tried))
    if (waits or tried.get(home.replica) == "busy") and _left_something(lineage, home):
        return Reason.SPILL
    return Reason.HOME_GONE


def _left_something(lineage: Lineage, home: Binding) -> bool:
    """Whether the branch has been served at its home: a home that was full from the start holds nothing to return
    to.
    """
    known = lineage.known
    return known is not None and any(
        residue.replica == home.replica and residue.incarnation == home.incarnation for residue in known.residues
    )


def _placed(
    turn: Turn,
    best: Replica,
    reason: Reason,
    home: Binding | None,
    ranked: tuple[Cost, ...],
    residues: tuple[Residue, ...],
) -> Placed:
    held = ranked[0].residency
    cached = held.device_tokens + held.host_tokens
    here = Binding(best.id, best.incarnation)
    return Placed(
        replica=best.id,
        incarnation=best.incarnation,
        url=best.url,
        reason=reason,
        binding=home if reason is Reason.SPILL and home is not None else here,
        candidates=ranked,
        prefill_tokens=max(0, turn.prompt_tokens - cached),
        cached_tokens=cached,
        held_once_tokens=next(
            (
                min(r.tokens, turn.shared_tokens)
                for r in residues
                if r.replica == best.id and r.incarnation == best.incarnation
            ),
            0,
        ),
    )


def _why(fleet: Fleet, tried: Tried) -> str:
    if not fleet.replicas:
        return f"fleet {fleet.name} has no replicas"
    if tried:
        return f"no replica of fleet {fleet.name} is left to try ({len(tried)} failed this turn)"
    return f"no replica of fleet {fleet.name} is ready ({len(fleet.replicas)} known)"
