"""Header rules of a proxy, and heads that cannot be split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.domain.errors import MalformedRequest, UpstreamBroken
from router.ports import ResponseHead
from router.upstream.wire import (
    Header,
    forward_request_headers,
    forward_response_headers,
    has_no_body,
    parse_origin,
    request_head,
    response_head,
    via_of,
    with_credentials,
)

ORIGIN = parse_origin("http://replica:30000")


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix", "authority"),
    [
        ("http://replica:30000", "replica", 30000, False, b"", b"replica:30000"),
        ("http://replica", "replica", 80, False, b"", b"replica"),
        ("https://replica/", "replica", 443, True, b"", b"replica"),
        ("https://replica:80/a/b/", "replica", 80, True, b"/a/b", b"replica:80"),
        ("http://[::1]:9", "::1", 9, False, b"", b"[::1]:9"),
        ("http://10.0.0.7:443/x", "10.0.0.7", 443, False, b"/x", b"10.0.0.7:443"),
        ("http://bücher:1", "bücher", 1, False, b"", b"xn--bcher-kva:1"),
    ],
)
def test_origins(url: str, host: str, port: int, tls: bool, prefix: bytes, authority: bytes) -> None:
    """A replica's URL gives host, port, path prefix and Host header."""
    origin = parse_origin(url)
    assert (origin.host, origin.port, origin.tls, origin.prefix, origin.authority) == (
        host,
        port,
        tls,
        prefix,
        authority,
    )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "replica:1",
        "ftp://x",
        "http://",
        "http://u:p@x",
        "http://x?q=1",
        "http://x#f",
        "http://x:99999",
        "http://x/a b",
    ],
)
def test_what_is_no_origin(url: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match=r"URL|path|[Pp]ort"):
        parse_origin(url)


def test_request_headers() -> None:
    """Hop-by-hop headers go, those that Connection names too; all others stay as they are, in order; Via is added."""
    assert forward_request_headers(
        (
            (b"HOST", b"x"),
            (b"session_id", b"1"),
            (b"Connection", b"Keep-Alive, X-Gone ,te"),
            (b"x-gone", b"1"),
            (b"Content-Length", b"3"),
            (b"Expect", b"100-continue"),
            (b"Proxy-Authorization", b"secret"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Upgrade", b"h2c"),
            (b"Trailer", b"x"),
            (b"Content-Encoding", b"gzip"),
            (b"Via", b"1.1 edge"),
            (b"SESSION_ID", b"2"),
        ),
        via_of((1, 0)),
    ) == (
        (b"session_id", b"1"),
        (b"Content-Encoding", b"gzip"),
        (b"Via", b"1.1 edge"),
        (b"SESSION_ID", b"2"),
        (b"Via", b"1.0 roost"),
    )


CLIENTS_OWN = (
    (b"AUTHORIZATION", b"Bearer c"),
    (b"x-Api-Key", b"c"),
    (b"Api-Key", b"c"),
    (b"Cookie", b"c"),
    (b"authorization", b"Basic c"),
)
OTHERS = ((b"A", b"1"), (b"authorization-x", b"2"))


@pytest.mark.parametrize("given", [(), CLIENTS_OWN])
def test_a_replica_is_shown_one_key_at_most(given: tuple[Header, ...]) -> None:
    """Its own where it has one, the client's only where they are kept, none else."""
    headers = (OTHERS[0], *given, OTHERS[1])
    assert with_credentials(headers, None, keep=True) == headers
    assert with_credentials(headers, None, keep=False) == OTHERS
    for keep in (True, False):
        assert with_credentials(headers, b"r", keep=keep) == (*OTHERS, (b"Authorization", b"Bearer r"))


def test_response_headers() -> None:
    """A response loses its framing too; names of Connection apply in whatever order they come."""
    head = ResponseHead(
        200,
        b"OK",
        (
            (b"X-Hop", b"1"),
            (b"Date", b"d"),
            (b"connection", b"close"),
            (b"Connection", b"x-hop"),
            (b"Content-Length", b"1"),
            (b"keep-alive", b"t"),
            (b"Transfer-Encoding", b"chunked"),
            (b"server", b"s"),
        ),
        None,
    )
    assert forward_response_headers(head) == ((b"Date", b"d"), (b"server", b"s"))


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("/v1/x?a=%20&b", b"GET /v1/x?a=%20&b HTTP/1.1"),
        ("/\udcff", b"GET /\xff HTTP/1.1"),
        ("http://any.host:1/v1?q", b"GET /v1?q HTTP/1.1"),
        ("HTTPS://any.host?q", b"GET /?q HTTP/1.1"),
        ("*", b"GET * HTTP/1.1"),
    ],
)
def test_targets(target: str, line: bytes) -> None:
    """A target goes out as it came; the absolute form loses its authority."""
    assert request_head(ORIGIN, "GET", target, (), None) == line + b"\r\nHost: replica:30000\r\n\r\n"


@pytest.mark.parametrize(
    "target", ["", "x", "/a b", "/a\r\nX: 1", "/\0", "http:///x", "http://h/ x", "ftp://h/x", "**"]
)
def test_bad_targets(target: str) -> None:
    """A target that is no path, or that would split the request line, is refused."""
    with pytest.raises(MalformedRequest):
        request_head(ORIGIN, "GET", target, (), None)


def test_prefix_and_length() -> None:
    """The replica's path prefix goes before the target, the length last."""
    head = request_head(parse_origin("http://r/p"), "POST", "/x", ((b"A", b"1"),), 0)
    assert head == b"POST /p/x HTTP/1.1\r\nHost: r\r\nA: 1\r\nContent-Length: 0\r\n\r\n"


_TEXT = st.binary(max_size=30)


@given(st.lists(st.tuples(_TEXT, _TEXT), max_size=5))
def test_no_header_splits_a_head(headers: list[tuple[bytes, bytes]]) -> None:
    """Whatever bytes are in them: n headers make n + 2 lines, or an error."""
    unsafe = any(byte in name + value for name, value in headers for byte in b"\r\n\0")
    if unsafe:
        with pytest.raises(MalformedRequest):
            request_head(ORIGIN, "POST", "/", headers, 1)
        with pytest.raises(UpstreamBroken):
            response_head(200, b"OK", headers)
    else:
        assert request_head(ORIGIN, "POST", "/", headers, 1).count(b"\n") == len(headers) + 4
        assert response_head(200, b"OK", headers).count(b"\n") == len(headers) + 2


def test_a_reason_cannot_split_a_head() -> None:
    """Nor can a reason phrase."""
    with pytest.raises(UpstreamBroken):
        response_head(200, b"OK\r\nX: 1", ())


def test_which_responses_have_no_body() -> None:
    """HEAD, 204, 304."""
    assert has_no_body("HEAD", 200)
    assert has_no_body("GET", 204)
    assert has_no_body("GET", 304)
    assert not has_no_body("POST", 200)
