"""What router and replicas tell of themselves: the admin API, `/metrics` of both, read together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from simulations.demo.tally import samples

__all__ = ["Lookout", "ReplicaSight", "Sight"]

_DECISIONS: Final = 200


@dataclass(frozen=True, slots=True)
class ReplicaSight:
    """One replica at one moment; tokens."""

    id: str
    phase: str
    in_flight: int
    """By the store's leases, of all routers."""
    engine_in_flight: int
    """Running and queued, by the engine."""
    locked_tokens: int
    cached_tokens: int
    """In the KV cache and evictable."""
    free_tokens: int
    prompt_tokens: int
    """Of settled turns, by the router's metrics."""
    hit_tokens: int
    """Of these, found in the cache."""

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the prompt tokens served here."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Sight:
    """Router and replicas at one moment."""

    replicas: tuple[ReplicaSight, ...]
    router_in_flight: int
    decisions: Sequence[Mapping[str, Any]]

    @property
    def in_flight(self) -> int:
        """Turns that any of the three accounts holds: the router's gauge, the leases, the engines."""
        leases = sum(each.in_flight for each in self.replicas)
        engines = sum(each.engine_in_flight for each in self.replicas)
        return max(self.router_in_flight, leases, engines)

    @property
    def healthy(self) -> frozenset[str]:
        """Replicas that take turns."""
        return frozenset(each.id for each in self.replicas if each.phase == "serving")


class Lookout:
    """Looks when asked."""

    def __init__(self, http: aiohttp.ClientSession, admin_url: str) -> None:
        self._http = http
        self._admin_url = admin_url

    async def look(self) -> Sight:
        """One look at all of them. Raises aiohttp.ClientError."""
        listed, metrics, told = await asyncio.gather(
            self._json("/admin/replicas"),
            self._text(f"{self._admin_url}/metrics"),
            self._json(f"/admin/decisions?limit={_DECISIONS}"),
        )
        replicas = listed["replicas"]
        engines = await asyncio.gather(*(self._text(f"{each['url']}/metrics") for each in replicas))
        prompt = samples(metrics, "roost_prompt_tokens_total", "replica")
        cached = samples(metrics, "roost_cached_tokens_total", "replica")
        return Sight(
            replicas=tuple(
                sight_of(each, engine, prompt.get(each["id"], 0.0), cached.get(each["id"], 0.0))
                for each, engine in zip(replicas, engines, strict=True)
            ),
            router_in_flight=round(sum(samples(metrics, "roost_in_flight", "replica").values())),
            decisions=told["decisions"],
        )

    async def add(self, url: str) -> str:
        """Add a replica through the admin API; its id."""
        async with self._http.post(f"{self._admin_url}/admin/replicas", json={"url": url}) as response:
            response.raise_for_status()
            told = await response.json()
            return str(told["id"])

    async def _json(self, path: str) -> Any:
        async with self._http.get(self._admin_url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def _text(self, url: str) -> str:
        async with self._http.get(url) as response:
            response.raise_for_status()
            return await response.text()


def sight_of(listed: Mapping[str, Any], metrics: str, prompt_tokens: float, hit_tokens: float) -> ReplicaSight:
    """A replica from the admin API's entry and its engine's exposition."""

    def gauge(name: str) -> int:
        return round(samples(metrics, f"sglang:{name}").get("", 0.0))

    return ReplicaSight(
        id=listed["id"],
        phase=_phase(listed),
        in_flight=listed["load"]["in_flight"],
        engine_in_flight=gauge("num_running_reqs") + gauge("num_queue_reqs"),
        locked_tokens=gauge("kv_used_tokens"),
        cached_tokens=gauge("kv_evictable_tokens"),
        free_tokens=gauge("kv_available_tokens"),
        prompt_tokens=round(prompt_tokens),
        hit_tokens=round(hit_tokens),
    )


def _phase(listed: Mapping[str, Any]) -> str:
    if listed["standing"] != "serving":
        return str(listed["standing"])
    if listed["healthy"]:
        return "serving"
    return "down" if listed["incarnation"] else "joining"
