"""Secrets out of files: one a line, so that the next can be there before the last has gone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["read_secrets"]

_VISIBLE: Final = re.compile(r"[!-~]{1,4096}")


def read_secrets(key: str, file: str) -> tuple[str, ...]:
    """The secrets in a file, empty lines left out. Raises OSError that names `key`, the setting, and shows none."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError:
        raise OSError(f"{key}: {file} is not ASCII text") from None
    except OSError as error:
        raise OSError(f"{key}: cannot read {file}: {error.strerror or error}") from error
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise OSError(f"{key}: {file} is empty")
    if not all(map(_VISIBLE.fullmatch, found)):
        raise OSError(f"{key}: {file} has a line with a space or an unprintable character in it, or of over 4096 bytes")
    return found
