"""A private folder for sockets and files of running processes. Only its owner may enter it.

It goes when it is closed. What a killed process left behind is swept away by the next one that asks for a folder of the
same purpose, unless someone still holds its lock: a descriptor that children may inherit, and the last of them drops.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["PrivateFolder"]

_LOCK: Final = "lock"


class PrivateFolder:
    """A new, empty folder with mode 0700. `purpose` is part of its name. Raises OSError."""

    def __init__(self, purpose: str) -> None:
        prefix = f"roost-{purpose}-"
        _sweep(prefix)
        self.path: Final = Path(tempfile.mkdtemp(prefix=prefix))
        self.lock = os.open(self.path / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        """Held while the folder is in use; inherited, it keeps the folder until the last heir is gone."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / _LOCK)  # only now may others try whether it is held

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
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
