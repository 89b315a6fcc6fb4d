"""`/livez` and `/readyz`, on both listeners."""

from __future__ import annotations

from aiohttp import web

from router.lifecycle.fleets import Fleets

__all__ = ["Health"]


class Health:
    """Whether this process lives, and whether it wants new turns."""

    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets
        self.stopping = False
        """Set at shutdown: not ready any more, though turns are still taken."""

    def answer(self, method: str, path: str) -> web.Response | None:
        """The answer to a probe, or None where the path is none."""
        if path not in ("/livez", "/readyz") or method not in ("GET", "HEAD"):
            return None
        if path == "/livez":
            return web.Response(text="ok\n")
        why = self.not_ready()
        return web.Response(text="ok\n") if why is None else web.Response(status=503, text=f"{why}\n")

    def not_ready(self) -> str | None:
        """Why turns cannot be placed; None when they can."""
        if self.stopping:
            return "shutting down"
        if not self._fleets.ready():
            return "no replica is ready; GET /admin/replicas of the admin API says why"
        return None
