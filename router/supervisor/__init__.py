"""Several workers behind one port, and one process that watches over them.

    supervisor ── binds both ports, starts the embedded store, keeps the workers, serves the admin API for all of them
      worker 0 ── accepts from the public socket, serves turns, has an admin API of its own on a Unix socket
      worker 1 ── …

- *No waiting connection is lost with a worker.* All accept from one socket, bound once and inherited, so what waits
  waits for any of them. (With SO_REUSEPORT each would have a queue of its own, which dies with it.)
- *A worker that dies is replaced*, after 1 s, doubling to 30 s for one that keeps dying. One that cannot start in the
  first place ends the whole command with its message: then the settings are wrong.
- *No worker outlives the supervisor* by more than a graceful shutdown, even if that was killed: each holds a socket
  whose other end only the supervisor has (`router.worker`). The embedded store dies at once.
- *Stopping* is the workers' own graceful shutdown; what is left after lag, grace and a margin is killed, and a second
  SIGINT kills at once.
- *Metrics are exact sums*: counters of the living and the dead, gauges of the living (`metric_files`).

What it does not do: replace a worker that hangs. Such a one answers no admin request, which is logged, and takes no new
connections, so the others carry its load.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from aiohttp import web

from router.domain.errors import RoostError
from router.folder import PrivateFolder
from router.main import CUT_S, EXIT_FAILED, EXIT_OK, Listeners, admin_door, announcer, bound
from router.main import run as run_alone
from router.settings import Settings
from router.store.embedded import EmbeddedValkey
from router.supervisor.admin import WorkersAdmin
from router.supervisor.crew import Crew
from router.telemetry.logs import configure

__all__ = ["run"]


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, in this process or in `settings.workers` of them. Returns the exit code."""
    if settings.workers == 1:
        return run_alone(settings)
    configure(settings.log.level, settings.log.format)
    try:
        with contextlib.ExitStack() as stack:
            public = stack.enter_context(bound("listen", settings.listen.host, settings.listen.port))
            admin = stack.enter_context(bound("admin", settings.admin.host, settings.admin.port))
            folder = stack.enter_context(PrivateFolder("workers"))
            url = stack.enter_context(EmbeddedValkey()).url if settings.store.kind == "embedded" else None
            asyncio.run(_supervise(settings, Listeners(public, admin), folder, url))
    except (RoostError, OSError, RuntimeError) as error:
        sys.stderr.write(f"roost: {error}\n")
        return EXIT_FAILED
    return EXIT_OK


async def _supervise(settings: Settings, listeners: Listeners, folder: PrivateFolder, store_url: str | None) -> None:
    stop, kill = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        (kill if stop.is_set() else stop).set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    door = admin_door(settings)
    crew = Crew(settings, listeners.public, folder.path, folder.lock, store_url)
    runner = web.AppRunner(WorkersAdmin(crew).app(door), access_log=None, shutdown_timeout=CUT_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listeners.admin).start()
        await crew.serve(stop, kill, announcer(listeners))
    finally:
        await runner.cleanup()
