"""YAML as people write it: settings, the keys file. Strict where YAML would lose something without a word."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

__all__ = ["NotYamlError", "parse"]


class NotYamlError(ValueError):
    """The text is not YAML. `str()` says what is wrong, without an excerpt; `at` where, as `, line 3, column 1`."""

    def __init__(self, said: str, at: str) -> None:
        super().__init__(said)
        self.at = at


class _Loader(yaml.SafeLoader):
    """YAML, refusing a key that is written twice: the first would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As the parent, for mappings whose keys differ."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse(text: str) -> Any:
    """What the text says, in plain types. Raises NotYamlError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise NotYamlError(getattr(error, "problem", None) or str(error).splitlines()[0], at) from error
    except (ValueError, AttributeError, RecursionError) as error:  # PyYAML lets through what Python says of a value
        raise NotYamlError("has a date, number or tag that cannot be, or is nested too deeply", "") from error
