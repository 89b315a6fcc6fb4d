"""Conversations as a client holds them, in each of the five dialects."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from router.domain.turn import Dialect

WORDS = "the quick brown fox jumps over the lazy dog and then walks all the way home again "


def prose(marker: str, size_bytes: int) -> str:
    """Text of about that size that no other marker shares."""
    return (f"{marker}: " + (f"{marker} " + WORDS) * (size_bytes // len(WORDS) + 1))[:size_bytes]


@dataclass
class Conversation:
    """A conversation that grows; `body` is its next turn's request."""

    name: str
    dialect: Dialect = Dialect.CHAT
    system: str = "You are a coding agent."
    model: str | None = "m"
    stream: bool = True
    size_bytes: int = 2000
    """Of each thing said."""
    header: tuple[str, str] | None = None
    field_given: tuple[str, Any] | None = None
    key: str | None = None
    """API key."""
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.said:
            self.said.append(prose(f"{self.name} asks", self.size_bytes))

    def grow(self) -> None:
        """The engine answered and the client says more."""
        number = len(self.said)
        self.said.append(prose(f"{self.name} is told {number}", self.size_bytes))
        self.said.append(prose(f"{self.name} asks {number}", self.size_bytes))

    @property
    def headers(self) -> dict[str, str]:
        told = {"content-type": "application/json"}
        if self.header is not None:
            told[self.header[0]] = self.header[1]
        if self.key is not None:
            told["authorization"] = f"Bearer {self.key}"
        return told

    def body(self) -> bytes:
        asked: dict[str, Any] = {} if self.model is None else {"model": self.model}
        asked["stream"] = self.stream
        if self.field_given is not None:
            asked[self.field_given[0]] = self.field_given[1]
        asked.update(self._prompt())
        return json.dumps(asked).encode()

    def _prompt(self) -> dict[str, Any]:
        roles = ["assistant" if index % 2 else "user" for index in range(len(self.said))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, self.said, strict=True)]
        match self.dialect:
            case Dialect.CHAT:
                return {"messages": [{"role": "system", "content": self.system}, *messages]}
            case Dialect.MESSAGES:
                return {"system": self.system, "messages": messages, "max_tokens": 64}
            case Dialect.RESPONSES:
                return {"instructions": self.system, "input": messages}
            case Dialect.COMPLETIONS:
                return {"prompt": self.system + "".join(self.said)}
            case _:
                return {"text": self.system + "".join(self.said), "sampling_params": {"max_new_tokens": 8}}
