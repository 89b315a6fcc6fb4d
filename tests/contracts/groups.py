"""Several servers that are one store: a cluster of masters, and a master with replicas and Sentinels."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.contracts.servers import binary

PATIENT_S = 30.0
GROUP = "roost-master"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Node:
    """A server on a TCP port of 127.0.0.1."""

    port: int
    process: subprocess.Popen[bytes]
    client: redis.Redis = field(repr=False)

    def say(self, *command: str | int | bytes) -> Any:
        """What it answers to a command."""
        return self.client.execute_command(*command)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """As `kill -9`, and gone when this returns."""
        self.process.kill()
        self.process.wait()


def until(met: Callable[[], object], what: str) -> None:
    """Wait for something that gives no sign of its own."""
    deadline_s = time.monotonic() + PATIENT_S
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if met():
                return
        assert time.monotonic() < deadline_s, f"not within {PATIENT_S:g} s: {what}"
        time.sleep(0.02)


class Group:
    """Servers of one kind that are started one by one and end together."""

    def __init__(self, kind: str, folder: Path, login: tuple[str, str] | None = None) -> None:
        self._binary = binary(kind)
        self._folder = folder
        self.login = login
        self.nodes: list[Node] = []

    def start(self, *options: str, port: int | None = None, conf: str | None = None) -> Node:
        """A server, once it answers. With `conf` it is a Sentinel."""
        port = free_port() if port is None else port
        home = self._folder / str(port)
        home.mkdir(exist_ok=True)
        if conf is None:
            command = ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        else:
            (home / "sentinel.conf").write_text(conf)
            command = [str(home / "sentinel.conf"), "--sentinel"]
        command = [str(self._binary), *command, "--port", str(port), "--bind", "127.0.0.1", *options]
        process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        user, password = self.login if self.login is not None and conf is None else (None, None)
        client = redis.Redis(port=port, username=user, password=password, socket_timeout=1.0)
        node = Node(port, process, client)
        self.nodes.append(node)
        until(client.ping, f"the server on port {port} answers")
        return node

    def close(self) -> None:
        for node in self.nodes:
            node.client.close()
            with contextlib.suppress(ProcessLookupError):
                node.process.send_signal(signal.SIGCONT)
            node.kill()


@contextmanager
def group(kind: str, login: tuple[str, str] | None = None) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="roost-group-") as folder:
        made = Group(kind, Path(folder), login)
        try:
            yield made
        finally:
            made.close()


# --- a cluster -------------------------------------------------------------------------------------------------------

SLOTS = 16384


class ClusterGroup:
    """Masters that share the slots evenly, each perhaps with a replica."""

    def __init__(
        self, servers: Group, masters: int, *, replicas: bool, node_timeout_ms: int, options: Sequence[str] = ()
    ) -> None:
        self._servers = servers
        self._options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout_ms), *options)
        self.masters = [self.add() for _ in range(masters)]
        self.replicas = [self.add() for _ in range(masters if replicas else 0)]
        for number, node in enumerate(self.masters):
            first, last = number * SLOTS // masters, (number + 1) * SLOTS // masters - 1
            node.say("CLUSTER", "ADDSLOTSRANGE", first, last)
        self.join()
        for master, replica in zip(self.masters, self.replicas, strict=False):
            until(lambda: len(self.ids(replica)) == len(self.all), "the replica knows everyone")  # noqa: B023
            replica.say("CLUSTER", "REPLICATE", self.id(master))
        for node in self.all:
            until(lambda: "cluster_state:ok" in self.info(node), "the cluster is well")  # noqa: B023
        for replica in self.replicas:
            until(lambda: replica.client.info("replication")["master_link_status"] == "up", "it replicates")  # noqa: B023

    def add(self) -> Node:
        return self._servers.start(*self._options, "--cluster-port", str(free_port()))

    def join(self) -> None:
        """Every node meets the first; their bus ports are not at the usual distance."""
        first = self.masters[0]
        about: Any = first.client.config_get("cluster-port")
        bus = int(about["cluster-port"])
        for node in self.all[1:]:
            node.say("CLUSTER", "MEET", "127.0.0.1", first.port, bus)

    @property
    def all(self) -> list[Node]:
        return [*self.masters, *self.replicas]

    @staticmethod
    def id(node: Node) -> str:
        return str(node.say("CLUSTER", "MYID").decode())

    @staticmethod
    def info(node: Node) -> str:
        raw = node.say("CLUSTER INFO")
        return raw.decode() if isinstance(raw, bytes) else "\n".join(f"{name}:{value}" for name, value in raw.items())

    @staticmethod
    def ids(node: Node) -> list[str]:
        return list(node.say("CLUSTER NODES"))

    def owner(self, slot: int) -> Node:
        """The master whose part the slot was in at the start."""
        return self.masters[slot * len(self.masters) // SLOTS]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.masters)}"


@contextmanager
def cluster(
    kind: str, masters: int = 3, *, replicas: bool = False, node_timeout_ms: int = 1000, options: Sequence[str] = ()
) -> Iterator[ClusterGroup]:
    with group(kind) as servers:
        yield ClusterGroup(servers, masters, replicas=replicas, node_timeout_ms=node_timeout_ms, options=options)


# --- a master behind Sentinels ---------------------------------------------------------------------------------------


class SentinelGroup:
    """A master, two replicas and three Sentinels that wait half a second."""

    def __init__(self, servers: Group, sentinel_options: str = "", *options: str) -> None:
        self._servers = servers
        login = servers.login
        auth = ("--masteruser", login[0], "--masterauth", login[1]) if login is not None else ()
        self.master = servers.start(*options, *auth)
        follow = ("--replicaof", f"127.0.0.1 {self.master.port}")
        self.replicas = [servers.start(*options, *auth, *follow) for _ in range(2)]
        until(self._replicated, "both replicas are online")  # else the Sentinels find them at their next look, in 10 s
        conf = [
            f"sentinel monitor {GROUP} 127.0.0.1 {self.master.port} 2",
            f"sentinel down-after-milliseconds {GROUP} 500",
            f"sentinel failover-timeout {GROUP} 5000",
            *([f"sentinel auth-user {GROUP} {login[0]}", f"sentinel auth-pass {GROUP} {login[1]}"] if login else []),
            *sentinel_options.splitlines(),
        ]
        self.sentinels = [servers.start(conf="\n".join(conf) + "\n") for _ in range(3)]

    def ready(self) -> None:
        """Wait until every Sentinel knows the others and the replicas, so that they can agree on a failover."""
        for sentinel in self.sentinels:
            until(lambda: self._knows_all(sentinel), "the Sentinels know each other")  # noqa: B023

    def _knows_all(self, sentinel: Node) -> bool:
        about: Any = sentinel.client.sentinel_master(GROUP)
        return (about["num-other-sentinels"], about["num-slaves"]) == (2, 2)

    def _replicated(self) -> bool:
        about = self.master.client.info("replication")
        return all(about.get(f"slave{number}", {}).get("state") == "online" for number in range(2))

    @property
    def url(self) -> str:
        return self.url_of(GROUP)

    def url_of(self, name: str, login: str = "", query: str = "") -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels)
        return f"redis+sentinel://{login}{hosts}/{name}{query}"

    def leader(self) -> Node:
        """Whom the first Sentinel holds for the master now."""
        place: Any = self.sentinels[0].client.sentinel_get_master_addr_by_name(GROUP)
        return next(node for node in (self.master, *self.replicas) if node.port == place[1])


@contextmanager
def sentinels(kind: str) -> Iterator[SentinelGroup]:
    with group(kind) as servers:
        made = SentinelGroup(servers)
        made.ready()
        yield made


# --- TLS -------------------------------------------------------------------------------------------------------------


def make_certificate(key: Path, certificate: Path) -> None:
    """A certificate for localhost; skips the test where openssl is absent."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
