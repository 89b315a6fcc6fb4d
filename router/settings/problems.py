"""Plain sentences for what is wrong with settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from router.settings.values import Allowed, mask_url

__all__ = ["ConfigError", "Path", "Problem", "describe", "explain", "unknown_key"]

Path = tuple[str | int, ...]

_SHOWN_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one setting."""

    path: Path
    """Where, from the top: `("fleets", 0, "policy")`. Empty: the whole file."""
    wrong: str
    allowed: str
    origin: str = ""
    """Where it was set: a file, an environment variable, a flag. Empty: a default, or built in code."""

    @property
    def key(self) -> str:
        """The path as text: `fleets[0].policy`."""
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return text.removeprefix(".")

    def __str__(self) -> str:
        """One line, whatever a key or a value holds."""
        where = f"{self.key}: " if self.path else ""
        origin = f"; set by {self.origin}" if self.origin else ""
        text = f"{where}{self.wrong} (allowed: {self.allowed}{origin})"
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)

    def as_plain(self) -> dict[str, str]:
        """For JSON."""
        return {"key": self.key, "wrong": self.wrong, "allowed": self.allowed, "origin": self.origin}


class ConfigError(Exception):
    """The settings cannot be used. `str()` has one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        """One line per problem."""
        return "\n".join(map(str, self.problems))


def unknown_key(path: Path, known: Iterable[str], *, origin: str = "") -> Problem:
    """The problem of a key that no setting has."""
    names = list(known)
    near = difflib.get_close_matches(str(path[-1]), names, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    return Problem(path, f"unknown key{hint}", ", ".join(names), origin)


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[Problem, ...]:
    """Pydantic's errors about a `model` as problems, without origins."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        within: tuple[Problem, ...] | None = getattr(cause, "problems", None)
        if within is not None:
            at = tuple(detail["loc"])
            problems.extend(replace(problem, path=at + problem.path) for problem in within)
        else:
            problems.append(_explain_one(detail["type"], tuple(detail["loc"]), detail.get("input"), cause, model))
    return tuple(problems)


def _explain_one(kind: str, path: Path, value: object, cause: object, model: type[BaseModel]) -> Problem:
    unknown = kind in {"extra_forbidden", "invalid_key"}
    annotation, metadata = _field_at(path[:-1] if unknown else path, model)
    if unknown:
        return unknown_key(path, annotation.model_fields if _is_group(annotation) else ())
    allowed = describe(annotation, metadata)
    if kind == "missing":
        return Problem(path, "missing", allowed)
    shown = _shown(value, secret=any(isinstance(item, Allowed) and item.secret for item in metadata))
    if isinstance(cause, ValueError):
        return Problem(path, f"{shown} {cause}", allowed)
    near = difflib.get_close_matches(str(value), allowed.split(", "), n=1) if kind == "literal_error" else ()
    hint = f", did you mean {near[0]!r}?" if near else ""
    return Problem(path, f"{shown} is not allowed{hint}", allowed)


def describe(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """What a field of this type may hold, in words."""
    annotation, metadata = _unwrap(annotation, metadata)
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is tuple:
        return f"a list of: {describe(parts[0])}"
    if _is_group(annotation):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    simple = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return simple[annotation] + _bounds(metadata)


def _bounds(metadata: Iterable[object]) -> str:
    words: dict[str, object] = {}
    for item in metadata:
        match item:
            case Ge(ge=bound):
                words["from"] = bound
            case Gt(gt=bound):
                words["above"] = bound
            case Le(le=bound):
                words["to"] = bound
    return "".join(f" {word} {bound}" for word, bound in words.items())


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unwrap(annotation: Any, metadata: Iterable[object]) -> tuple[Any, list[object]]:
    """Take `Annotated` and `| None` off; gather the metadata, that of nested `Field(…)` too."""
    gathered: list[object] = []
    for item in metadata:
        gathered.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _unwrap(inner, [*gathered, *more])
    if origin in {Union, UnionType}:
        present = [part for part in get_args(annotation) if part is not NoneType]
        return _unwrap(present[0], gathered)
    return annotation, gathered


def _field_at(path: Path, model: type[BaseModel]) -> tuple[Any, list[object]]:
    """The type and metadata at a path from the top; whatever a path goes through is a group or a list."""
    annotation: Any = model
    metadata: list[object] = []
    for part in path:
        if isinstance(part, int):
            annotation, metadata = _unwrap(get_args(annotation)[0], ())
        elif _is_group(annotation) and part in annotation.model_fields:
            field = annotation.model_fields[part]
            annotation, metadata = _unwrap(field.annotation, field.metadata)
        else:
            break
    return annotation, metadata


def _shown(value: object, *, secret: bool) -> str:
    """The value as it may stand in a message: short, and without a password."""
    if secret:
        return "the value"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    text = repr(mask_url(value) if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…"
