"""A tenant: who pays, as a keys file names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Denied", "Tenant", "TenantLimits", "next_arrival"]

_MINUTE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use at once and in time; None: as much as it likes."""

    rate_per_minute: int | None = None
    """Turns a minute. That many may come at once; they are given back evenly over the minute."""
    concurrent: int | None = None
    """Turns under way at one moment."""

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self.rate_per_minute is not None or self.concurrent is not None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of API keys."""

    name: str
    scope: str
    """What its sessions, prompts and stored responses are hashed with: the same whichever of its keys is used."""
    limits: TenantLimits = TenantLimits()
    engine_control: bool = False
    """Whether it may ask paths that act on an engine as a whole: flush caches, abort others' requests, load weights."""


@dataclass(frozen=True, slots=True)
class Denied:
    """A turn that its tenant may not begin now."""

    limit: str
    """`rate` or `concurrent`."""
    retry_after_s: float


def next_arrival(arrival_us: int, now_us: int, rate_per_minute: int) -> tuple[int, float]:
    """Rate limiting by the generic cell rate algorithm (ITU-T I.371): one number, no window that could be gamed.

    `arrival_us`: what this returned last for the tenant, 0 at first; times in microseconds. Returns it moved on and
    0.0, or unmoved and the seconds until a turn is allowed. A full minute's turns may come at once, then one for each
    `60 / rate_per_minute` seconds that pass. `router/store/scripts/take_permit.lua` does the same.
    """
    moved_us = max(arrival_us, now_us) + _MINUTE_US // rate_per_minute
    if moved_us - now_us > _MINUTE_US:
        return arrival_us, (moved_us - now_us - _MINUTE_US) / 1e6
    return moved_us, 0.0
