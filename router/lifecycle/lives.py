"""A replica's record in the shared membership as it should be after a look at it: its life, its room, its models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.discovery.observation import Observation
from router.domain.replica import Capacity, Profile, Standing
from router.domain.shared import Member

__all__ = ["Noticed", "outdated", "recorded", "restored"]


@dataclass(frozen=True, slots=True)
class Noticed:
    """The life that this router last agreed on with the record."""

    lives: int = 0
    """Lives noticed when `life` was recorded."""
    life: str = ""


def recorded(member: Member, seen: Observation, noticed: Noticed, profile: Profile, now_s: float) -> Member:
    """The record of `member` after this look. `now_s`: the store's clock, which decisions measure a slow start with."""
    incarnation = _incarnation(member, seen, noticed)
    capacity = _capacity(seen, profile) or member.capacity
    models = seen.models or member.models
    if (incarnation, capacity, models) == (member.incarnation, member.capacity, member.models):
        return member
    joined_at_s = member.joined_at_s if incarnation == member.incarnation else now_s
    return replace(member, incarnation=incarnation, capacity=capacity, models=models, joined_at_s=joined_at_s)


def outdated(member: Member, seen: Observation, noticed: Noticed) -> bool:
    """Whether another router has found a newer life, and this look still tells of the one before.

    Slow facts are read seldom: who did not meet the gap between two lives knows of the new one only by the record, and
    would write the old one over it.
    """
    return seen.incarnation == noticed.life and member.incarnation not in ("", noticed.life)


def restored(found: Member, known: Member) -> Member:
    """What to record of a member after the store has lost it, and has `found` again from a router that knew nothing:
    an operator's word is as it was, and a life that goes on is as old as it was.
    """
    if not found.incarnation:
        return replace(known, url=found.url, source=found.source)
    standing = known.standing if found.standing is Standing.SERVING else found.standing
    same_life = found.incarnation == known.incarnation
    joined_at_s = min(found.joined_at_s, known.joined_at_s) if same_life else found.joined_at_s
    return replace(found, standing=standing, joined_at_s=joined_at_s)


def _incarnation(member: Member, seen: Observation, noticed: Noticed) -> str:
    """The life that is being lived there. Where the engine shows nothing that tells its lives apart, a restart that
    this router noticed begins the next numbered one, unless another router has recorded it already.
    """
    if seen.incarnation is not None:
        return seen.incarnation
    known = member.incarnation or "life-0"
    if seen.lives > noticed.lives and known == noticed.life:
        number = known.removeprefix("life-")
        known = f"life-{int(number) + 1 if number.isdigit() else 1}"
    return known


def _capacity(seen: Observation, profile: Profile) -> Capacity | None:
    if seen.device_tokens is None:
        return None
    return Capacity(
        device_tokens=seen.device_tokens,
        host_tokens=seen.host_tokens if seen.host_tokens is not None else profile.host_tokens,
        max_running=seen.max_running or profile.max_running,
    )
