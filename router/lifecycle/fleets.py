"""Which fleet serves a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from router.domain.errors import MalformedRequest, UnknownModel
from router.lifecycle.fleet import FleetRuntime

__all__ = ["Fleets"]

ANY = "*"


class Fleets:
    """All fleets of this router."""

    def __init__(self, fleets: Sequence[FleetRuntime]) -> None:
        self._fleets = tuple(fleets)

    def __iter__(self) -> Iterator[FleetRuntime]:
        return iter(self._fleets)

    def named(self, name: str) -> FleetRuntime | None:
        """The fleet of that name."""
        return next((fleet for fleet in self._fleets if fleet.name == name), None)

    def serving(self, model: str | None) -> FleetRuntime:
        """The fleet for a request that names `model`.

        A name is looked for among configured names, then among what replicas serve, then without a LoRA suffix
        (`model:adapter`), then in a fleet that takes any. While the only fleet does not know its models yet, it takes
        all. Raises UnknownModel, or MalformedRequest where a model must be named to choose a fleet.
        """
        if model is None:
            if len(self._fleets) == 1:
                return self._fleets[0]
            raise MalformedRequest(f"the request names no model; served here: {self._names()}")
        for name in dict.fromkeys((model, model.split(":", 1)[0])):
            fleet = self._knowing(name)
            if fleet is not None:
                return fleet
        for fleet in self._fleets:
            if ANY in fleet.spec.models or (len(self._fleets) == 1 and not fleet.models()):
                return fleet
        shown = "".join(c if c.isprintable() else "?" for c in model[:80])
        raise UnknownModel(f"model {shown!r} is not served here; served: {self._names()}")

    def _knowing(self, name: str) -> FleetRuntime | None:
        configured = (fleet for fleet in self._fleets if name in fleet.spec.models)
        served = (fleet for fleet in self._fleets if name in fleet.models())
        return next(configured, None) or next(served, None)

    def first(self) -> FleetRuntime:
        """Where requests go that belong to no model."""
        return self._fleets[0]

    def ready(self) -> bool:
        """Whether any turn could be placed now."""
        return any(fleet.ready() for fleet in self._fleets)

    async def run(self) -> None:
        """Keep all fleets fresh until cancelled."""
        async with asyncio.TaskGroup() as group:
            for fleet in self._fleets:
                group.create_task(fleet.run(), name=f"fleet {fleet.name}")

    def _names(self) -> str:
        names = [name for fleet in self._fleets for name in fleet.models()]
        return ", ".join(sorted(names)) or "nothing yet (no replica has said what it serves)"
