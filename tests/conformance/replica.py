"""A mock replica over raw sockets: what SGLang 0.5.23 offers, and every way to misbehave.

It answers probes by itself (`/health`, `/ready`, `/v1/loads`, `/server_info`, `/v1/models` and their older names; what
each router looks at differs) and hands every other request to its `script`, which has the socket. What came is in
`seen`. A restart at the same port is a new life of the engine and `/server_info` tells so.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal
from zlib import crc32

from tests.conformance.dialects import DIALECTS, MODEL, OF_PATH, PATHS, Dialect, events, whole

PATIENCE_S = 20.0
"""Far beyond what any step takes that is not made to wait."""
MARK = re.compile(rb"mark-[0-9a-f]{12}")

_NOT_SGLANG = frozenset({"/loads", "/load", "/v1/chat/completions/render", "/v1/completions/render"})
"""What some routers ask of other engines. They must hear that it is not there."""

_SECTIONS: dict[str, Any] = {
    "memory": {"weight_gb": 1.0, "kv_cache_gb": 1.0, "graph_gb": 0.0, "token_capacity": 750_000},
    "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    "disaggregation": {"mode": "null"},
}
"""What `/v1/loads?include=…` adds to each rank."""

Headers = list[tuple[bytes, bytes]]
Health = Literal["good", "bad", "silent"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as a replica received it."""

    method: str
    target: str
    headers: Headers
    body: bytes
    mark: bytes
    """The newest mark in the body; each turn of the suite carries its own."""

    @property
    def path(self) -> str:
        return self.target.split("?", 1)[0]

    @property
    def dialect(self) -> Dialect | None:
        return OF_PATH.get(self.path)

    @property
    def sha256(self) -> str:
        return sha256(self.body).hexdigest()

    @property
    def stream(self) -> bool:
        return re.search(rb'"stream"\s*:\s*true', self.body) is not None

    def header(self, name: bytes) -> list[bytes]:
        """All values of a header, its name in whatever case."""
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class Visit:
    """One request under way, as its script sees it."""

    seen: Seen
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    replica: Replica
    number: int
    kept: bool = True
    """Whether the connection goes on after this answer."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the other side has closed, as `until_closed` saw it."""

    @property
    def answer_id(self) -> str:
        return f"resp_{self.replica.port}_{self.number}"

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = b"{}", headers: Sequence[tuple[str, str]] = ()) -> None:
        """A whole response."""
        bodiless = self.seen.method == "HEAD" or status in (204, 304)
        given = [*headers]
        if not any(name.lower() == "content-type" for name, _ in headers):
            given.append(("Content-Type", "application/json"))
        if status != 204:
            given.append(("Content-Length", str(len(body))))
        await self.send(head(status, given) + (b"" if bodiless else body))

    async def begin(self, headers: Sequence[tuple[str, str]] = ()) -> None:
        """The head of an event stream."""
        told = [("Content-Type", "text/event-stream; charset=utf-8"), ("Transfer-Encoding", "chunked")]
        await self.send(head(200, [*told, *headers]))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def stream(self, events: Sequence[bytes]) -> None:
        """A whole event stream, one chunk an event."""
        await self.begin()
        for event in events:
            await self.chunk(event)
        await self.end()

    def reset(self) -> None:
        """Die on the spot: the other side sees a reset or a cut."""
        self.kept = False
        self.writer.transport.abort()

    def close(self) -> None:
        """Close after what was sent, whether or not the message has ended."""
        self.kept = False
        self.writer.close()

    @property
    def events(self) -> list[bytes]:
        """The stream that answers this request."""
        return events(self.seen.dialect or Dialect.CHAT, self.answer_id, len(self.seen.body) // 4)

    async def reply(self) -> None:
        """What the engine would say."""
        dialect = self.seen.dialect
        if self.seen.path.endswith("/tokenize"):
            await self.answer(body=_tokenized(self.seen.body))
        elif self.seen.path in _NOT_SGLANG:
            await self.answer(404, b'{"detail":"Not Found"}')
        elif dialect is None:
            await self.answer(body=json.dumps({"path": self.seen.target, "life": self.replica.life}).encode())
        elif self.seen.stream:
            await self.stream(self.events)
        else:
            await self.answer(body=whole(dialect, self.answer_id, len(self.seen.body) // 4))

    async def until_closed(self) -> None:
        """Wait for the other side to close."""
        with suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass
        self.kept = False
        self.left.set()
        self.replica.closed_early += 1


Script = Callable[[Visit], Awaitable[None]]


async def speak(visit: Visit) -> None:
    """The script of a replica that is well."""
    await visit.reply()


class Gate:
    """A script that holds every answer back until `open`; `arrived` counts what came."""

    def __init__(self, then: Script = speak, begin: bool = False) -> None:
        self._then = then
        self._begin = begin
        """Whether the head and the first event go out at once."""
        self._open = asyncio.Event()
        self.arrived = 0
        self.left = 0
        """Requests whose client went while they waited."""

    async def __call__(self, visit: Visit) -> None:
        self.arrived += 1
        told = visit.events
        if self._begin:
            await visit.begin()
            await visit.chunk(told[0])
        opened = asyncio.create_task(self._open.wait())
        gone = asyncio.create_task(visit.until_closed())
        try:
            await asyncio.wait((opened, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
            gone.cancel()
            await asyncio.gather(opened, gone, return_exceptions=True)
        if visit.left.is_set():
            self.left += 1
        elif self._begin:
            for event in told[1:]:
                await visit.chunk(event)
            await visit.end()
        else:
            await self._then(visit)

    def open(self) -> None:
        self._open.set()


@dataclass
class Replica:
    """One mock replica."""

    script: Script = speak
    health: Health = "good"
    """How it answers `/health` and whatever else tells liveness."""
    loads: dict[str, float] = field(default_factory=dict)
    """What `/v1/loads` says instead of the truth."""
    frozen: bool = False
    """Whether `/v1/loads` says for ever that nothing runs."""
    device_tokens: int = 750_000
    life: int = 1
    keepalive_s: float = 0.0
    """Seconds after which it closes an idle connection; 0: never."""
    key: bytes | None = None
    """API key it demands."""
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    running: int = 0
    running_peak: int = 0
    probes: int = 0
    connections: int = 0
    closed_early: int = 0
    """Requests whose other side closed while the script waited for that."""
    prefilled_tokens: int = 5
    _server: asyncio.Server | None = None
    _talks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def turns(self) -> list[Seen]:
        """Requests that are turns."""
        return [seen for seen in self.seen if seen.dialect is not None]

    def saw(self, mark: bytes) -> int:
        """How often it was asked for the turn that carries this mark; to count its tokens is not to be asked for it."""
        counting = "/v1/messages/count_tokens"
        return sum(seen.mark == mark and (seen.dialect is not None or seen.path == counting) for seen in self.seen)

    def reset(self) -> None:
        """Well again, and nothing seen."""
        self.script, self.health, self.loads, self.frozen, self.keepalive_s = speak, "good", {}, False, 0.0
        self.seen.clear()
        self.running_peak = self.closed_early = 0

    async def start(self) -> None:
        """Listen, on the port it had if it had one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: connections break, nobody listens. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await server.wait_closed()

    async def restart(self) -> None:
        """A new life at the same address."""
        await self.stop()
        self.life += 1
        self.prefilled_tokens = 5
        await self.start()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        self.connections += 1
        try:
            # What is no HTTP/1.1 (some routers look for HTTP/2 or gRPC first) ends the connection.
            broken = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError, ValueError)
            with suppress(*broken, asyncio.CancelledError):
                while await self._serve(reader, writer):
                    pass
        finally:
            self._talks.discard(task)
            writer.transport.abort() if task.cancelled() else writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        async with asyncio.timeout(self.keepalive_s or None):
            start = await reader.readuntil(b"\r\n\r\n")
        seen = await _read(start, reader, writer)
        visit = Visit(seen, reader, writer, self, len(self.seen))
        if seen.method in ("GET", "HEAD") and (told := self._told(seen.path)) is not None:
            self.probes += 1
            status, body = told
            if status == 0:
                await visit.until_closed()
                self.closed_early -= 1
                return False
            await visit.answer(status, body)
            return True
        if self.key is not None and seen.header(b"authorization") != [b"Bearer " + self.key]:
            self.seen.append(seen)
            await visit.answer(401, b'{"error":"Unauthorized"}')
            return True
        self.seen.append(seen)
        self.running += 1
        self.running_peak = max(self.running_peak, self.running)
        self.prefilled_tokens += len(seen.body) // 4
        try:
            await self.script(visit)
        finally:
            self.running -= 1
        return visit.kept

    def _told(self, path: str) -> tuple[int, bytes] | None:
        """SGLang's answer to a probe: status and body; status 0: none ever comes."""
        if path in ("/health", "/ready", "/health_generate", "/readyz", "/liveness", "/healthz"):
            return {"good": 200, "bad": 503, "silent": 0}[self.health], b""
        if path == "/metrics":
            return 200, self._metrics()
        load = self._load()
        info: dict[str, Any] = {
            "version": "0.5.23",
            "random_seed": 42,
            "status": "ready",
            "model_path": MODEL,
            "tokenizer_path": MODEL,
            "served_model_name": MODEL,
            "max_total_num_tokens": self.device_tokens,
            "max_running_requests": 64,
            "page_size": 64,
            "dp_size": 1,
            "tp_size": 1,
            "load_balance_method": "round_robin",
            "disaggregation_mode": "null",
            "internal_states": [
                {
                    "startup_time": {"load_weight": 1.5, "scheduler_e2e": self.port + self.life / 16},
                    "effective_max_running_requests_per_dp": 64,
                }
            ],
        }
        model = {"id": MODEL, "object": "model", "created": 1795967097, "owned_by": "sglang", "root": MODEL}
        about = {"model_path": MODEL, "tokenizer_path": MODEL, "served_model_name": MODEL, "is_generation": True}
        old = {"dp_rank": 0, "num_reqs": load["num_running_reqs"], "num_waiting_reqs": 0, "num_tokens": 0}
        answers: dict[str, Any] = {
            "/v1/loads": {
                "timestamp": "2026-11-29T12:00:00",
                "version": "0.5.23",
                "accelerator": None,
                "num_accelerators": 4,
                "loads": [{"timestamp": 1795967097.0, **load, **_SECTIONS}],
            },
            "/v1/models": {"object": "list", "data": [{**model, "max_model_len": 262144}]},
            "/model_info": about,
            "/get_model_info": about,
            "/server_info": info,
            "/get_server_info": info,
            "/get_load": [old],
            "/version": {"version": "0.10.0"},
        }
        return (200, json.dumps(answers[path]).encode()) if path in answers else None

    def _metrics(self) -> bytes:
        """The load as SGLang's gauges, which some routers read instead."""
        load = self._load()
        told = {
            "num_running_reqs": load["num_running_reqs"],
            "num_queue_reqs": load["num_waiting_reqs"],
            "num_used_tokens": load["num_used_tokens"],
            "max_total_num_tokens": load["max_total_num_tokens"],
            "token_usage": load["token_usage"],
            "gen_throughput": load["gen_throughput"],
            "cache_hit_rate": load["cache_hit_rate"],
        }
        lines = (
            f'# TYPE sglang:{name} gauge\nsglang:{name}{{engine_type="unified",model_name="{MODEL}"}} {value:.1f}\n'
            for name, value in told.items()
        )
        return "".join(lines).encode()

    def _load(self) -> dict[str, float]:
        return {
            "dp_rank": 0,
            "num_running_reqs": 0 if self.frozen else self.running,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "num_active_tokens": 0,
            "num_prealloc_ready_tokens": 0,
            "num_total_reqs": 0 if self.frozen else self.running,
            "max_total_num_tokens": self.device_tokens,
            "max_running_requests": 64,
            "token_usage": 0.0,
            "gen_throughput": 0.0,
            "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": 5 if self.frozen else self.prefilled_tokens,
            "total_prefill_busy_us": 250 if self.frozen else 50 * self.prefilled_tokens,
            **self.loads,
        }


def _tokenized(body: bytes) -> bytes:
    """What `/tokenize` says, in SGLang's and in vLLM's words: texts that begin alike have tokens that begin alike."""
    try:
        asked = json.loads(body)
    except ValueError:
        asked = {}
    text = json.dumps(asked.get("prompt") or asked.get("text") or asked.get("messages") or "").encode()
    tokens = [crc32(text[start : start + 4]) % 100_000 for start in range(0, len(text), 4)]
    return json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": 262144}).encode()


def head(status: int, headers: Sequence[tuple[str, str]]) -> bytes:
    """A response's head."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} Told\r\n{lines}\r\n".encode("latin-1")


async def _read(start: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seen:
    first, *lines = start[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ")
    headers = []
    length, chunked = 0, False
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name, value.strip()))
        if name.lower() == b"content-length":
            length = int(value)
        elif name.lower() == b"transfer-encoding":
            chunked = b"chunked" in value.lower()
        elif name.lower() == b"expect":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await (_chunked(reader) if chunked else reader.readexactly(length))
    marks = MARK.findall(body[-200_000:])
    return Seen(method.decode(), target.decode("latin-1"), headers, body, marks[-1] if marks else b"")


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    while (await reader.readline()).strip():
        pass
    return bytes(body)


__all__ = [
    "DIALECTS",
    "MARK",
    "PATHS",
    "PATIENCE_S",
    "Gate",
    "Headers",
    "Health",
    "Replica",
    "Script",
    "Seen",
    "Visit",
    "head",
    "speak",
]
