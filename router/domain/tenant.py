"""A tenant: who pays, as a keys file names it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tenant", "TenantLimits"]


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
