"""The stage: a private store, simulated replicas and the real router, all in this process, and gone when it is left.

Times: the replicas run `time_scale` times faster than their profile, so what the router knows in seconds is told it in
the same seconds: prior rates are multiplied, β, the crowd's half-life and the ramp divided. Its floor for a move, one
real second, stays and is as many simulated seconds as the time scale says: it moves sessions more reluctantly here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from router.main import Listeners, bind, serve
from router.settings import Admin, Fleet, Listen, Placement, Profile, Settings, Store, Timeouts
from router.store.embedded import EmbeddedValkey
from simulations.engine_server.server import Engine
from simulations.replica_model import ReplicaProfile

__all__ = ["HOST", "Stage", "StageFailed", "stage"]

HOST = "127.0.0.1"
_STORE_TIMEOUT_S = 2.0
"""Everything shares one event loop here: that it is late is no sign that the store is away."""
_GRACE_S = 5.0
_DECISIONS = 2_000


class StageFailed(Exception):
    """The router did not come up, or ended before its time."""


@dataclass(slots=True)
class Stage:
    """What stands on it."""

    url: str
    admin_url: str
    profile: ReplicaProfile
    time_scale: float
    engines: list[Engine]
    router: asyncio.Task[None]
    seed: int
    port_taken: bool
    """Whether the port asked for was not to be had."""

    async def another_engine(self) -> Engine:
        """One replica more, up and not yet known to the router."""
        engine = _engine(self.profile, self.seed + len(self.engines), self.time_scale)
        self.engines.append(engine)
        await engine.start()
        return engine


@asynccontextmanager
async def stage(
    profile: ReplicaProfile, *, replicas: int, port: int, time_scale: float, seed: int
) -> AsyncIterator[Stage]:
    """Everything up, the router serving; everything gone afterwards. Raises StageFailed, OSError and RoostError."""
    async with AsyncExitStack() as stack:
        public, taken = _bound(port)
        stack.enter_context(closing(public))
        admin, _ = _bound(Admin().port)
        stack.enter_context(closing(admin))
        store = stack.enter_context(EmbeddedValkey())  # in the main thread, as it asks
        engines: list[Engine] = []
        stack.push_async_callback(_stop, engines)
        for number in range(replicas):
            engines.append(_engine(profile, seed + number, time_scale))
            await engines[-1].start()
        settings = _settings(profile, engines, time_scale)
        stop, up = asyncio.Event(), asyncio.Event()
        serving = serve(settings, Listeners(public, admin), stop, store_url=store.url, announce=up.set)
        router = asyncio.create_task(serving, name="router")
        stack.push_async_callback(_end, router, stop)
        await _up(router, up)
        yield Stage(
            url=f"http://{HOST}:{public.getsockname()[1]}",
            admin_url=f"http://{HOST}:{admin.getsockname()[1]}",
            profile=profile,
            time_scale=time_scale,
            engines=engines,
            router=router,
            seed=seed,
            port_taken=taken,
        )


def _bound(port: int) -> tuple[socket.socket, bool]:
    """A listening socket on that port, or on a free one where it is taken; and whether it was."""
    try:
        return bind(HOST, port), False
    except OSError:
        return bind(HOST, 0), True


def _engine(profile: ReplicaProfile, seed: int, time_scale: float) -> Engine:
    return Engine(profile, host=HOST, port=0, seed=seed, time_scale=time_scale)


async def _stop(engines: list[Engine]) -> None:
    for engine in engines:
        await engine.stop()


async def _up(router: asyncio.Task[None], up: asyncio.Event) -> None:
    announced = asyncio.create_task(up.wait())
    try:
        await asyncio.wait((router, announced), return_when=asyncio.FIRST_COMPLETED)
    finally:
        announced.cancel()
    if router.done():
        router.result()
        raise StageFailed("the router ended before it served")


async def _end(router: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    await router


def _settings(profile: ReplicaProfile, engines: list[Engine], time_scale: float) -> Settings:
    placement, known = Placement(), Profile()
    prior = Profile(
        prefill_rate=known.prefill_rate * time_scale,
        host_load_rate=known.host_load_rate * time_scale,
        step_time_s=known.step_time_s / time_scale,
        device_tokens=profile.device_tokens,
        host_tokens=profile.host_tokens,
        max_running=profile.max_running,
    )
    return Settings(
        listen=Listen(host=HOST),
        admin=Admin(host=HOST),
        store=Store(timeout_s=_STORE_TIMEOUT_S),
        fleets=(Fleet(name="demo", replicas=tuple(each.url for each in engines), profile=prior, probe_interval_s=0.5),),
        placement=Placement(
            beta_s=placement.beta_s / time_scale,
            crowd_half_life_s=placement.crowd_half_life_s / time_scale,
            ramp_s=placement.ramp_s / time_scale,
            decisions_kept=_DECISIONS,
        ),
        timeouts=Timeouts(ready_lag_s=0.0, shutdown_grace_s=_GRACE_S),
    )
