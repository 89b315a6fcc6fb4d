"""Traces from files: plain or xz, decompressed as they are read."""

from __future__ import annotations

import lzma
from pathlib import Path

from simulations.trace import Trace, TraceError
from simulations.trace_formats import read

__all__ = ["load"]


def load(path: Path) -> Trace:
    """The trace in a file; `.xz` is decompressed on the way. Raises TraceError, also where the file cannot be read."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            return read(lines)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
