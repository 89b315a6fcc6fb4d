"""Which API a path belongs to."""

from __future__ import annotations

import pytest

from router.api.paths import BROADCAST, computes, error_dialect, stored_response, tenant_may, turn_dialect
from router.domain.turn import Dialect

TURNS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETIONS,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
    "/generate": Dialect.GENERATE,
}


@pytest.mark.parametrize(("path", "dialect"), TURNS.items())
def test_only_a_post_to_the_very_path_is_a_turn(path: str, dialect: Dialect) -> None:
    assert turn_dialect("POST", path) is dialect
    for method in ("GET", "HEAD", "OPTIONS", "DELETE", "PATCH", "post"):
        assert turn_dialect(method, path) is Dialect.OTHER
    assert (turn_dialect("PUT", path) is dialect) == (path == "/generate")  # SGLang routes both there
    for near in (path + "/", "/" + path, path.upper(), path + "/count_tokens", path[:-1], path.replace("e", "%65")):
        assert turn_dialect("POST", near) is Dialect.OTHER


@pytest.mark.parametrize(("path", "dialect"), TURNS.items())
def test_errors_are_said_in_the_words_of_the_path_and_of_all_below_it(path: str, dialect: Dialect) -> None:
    assert error_dialect(path) is dialect
    assert error_dialect(path + "/count_tokens") is dialect
    assert error_dialect(path + "s") is Dialect.CHAT


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/embeddings", "*", "/v1/models", "/v1/message"])
def test_elsewhere_openais_words_are_used(path: str) -> None:
    assert error_dialect(path) is Dialect.CHAT


@pytest.mark.parametrize(
    ("path", "response_id"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/input_items", "resp_1"),
        ("/v1/responses/a.b-c:d%20", "a.b-c:d%20"),
        ("/v1/responses/" + "x" * 256, "x" * 256),
        ("/v1/responses/" + "x" * 257, None),
        ("/v1/responses", None),
        ("/v1/responses/", None),
        ("/v1/responses/a/b/c", None),
        ("/v1/responses/a/../b", None),
        ("/v2/responses/a", None),
    ],
)
def test_the_id_of_a_stored_response_is_read_from_its_path(path: str, response_id: str | None) -> None:
    assert stored_response(path) == response_id


def test_no_turn_is_broadcast() -> None:
    assert not BROADCAST & set(TURNS)


@pytest.mark.parametrize("path", sorted(TURNS))
def test_a_tenant_may_ask_its_turns_and_they_count(path: str) -> None:
    assert tenant_may("POST", path)
    assert computes("POST", path)
    assert not computes("GET", path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/models/org/model"),
        ("POST", "/v1/messages/count_tokens"),
    ],
)
def test_a_tenant_may_ask_what_concerns_nobody_else(method: str, path: str) -> None:
    assert tenant_may(method, path)
    assert not computes(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in sorted(BROADCAST)),
        ("POST", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/../flush_cache"),
        ("GET", "/v1/responses/a%2Fb"),
        ("POST", "/v1/models/x"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/V1/CHAT/COMPLETIONS"),
        ("POST", "/v1/chat/completions/"),
        ("POST", ""),
        ("GET", "/"),
        ("CONNECT", "/v1/chat/completions"),
    ],
)
def test_all_else_is_not_for_every_tenant(method: str, path: str) -> None:
    assert not tenant_may(method, path)
