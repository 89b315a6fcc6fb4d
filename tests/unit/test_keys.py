"""The keys file: what it may say, what is wrong with it in words that repeat no hash, and whose a key is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.keys import (
    KEY_PREFIX,
    KeyRing,
    KeysFile,
    KeysFileError,
    hash_of,
    is_tenant_name,
    new_key,
    read_keys,
)
from router.domain.errors import UnknownKey
from router.domain.tenant import TenantLimits
from router.placement.scope import named_scope, record_key, response_key

A, B = hash_of(b"key-a"), hash_of(b"key-b")
FILE = f"""
secret: abc
tenants:
  acme: {{keys: ["{A}", "{B.upper().replace("SHA", "sha")}"], rate_per_minute: 60, concurrent: 2}}
  ops: {{keys: ["{hash_of(b"key-ops")}"], engine_control: true}}
  nobody: {{}}
"""


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", f"Bearer {key}".encode())]


def test_a_key_names_its_tenant_and_what_it_may() -> None:
    ring = read_keys(FILE)
    acme, ops = ring.find(bearer("key-a")), ring.find(bearer("key-ops"))
    assert ring.find([(b"X-API-Key", b"key-b")]) is acme
    assert (acme.name, acme.limits, acme.engine_control) == ("acme", TenantLimits(60, 2), False)
    assert (ops.name, ops.limits.any, ops.engine_control) == ("ops", False, True)
    assert acme.scope != ops.scope
    assert (len(ring), len(ring.tenants)) == (3, 2)


@pytest.mark.parametrize("key", ["key-c", "", "key-a ", A, A[7:], "KEY-A"])
def test_nothing_else_is_a_key(key: str) -> None:
    ring = read_keys(FILE)
    if key.strip() == "key-a":
        assert ring.find(bearer(key)).name == "acme"  # spaces around a header's value do not count
        return
    with pytest.raises(UnknownKey):
        ring.find(bearer(key))


def test_the_refusal_does_not_repeat_the_key() -> None:
    for headers in (bearer("planted"), [(b"x-api-key", b"planted")], bearer("planted") * 2):
        with pytest.raises(UnknownKey) as caught:
            read_keys(FILE).find(headers)
        assert "planted" not in str(caught.value)


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_whatever_the_headers_hold_it_is_refused_and_nothing_else(authorization: bytes, key: bytes) -> None:
    with pytest.raises(UnknownKey):
        read_keys("tenants: {}").find([(b"authorization", authorization), (b"x-api-key", key)])


def test_a_scope_depends_on_name_and_secret_and_no_key() -> None:
    """Else a new key would lose the sessions; without the secret nobody can compute it."""
    assert read_keys(FILE).find(bearer("key-a")).scope == named_scope("acme", b"abc")
    scopes = {named_scope(name, secret) for name in ("a", "b") for secret in (b"", b"x", b"x" * 64, b"x" * 65)}
    assert len(scopes) == 8


@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80))
def test_two_scopes_have_no_name_in_common(name: str, one: str, other: str) -> None:
    if one[:64] != other[:64]:
        return  # a scope is 24 digits; hypothesis likes texts that differ
    assert record_key("mine", name) != record_key("theirs", name)
    assert response_key("mine", name) != response_key("theirs", name) != record_key("theirs", name)


WRONG = {
    "": "must be a mapping",
    "tenants: [": "not YAML, line 1, column 11",
    "tenants: []": "must be a mapping",
    "[]": "must be a mapping",
    "tenants: {}\nkeys: 1": "the file has an unknown key; allowed: tenants, secret",
    "secret: 5\ntenants: {}": "secret must be text",
    "tenants: {'a b': {}}": "a tenant's name has 1 to 63",
    "tenants: {5: {}}": "a tenant's name has 1 to 63",
    "tenants: {a: 5}": "tenants.a must be a mapping",
    "tenants: {a: {kyes: []}}": "tenants.a has an unknown key; allowed: keys",
    "tenants: {a: {keys: 5}}": "tenants.a.keys must be a list",
    "tenants: {a: {keys: [roost-planted]}}": "tenants.a.keys[0] is not sha256:",
    f"tenants: {{a: {{keys: ['{A}0']}}}}": "tenants.a.keys[0] is not sha256:",
    f"tenants: {{a: {{keys: ['{A}', 5]}}}}": "tenants.a.keys[1] is not sha256:",
    f"tenants: {{a: {{keys: ['{A}', '{A}']}}}}": "tenants.a.keys[1] is there twice",
    f"tenants: {{a: {{keys: ['{A}']}}, b: {{keys: ['{A}']}}}}": "tenants.b.keys[0] is there twice",
    "tenants: {a: {}, a: {}}": "not YAML, line 1, column 18: 'a' is there twice",
    "secret: 2026-13-45\ntenants: {}": "not YAML: has a date",
    f"tenants: {{a: {{concurrent: {'9' * 5000}}}}}": "not YAML: has a date, number",
    "tenants: !!timestamp planted": "not YAML: has a date, number or tag",
    "tenants: " + "[" * 2000 + "]" * 2000: "not YAML: has",
    "tenants: {a: {concurrent: 0}}": "tenants.a.concurrent must be a whole number",
    "tenants: {a: {rate_per_minute: 1.5}}": "tenants.a.rate_per_minute must be a whole number",
    "tenants: {a: {concurrent: true}}": "tenants.a.concurrent must be a whole number",
    "tenants: {a: {engine_control: 'yes'}}": "tenants.a.engine_control must be true or false",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_explained_without_what_is_in_it(text: str) -> None:
    with pytest.raises(KeysFileError) as caught:
        read_keys(text)
    told = str(caught.value)
    assert told.startswith(WRONG[text])
    assert "\n" not in told
    assert "planted" not in told
    assert A[7:] not in told


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        ring = read_keys(text)
    except KeysFileError:
        return
    assert isinstance(ring, KeyRing)


def test_a_fresh_key_is_long_random_and_recognisable() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) >= 48 and key.isascii() for key in keys)


def test_names() -> None:
    assert all(map(is_tenant_name, ("a", "A-1.b_c", "9", "a" * 63)))
    assert not any(map(is_tenant_name, ("", "-a", "a b", "ä", "a" * 64, "a\n", "a/b", "{a}")))


def test_a_file_that_cannot_be_read_says_which(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, said in (("absent", "No such file"), ("binary", "is not UTF-8 text")):
        with pytest.raises(KeysFileError, match=f"keys file .*{name}: {said}"):
            KeysFile(tmp_path / name)
