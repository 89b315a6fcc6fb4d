"""The metric files of the workers: read for a scrape, and put in order when a worker has died.

prometheus-client's multiprocess mode: each process maps a file for each kind of metric, named after its process id, and
a scrape adds them up (prometheus-client 0.26 `multiprocess.py`, `mmap_dict.py`). Two things are left to us. The gauges
of a dead process have to go, for what it had in flight is in flight no more. Its counters have to stay, but not each in
a file of its own, or a worker that keeps dying would make every scrape slower than the last.

Both functions are synchronous, so on one event loop a scrape never meets a file half moved.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Final

from prometheus_client import multiprocess
from prometheus_client.mmap_dict import MmapedDict

from router.telemetry.metrics import render_all_processes

__all__ = ["exposition", "retire"]

log = logging.getLogger("roost.supervisor")

_SUMMED: Final = ("counter", "histogram")
_DEAD: Final = "dead"
"""Stands where a living process has its id in a file's name."""


def exposition(folder: Path) -> bytes | None:
    """All workers' metrics; None when a worker is just now making a file, which for microseconds has no bytes."""
    try:
        return render_all_processes(str(folder))
    except struct.error:
        return None


def retire(folder: Path, pid: int) -> None:
    """Forget a dead process's gauges and add its counters and histograms to those of the dead before it."""
    multiprocess.mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
    for kind in _SUMMED:
        file = folder / f"{kind}_{pid}.db"
        if not file.exists():
            continue
        try:
            _add(file, folder / f"{kind}_{_DEAD}.db")
        except (struct.error, RuntimeError):
            # It died while making the file, or wrote into it what no scrape could read.
            log.warning("the %ss of the worker with pid %d are lost: its file cannot be read", kind, pid)
        file.unlink()


def _add(file: Path, total: Path) -> None:
    sums = MmapedDict(str(total))  # type: ignore[no-untyped-call]
    try:
        # All of it is read before any of it is added.
        for key, value, *_ in list(MmapedDict.read_all_values_from_file(str(file))):  # type: ignore[no-untyped-call]
            before, _at_s = sums.read_value(key)  # type: ignore[no-untyped-call]
            sums.write_value(key, before + value, 0.0)  # type: ignore[no-untyped-call]
    finally:
        sums.close()  # type: ignore[no-untyped-call]
