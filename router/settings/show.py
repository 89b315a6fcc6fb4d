"""Settings as they may be shown: plain values, no password."""

from __future__ import annotations

from typing import Any

from router.settings.model import Settings
from router.settings.values import mask_url

__all__ = ["effective"]


def effective(settings: Settings) -> dict[str, Any]:
    """All settings, defaults included, as JSON types, with the password in the store's URL masked."""
    plain = settings.model_dump(mode="json")
    if settings.store.url is not None:
        plain["store"]["url"] = mask_url(settings.store.url)
    return plain
