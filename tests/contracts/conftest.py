"""Every store, for every test of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contracts.servers import serving
from tests.contracts.worlds import Fleet, World, memory_world, redis_world


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with serving("valkey") as server:
        yield server.url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with serving("redis") as server:
        yield server.url


@pytest.fixture(params=["memory", "valkey", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        async with memory_world() as made:
            yield made
    else:
        async with redis_world(request.getfixturevalue(f"{request.param}_url")) as made:
            yield made


@pytest.fixture
def fleet(world: World) -> Fleet:
    return Fleet(world)
