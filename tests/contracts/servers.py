"""Real servers for tests of the store: the embedded Valkey, and the system's redis-server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.domain.errors import StoreUnavailable
from router.store.embedded import EmbeddedValkey, find_binary

KINDS = ("valkey", "redis")


def binary(kind: str) -> Path:
    """The server's binary; skips the test where it is absent."""
    if kind == "valkey":
        try:
            return find_binary()
        except StoreUnavailable as absent:
            pytest.skip(str(absent))
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on PATH (apt-get install redis-server)")
    return Path(found)


@contextmanager
def serving(kind: str) -> Iterator[EmbeddedValkey]:
    """A server of its own; `EmbeddedValkey` starts any binary that takes Redis' options."""
    with EmbeddedValkey(binary(kind)) as server:
        yield server


@contextmanager
def serving_with(kind: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server with further options (a port, TLS, a password) and its unix socket, once it listens."""
    with tempfile.TemporaryDirectory(prefix="roost-test-") as directory:
        path = Path(directory) / "s"
        with serving_at(kind, path, *options) as process:
            yield process, path


@contextmanager
def serving_at(kind: str, path: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server at a unix socket of that path, once it listens."""
    path.unlink(missing_ok=True)
    quiet = ("--port", "0", "--save", "", "--appendonly", "no")
    command = [str(binary(kind)), *quiet, "--unixsocket", str(path), *options]
    process = subprocess.Popen(command, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        with process.stdout as log:  # each line is an occasion to look; the last comes when it listens
            lines = []
            for line in log:
                lines.append(line.decode(errors="replace"))
                if _listens(path):
                    break
            else:
                raise AssertionError(f"the server ended: {''.join(lines)}")
        yield process
    finally:
        process.kill()
        process.wait()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
