"""Several workers behind one port (being written); one worker runs in this process."""

from __future__ import annotations

from router.main import run as run_one
from router.settings import Settings

__all__ = ["run"]


def run(settings: Settings) -> int:
    """Serve until told to stop; the exit code."""
    return run_one(settings)
