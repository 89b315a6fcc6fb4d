"""What goes into a replica model and what comes out of it: a profile, requests, events, a snapshot.

Tokens and pages are counts, times are seconds on the caller's own clock. Events are named tuples, not dataclasses:
a virtual run makes several per turn and millions in all, and these are built in a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Aborted",
    "Counters",
    "Event",
    "Failed",
    "Finished",
    "FirstToken",
    "Progress",
    "Refused",
    "ReplicaProfile",
    "Request",
    "Retracted",
    "Snapshot",
    "Started",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProfile:
    """The size and the speed of one replica. `simulations.profiles` holds named ones, every figure with its source."""

    name: str
    model: str
    page_tokens: int
    """Tokens in a KV page; only whole pages are shared."""
    device_tokens: int
    """KV capacity on the accelerators; a multiple of the page."""
    host_tokens: int = 0
    """KV capacity of the host tier (HiCache); 0: none."""
    context_tokens: int
    """Longest prompt and output together."""
    max_running: int
    """Turns in the running batch at once."""
    max_queued: int | None = None
    """Turns that may wait; one more is refused. None: no limit."""
    priority_scheduling: bool = False
    """Waiting turns with a higher priority go first, and may displace the least of a full queue."""
    chunk_tokens: int
    """Prompt tokens in one prefill pass (--chunked-prefill-size)."""
    decode_steps_between_prefills: int = 0
    """Decode steps owed to the running batch after each prefill pass (--prefill-decode-interval); 0 is SGLang's
    default: waiting prefills go first, and running turns stall until they are done."""
    prefill_tokens_per_s: float
    """At depth 0, where attention costs nothing."""
    prefill_depth_tokens: float
    """Depth at which attention costs as much as all the rest, so that a token costs double."""
    prefill_base_s: float
    """Of each prefill pass."""
    decode_base_s: float
    """Of each decode step."""
    decode_per_sequence_s: float
    """Added to a decode step by each turn in it."""
    decode_per_kv_token_s: float
    """Added to a decode step by each KV token read in it."""
    accept_length: float = 1.0
    """Tokens that a decode step brings each turn, on average: 1 without speculation."""
    accept_spread: float = 0.0
    """Turns differ from the average by up to this share."""
    host_load_tokens_per_s: float = 1e6
    """Load-back from the host tier."""
    tp_size: int = 1
    accelerator: str = ""
    """As `/v1/loads` names it; empty: none."""
    draft_tokens: int = 0
    """Tokens that a verify step checks; 0: no speculation."""

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.device_tokens < 4 * self.page_tokens or self.device_tokens % self.page_tokens:
            raise ValueError("device_tokens must be at least four whole pages")
        if self.host_tokens < 0 or self.host_tokens % self.page_tokens:
            raise ValueError("host_tokens must be whole pages")
        if self.chunk_tokens < self.page_tokens or self.max_running < 1:
            raise ValueError("chunk_tokens must hold a page, and max_running a turn")
        if self.max_queued is not None and self.max_queued < 1:
            raise ValueError("max_queued must be positive, or None for no limit")
        if self.accept_length < 1 or not 0 <= self.accept_spread < 1:
            raise ValueError("accept_length must be at least 1, accept_spread within [0, 1)")
        speeds = (self.prefill_tokens_per_s, self.prefill_depth_tokens, self.decode_base_s, self.host_load_tokens_per_s)
        if min(speeds) <= 0 or min(self.prefill_base_s, self.decode_per_sequence_s, self.decode_per_kv_token_s) < 0:
            raise ValueError("times and rates must be positive")


@dataclass(frozen=True, slots=True)
class Request:
    """One turn as a replica gets it.

    `pages` are chained keys: `pages[i]` stands for the i-th page *and all before it*, of the prompt followed by the
    whole output. Two sequences that agree at i agree up to i, which is what makes matching a bisection. It may end
    before the output does, or even before the prompt; pages without a key are computed and not kept. The sequence is
    not copied, and only its first `(prompt_tokens + output_tokens) // page_tokens` entries are looked at, so callers
    may keep one growing array per conversation, as long as those entries never change.
    """

    rid: str
    pages: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    """What the model will say, unless aborted; at least 1."""
    max_tokens: int = 4096
    """What the client allows; admission reserves memory by it."""
    priority: int = 0
    """Higher goes first, where the profile schedules by priority."""


class Started(NamedTuple):
    """Prefill begins. Cached counts are of the prompt, by tier; they are settled here."""

    rid: str
    at_s: float
    device_tokens: int
    host_tokens: int


class FirstToken(NamedTuple):
    """Prefill is done and the first token out."""

    rid: str
    at_s: float


class Progress(NamedTuple):
    """Tokens said so far; see `ReplicaModel.progress`."""

    rid: str
    output_tokens: int


class Finished(NamedTuple):
    """The whole output is out."""

    rid: str
    at_s: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    output_tokens: int
    retractions: int


class Retracted(NamedTuple):
    """KV ran out: this turn's was freed, and it waits again. Nothing it has said is lost."""

    rid: str
    at_s: float


class Aborted(NamedTuple):
    """Ended on request, with what had been said."""

    rid: str
    at_s: float
    output_tokens: int


class Refused(NamedTuple):
    """Never started. `displaced`: taken out of a full queue by a higher priority."""

    rid: str
    at_s: float
    reason: str
    """`queue_full`, `displaced` or `too_long`."""


class Failed(NamedTuple):
    """Ended by the engine: KV ran out and nothing else could be retracted."""

    rid: str
    at_s: float
    output_tokens: int


Event = Started | FirstToken | Finished | Retracted | Aborted | Refused | Failed


@dataclass(slots=True)
class Counters:
    """Sums over a life."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    prefilled_tokens: int = 0
    """Computed, prompts again after retraction included."""
    prefill_busy_s: float = 0.0
    aborted: int = 0
    refused: int = 0
    retractions: int = 0
    retracted_input_tokens: int = 0
    retracted_output_tokens: int = 0
    decode_steps: int = 0
    verify_calls: int = 0
    """Decode steps times turns in them."""
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    backed_up_tokens: int = 0
    loaded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A replica at one instant; tokens."""

    running: int
    waiting: int
    waiting_uncached_tokens: int
    locked_tokens: int
    """Cached pages that running turns stand on."""
    held_tokens: int
    """Pages that running turns own and share with no one; an upper bound within a page per turn."""
    evictable_tokens: int
    """Cached pages that nobody uses."""
    free_tokens: int
    host_tokens: int
    sequence_tokens: int
    """Sum of the running turns' lengths."""
    tokens_per_s: float
    """Decoding now."""
    counters: Counters = field(repr=False)
