"""Where a server is and how to log in there."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import RedisError

from router.domain.errors import StoreUnavailable

__all__ = ["Address", "Command", "Login"]

Command = tuple[bytes | str | int, ...]


@dataclass(frozen=True, slots=True)
class Login:
    """Who to be. A file is read whenever a connection is made, so that a password may be rotated under a router."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None

    def commands(self) -> list[Command]:
        """What logs in; nothing where there is no password. Raises StoreUnavailable for a file that cannot be read."""
        password = self.password
        if self.password_file is not None:
            try:
                password = self.password_file.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
                raise StoreUnavailable(f"store: cannot read the password file {self.password_file}: {why}") from error
        if not password:
            return []
        return [("AUTH", *((self.username,) if self.username else ()), password)]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, how to reach it and what to say first."""

    host: str
    port: int
    path: str | None = None
    """Of a unix socket; then host and port mean nothing."""
    tls: ssl.SSLContext | None = None
    login: Login = Login()
    database: int = 0

    @classmethod
    def parsed(cls, url: str, *, username: str | None = None, password_file: Path | None = None) -> Self:
        """From a plain URL (redis://, rediss:// or unix://), whose login the arguments complete or replace.

        Raises ValueError for what redis-py does not understand, or for TLS files that cannot be used.
        """
        options: dict[str, Any] = dict(parse_url(url))
        kind: type[Any] = options.pop("connection_class", Connection)
        try:
            given = kind(**options)
            tls = given.ssl_context.get() if kind is SSLConnection else None
        except TypeError as error:
            raise ValueError("the store's URL has an option in its query that is not known") from error
        except (OSError, RedisError) as error:
            raise ValueError(f"the store's URL asks for TLS that cannot be had: {error}") from error
        unix = kind is UnixDomainSocketConnection
        return cls(
            host="" if unix else str(given.host),
            port=0 if unix else int(given.port),
            path=str(given.path) if unix else None,
            tls=tls,
            login=Login(username or given.username or None, given.password or None, password_file),
            database=int(given.db or 0),
        )

    def at(self, host: str, port: int) -> Self:
        """Another server that is spoken with in the same way."""
        return replace(self, host=host, port=port)

    @property
    def label(self) -> str:
        """The place without its credentials, for messages."""
        return f"unix://{self.path}" if self.path is not None else f"{self.host}:{self.port}"

    def greeting(self) -> list[Command]:
        """Login and choice of database."""
        return [*self.login.commands(), *([("SELECT", self.database)] if self.database else [])]
