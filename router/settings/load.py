"""Reading settings: flags over environment over file over defaults."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource

from router.document import NotYamlError, parse
from router.settings import problems
from router.settings.model import Settings
from router.settings.problems import ConfigError, Problem, unknown_key
from router.settings.rules import follow_url

__all__ = ["Flags", "load"]

_PREFIX = str(Settings.model_config.get("env_prefix"))
_DELIMITER = str(Settings.model_config.get("env_nested_delimiter"))


def _flag(name: str, *path: str) -> Any:
    return field(default=None, metadata={"flag": name, "path": path})


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line said; None: nothing."""

    host: str | None = _flag("--host", "listen", "host")
    port: int | None = _flag("--port", "listen", "port")
    admin_host: str | None = _flag("--admin-host", "admin", "host")
    admin_port: int | None = _flag("--admin-port", "admin", "port")
    workers: int | None = _flag("--workers", "workers")
    redis: str | None = _flag("--redis", "store", "url")
    store: str | None = _flag("--store", "store", "kind")
    log_level: str | None = _flag("--log-level", "log", "level")
    replicas: tuple[str, ...] = ()
    """Replicas of a fleet named `default`."""
    policy: str | None = None
    """The policy of every fleet."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one source says, and how to name the source of each key in a message."""

    values: dict[str, Any]
    names: Mapping[problems.Path, str]
    """By path: where it, and what lies below it, was set."""


def load(file: Path | None, env: Mapping[str, str], flags: Flags = Flags()) -> Settings:
    """The settings that result. Raises `ConfigError` with every problem found.

    `env` is usually `os.environ`; only names that begin with `ROOST_` are looked at, and of those the ones Kubernetes
    makes for a Service called roost are passed over. `ROOST_FLEETS` and other lists are JSON.
    """
    found: list[Problem] = []
    layers = [_of_flags(flags), _of_environment(env, found)]
    if file is not None:
        layers.append(_of_file(file))
    found.extend(_fleets_twice(layers))
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = _laid_over(merged, layer.values)
    if flags.policy is not None:
        merged["fleets"] = _with_policy(merged.get("fleets", [{"name": "default"}]), flags.policy)
        layers.insert(0, _Layer({}, {("fleets", "*", "policy"): "--policy"}))
    known = Settings.model_fields
    found.extend(unknown_key((key,), known) for key in merged if key not in known)
    try:
        settings = Settings(**{key: value for key, value in merged.items() if key in known})
    except ValidationError as error:
        found.extend(problems.explain(error, Settings))
    else:
        if not found:
            return settings
    raise ConfigError(_unique(replace(p, origin=p.origin or _origin(p.path, layers)) for p in found))


def _of_flags(flags: Flags) -> _Layer:
    values: dict[str, Any] = {}
    names: dict[problems.Path, str] = {}
    for each in fields(flags):
        given = getattr(flags, each.name)
        if given is not None and "path" in each.metadata:
            _set(values, each.metadata["path"], given)
            names[each.metadata["path"]] = each.metadata["flag"]
    if flags.replicas:
        values["fleets"] = [{"name": "default", "replicas": list(flags.replicas)}]
        names["fleets",] = "--replica"
    return _layer(values, names)


def _of_environment(env: Mapping[str, str], found: list[Problem]) -> _Layer:
    kept: dict[str, str | None] = {}
    names: dict[problems.Path, str] = {}
    for name, raw in sorted(env.items()):
        if not name.upper().startswith(_PREFIX) or not raw:
            continue
        path = tuple(name[len(_PREFIX) :].lower().split(_DELIMITER))
        problem = _problem_of_variable(name, raw, path)
        if problem is not None:
            found.append(problem)
        elif _annotation(path) is not None:
            kept[name.lower()] = raw
            names[path] = f"environment {name}"
    source = EnvSettingsSource(Settings)
    source.env_vars = kept  # in place of os.environ, which it read when it was made
    return _layer(source(), names)


def _problem_of_variable(name: str, raw: str, path: tuple[str, ...]) -> Problem | None:
    """What is wrong with a variable's name or form, apart from its value."""
    origin = f"environment {name}"
    if _annotation(path) is None:
        if len(path) > 1:
            return _unknown_variable(path, origin)
        if "://" in raw or not (meant := _meant(path[0])):
            return None  # Kubernetes writes ROOST_PORT=tcp://… for a Service called roost, and more such names
        return Problem(path, f"no setting, did you mean {meant}?", f"names as {_PREFIX}STORE{_DELIMITER}URL", origin)
    if _is_text(path):
        return None
    try:
        decoded = json.loads(raw)
    except ValueError:
        decoded = None
    wanted = dict if _group(path) is not None else list
    if not isinstance(decoded, wanted):
        return Problem(
            path, "is not JSON of the right kind", f"a JSON {'object' if wanted is dict else 'list'}", origin
        )
    return None


def _unknown_variable(path: tuple[str, ...], origin: str) -> Problem:
    for depth in range(len(path)):
        group = _group(path[:depth])
        if group is None:
            return Problem(path[:depth], "has no keys below it in the environment", "one value", origin)
        if path[depth] not in group.model_fields:
            return unknown_key(path[: depth + 1], group.model_fields, origin=origin)
    raise AssertionError(path)


def _meant(text: str) -> str | None:
    """The variable somebody wanted who wrote one underscore for two, or nearly a name without any."""
    known = {"_".join(path): path for path in _paths()}
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.85)
    return _PREFIX + _DELIMITER.join(known[near[0]]).upper() if near else None


def _paths(below: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    group = _group(below)
    if group is None:
        yield below
        return
    for name in group.model_fields:
        yield from _paths((*below, name))


def _annotation(path: tuple[str, ...]) -> Any:
    """The declared type at a path of names; None where there is no such setting."""
    annotation: Any = Settings
    for part in path:
        if (
            not (isinstance(annotation, type) and issubclass(annotation, BaseModel))
            or part not in annotation.model_fields
        ):
            return None
        annotation = annotation.model_fields[part].annotation
    return annotation


def _group(path: tuple[str, ...]) -> type[BaseModel] | None:
    annotation = _annotation(path)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _is_text(path: tuple[str, ...]) -> bool:
    """Whether the variable's text is the value, not JSON."""
    return _group(path) is None and getattr(_annotation(path), "__origin__", None) is not tuple


def _of_file(file: Path) -> _Layer:
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem((), f"{file}: {error.strerror or error}", "a readable YAML file")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem((), f"{file}: is not UTF-8 text", "a readable YAML file")]) from error
    except NotYamlError as error:
        raise ConfigError([Problem((), f"{file}{error.at}: {error}", "YAML")]) from error
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        known = ", ".join(Settings.model_fields)
        raise ConfigError([Problem((), f"{file}: is not a mapping of settings", f"the keys {known}")])
    return _layer(values, {(): str(file)})


def _layer(values: dict[str, Any], names: Mapping[problems.Path, str]) -> _Layer:
    """A layer in which a store's URL and kind agree, and an empty list of fleets or an empty group says nothing."""
    kept = {key: value for key, value in values.items() if not (value is None or (key == "fleets" and value == []))}
    if "store" in kept:
        kept["store"] = follow_url(kept["store"])
    return _Layer(kept, names)


def _fleets_twice(layers: Sequence[_Layer]) -> Iterator[Problem]:
    by_flag, *lower = (layer for layer in layers)
    if "fleets" in by_flag.values and any("fleets" in layer.values for layer in lower):
        where = " and ".join(_origin(("fleets",), [layer]) for layer in lower if "fleets" in layer.values)
        yield Problem(
            ("fleets",), f"both --replica flags and a list of fleets ({where})", "one of the two", "--replica"
        )


def _with_policy(fleets: Any, policy: str) -> Any:
    if not isinstance(fleets, list):
        return fleets
    return [{**fleet, "policy": policy} if isinstance(fleet, dict) else fleet for fleet in fleets]


def _laid_over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; anything else, lists too, is replaced."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _set(values: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    *groups, last = path
    for group in groups:
        values = values.setdefault(group, {})
    values[last] = value


def _origin(path: problems.Path, layers: Sequence[_Layer]) -> str:
    """Where the setting, or the nearest thing above it, was set; empty for a default."""
    for depth in range(len(path), 0, -1):
        for layer in layers:
            if name := _name_in(layer, path[:depth]):
                return name
    return next((layer.names[()] for layer in layers if () in layer.names), "")


def _name_in(layer: _Layer, path: problems.Path) -> str:
    anywhere = tuple("*" if isinstance(part, int) else part for part in path)
    if anywhere in layer.names:
        return layer.names[anywhere]
    below: Any = layer.values
    for part in path:
        try:
            below = below[part]
        except (KeyError, IndexError, TypeError):
            return ""
    return next((layer.names[path[:n]] for n in range(len(path), -1, -1) if path[:n] in layer.names), "")


def _unique(found: Iterator[Problem]) -> list[Problem]:
    return list(dict.fromkeys(found))
