"""Roost itself, as a process of its own before the two servers, and what its admin port says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.sglang.servers import Server, eventually, free_port

__all__ = ["Roost"]

_STOP_WITHIN_S = 45.0


class Roost:
    """`roost router`, started on free ports; use as a context."""

    def __init__(self, servers: Sequence[Server], log: Path, *args: str) -> None:
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._servers = servers
        self._log = log
        self._args = args
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            str(Path(sys.executable).with_name("roost")),
            *("router", "--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(self.admin_port)),
            *(part for server in self._servers for part in ("--replica", server.url)),
            *self._args,
        ]
        env = {name: value for name, value in os.environ.items() if not name.startswith("ROOST_")}
        env["ROOST_TIMEOUTS__READY_LAG_S"] = "0"  # no load balancer is to see it leave
        env["ROOST_STORE__TIMEOUT_S"] = "2"  # engines take all cores now and then: a busy machine is no slow store
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            eventually(self._placing, 30, "Roost ready for all its replicas")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _placing(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"Roost ended:\n{self._log.read_text(errors='replace')[-3000:]}"
        try:
            self._admin("GET", "/readyz")
            return all(replica["healthy"] for replica in self.replicas().values())
        except (urllib.error.URLError, OSError):
            return False

    # --- the admin port -----------------------------------------------------------------------------------------------

    def replicas(self) -> dict[str, dict[str, Any]]:
        """GET /admin/replicas, by id."""
        return {replica["id"]: replica for replica in json.loads(self._admin("GET", "/admin/replicas"))["replicas"]}

    def healthy(self, server: Server) -> bool:
        """Whether Roost would place turns there."""
        healthy: bool = self.replicas()[server.id]["healthy"]
        return healthy

    def cordon(self, server: Server) -> None:
        """No new branches there."""
        self._admin("POST", f"/admin/replicas/{server.id}/cordon")

    def undrain(self, server: Server) -> None:
        """Serving again."""
        self._admin("POST", f"/admin/replicas/{server.id}/undrain")

    def decisions(self, session: str = "", limit: int = 500) -> list[dict[str, Any]]:
        """GET /admin/decisions, oldest first, once all of them have come true. `session` as in `x-roost-session`."""
        query = f"/admin/decisions?limit={limit}" + (f"&session={session.partition('-')[0]}" if session else "")
        found: list[dict[str, Any]] = []

        def settled() -> bool:
            found[:] = json.loads(self._admin("GET", query))["decisions"][::-1]
            return all(decision["came_true"] is not None for decision in found)

        eventually(settled, 30, "every turn settled")
        return found

    def in_flight(self) -> dict[str, float]:
        """The gauge `roost_in_flight`, by replica."""
        lines = self._admin("GET", "/metrics").decode().splitlines()
        found = {}
        for line in lines:
            if line.startswith("roost_in_flight{"):
                labels, _, value = line.rpartition(" ")
                found[labels.split('replica="')[1].split('"')[0]] = float(value)
        return found

    def wait_idle(self, within_s: float = 30.0) -> None:
        """Wait until the gauge shows no turn anywhere."""
        eventually(lambda: not any(self.in_flight().values()), within_s, "roost_in_flight 0 everywhere")

    def _admin(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body
