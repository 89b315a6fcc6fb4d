"""Which server a key is on: one server, the master of a group behind Sentinels, or a node of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from router.store.address import Address, Command
from router.store.cluster import Cluster
from router.store.sentinel import Sentinels
from router.store.url import split_url
from router.store.wire import Wire, fixed

__all__ = ["Topology", "topology_of"]


class Topology(Protocol):
    """What carries a command to the server that has its keys."""

    label: str
    """For messages: where the store is, without credentials."""

    def call(self, key: bytes, command: Command, due: float) -> Awaitable[Any]:
        """The reply of the server that has `key`, by `due` (the loop's time) at the latest.

        Raises `hiredis.ReplyError` for an error reply, `StoreUnavailable` for no reply in time.
        """
        ...

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        ...


class Single:
    """`Topology` of one server, or of whatever stands behind one address."""

    def __init__(self, address: Address) -> None:
        self.label = address.label
        self._wire = Wire(self.label, fixed(address))

    def call(self, key: bytes, command: Command, due: float) -> Awaitable[Any]:  # noqa: ARG002 (one server has all)
        """See `Topology.call`."""
        return self._wire.call(command, due)

    async def close(self) -> None:
        """See `Topology.close`."""
        await self._wire.close()


def topology_of(
    url: str,
    *,
    username: str | None = None,
    password_file: Path | None = None,
    sentinel_password_file: Path | None = None,
) -> Topology:
    """What a URL of `router.store.url` names. The arguments complete or replace the logins in it.

    Raises ValueError for a URL that cannot be used, with nothing secret in its text.
    """
    try:
        parts = split_url(url)
    except ValueError as error:
        raise ValueError(f"the store's URL {error}") from error
    data = Address.parsed(parts.server, username=username, password_file=password_file)
    if parts.kind == "cluster":
        return Cluster(list(parts.hosts), data)
    if parts.kind == "sentinel":
        sentinel = Address.parsed(parts.sentinel, password_file=sentinel_password_file)
        return Sentinels([sentinel.at(host, port) for host, port in parts.hosts], parts.master, data)
    return Single(data)
