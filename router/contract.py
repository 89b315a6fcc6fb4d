"""What a replica agent and the router say to each other, and the header names that clients see.

A report is what the agent says of its replica; it is also the proof of life: it is written with a short TTL, and a
replica whose report has gone is gone. The router refuses a report of another major version with a clear problem, never
with a crash.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

__all__ = [
    "ERROR_HEADER",
    "REASON_HEADER",
    "REPAIRED_HEADER",
    "REPLICA_HEADER",
    "REPORT_TTL_S",
    "REPORT_VERSION",
    "SESSION_HEADER",
    "Phase",
    "Report",
    "decode_report",
    "encode_report",
]

REPLICA_HEADER: Final = "x-roost-replica"
"""Response: the replica that served the turn."""
REASON_HEADER: Final = "x-roost-reason"
"""Response: why it went there (`router.domain.decision.Reason`)."""
SESSION_HEADER: Final = "x-roost-session"
"""Response: the session as Roost knows it. Request: a session id that Roost made up earlier."""
REPAIRED_HEADER: Final = "x-roost-repaired"
"""Response: the repairs that were made to the request body, by name."""
ERROR_HEADER: Final = "x-roost-error"
"""Response: the code of an error that Roost itself answers."""

REPORT_VERSION: Final = 1
REPORT_TTL_S: Final = 10.0


class Phase(StrEnum):
    """Where a replica is in its life, as its agent sees it."""

    LAUNCHING = "launching"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_Name = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,255}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One report. Unknown fields are ignored, so that a newer agent can say more."""

    version: int = REPORT_VERSION
    replica: _Name
    url: str
    incarnation: _Name
    """Printable ASCII, at most 255 characters, as all ids in the store."""
    phase: Phase
    models: list[str] = []
    device_tokens: _Count = 0
    """KV room on the device, tokens (`max_total_num_tokens`); 0: not known yet."""
    host_tokens: _Count = 0
    max_running: _Count = 0
    running: _Count = 0
    waiting: _Count = 0
    waiting_uncached_tokens: _Count = 0
    phase_since_s: float = 0.0
    """Unix seconds."""


_decoder = msgspec.json.Decoder(Report)
_encoder = msgspec.json.Encoder()


def encode_report(report: Report) -> bytes:
    """A report as it is stored."""
    return _encoder.encode(report)


def decode_report(raw: bytes) -> Report | str:
    """A report, or one line that says why it cannot be used."""
    try:
        report = _decoder.decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"not a report: {str(error)[:120]}"
    if report.version != REPORT_VERSION:
        return f"report version {report.version}, this router reads {REPORT_VERSION}: upgrade the older of the two"
    return report
