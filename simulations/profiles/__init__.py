"""Named profiles of replicas: one YAML file each, in which every figure stands beside its source.

A source is a public measurement, arithmetic from public geometry, a flag of a launch line, or the word *assumption*.
`load` gives the figures, `sources` what they rest on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.resources import files
from typing import Any

import yaml

from simulations.replica_model import ReplicaProfile

__all__ = ["UnknownProfile", "load", "names", "sources"]

_SUFFIX = ".yaml"


class UnknownProfile(ValueError):
    """No profile has that name."""


def names() -> tuple[str, ...]:
    """All profiles, sorted."""
    found = (each.name for each in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def load(name: str, **changes: Any) -> ReplicaProfile:
    """The profile of that name, with fields changed as given.

    Raises `UnknownProfile`, and ValueError where the figures contradict each other.
    """
    figures = {key: figure["value"] for key, figure in _read(name).items()}
    return replace(ReplicaProfile(name=name, **figures), **changes)


def sources(name: str) -> dict[str, str]:
    """Where each figure of a profile comes from, by field."""
    return {key: figure["source"] for key, figure in _read(name).items()}


def _read(name: str) -> Mapping[str, Mapping[str, Any]]:
    if name not in names():
        raise UnknownProfile(f"no profile {name!r}; there are {', '.join(names())}")
    figures = yaml.safe_load((files(__package__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8"))
    known = {field.name for field in fields(ReplicaProfile)} - {"name"}
    for key, figure in figures.items():
        if key not in known or set(figure) != {"value", "source"} or not str(figure["source"]).strip():
            raise ValueError(f"{name}: {key} is no figure with a value and a source")
    return {key: {**figure, "value": _number(figure["value"])} for key, figure in figures.items()}


def _number(value: Any) -> Any:
    """YAML 1.1 reads 6.3e-9 as text."""
    try:
        return float(value) if isinstance(value, str) and value[:1].isdigit() else value
    except ValueError:
        return value
