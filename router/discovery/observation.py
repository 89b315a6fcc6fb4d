"""What one round of probing learned of a replica. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["WANTS_KEY", "Engine", "Failure", "Observation", "bounded_problems", "measured_prefill_rate", "printable"]

WANTS_KEY = ", the replica wants its API key"
"""How a problem ends that a key would solve."""
_PROBLEMS_MAX = 8
_PROBLEM_CHARS_MAX = 160


class Engine(StrEnum):
    """What kind of server answers there. Bounded: may be a metric label."""

    SGLANG = "sglang"
    OPENAI = "openai"
    """Not SGLang, but it lists its models as OpenAI does; reachable means ready."""
    UNKNOWN = "unknown"


class Failure(StrEnum):
    """Why a replica could not be reached. Bounded: may be a metric label."""

    REFUSED = "refused"
    """Nobody listens: the process is gone or not yet up. The only failure that speaks for a new life."""
    UNRESOLVED = "unresolved"
    """No address, no route, no TLS: never connected."""
    TIMEOUT = "timeout"
    """Connected or not, no answer in time: busy, stopped, or cut off."""
    RESET = "reset"
    """The connection broke before an answer."""
    NONSENSE = "nonsense"
    """What came is not HTTP."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A replica as its own surface shows it. None means: not said, or not said credibly.

    With data parallelism (`dp_ranks` > 1) counts are sums over ranks; a session lives in one rank, so the largest
    context it can keep is `device_tokens / dp_ranks`.
    """

    reachable: bool = False
    failure: Failure | None = None
    """Set exactly when not reachable."""
    ready: bool | None = None
    """What `/ready` says; None where the engine has no such path. Then reachable is all there is to go by."""
    engine: Engine = Engine.UNKNOWN
    version: str = ""
    models: tuple[str, ...] = ()
    """Served names, those of LoRA adapters included."""
    incarnation: str | None = None
    """Equal on every router while the engine process lives; None where the engine shows nothing that tells its lives
    apart.
    """
    lives: int = 0
    """New lives this router has noticed since it first saw the replica; the substitute where `incarnation` is None.
    Routers may differ in it.
    """
    device_tokens: int | None = None
    host_tokens: int | None = None
    """0: no host tier. None: not known."""
    page_size: int | None = None
    context_length: int | None = None
    max_running: int | None = None
    running: int | None = None
    waiting: int | None = None
    used_tokens: int | None = None
    """KV tokens locked by running requests; evictable cache is not counted."""
    waiting_uncached_tokens: int | None = None
    prefill_uncached_total: int | None = None
    """Tokens prefilled in this life; with `prefill_busy_us_total`, microseconds spent on it, the measured prefill
    rate.
    """
    prefill_busy_us_total: int | None = None
    accept_length: float | None = None
    """Tokens per verification step, the bonus token included; None without speculation."""
    cache_report: bool | None = None
    """Whether usage tells cached tokens (`--enable-cache-report`)."""
    response_store: bool | None = None
    """Whether stored responses can be read back (`--enable-response-store`)."""
    disaggregation_mode: str = ""
    """"null", "prefill" or "decode" for SGLang; "" where not known."""
    draining: bool = False
    """Takes no new turns though it has served in this life: drained, paused, or marked unhealthy. See
    `router.discovery.assemble`.
    """
    dp_ranks: int = 1
    problems: tuple[str, ...] = ()
    """What was odd this round; a few short printable texts, never a body, never a key."""
    was_ready: bool = False
    """Has answered ready in this life."""
    restart_suspected: bool = False
    """A sign of a new life was seen that no fact has confirmed or refuted yet."""
    describe_at_s: float = 0.0
    """When (monotonic clock of the probing router) the slow facts are to be read again."""

    @property
    def wants_key(self) -> bool:
        """Whether it refused what was asked this round for want of its API key."""
        return any(problem.endswith(WANTS_KEY) for problem in self.problems)


def printable(text: str, chars_max: int = _PROBLEM_CHARS_MAX) -> str:
    """The text with everything unprintable (controls, line ends, direction marks, lone surrogates) replaced, cut to
    length.
    """
    return "".join(c if c.isprintable() else "?" for c in text[:chars_max])


def bounded_problems(problems: Iterable[str]) -> tuple[str, ...]:
    """Distinct problems in order, bounded in number and length, safe to log."""
    distinct = dict.fromkeys(printable(problem) for problem in problems)
    return tuple(distinct)[:_PROBLEMS_MAX]


def measured_prefill_rate(before: Observation, after: Observation) -> float | None:
    """Uncached prompt tokens per second of prefill work between two observations of one life; None where nothing was
    prefilled.

    The engine counts both itself (`total_prefill_uncached_tokens`, `total_prefill_busy_us` in `/v1/loads`), so idle
    time does not dilute it.
    """
    if (before.incarnation, before.lives, before.dp_ranks) != (after.incarnation, after.lives, after.dp_ranks):
        return None
    counters = (
        before.prefill_uncached_total,
        after.prefill_uncached_total,
        before.prefill_busy_us_total,
        after.prefill_busy_us_total,
    )
    if any(counter is None for counter in counters):
        return None
    tokens_before, tokens_after, us_before, us_after = (counter or 0 for counter in counters)
    if tokens_after <= tokens_before or us_after <= us_before:
        return None
    return (tokens_after - tokens_before) * 1e6 / (us_after - us_before)
