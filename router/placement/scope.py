"""What keeps tenants apart: every name that one of them gives is hashed with its scope before the shared state sees it.

A scope is the tenant itself, as far as sessions go: the digest of a key, or of a name in the keys file and the secret
beside it. Two tenants' names for a thing meet only by a collision of BLAKE2b, whatever either of them knows of the
other. In particular:

- *A session's record* goes by the session and the scope. `x-roost-session` shows a session to its client; a tenant that
  presents another's (its seal can be made by whoever knows his own scope) has a record of its own under that name.
- *A stored response* goes by its id and the scope: under another scope the id is unknown.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["named_scope", "record_key", "response_key"]

_KEY_BYTES = 64
"""The longest key that BLAKE2b takes."""


def named_scope(name: str, secret: bytes) -> str:
    """The scope of a tenant that a keys file names. `secret` (any length, may be empty) keeps others from computing it:
    boundaries of prompts are hashed fast rather than safely, and whoever knows a scope might search for two that meet.
    """
    key = blake2b(secret, digest_size=_KEY_BYTES).digest() if secret else b""
    return blake2b(name.encode(), digest_size=12, key=key, person=b"roost-named").hexdigest()


def record_key(scope: str, session: str) -> str:
    """What a session's record is called in the store."""
    return _scoped(scope, session, b"roost-record")


def response_key(scope: str, response_id: str) -> str:
    """What the binding of a stored response is called in the store."""
    return _scoped(scope, response_id, b"roost-response")


def _scoped(scope: str, name: str, person: bytes) -> str:
    raw = name.encode("utf-8", "surrogatepass")
    return blake2b(raw, digest_size=12, key=scope.encode()[:_KEY_BYTES], person=person).hexdigest()
