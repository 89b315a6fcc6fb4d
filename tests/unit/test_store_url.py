"""URLs of stores: what each kind says, and what is refused without repeating a secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.domain.errors import StoreUnavailable
from router.store.address import Address, Login
from router.store.topology import topology_of
from router.store.url import StoreUrl, split_url

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h:1/2", StoreUrl("single", "redis://h:1/2")),
        ("redis://h", StoreUrl("single", "redis://h")),
        (
            "rediss://u:p@h/2?ssl_cert_reqs=none",
            StoreUrl("single", "rediss://u:p@h/2?ssl_cert_reqs=none", has_password=True),
        ),
        ("unix:///run/s?db=3", StoreUrl("single", "unix:///run/s?db=3")),
        (
            "redis+sentinel://u:p@a,b:2,[::1]:3/main/4?sentinel_username=su&sentinel_password=s%2Fp",
            StoreUrl(
                "sentinel",
                "redis://u:p@host/4?",
                (("a", 26379), ("b", 2), ("::1", 3)),
                "main",
                "redis://host?password=s%2Fp&username=su",
                has_password=True,
                has_sentinel_password=True,
            ),
        ),
        (
            "rediss+sentinel://a/main?ssl_ca_certs=/ca",
            StoreUrl(
                "sentinel",
                "rediss://host/?ssl_ca_certs=%2Fca",
                (("a", 26379),),
                "main",
                "rediss://host?ssl_ca_certs=%2Fca",
            ),
        ),
        (
            "rediss+cluster://:p@a:1,b",
            StoreUrl("cluster", "rediss://:p@host/?", (("a", 1), ("b", 6379)), "", "rediss://host?", has_password=True),
        ),
    ],
)
def test_a_url_is_taken_apart(url: str, said: StoreUrl) -> None:
    assert split_url(url) == said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "is not a Redis URL"),
        ("redis://", "is not a Redis URL"),
        ("redis:h", "is not a Redis URL"),
        (f"redis://:{SECRET}\u2100@h", "is not a Redis URL"),
        ("redis://[h", "is not a Redis URL"),
        ("redis://h:70000", "has a port that is not a number up to 65535"),
        (f"redis://:{SECRET}/{SECRET}@h", "has a port that is not a number up to 65535"),
        (f"redis://:{SECRET}?{SECRET}=1@h", r"has a port|has an option in its query that is not known"),
        (f"redis://h?{SECRET}=1", "has an option in its query that is not known"),
        (f"redis://:{SECRET}#{SECRET}@h", "has a '#'"),
        ("redis://h/x", "names a database that is not a number"),
        ("redis://h/1/2", "names a database that is not a number"),
        ("unix:///s?db=x", "names a database that is not a number"),
        ("redis://h?ssl_cert_reqs=none", "has the option ssl_cert_reqs, which does not go with its scheme"),
        ("redis://h?sentinel_password=x", "has the option sentinel_password, which does not go with its scheme"),
        ("redis+sentinel://h:1", "names no master"),
        ("redis+sentinel://h:1/", "names no master"),
        ("redis+sentinel:///main", "names no host, or an empty one"),
        ("redis+sentinel://a,,b/main", "names no host, or an empty one"),
        ("redis+sentinel://a/main/x", "names a database that is not a number"),
        ("redis+cluster://a,b:x", "has a port that is not a number"),
        ("redis+cluster://a/0", "names a database, and a cluster has only one"),
        ("redis+cluster://a?db=1", "names a database, and a cluster has only one"),
    ],
)
def test_a_wrong_url_is_refused_with_a_reason_and_no_secret(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        split_url(url)
    assert SECRET not in str(caught.value)


@given(rest=st.text(alphabet=":/@,?#[]%&=a1", max_size=20), scheme=st.sampled_from(["redis", "redis+sentinel", "unix"]))
def test_any_text_is_a_url_or_refused(rest: str, scheme: str) -> None:
    try:
        parts = split_url(f"{scheme}://{rest}")
    except ValueError:
        return
    assert parts.kind in {"single", "sentinel"}


def test_nothing_shows_a_password() -> None:
    url = f"redis+sentinel://u:{SECRET}@a:1/main?sentinel_password={SECRET}"
    assert SECRET not in repr(split_url(url))
    assert SECRET not in topology_of(url).label
    assert SECRET not in repr(Address.parsed(f"redis://u:{SECRET}@h"))


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("ssl_ca_certs=/nowhere/ca.pem", "asks for TLS that cannot be had: .*No such file"),
        ("ssl_certfile=/nowhere/cert.pem&ssl_keyfile=/nowhere/key.pem", "asks for TLS that cannot be had: .*No such"),
        ("ssl_cert_reqs=perhaps", "asks for TLS that cannot be had: .*perhaps"),
        ("ssl_ciphers=none-such", "asks for TLS that cannot be had: .*cipher"),
    ],
)
def test_tls_that_cannot_be_had_is_told(query: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        topology_of(f"rediss+cluster://h?{query}")


def test_a_router_whose_store_cannot_be_spoken_with_says_why_and_ends() -> None:
    flags = ["--redis", "rediss://h?ssl_ca_certs=/nowhere/ca.pem", "--port", "0", "--admin-port", "0"]
    command = [str(Path(sys.executable).with_name("roost")), "router", *flags]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        "roost: store.url: the store's URL asks for TLS that cannot be had: [Errno 2] No such file or directory"
    )


def test_a_login_is_completed_by_the_settings_and_a_file_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "password"
    address = Address.parsed("redis://h/3", username="router", password_file=file)
    with pytest.raises(StoreUnavailable, match=f"cannot read the password file {file}: No such file"):
        address.greeting()
    for password in ("one", "two words "):
        file.write_text(f"{password}\n")
        assert address.greeting() == [("AUTH", "router", password), ("SELECT", 3)]
    file.write_bytes(b"\xff")
    with pytest.raises(StoreUnavailable, match="is not UTF-8 text"):
        address.greeting()
    assert Login("router").commands() == []
    assert Address.parsed("redis://:p@h", username="router").greeting() == [("AUTH", "router", "p")]
