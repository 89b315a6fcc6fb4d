"""API keys: whose a key is, by a file that holds their hashes only and is read again whenever it changes.

    secret: 5f0c…            # any text that nobody can guess, the same on every router (see `named_scope`);
                             # another one forgets all sessions
    tenants:
      acme:
        keys: [sha256:9f86…, sha256:2c26…]    # two at once while one replaces the other
        rate_per_minute: 600                   # turns; absent: no limit
        concurrent: 32
      operators:
        keys: [sha256:60f5…]
        engine_control: true                   # may flush caches, load weights, abort anyone's requests

- *Hashed at rest.* Keys are 256 random bits, so one round of SHA-256 is enough: there is nothing to guess that a slow
  hash would protect.
- *Compared in constant time.* What is looked up is a digest, never the key; the digests are compared by
  `hmac.compare_digest`.
- *A changed file counts within a second*, whole or not at all: one that cannot be used keeps the keys that were there,
  and the log says so once. A tenant that is taken out gets no new turn; its running ones finish.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any, Final

from router.document import NotYamlError, parse
from router.domain.errors import RoostError, UnknownKey
from router.domain.tenant import Tenant, TenantLimits
from router.placement.scope import named_scope

__all__ = [
    "KEY_LENGTH_MIN",
    "KEY_PREFIX",
    "KeyRing",
    "KeysFile",
    "KeysFileError",
    "hash_of",
    "is_tenant_name",
    "new_key",
    "read_keys",
]

log = logging.getLogger("roost.keys")

KEY_PREFIX: Final = "roost-"
"""By which scanners for leaked secrets can tell a key."""
_KEY_BYTES: Final = 32
KEY_LENGTH_MIN: Final = 24
"""Characters of a key that somebody else made; fewer might be guessed from a hash, whatever they are."""
_SHELF_BYTES: Final = 2
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_ALLOWED: Final = "1 to 63 letters, digits, '.', '_' and '-', a letter or digit first"
_FILE_KEYS: Final = ("tenants", "secret")
_TENANT_KEYS: Final = ("keys", "rate_per_minute", "concurrent", "engine_control")
_LOOK_S: Final = 1.0
"""Between looks at the file: one `stat`."""


class KeysFileError(RoostError):
    """The keys file cannot be used. `str()` says why, in one line, without any hash."""


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: bytes) -> str:
    """A key as it stands in the file."""
    return f"sha256:{sha256(key).hexdigest()}"


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may be called so: `NAME_ALLOWED`."""
    return _NAME.fullmatch(name) is not None


class KeyRing:
    """Which tenant a key names. Immutable."""

    def __init__(self, hashes: Mapping[bytes, Tenant]) -> None:
        """`hashes`: SHA-256 digests of keys."""
        self._size = len(hashes)
        self._shelves: dict[bytes, list[tuple[bytes, Tenant]]] = {}
        for digest, tenant in hashes.items():
            self._shelves.setdefault(digest[:_SHELF_BYTES], []).append((digest, tenant))

    def __len__(self) -> int:
        return self._size

    @property
    def tenants(self) -> frozenset[Tenant]:
        """All tenants that have a key."""
        return frozenset(tenant for shelf in self._shelves.values() for _, tenant in shelf)

    def find(self, headers: Sequence[tuple[bytes, bytes]]) -> Tenant:
        """Whose request this is, by `Authorization: Bearer` or `x-api-key`; an unknown key in one of them is passed
        over where the other is known. Raises UnknownKey.
        """
        bearers = [value for name, value in headers if name.lower() == b"authorization"]
        keys = [value for name, value in headers if name.lower() == b"x-api-key"]
        if len(bearers) > 1 or len(keys) > 1:
            raise UnknownKey("there is more than one API key in the request")
        given = [value[7:].strip() for value in bearers if value[:7].lower() == b"bearer "]
        given += [value.strip() for value in keys]
        known = [tenant for key in filter(None, given) if (tenant := self._whose(sha256(key).digest())) is not None]
        if any(tenant is not known[0] for tenant in known):
            raise UnknownKey("there are keys of two tenants in the request")
        if known:
            return known[0]
        if any(given):
            raise UnknownKey("that API key is not known here")
        raise UnknownKey("an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")

    def _whose(self, digest: bytes) -> Tenant | None:
        # Which shelf is looked at depends on a part of a digest, from which nobody gets any nearer to a key.
        owner = None
        for known, tenant in self._shelves.get(digest[:_SHELF_BYTES], ()):
            if compare_digest(known, digest):
                owner = tenant
        return owner


def read_keys(text: str) -> KeyRing:
    """The keys of a file's text. Raises KeysFileError with the first thing that is wrong."""
    try:
        told = parse(text)
    except NotYamlError as error:
        raise KeysFileError(f"not YAML{error.at}: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("tenants"), dict):
        raise KeysFileError("must be a mapping with the key tenants, a mapping of tenants by name")
    _known(told, _FILE_KEYS, "the file")
    secret = told.get("secret", "")
    if not isinstance(secret, str):
        raise KeysFileError("secret must be text, in quotes if it looks like a number")
    hashes: dict[bytes, Tenant] = {}
    for name, entry in told["tenants"].items():
        if not isinstance(name, str) or not is_tenant_name(name):
            raise KeysFileError(f"a tenant's name has {NAME_ALLOWED}, and is in quotes if it looks like a number")
        tenant = _tenant(name, entry, secret)
        for number, digest in enumerate(_digests(name, entry)):
            if digest in hashes:
                raise KeysFileError(f"tenants.{name}.keys[{number}] is there twice; a key belongs to one tenant, once")
            hashes[digest] = tenant
    return KeyRing(hashes)


def _tenant(name: str, entry: Any, secret: str) -> Tenant:
    where = f"tenants.{name}"
    if not isinstance(entry, dict):
        raise KeysFileError(f"{where} must be a mapping with the keys {', '.join(_TENANT_KEYS)}")
    _known(entry, _TENANT_KEYS, where)
    control = entry.get("engine_control", False)
    if not isinstance(control, bool):
        raise KeysFileError(f"{where}.engine_control must be true or false")
    limits = TenantLimits(_count(entry, "rate_per_minute", where), _count(entry, "concurrent", where))
    return Tenant(name, named_scope(name, secret.encode()), limits, control)


def _known(given: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    if not given.keys() <= set(known):
        raise KeysFileError(f"{where} has an unknown key; allowed: {', '.join(known)}")


def _count(entry: dict[Any, Any], key: str, where: str) -> int | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1_000_000:
        raise KeysFileError(f"{where}.{key} must be a whole number from 1 to 1000000, or absent for no limit")
    return value


def _digests(name: str, entry: dict[Any, Any]) -> Iterator[bytes]:
    keys = entry.get("keys", [])
    if not isinstance(keys, list):
        raise KeysFileError(f"tenants.{name}.keys must be a list of sha256:HEX")
    for number, text in enumerate(keys):
        found = _HASH.fullmatch(text.lower()) if isinstance(text, str) else None
        if found is None:
            raise KeysFileError(
                f"tenants.{name}.keys[{number}] is not sha256: and 64 hexadecimal digits; `roost keys hash` makes that "
                "of a key, which itself does not belong here"
            )
        yield bytes.fromhex(found[1])


class KeysFile:
    """The ring of a file, as it was when it could last be used."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises KeysFileError."""
        self._path = path
        self._seen = self._state()
        self.ring = self._read()

    async def run(self) -> None:
        """Look at the file until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            ring = self._read()
        except KeysFileError as error:
            log.warning("the keys of before stay in force: %s", error)
            return
        self.ring = ring
        log.info("keys read anew: %d tenants, %d keys", len(ring.tenants), len(ring))

    def _state(self) -> tuple[int, ...]:
        """What changes with the file; a symbolic link is followed, as Kubernetes swaps one for a changed Secret."""
        try:
            told = self._path.stat()
        except OSError:
            return ()
        return (told.st_mtime_ns, told.st_ctime_ns, told.st_size, told.st_ino)

    def _read(self) -> KeyRing:
        try:
            return read_keys(self._path.read_text(encoding="utf-8"))
        except KeysFileError as error:
            raise KeysFileError(f"keys file {os.fspath(self._path)}: {error}") from error
        except UnicodeDecodeError as error:
            raise KeysFileError(f"keys file {os.fspath(self._path)}: is not UTF-8 text") from error
        except OSError as error:
            raise KeysFileError(f"keys file {os.fspath(self._path)}: {error.strerror or error}") from error
