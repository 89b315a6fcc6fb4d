"""A client of Roost: turns asked, streams read as far as a test wants, conversations whose history grows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.sglang.dialects import Dialect, Exchange, Reply, events_of

__all__ = ["Answer", "Conversation", "Stream", "ask", "new_client", "prose"]

_TIMEOUT = aiohttp.ClientTimeout(total=100)


def new_client() -> aiohttp.ClientSession:
    """A client that keeps no connection: each turn of these tests may come from another process."""
    return aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(force_close=True))


def prose(seed: str, size_bytes: int) -> str:
    """Text of made-up words, the same for the same seed and no other."""
    dice = random.Random(seed)
    text = ""
    while len(text) < size_bytes:
        syllables = (dice.choice("bcdfgklmnprstv") + dice.choice("aeiou") for _ in range(dice.randint(1, 4)))
        text += "".join(syllables) + " "
    return text[:size_bytes].rstrip()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response. `broken`: the connection ended before the message did."""

    status: int
    headers: Mapping[str, str]
    reply: Reply
    body: bytes
    broken: bool = False

    @property
    def replica(self) -> str:
        """Where Roost says it came from."""
        return self.headers["x-roost-replica"]

    @property
    def reason(self) -> str:
        """Why, by Roost's word."""
        return self.headers["x-roost-reason"]

    @property
    def session(self) -> str:
        """The session, by Roost's word."""
        return self.headers["x-roost-session"]


class Stream:
    """A streamed turn under way."""

    def __init__(self, dialect: Dialect, response: aiohttp.ClientResponse) -> None:
        self._dialect = dialect
        self._response = response
        self._data = b""

    @classmethod
    async def open(
        cls,
        http: aiohttp.ClientSession,
        url: str,
        dialect: Dialect,
        body: dict[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """Ask for a stream; returns with its head."""
        return cls(dialect, await http.post(url + dialect.path, json={**body, "stream": True}, headers=headers))

    @property
    def replica(self) -> str:
        """Where Roost says it comes from."""
        return self._response.headers["x-roost-replica"]

    @property
    def session(self) -> str:
        """The session, by Roost's word."""
        return self._response.headers["x-roost-session"]

    async def until_output(self) -> None:
        """Read until the model has written something."""
        while not any(map(self._dialect.has_output, events_of(self._data))):
            piece = await self._response.content.readany()
            assert piece, f"the stream ended without output: {self._data!r}"
            self._data += piece

    async def rest(self) -> Answer:
        """Read to the end, however it comes."""
        broken = False
        try:
            while piece := await self._response.content.readany():
                self._data += piece
        except aiohttp.ClientPayloadError:
            broken = True
            self.leave()
        reply = self._dialect.streamed(events_of(self._data))
        return Answer(self._response.status, self._response.headers, reply, self._data, broken)

    def leave(self) -> None:
        """Close the connection in the middle."""
        self._response.close()


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    dialect: Dialect,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One turn from beginning to end."""
    if body.get("stream"):
        stream = await Stream.open(http, url, dialect, body, headers)
        return await stream.rest()
    async with http.post(url + dialect.path, json=body, headers=headers) as response:
        data = await response.read()
        reply = dialect.whole(await response.json()) if response.status == 200 else Reply()
        return Answer(response.status, response.headers, reply, data)


@dataclass(slots=True)
class Conversation:
    """A conversation of one dialect: every turn sends the whole history."""

    name: str
    dialect: Dialect
    system: str
    headers: Mapping[str, str] = field(default_factory=dict)
    history: list[Exchange] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @classmethod
    def new(cls, name: str, dialect: Dialect, system_bytes: int, session: str | None = None) -> Conversation:
        """`session`: what it sends as Modal-Session-Id; without one it is known by its prompt only."""
        headers = {} if session is None else {"Modal-Session-Id": session}
        return cls(name, dialect, prose(f"{name} system", system_bytes), headers)

    def next_body(self, user_bytes: int, **more: Any) -> tuple[str, dict[str, Any]]:
        """What the user says next, and the body that says it."""
        user = prose(f"{self.name} turn {len(self.history)}", user_bytes)
        more = {"max_tokens": 6, "stream": True, **more}
        return user, self.dialect.body(self.system, self.history, user, **more)

    def long_body(self, max_tokens: int = 1500, **more: Any) -> dict[str, Any]:
        """A next turn that writes long after a test has seen enough; five of them fit into one server's KV together."""
        return self.next_body(60, max_tokens=max_tokens, **{**self.dialect.endless, **more})[1]

    async def turn(self, http: aiohttp.ClientSession, url: str, user_bytes: int, **more: Any) -> Answer:
        """The next turn; a good answer becomes part of the history."""
        user, body = self.next_body(user_bytes, **more)
        answer = await ask(http, url, self.dialect, body, self.headers)
        if answer.status == 200 and not answer.broken and not answer.reply.errors:
            self.history.append((user, answer.reply.said))
        self.answers.append(answer)
        return answer
