"""One turn over HTTP: send the body, read the stream, note when each piece of output came.

Servers put several tokens into an event when they speculate or fall behind. The time between two events is therefore
divided by the tokens an event of that reply holds on average.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO

import aiohttp
from yarl import URL

from router.domain.outcome import Usage
from router.domain.turn import Dialect
from router.upstream.sse import reader_for
from simulations.prompt_dialects import PATHS

__all__ = ["Answer", "Client", "Served", "Unreachable"]

_CONNECT_TIMEOUT_S = 10.0
_SILENCE_TIMEOUT_S = 600.0
"""A queue may be long; a server that says nothing for ten minutes is gone."""
_REPLICA_HEADER = "x-roost-replica"


class Unreachable(Exception):
    """Nobody answers at the URL."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself; None where it does not."""

    model: str | None = None
    context_tokens: int | None = None


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds from the send."""

    error: str | None = None
    replica: str | None = None
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None
    duration_s: float = 0.0
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    """Between output tokens, one for each event after the first."""


class Client:
    """Sends turns to one server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, dialect: Dialect) -> None:
        self._http = http
        self._root = URL(url.rstrip("/").removesuffix("/v1"))
        self._url = self._root.joinpath(PATHS[dialect].lstrip("/"))
        self._dialect = dialect

    @staticmethod
    def session() -> aiohttp.ClientSession:
        """An HTTP session for any number of turns at once."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def served(self) -> Served:
        """The first model of /v1/models and its context. Raises Unreachable."""
        try:
            async with self._http.get(self._root.joinpath("v1", "models")) as response:
                if response.status != 200:
                    return Served()
                told = await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise Unreachable(f"nobody answers at {self._root}: {error}") from error
        except (aiohttp.ClientError, ValueError):
            return Served()
        models = told.get("data") if isinstance(told, dict) else None
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        name, context = first.get("id"), first.get("max_model_len")
        return Served(name if isinstance(name, str) else None, context if isinstance(context, int) else None)

    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """One turn. Whatever goes wrong is in the answer's `error`."""
        answer = Answer()
        sent = time.perf_counter()
        given = {"content-type": "application/json", **headers}
        try:
            async with self._http.post(self._url, data=BytesIO(body), headers=given) as response:
                answer.replica = response.headers.get(_REPLICA_HEADER)
                if response.status == 200:
                    await self._read(response, answer, sent)
                else:
                    answer.error = f"status_{response.status}"
        except TimeoutError:
            answer.error = "timeout"
        except aiohttp.ClientConnectorError:
            answer.error = "unreachable"
        except (aiohttp.ClientError, OSError):
            answer.error = "broken"
        answer.duration_s = time.perf_counter() - sent
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, sent: float) -> None:
        reader = reader_for(self._dialect, response.headers.get("content-type", "").encode())
        events, last = 0, sent
        async for piece in response.content.iter_any():
            reader.feed(piece)
            came = reader.output_events - events
            if not came:
                continue
            now = time.perf_counter()
            if answer.ttft_s is None:
                answer.ttft_s = now - sent
            else:
                answer.gaps_s.extend([(now - last) / came] * came)
            events, last = reader.output_events, now
        reader.finish()
        answer.usage = reader.usage
        said = reader.usage.output_tokens or 0
        if said > events:  # several tokens an event: what is between two events is between that many tokens
            answer.gaps_s = array("f", (gap_s * events / said for gap_s in answer.gaps_s))
        if reader.error is not None:
            answer.error = reader.error
        elif not reader.terminal:
            answer.error = "incomplete"
