"""Two real SGLang servers on the CPU, started through the shared script and stopped with everything they started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "CAPACITY_TOKENS",
    "MODEL",
    "PAGE_TOKENS",
    "Pair",
    "Server",
    "eventually",
    "free_port",
    "missing",
    "shared",
    "venv",
]

MODEL = "tiny"
PAGE_TOKENS = 16
CAPACITY_TOKENS = 11_264
"""KV of one server: room for two grown conversations of `test_conversations`, not for four."""
_FLAGS = (
    *("--served-model-name", MODEL),
    *("--page-size", str(PAGE_TOKENS)),
    *("--max-total-tokens", str(CAPACITY_TOKENS)),
    # Messages with `thinking` are refused without one; the tiny model's whole output then comes as thinking.
    *("--reasoning-parser", "qwen3"),
    "--enable-response-store",
    # An idle scheduler spins a core otherwise.
    "--sleep-on-idle",
)
TIGHT = ("--max-running-requests", "1", "--max-queued-requests", "1")
"""Flags of a server that is full with two turns."""
_READY_WITHIN_S = 300.0
_DRAINED_WITHIN_S = 60.0
_REPOSITORY = Path(__file__).resolve().parents[2]


def shared(env: Mapping[str, str]) -> Path:
    """The shared folder: `ROOST_SHARED`, else beside the repository."""
    return Path(env.get("ROOST_SHARED") or _REPOSITORY.parent / "shared")


def venv(env: Mapping[str, str]) -> Path:
    """SGLang's virtual environment: `SGLANG_VENV`, else where the shared script installs it."""
    return Path(env.get("SGLANG_VENV") or Path.home() / ".cache" / "roost-sglang")


def missing(env: Mapping[str, str]) -> str:
    """Why no SGLang can be run here; empty if it can."""
    if not (shared(env) / "sglang-cpu" / "serve.sh").is_file():
        return "the shared SGLang scripts are not there (shared/ beside the repository, or ROOST_SHARED)"
    if not (venv(env) / "bin" / "sglang").exists():
        return f"SGLang is not installed in {venv(env)} (shared sglang-cpu/install.sh, or SGLANG_VENV)"
    return ""


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(check: Callable[[], bool], within_s: float, what: str) -> None:
    """Ask another process until it agrees; it has no event to wait for."""
    deadline_s = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.1)


class Server:
    """One SGLang server on a port of its own, life after life."""

    def __init__(self, script: Path, home: Path, folder: Path, name: str, say: Callable[[str], None]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        """As Roost names it."""
        self.name = name
        self._script = script
        self._home = home
        self._log = folder / f"sglang-{name}.log"
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._extra: tuple[str, ...] = ()
        self._since_s = 0.0

    def launch(self, extra: tuple[str, ...] = ()) -> None:
        """Start it, without waiting."""
        command = ["bash", str(self._script), str(self.port), *_FLAGS, *extra]
        if shutil.which("setpriv"):  # ends with the tests even when those are killed
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "SGLANG_VENV": str(self._home)},
                start_new_session=True,
            )
        self._extra = extra
        self._since_s = time.monotonic()

    def wait_ready(self) -> None:
        """Wait for `/ready`, with a line of progress every now and then."""
        told_s = 0.0
        while not self.ready():
            age_s = time.monotonic() - self._since_s
            assert self.alive(), (
                f"SGLang {self.name} ended while it started:\n{self._log.read_text(errors='replace')[-3000:]}"
            )
            assert age_s < _READY_WITHIN_S, (
                f"SGLang {self.name} was not ready within {_READY_WITHIN_S:.0f} s; see {self._log}"
            )
            if age_s - told_s >= 15:
                told_s = age_s
                self._say(f"SGLang {self.name} is starting, {age_s:.0f} s so far")
            time.sleep(0.5)
        self._say(f"SGLang {self.name} is ready after {time.monotonic() - self._since_s:.0f} s")

    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def runs_with(self, extra: tuple[str, ...]) -> bool:
        """Whether it runs and was started with these further flags."""
        return self.alive() and self._extra == extra

    def ready(self) -> bool:
        """What `/ready` says."""
        return self._get("/ready") is not None

    def running(self) -> int:
        """Turns running or waiting there now, by its own word."""
        load = self.loads()
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    def prefilled_tokens(self) -> int:
        """Prompt tokens it has computed in this life, by its own word."""
        return int(self.loads()["total_prefill_uncached_tokens"])

    def loads(self) -> dict[str, Any]:
        """`/v1/loads` of its one rank."""
        body = self._get("/v1/loads")
        assert body is not None, f"SGLang {self.name} does not answer"
        load: dict[str, Any] = json.loads(body)["loads"][0]
        return load

    def info(self) -> dict[str, Any]:
        """`/server_info`."""
        info: dict[str, Any] = json.loads(self._get("/server_info") or b"{}")
        return info

    def flush(self) -> None:
        """Empty its cache."""
        request = urllib.request.Request(f"{self.url}/flush_cache?timeout=20", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def terminate(self) -> None:
        """SIGTERM to its main process, as Kubernetes would; returns at once."""
        assert self._process is not None
        self._process.terminate()

    def exit_status(self) -> int:
        """Its exit status, once it has drained."""
        assert self._process is not None
        return self._process.wait(_DRAINED_WITHIN_S)

    def kill(self) -> None:
        """SIGKILL to all of it at once, as losing the machine would."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End it for good, whatever state it is in."""
        if self._process is None:
            return
        if self.alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self.kill()

    def _get(self, path: str) -> bytes | None:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                body: bytes = answer.read()
                return body
        except (urllib.error.URLError, OSError):
            return None


class Pair:
    """The two servers of a test session."""

    def __init__(self, env: Mapping[str, str], folder: Path, say: Callable[[str], None]) -> None:
        script = shared(env) / "sglang-cpu" / "serve.sh"
        self.servers = tuple(Server(script, venv(env), folder, name, say) for name in ("A", "B"))

    def ensure(self, *, tight: bool = False) -> tuple[Server, Server]:
        """Both ready, idle, with empty caches; the second full with two turns where `tight`.

        Starts what is not so. Call it from the main thread: a server ends with the thread that started it.
        """
        wanted = ((), TIGHT if tight else ())
        for server, extra in zip(self.servers, wanted, strict=True):
            if not server.runs_with(extra):
                server.stop()
                server.launch(extra)
        for server in self.servers:
            if not server.ready():
                server.wait_ready()
            eventually(lambda server=server: server.running() == 0, 60, f"SGLang {server.name} idle")  # type: ignore[misc]
            server.flush()
        first, second = self.servers
        return first, second

    def stop(self) -> None:
        """End both."""
        for server in self.servers:
            server.stop()
