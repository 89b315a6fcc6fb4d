"""Who may ask what on the public listener.

Without a keys file everybody may ask everything, and whoever has the same key is the same tenant. With one, a request
needs a key that the file knows, and a tenant reaches no further than its own turns, responses and questions; paths that
act on an engine as a whole, and fields that reach into another turn's state, need a tenant with `engine_control`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from router.api.keys import KeysFile
from router.api.paths import computes, tenant_may
from router.domain.errors import MalformedRequest, NotAllowed
from router.domain.tenant import Tenant
from router.domain.turn import Dialect, Facts
from router.lifecycle.turnstile import Turnstile

__all__ = ["Access"]


class Access:
    """Keys, what they open, and tenants' limits."""

    def __init__(self, keys: KeysFile | None, turnstile: Turnstile, *, engine_paths: bool = False) -> None:
        """`engine_paths`: every tenant may ask paths that act on an engine as a whole."""
        self._keys = keys
        self._turnstile = turnstile
        self._engine_paths = engine_paths

    def whose(self, headers: Sequence[tuple[bytes, bytes]]) -> Tenant | None:
        """Whose request it is; None where keys are not looked up. Raises UnknownKey."""
        return self._keys.ring.find(headers) if self._keys is not None else None

    def admit(self, tenant: Tenant | None, method: str, path: str) -> None:
        """Whether the tenant may ask this at all. Raises NotAllowed."""
        if tenant is None or tenant.engine_control or self._engine_paths or tenant_may(method, path):
            return
        raise NotAllowed(
            "this key may not ask this path: it is not a turn of its own, nor a question about text, and other paths "
            "need engine_control in the keys file"
        )

    def check(self, tenant: Tenant | None, facts: Facts, *, encoded: bool) -> None:
        """Whether the body stays within what its tenant may. Raises NotAllowed and MalformedRequest."""
        if tenant is None or tenant.engine_control or facts.dialect is Dialect.OTHER:
            return
        if encoded:
            raise MalformedRequest("a compressed body cannot be looked into; send it as it is")
        if facts.steers_engine:
            raise NotAllowed("this key may not name an engine's sessions, nor hosts that it should fetch KV from")

    def turn(self, tenant: Tenant | None, method: str, path: str) -> AbstractAsyncContextManager[None]:
        """Around the work at replicas. Raises OverLimit on entry where the tenant has used up its turns."""
        return self._turnstile.turn(tenant if tenant is not None and computes(method, path) else None)
