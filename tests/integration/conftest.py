"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.servers import serving


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """One Valkey for all; each test keeps to a prefix of its own."""
    with serving("valkey") as server:
        yield server.url
