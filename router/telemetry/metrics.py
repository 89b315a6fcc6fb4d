"""Events as Prometheus metrics. Base units; every label is bounded by configuration, membership or an enum.

What to do about them stands in router/README.md. With several workers prometheus-client's multiprocess mode adds them
up exactly: gauges are sums over living processes, counters outlive theirs.
"""

from __future__ import annotations

from typing import Final, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.metrics import MetricWrapperBase

from router.telemetry.events import (
    Event,
    FleetSeen,
    TurnFinished,
    TurnRefused,
    TurnStarted,
    TurnWaited,
    TurnWaiting,
)

__all__ = ["Metrics", "render_all_processes"]

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)

TTFT_BUCKETS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
DURATION_BUCKETS: Final = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WAIT_BUCKETS: Final = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
PLACE_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)


class Metrics:
    """An `Observer` that counts."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, of no use to anyone here
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._in_flight = Gauge(
            "roost_in_flight",
            "Turns placed at a replica by this router and not settled",
            ["replica"],
            registry=r,
            multiprocess_mode="livesum",
        )
        self._turns = Counter(
            "roost_turns",
            "Turns settled, by how they ended and why they went where they went",
            ["fleet", "replica", "dialect", "reason", "end"],
            registry=r,
        )
        self._store = Gauge(
            "roost_store_up",
            "Whether the store can be used: 0 while it is away or another version's, for any worker",
            registry=r,
            multiprocess_mode="livemin",
        )
        self._refused = Counter(
            "roost_requests_refused",
            "Requests that Roost itself answered with an error",
            ["dialect", "code"],
            registry=r,
        )
        self._tenants_refused = Counter(
            "roost_tenant_requests_refused",
            "Requests of tenants in the keys file that Roost itself answered with an error",
            ["tenant", "code"],
            registry=r,
        )
        self._sources = Counter(
            "roost_turns_by_session_source",
            "Turns by the header or field that named their session",
            ["source"],
            registry=r,
        )
        self._retries = Counter("roost_retries", "Turns tried on a further replica", ["fleet"], registry=r)
        self._blind = Counter("roost_blind_turns", "Turns placed without the store", ["fleet"], registry=r)
        self._ejections = Counter(
            "roost_ejections",
            "Times a replica that served was taken out: its turns failed, or it is dead",
            ["fleet", "replica", "why"],
            registry=r,
        )
        self._prompt = Counter(
            "roost_prompt_tokens", "Prompt tokens of settled turns", ["fleet", "replica"], registry=r
        )
        self._cached = Counter(
            "roost_cached_tokens", "Prompt tokens that the engine found in its cache", ["fleet", "replica"], registry=r
        )
        self._predicted = Counter(
            "roost_predicted_cached_tokens",
            "Prompt tokens that were predicted to be cached, of turns whose engine says how many were",
            ["fleet", "replica"],
            registry=r,
        )
        self._output = Counter(
            "roost_output_tokens", "Output tokens of settled turns", ["fleet", "replica"], registry=r
        )
        self._ttft = Histogram(
            "roost_turn_ttft_seconds", "Commit to first output", ["fleet"], registry=r, buckets=TTFT_BUCKETS
        )
        self._duration = Histogram(
            "roost_turn_duration_seconds", "Commit to settled", ["fleet"], registry=r, buckets=DURATION_BUCKETS
        )
        self._place = Histogram(
            "roost_place_seconds",
            "Identify, fetch, decide and acquire: what placing adds before the first byte goes upstream",
            ["fleet"],
            registry=r,
            buckets=PLACE_BUCKETS,
        )
        self._waiting = Gauge(
            "roost_waiting",
            "New sessions that wait for KV room at this router",
            ["fleet"],
            registry=r,
            multiprocess_mode="livesum",
        )
        self._wait = Histogram(
            "roost_wait_seconds",
            "How long new sessions waited for KV room, by whether they got it",
            ["fleet", "result"],
            registry=r,
            buckets=WAIT_BUCKETS,
        )
        self._live_share = Gauge(
            "roost_kv_live_share",
            "KV tokens that live branches want kept per token of room; above its limit new sessions wait",
            ["fleet"],
            registry=r,
            multiprocess_mode="livemostrecent",
        )
        self._children: dict[int, dict[tuple[str, ...], MetricWrapperBase]] = {}

    def emit(self, event: Event) -> None:
        """See `router.telemetry.events.Observer`."""
        match event:
            case TurnStarted():
                self._of(self._in_flight, event.replica).inc()
            case TurnFinished():
                self._finished(event)
            case TurnRefused():
                self._of(self._refused, event.dialect, event.code).inc()
                if event.tenant is not None:
                    self._of(self._tenants_refused, event.tenant, event.code).inc()
            case TurnWaiting():
                self._of(self._waiting, event.fleet).inc()
            case TurnWaited():
                self._of(self._waiting, event.fleet).dec()
                self._of(self._wait, event.fleet, "admitted" if event.admitted else "not_admitted").observe(
                    event.waited_s
                )
            case FleetSeen():
                self._of(self._live_share, event.fleet).set(event.live_share)

    def store(self, up: bool) -> None:
        """The store is up, or not."""
        self._store.set(up)

    def ejected(self, fleet: str, replica: str, why: str) -> None:
        """A replica is out; `why` is "turns" or "dead"."""
        self._of(self._ejections, fleet, replica, why).inc()

    def render(self) -> bytes:
        """The exposition of this process."""
        return generate_latest(self.registry)

    def _finished(self, event: TurnFinished) -> None:
        fleet, replica, outcome = event.fleet, event.replica, event.outcome
        self._of(self._in_flight, replica).dec()
        self._of(self._turns, fleet, replica, event.dialect, event.reason.value, outcome.end.value).inc()
        self._of(self._sources, event.session_source).inc()
        self._of(self._place, fleet).observe(event.place_s)
        self._of(self._duration, fleet).observe(outcome.duration_s)
        if outcome.ttft_s is not None:
            self._of(self._ttft, fleet).observe(outcome.ttft_s)
        if event.attempt > 1:
            self._of(self._retries, fleet).inc()
        if event.blind:
            self._of(self._blind, fleet).inc()
        usage = outcome.usage
        if usage.prompt_tokens is not None:
            self._of(self._prompt, fleet, replica).inc(usage.prompt_tokens)
        if usage.output_tokens is not None:
            self._of(self._output, fleet, replica).inc(usage.output_tokens)
        if usage.cached_tokens is not None:
            self._of(self._cached, fleet, replica).inc(usage.cached_tokens)
            self._of(self._predicted, fleet, replica).inc(event.predicted_cached_tokens)

    def _of(self, metric: _Metric, *labels: str) -> _Metric:
        """The child for these labels; looking it up here costs a tenth of `labels`, which takes a lock."""
        children = self._children.setdefault(id(metric), {})
        child = children.get(labels)
        if child is None:
            child = children[labels] = metric.labels(*labels)
        return cast("_Metric", child)


def render_all_processes(folder: str) -> bytes:
    """The exposition of all workers whose metric files lie in `folder`."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
