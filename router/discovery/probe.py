"""The probe: asks a plain replica about itself over HTTP. The only module of discovery that does I/O.

Each round asks `/ready` and `/v1/loads`, which cost the engine nothing (a flag and a shared-memory snapshot).
`/server_info`, `/v1/models`, `/model_info` and `/metrics` are asked at once, and only when a replica is new, back, or
was last described `describe_every_s` ago, because `/server_info` queries the scheduler. `/health` is never asked: it
generates a token, and one that fails marks the engine unhealthy (srt/entrypoints/http_server.py).

`observe` raises nothing but cancellation and returns within three times `timeout_s`, whatever the other side does.
Bodies are read up to `body_max_bytes`; redirects are not followed, so the bearer token stays with the replica it was
meant for. Nothing of a body is logged or kept but the parsed facts: SGLang's `/server_info` shows the replica's API
key in clear text.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from router.discovery.assemble import Description, assemble, description_due, restart_sign, unreachable
from router.discovery.engine_json import (
    Loads,
    ModelInfo,
    Models,
    ServerInfo,
    parse_loads,
    parse_model_info,
    parse_models,
    parse_server_info,
)
from router.discovery.engine_metrics import EngineMetrics, parse_metrics
from router.discovery.observation import WANTS_KEY, Engine, Failure, Observation

__all__ = ["Probe", "open_session"]

_CHUNK_BYTES = 65536
_NO_SUCH_PATH = (404, 405, 501)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came of one GET. `failure` is set where no HTTP answer came; `problem` where an unusable one came."""

    path: str
    status: int = 0
    body: bytes = b""
    failure: Failure | None = None
    problem: str = ""

    @property
    def usable(self) -> bool:
        return self.failure is None and not self.problem and self.status == 200

    @property
    def problems(self) -> tuple[str, ...]:
        """The problem in words; a path that is not there is none."""
        if self.problem:
            return (f"{self.path}: {self.problem}",)
        if self.failure is not None:
            return (f"{self.path}: {self.failure.value}",)
        if self.status == 200 or self.status in _NO_SUCH_PATH:
            return ()
        hint = WANTS_KEY if self.status in (401, 403) else ""
        return (f"{self.path}: HTTP {self.status}{hint}",)


def open_session() -> aiohttp.ClientSession:
    """A session fit for probing: no cookies, no proxy from the environment, no cap that a hanging replica could use
    up for others.

    Idle connections are dropped before SGLang drops them (`SGLANG_TIMEOUT_KEEP_ALIVE`, 5 s).
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)


class Probe:
    """Observes replicas over one shared session, which the caller opens and closes. Keeps no state of its own."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        api_key: str | None = None,
        timeout_s: float = 2.0,
        describe_every_s: float = 60.0,
        describe_retry_s: float = 10.0,
        body_max_bytes: int = 4 * 1024 * 1024,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`api_key` is the replicas' own `--api-key`, sent as a bearer token with every request; times in seconds."""
        self._session = session
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "roost-probe"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._describe_every_s = describe_every_s
        self._describe_retry_s = describe_retry_s
        self._body_max_bytes = body_max_bytes
        self._monotonic_s = monotonic_s

    async def observe(self, url: str, previous: Observation | None) -> Observation:
        """One round at the replica whose base address is `url`; `previous` is what the round before returned for it."""
        now_s = self._monotonic_s()
        plain = previous is not None and previous.engine is not Engine.SGLANG and previous.reachable
        if previous is not None and plain and now_s < previous.describe_at_s and not previous.restart_suspected:
            return await self._observe_plain(url, previous)
        first = await self._get(url, "/ready")
        if first.failure is not None:
            return unreachable(previous, first.failure, first.problems)
        ready = _readiness(first.status)
        loads_answer = await self._get(url, "/v1/loads")
        loads = parse_loads(loads_answer.body) if loads_answer.usable else Loads(problems=loads_answer.problems)
        description, describe_at_s = None, 0.0 if previous is None else previous.describe_at_s
        if description_due(previous, ready, restart_sign(previous, loads), now_s):
            description = await self._describe(url)
            describe_at_s = now_s + (self._describe_every_s if description.answered else self._describe_retry_s)
        problems = () if first.status == 503 else first.problems
        return assemble(previous, ready, loads, description, describe_at_s=describe_at_s, problems=problems)

    async def _observe_plain(self, url: str, previous: Observation) -> Observation:
        """A round at a server that is not SGLang: it need only answer."""
        answer = await self._get(url, "/v1/models")
        if answer.failure is not None:
            return unreachable(previous, answer.failure, answer.problems)
        models = parse_models(answer.body) if answer.usable else Models(problems=answer.problems)
        problems = (*answer.problems, *models.problems)
        return assemble(previous, None, Loads(), None, describe_at_s=previous.describe_at_s, problems=problems)

    async def _describe(self, url: str) -> Description:
        """The slow facts, asked side by side."""
        info, models, model_info, metrics = await asyncio.gather(
            *(self._get(url, path) for path in ("/server_info", "/v1/models", "/model_info", "/metrics"))
        )
        return Description(
            server_info=parse_server_info(info.body) if info.usable else ServerInfo(problems=info.problems),
            models=parse_models(models.body) if models.usable else Models(problems=models.problems),
            model_info=parse_model_info(model_info.body)
            if model_info.usable
            else ModelInfo(problems=model_info.problems),
            metrics=parse_metrics(metrics.body) if metrics.usable else EngineMetrics(problems=metrics.problems),
            answered=all(answer.failure is None and answer.status < 500 for answer in (info, models, model_info)),
        )

    async def _get(self, url: str, path: str) -> _Answer:
        """GET `url` + `path`; never raises but for cancellation."""
        try:
            async with self._session.get(
                url.rstrip("/") + path, headers=self._headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                try:
                    body = await self._read(response)
                except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
                    return _Answer(path, response.status, problem=f"body {_failure(error).value}")
                if body is None:
                    return _Answer(path, response.status, problem=f"body over {self._body_max_bytes} bytes")
                return _Answer(path, response.status, body)
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            return _Answer(path, failure=_failure(error))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes | None:
        """The whole body, or None (and the connection closed) where it is larger than allowed."""
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            if len(body) > self._body_max_bytes:
                response.close()
                return None
        return bytes(body)


def _readiness(status: int) -> bool | None:
    """What a status of `/ready` says. A gateway's 5xx says no as well; other answers say nothing of readiness."""
    if 200 <= status < 300:
        return True
    return False if status >= 500 and status not in _NO_SUCH_PATH else None


def _failure(error: Exception) -> Failure:
    """The kind of a failed GET."""
    if isinstance(error, TimeoutError):
        return Failure.TIMEOUT
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionResetError):  # something accepts there, and cuts
            return Failure.RESET
        refused = isinstance(error.os_error, ConnectionRefusedError) or error.os_error.errno == errno.ECONNREFUSED
        return Failure.REFUSED if refused else Failure.UNRESOLVED
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | OSError):
        return Failure.RESET
    if isinstance(error, aiohttp.InvalidURL):
        return Failure.UNRESOLVED
    return Failure.NONSENSE
