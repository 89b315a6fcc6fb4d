"""The response reader gives the same head and payload wherever the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream.response import ResponseReader

HEAD_MAX_BYTES = 65_536


def _feed(reader: ResponseReader, raw: bytes, cuts: list[int]) -> bytes:
    payload = b""
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    for start, end in pairwise(edges):
        if start < end:
            payload += reader.feed(raw[start:end])
    return payload


_CUTS = st.lists(st.integers(0, 10_000), max_size=20)


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=20), _CUTS)
def test_chunked(pieces: list[bytes], cuts: list[int]) -> None:
    """Chunks are joined, interim responses skipped, trailers dropped; the connection may serve again."""
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 Fine\r\nA: 1\r\na: 2 \r\nTransfer-Encoding: Chunked\r\n\r\n"
    raw += b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nT: 1\r\n\r\n"
    reader = ResponseReader(HEAD_MAX_BYTES)
    for _ in range(2):
        reader.begin("POST")
        assert _feed(reader, raw, cuts) == b"".join(pieces)
        head = reader.head
        assert head is not None
        assert (head.status, head.reason, head.content_length) == (200, b"Fine", None)
        assert head.headers == ((b"A", b"1"), (b"a", b"2"), (b"Transfer-Encoding", b"Chunked"))
        assert (reader.complete, reader.broken, reader.reusable) == (True, None, True)


@given(st.binary(max_size=2000), _CUTS)
def test_length(body: bytes, cuts: list[int]) -> None:
    """A body of a given length ends there."""
    raw = b"HTTP/1.1 404 \r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("GET")
    assert _feed(reader, raw, cuts) == body
    assert reader.head is not None
    assert (reader.head.status, reader.head.content_length, reader.complete) == (404, len(body), True)


@given(st.binary(max_size=2000), _CUTS)
def test_until_the_connection_ends(body: bytes, cuts: list[int]) -> None:
    """Without length or chunks, only the end of the connection completes the body."""
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("GET")
    assert _feed(reader, b"HTTP/1.1 200 OK\r\n\r\n" + body, cuts) == body
    assert not reader.complete
    reader.eof()
    assert (reader.complete, reader.broken, reader.reusable) == (True, None, False)


@given(st.binary(max_size=300))
def test_garbage_is_broken_or_waits(raw: bytes) -> None:
    """No bytes make the reader raise; what cannot become a response is broken, at the latest with the connection."""
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("GET")
    reader.feed(raw or b"x")
    reader.eof()
    assert reader.complete or reader.broken


@pytest.mark.parametrize("cut", range(1, 40))
def test_end_of_the_connection_within_a_response(cut: int) -> None:
    """A connection that ends within a head or a body of known end is broken."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"[:cut]
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("GET")
    reader.feed(raw)
    reader.eof()
    assert not reader.complete
    assert reader.broken


@pytest.mark.parametrize(
    ("method", "raw", "reusable"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", False),
        ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n", False),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", True),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", True),
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", False),
        ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_ends_with_its_head(method: str, raw: bytes, reusable: bool) -> None:
    """Responses without a body are complete with their head."""
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin(method)
    assert reader.feed(raw) == b""
    assert (reader.complete, reader.broken, reader.reusable) == (True, None, reusable)


def test_a_second_response_is_not_taken() -> None:
    """Bytes behind a complete response spoil the connection and are not payload."""
    one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("GET")
    assert reader.feed(one + one) == b"ok"
    assert (reader.complete, reader.broken, reader.reusable) == (True, None, False)


def test_bytes_behind_head_are_not_payload() -> None:
    """A body sent in answer to HEAD is not one."""
    reader = ResponseReader(HEAD_MAX_BYTES)
    reader.begin("HEAD")
    assert reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") == b""
    assert (reader.complete, reader.reusable) == (True, False)
