"""Scripted replicas over real sockets: SGLang's surface, the five dialects, and every way to misbehave.

A replica answers probes by itself and hands each other request to its `script`, which has the socket. What came is kept
in `seen`. A restart on the same port is a new life of the engine, as `/server_info` tells it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from router.domain.turn import Dialect

PATIENCE_S = 20.0
"""Far beyond what any step takes; a step that takes longer hangs."""

PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.COMPLETIONS: "/v1/completions",
    Dialect.RESPONSES: "/v1/responses",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.GENERATE: "/generate",
}
DIALECTS = tuple(PATHS)
_DIALECT_OF = {path: dialect for dialect, path in PATHS.items()}
_PROBED = frozenset({"/ready", "/v1/loads", "/server_info", "/v1/models", "/model_info", "/metrics"})

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as a replica received it."""

    method: str
    target: str
    headers: Headers
    body: bytes
    head: bytes = b""
    """Request line and headers, as they came."""

    @property
    def path(self) -> str:
        return self.target.split("?", 1)[0]

    @property
    def dialect(self) -> Dialect:
        return _DIALECT_OF.get(self.path, Dialect.OTHER)

    @property
    def sha256(self) -> str:
        return sha256(self.body).hexdigest()

    @property
    def stream(self) -> bool:
        try:
            asked = json.loads(self.body)
        except (ValueError, RecursionError):
            return False
        return isinstance(asked, dict) and asked.get("stream") is True

    def header(self, name: bytes) -> list[bytes]:
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

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = b"{}", headers: Sequence[tuple[str, str]] = ()) -> None:
        """A whole response."""
        bodiless = self.seen.method == "HEAD" or status in (204, 304)
        given = [("Content-Type", "application/json"), *headers]
        if status != 204:
            given.append(("Content-Length", str(len(body))))
        await self.send(_head(status, given) + (b"" if bodiless else body))

    async def begin(self, content_type: str = "text/event-stream") -> None:
        """The head of a chunked response."""
        await self.send(_head(200, [("Content-Type", content_type), ("Transfer-Encoding", "chunked")]))

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Die on the spot."""
        self.kept = False
        self.writer.transport.abort()

    def close(self) -> None:
        """Close after what was sent, whether or not the message has ended."""
        self.kept = False
        self.writer.close()

    async def reply(self) -> None:
        """What the engine would say in this dialect."""
        seen = self.seen
        if seen.dialect is Dialect.OTHER:
            await self.answer(body=json.dumps({"path": seen.target, "life": self.replica.life}).encode())
        elif seen.stream:
            await self.begin()
            for event in events(seen.dialect, self.response_id, len(seen.body) // 4):
                await self.chunk(event)
            await self.end()
        else:
            await self.answer(body=whole(seen.dialect, self.response_id, len(seen.body) // 4))

    @property
    def response_id(self) -> str:
        return f"resp_{self.replica.port}_{self.number}"

    async def until_closed(self) -> None:
        """Wait for the other side to close."""
        with suppress(ConnectionError):
            while await self.reader.read(65_536):
                pass
        self.kept = False


Script = Callable[[Visit], Awaitable[None]]


async def speak(visit: Visit) -> None:
    """The script of a replica that is well."""
    await visit.reply()


class Gate:
    """A script that holds every answer back until `open`; `arrived` tells how many wait or have waited."""

    def __init__(self, then: Script = speak) -> None:
        self._then = then
        self._open = asyncio.Event()
        self._changed = asyncio.Condition()
        self.arrived = 0

    async def __call__(self, visit: Visit) -> None:
        async with self._changed:
            self.arrived += 1
            self._changed.notify_all()
        await self._open.wait()
        await self._then(visit)

    def open(self) -> None:
        self._open.set()

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.arrived >= count)


@dataclass
class Replica:
    """One scripted replica."""

    model: str = "m"
    script: Script = speak
    ready: bool = True
    mute: bool = False
    """Takes probes and never answers them, as an engine that is all prefill."""
    loads: dict[str, int] = field(default_factory=dict)
    """What `/v1/loads` says instead of the truth."""
    device_tokens: int = 750_000
    api_key: str | None = None
    """What probes must show."""
    life: int = 1
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    running: int = 0
    probes: int = 0
    prefilled_tokens: int = 5
    """In this life; a few by the engine's own warmup."""
    _server: asyncio.Server | None = None
    _talks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def turns(self) -> list[Seen]:
        """Requests that are turns."""
        return [seen for seen in self.seen if seen.dialect is not Dialect.OTHER]

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
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._serve(reader, writer):
                    pass
        finally:
            self._talks.discard(task)
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        seen = await _read(reader)
        visit = Visit(seen, reader, writer, self, len(self.seen))
        if seen.method == "GET" and seen.path in _PROBED and b"roost-probe" in b"".join(seen.header(b"user-agent")):
            self.probes += 1
            if self.mute:
                await visit.until_closed()
                return False
            told = self._told(seen.path) if self._admits(seen) else (401, b'{"error":"Unauthorized"}')
            await visit.answer(*told)
            return True
        self.seen.append(seen)
        self.running += 1
        self.prefilled_tokens += len(seen.body) // 4
        try:
            await self.script(visit)
        finally:
            self.running -= 1
        return visit.kept

    def _admits(self, seen: Seen) -> bool:
        """As SGLang's --api-key, which is not asked for at /metrics (srt/utils/auth.py)."""
        keyless = self.api_key is None or seen.path == "/metrics"
        return keyless or seen.header(b"authorization") == [f"Bearer {self.api_key}".encode()]

    def _told(self, path: str) -> tuple[int, bytes]:
        """SGLang 0.5.23's answer to a probe."""
        if path == "/ready":
            return (200 if self.ready else 503), b""
        if path == "/metrics":
            return 200, b'sglang:page_size{model_name="m"} 64.0\n'
        answers: dict[str, dict[str, Any]] = {
            "/v1/loads": {"version": "0.5.23", "loads": [self._load()]},
            "/v1/models": {
                "object": "list",
                "data": [{"id": self.model, "owned_by": "sglang", "max_model_len": 262144}],
            },
            "/model_info": {"served_model_name": self.model, "model_path": "/models/m"},
            "/server_info": {
                "version": "0.5.23",
                "random_seed": 42,
                "status": "ready",
                "served_model_name": self.model,
                "max_total_num_tokens": self.device_tokens,
                "page_size": 64,
                "launch_command": "sglang serve",
                "internal_states": [
                    {"startup_time": {"load_weight": 1.5, "scheduler_e2e": self.port + self.life / 16}}
                ],
            },
        }
        return 200, json.dumps(answers[path]).encode()

    def _load(self) -> dict[str, int]:
        return {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0,
            "max_total_num_tokens": self.device_tokens,
            "max_running_requests": 64,
            "total_prefill_uncached_tokens": self.prefilled_tokens,
            "total_prefill_busy_us": 50 * self.prefilled_tokens,
            **self.loads,
        }


@asynccontextmanager
async def replicas(count: int, **given: Any) -> AsyncIterator[list[Replica]]:
    """`count` replicas that listen."""
    made = [Replica(**given) for _ in range(count)]
    try:
        for each in made:
            await each.start()
        yield made
    finally:
        for each in made:
            await each.stop()


def _head(status: int, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status} Told\r\n{lines}\r\n".encode()


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ")
    headers = []
    length = 0
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name, value.strip()))
        if name.lower() == b"content-length":
            length = int(value)
    return Seen(method.decode(), target.decode("latin-1"), headers, await reader.readexactly(length), head)


# --- what an engine says ---------------------------------------------------------------------------------------------


def whole(dialect: Dialect, response_id: str, prompt_tokens: int, text: str = "fine ☃") -> bytes:
    """A reply that is no stream."""
    openai = {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "total_tokens": prompt_tokens + 2}
    reply: dict[str, Any]
    match dialect:
        case Dialect.CHAT:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            reply = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": openai}
        case Dialect.COMPLETIONS:
            reply = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": text}], "usage": openai}
        case Dialect.RESPONSES:
            reply = _response(response_id, prompt_tokens, "completed", text)
        case Dialect.MESSAGES:
            usage = {"input_tokens": prompt_tokens, "output_tokens": 2}
            content = [{"type": "text", "text": text}]
            reply = {"id": "msg", "type": "message", "role": "assistant", "content": content, "usage": usage}
        case _:
            meta = {
                "id": "g",
                "finish_reason": {"type": "stop"},
                "prompt_tokens": prompt_tokens,
                "completion_tokens": 2,
            }
            reply = {"text": text, "output_ids": [1, 2], "meta_info": {**meta, "cached_tokens": 0}}
    return json.dumps(reply, ensure_ascii=False).encode()


def events(
    dialect: Dialect, response_id: str, prompt_tokens: int, pieces: Sequence[str] = ("fi", "ne ☃")
) -> list[bytes]:
    """A stream, event by event, with its terminal event last."""
    if dialect is Dialect.MESSAGES:
        return _anthropic(prompt_tokens, pieces)
    if dialect is Dialect.RESPONSES:
        return _typed(response_id, prompt_tokens, pieces)
    found = []
    if dialect is Dialect.GENERATE:
        for number in range(len(pieces)):
            done = number + 1 == len(pieces)
            meta: dict[str, Any] = {"id": "g", "finish_reason": {"type": "stop"} if done else None}
            meta |= {"prompt_tokens": prompt_tokens}
            meta |= {"completion_tokens": number + 1, "cached_tokens": 0}
            found.append(_data({"text": "".join(pieces[: number + 1]), "meta_info": meta}))
    else:
        for piece in pieces:
            told: dict[str, Any] = {"delta": {"content": piece}} if dialect is Dialect.CHAT else {"text": piece}
            found.append(_data({"id": "c", "choices": [{"index": 0, **told, "finish_reason": None}], "usage": None}))
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(pieces), "total_tokens": prompt_tokens}
        found.append(_data({"id": "c", "choices": [], "usage": usage}))
    return [*found, b"data: [DONE]\n\n"]


def _anthropic(prompt_tokens: int, pieces: Sequence[str]) -> list[bytes]:
    start: dict[str, Any] = {
        "id": "msg",
        "type": "message",
        "role": "assistant",
        "content": [],
        "usage": {"input_tokens": prompt_tokens},
    }
    block = {"type": "text", "text": ""}
    told: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": start}),
        ("content_block_start", {"index": 0, "content_block": block}),
        *(("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": piece}}) for piece in pieces),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": len(pieces)}}),
        ("message_stop", {}),
    ]
    return [f"event: {name}\n".encode() + _data({"type": name, **more}) for name, more in told]


def _typed(response_id: str, prompt_tokens: int, pieces: Sequence[str]) -> list[bytes]:
    told: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {"id": response_id, "status": "in_progress"}}),
        *(("response.output_text.delta", {"item_id": "i", "delta": piece}) for piece in pieces),
        ("response.completed", {"response": _response(response_id, prompt_tokens, "completed", "".join(pieces))}),
    ]
    return [
        f"event: {name}\n".encode() + _data({"type": name, "sequence_number": number, **more})
        for number, (name, more) in enumerate(told)
    ]


def _response(response_id: str, prompt_tokens: int, status: str, text: str) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    usage = {"input_tokens": prompt_tokens, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}}
    return {"id": response_id, "object": "response", "status": status, "output": output, "usage": usage}


def _data(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
