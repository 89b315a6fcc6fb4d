"""A client over raw sockets: it sees framing, when each piece came, and how a response ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256

Given = Mapping[str, str] | list[tuple[str, str]]
"""Headers of a request; a list where one comes twice."""


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: list[tuple[str, str]]
    """Names in lower case."""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Body as it came: seconds of the loop's clock, bytes of one chunk (or one read, where it was not chunked)."""
    complete: bool = False
    """Whether the message ended as HTTP says that it must."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def sha256(self) -> str:
        return sha256(self.body).hexdigest()

    def header(self, name: str) -> str:
        """The values of a header, joined as HTTP joins them; empty if it is not there."""
        return ", ".join(value for key, value in self.headers if key == name)

    @property
    def short(self) -> str:
        """For messages."""
        return f"{self.status} {self.body[:200]!r}{'' if self.complete else ' (broken off)'}"


class Flow:
    """One connection to a router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._answer: Answer | None = None

    async def send(self, method: str, target: str, body: bytes | None = None, headers: Given | None = None) -> None:
        """A request in the usual framing. A `Content-Length` or `Host` in the headers replaces the usual one."""
        given = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
        names = {name.lower() for name, _ in given}
        if "host" not in names:
            given.insert(0, ("Host", "router.example"))
        if body is not None and not names & {"content-length", "transfer-encoding"}:
            given.append(("Content-Length", str(len(body))))
        if body is not None and "content-type" not in names:
            given.append(("Content-Type", "application/json"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in given)
        await self.raw(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b""))

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        """The response's head, any 1xx passed over; its body follows by `piece` or `rest`."""
        while True:
            raw = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = raw[:-4].split(b"\r\n")
            status = int(first.split(b" ")[1])
            if status >= 200 or status == 101:
                break
        headers = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.decode("latin-1").lower(), value.strip().decode("latin-1")))
        self._answer = Answer(status, headers)
        return self._answer

    async def piece(self) -> bytes:
        """The next piece of a chunked or endless body; empty at its proper end."""
        answer = self._answer
        assert answer is not None, "the head comes first"
        if "chunked" in answer.header("transfer-encoding"):
            size = int((await self.reader.readline()).split(b";")[0], 16)
            data = (await self.reader.readexactly(size + 2))[:-2]
        else:
            data = await self.reader.read(65_536)
        if data:
            answer.pieces.append((asyncio.get_running_loop().time(), data))
        else:
            answer.complete = True
        return data

    async def rest(self, *, bodiless: bool = False) -> Answer:
        """The response to its end, whatever the end is."""
        answer = self._answer or await self.head()
        if bodiless or answer.status in (101, 204, 304):
            answer.complete = True
            self._answer = None
            return answer
        length = answer.header("content-length")
        try:
            if length and "chunked" not in answer.header("transfer-encoding"):
                data = await self.reader.readexactly(int(length.split(",")[0]))
                answer.pieces.append((asyncio.get_running_loop().time(), data))
                answer.complete = True
            else:
                while await self.piece():
                    pass
        except asyncio.IncompleteReadError as error:
            answer.pieces.append((asyncio.get_running_loop().time(), error.partial))
        except (ConnectionError, ValueError):
            pass
        self._answer = None
        return answer

    def abort(self) -> None:
        """Go away at once, as a client that was killed."""
        self.writer.transport.abort()


@asynccontextmanager
async def connection(port: int, *, limit: int = 1 << 24) -> AsyncIterator[Flow]:
    """A connection to a router on this host, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield Flow(reader, writer)
    finally:
        writer.close()
        with suppress(Exception):  # however it ended
            await writer.wait_closed()


async def request(
    port: int, method: str, target: str, body: bytes | None = None, headers: Given | None = None
) -> Answer:
    """One request on a connection of its own, to the end of its response."""
    async with connection(port) as flow:
        await flow.send(method, target, body, headers)
        await flow.head()
        return await flow.rest(bodiless=method == "HEAD")
