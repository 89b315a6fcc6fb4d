"""Every store, for every test of the contract."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contracts.groups import cluster, free_port, make_certificate, sentinels
from tests.contracts.rights import RIGHTS
from tests.contracts.servers import serving, serving_with
from tests.contracts.worlds import FLEET, Fleet, Place, World, memory_world, redis_world

TAGS = (FLEET, "m2", "m%7D", "ü/ä 1", "tenant:acme", "tenant:other")
"""Names of fleets and tenants in the tests, as they stand in keys."""


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with serving("valkey") as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with serving("redis") as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_place(valkey_url: str) -> Place:
    return Place(valkey_url, valkey_url)


@pytest.fixture(scope="session")
def redis_place(redis_url: str) -> Place:
    return Place(redis_url, redis_url)


@pytest.fixture(scope="session")
def secured_place() -> Iterator[Place]:
    """A Redis that is reached by TLS, by a user who may do only what a router must."""
    with tempfile.TemporaryDirectory(prefix="roost-tls-") as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "cert.pem"
        make_certificate(key, certificate)
        port = free_port()
        options = ["--bind", "127.0.0.1", "--tls-port", str(port), "--tls-auth-clients", "no"]
        options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        options += ["--tls-ca-cert-file", str(certificate)]
        options += ["--user", "router", "on", ">s3cret/@", *RIGHTS.split(), "~p:*", "+select"]
        with serving_with("redis", *options) as (_, path):
            url = f"rediss://router:s3cret%2F%40@127.0.0.1:{port}/2?ssl_ca_certs={certificate}"
            yield Place(url, f"unix://{path}?db=2")


@pytest.fixture(scope="session")
def sentinel_place() -> Iterator[Place]:
    with sentinels("valkey") as group:
        yield Place(group.url, f"redis://127.0.0.1:{group.master.port}")


@pytest.fixture(scope="session")
def cluster_valkey_place() -> Iterator[Place]:
    yield from _cluster("valkey")


@pytest.fixture(scope="session")
def cluster_redis_place() -> Iterator[Place]:
    yield from _cluster("redis")


def _cluster(kind: str) -> Iterator[Place]:
    with cluster(kind) as nodes:
        yield Place(nodes.url, f"redis://127.0.0.1:{nodes.masters[0].port}", TAGS)


@pytest.fixture(params=["memory", "valkey", "redis", "secured", "sentinel", "cluster_valkey", "cluster_redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        async with memory_world() as made:
            yield made
    else:
        async with redis_world(request.getfixturevalue(f"{request.param}_place")) as made:
            yield made


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)
