"""A folder for what the workers share: metric files and admin sockets. Only its owner may enter it.

It goes with the supervisor. What a killed one left behind is swept away by the next, unless a worker of that one still
finishes its turns: the folder's lock is inherited by every worker, and the last of them drops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["private_folder"]

_PREFIX: Final = "roost-workers-"
_LOCK: Final = "lock"


@contextlib.contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """A new, empty folder, and the descriptor of its lock for workers to inherit. Raises OSError."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _LOCK)  # only now may others try whether it is held
            yield folder, lock
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
