"""The cases, one module a subject. `all_cases` imports them in the order of the table."""

from __future__ import annotations

from importlib import import_module

from tests.conformance.case import CASES, Case

SUBJECTS = (
    "affinity",
    "spreading",
    "shared",
    "failover",
    "health",
    "membership",
    "stopping",
    "streams",
    "leaving",
    "bytes",
    "headers",
    "bodies",
    "routes",
    "security",
    "memory",
    "errors",
    "endings",
    "events",
    "targets",
    "requests",
    "binding",
)
"""Modules of this package. A new one is added here."""


def all_cases() -> list[Case]:
    """Every case, registered."""
    for subject in SUBJECTS:
        import_module(f"{__name__}.{subject}")
    return CASES
