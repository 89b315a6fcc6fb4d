"""A replica as the router sees it: what it is, what it holds, how fast it is, and what it has been given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["NO_BELIEFS", "ZERO_LOAD", "Beliefs", "Capacity", "Fleet", "Load", "Profile", "Replica", "Standing"]


class Standing(StrEnum):
    """What an operator or the replica itself has said about taking turns."""

    SERVING = "serving"
    CORDONED = "cordoned"
    """No new branches; its own branches go on."""
    DRAINING = "draining"
    """No new turns; running ones finish."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV room of one replica, in tokens, and how many turns it runs at once."""

    device_tokens: int
    host_tokens: int = 0
    max_running: int = 64


@dataclass(frozen=True, slots=True)
class Profile:
    """Prior figures of a replica class, used until enough has been observed.

    Defaults are deliberately round assumptions for a 4×B200 Kimi-K2.6 replica: no measured prefill rate was found in
    public sources, so 20,000 tokens/s is the middle of the 8k-40k range to sweep.
    """

    prefill_rate: float = 20_000.0
    """Uncached prompt tokens per second."""
    host_load_rate: float = 700_000.0
    """Tokens per second loaded back from host memory (100k tokens of BF16 MLA rows at 50 GB/s)."""
    step_time_s: float = 0.02
    """Seconds per decode step with one turn running."""
    step_slope: float = 0.02
    """Relative growth of the step time per further running turn."""
    accept_length: float = 1.0
    """Tokens accepted per decode step (1 without speculation)."""
    tokens_per_byte: float = 0.25
    """Prompt tokens per byte of prompt text."""
    device_tokens: int = 750_000
    host_tokens: int = 0
    max_running: int = 64


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What has been learned of one replica's life; see `router.placement.learn`. A zero weight means: nothing yet."""

    prefill_rate: float = 0.0
    prefill_weight: float = 0.0
    token_time_s: float = 0.0
    """Seconds between two output tokens of one stream, scaled to one running turn."""
    token_weight: float = 0.0
    tokens_per_byte: float = 0.0
    bytes_weight: float = 0.0
    residency_factor: float = 1.0
    """Cached tokens found / cached tokens predicted; 1 is a perfect prediction."""
    evicted_asked_share: float = 0.5
    """ε: of the tokens believed evicted, the share that was asked for again (0 with room to spare, towards 1 at the
    cliff)."""


NO_BELIEFS = Beliefs()
"""Nothing yet."""


@dataclass(frozen=True, slots=True)
class Load:
    """What all routers together have placed on a replica and not settled, plus the counters of its life."""

    in_flight: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of turns whose first byte has not come yet."""
    locked_tokens: int = 0
    """KV tokens that running turns are adding. What they reuse was counted when it was admitted, and a prefix that
    several of them share would else count once for each.
    """
    admitted_tokens: int = 0
    """KV tokens newly written in this incarnation's life; never goes down within a life."""
    crowd: float = 0.0
    """Weight of live branches bound here, decayed to `crowd_at_s`."""
    crowd_at_s: float = 0.0
    live_tokens: float = 0.0
    """KV tokens that live branches bound here want kept, decayed to `crowd_at_s` too."""


ZERO_LOAD = Load()


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica in a fleet snapshot."""

    id: str
    url: str
    incarnation: str
    capacity: Capacity
    standing: Standing = Standing.SERVING
    healthy: bool = True
    """False: unreachable or not ready; takes no turn."""
    ejected: bool = False
    """Reachable, but out for failing its turns: takes one only where nobody else may."""
    probation: bool = False
    """Back after it was ejected or dead: takes one turn at a time until one has said something."""
    unseen: bool = False
    """This router has not looked at it yet, and another one has recorded its life: it takes its own branches only."""
    joined_at_s: float = 0.0
    """When this incarnation became ready (Unix seconds); start of its slow start."""
    load: Load = ZERO_LOAD
    beliefs: Beliefs = NO_BELIEFS
    models: tuple[str, ...] = ()
    foreign_in_flight: int = 0
    """Turns that the engine reports beyond our leases: traffic that did not come through any router."""
    foreign_prefill_tokens: int = 0
    reports_cache: bool = False
    """Its usage tells cached tokens; where it leaves them out, none were."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of one model at one moment."""

    name: str
    profile: Profile
    replicas: tuple[Replica, ...]
    now_s: float
    """The store's clock (Unix seconds) at the snapshot, so that all routers decay alike."""

    def get(self, replica_id: str) -> Replica | None:
        """The replica of that id, if it is in this snapshot."""
        for replica in self.replicas:
            if replica.id == replica_id:
                return replica
        return None
