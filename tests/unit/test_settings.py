"""Settings: which layer wins, what is refused, and that the refusal says how to put it right."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from router.domain import replica as domain
from router.settings import (
    Admin,
    Auth,
    ConfigError,
    Flags,
    Fleet,
    Listen,
    Profile,
    Settings,
    Store,
    Timeouts,
    cautions,
    effective,
    load,
)
from router.settings.problems import Problem, describe
from router.settings.values import SECRETS_TOLD, mask_url

EVERYTHING = (
    "listen, admin, auth, workers, store, fleets, identity, placement, limits, timeouts, ejection, streams, log"
)
FLEET_KEYS = (
    "name, models, replicas, policy, profile, repairs, admission, probe_interval_s, "
    "replica_key_file, replica_key, client_credentials"
)
REDIS_URLS = (
    "redis://HOST:PORT/DB, unix:///PATH, redis+sentinel://HOST:PORT,…/MASTER or redis+cluster://HOST:PORT,…; "
    "rediss for TLS"
)
POLICIES = "roost, round_robin, least_inflight, rendezvous, bounded_load, session_sticky"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "roost.yaml"


def _write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def _problems(file: Path | None, env: Mapping[str, str] | None = None, flags: Flags | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, env or {}, flags or Flags())
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems), "one line per problem"
    return [line.replace(str(file), "FILE") for line in lines]


def _fields(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{at}{name}", field
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _fields(part, f"{at}{name}.")


# --- defaults --------------------------------------------------------------------------------------------------------


def test_every_setting_says_what_it_is() -> None:
    """Every field, at any depth, has a description; a number's name or description names its unit."""
    for path, field in _fields(Settings):
        assert field.description, path
        if field.annotation in {int, float}:
            name = path.rpartition(".")[2]
            units = ("second", "token", "byte", "count", "port", "no unit", "turns", "growth")
            assert any(unit in field.description.lower() for unit in units), (path, name)


def test_defaults_are_consistent_and_raise_no_caution() -> None:
    settings = load(None, {})
    assert settings == Settings()
    assert cautions(settings) == ()
    assert settings.listen.host == settings.admin.host == "127.0.0.1"
    assert settings.store.kind == "embedded"
    assert [fleet.name for fleet in settings.fleets] == ["default"]
    assert settings.identity.session_headers[0] == "modal-session-id"


def test_profile_is_the_prior_that_placement_reads() -> None:
    """Same names, same defaults: there is one set of prior figures."""
    assert Profile().prior() == domain.Profile()


def test_settings_never_read_the_environment_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_WORKERS", "7")
    assert Settings().workers == 1


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.workers = 2  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.listen.port = 2  # type: ignore[misc]


# --- layers ----------------------------------------------------------------------------------------------------------


def test_flags_win_over_environment_over_file_over_defaults(file: Path) -> None:
    """Key by key, not group by group."""
    _write(file, "listen: {host: 10.0.0.1, port: 1}\nlog: {level: error}\nworkers: 2\n")
    env = {"ROOST_LISTEN__PORT": "2", "ROOST_LOG__LEVEL": "warning"}
    settings = load(file, env, Flags(log_level="debug"))
    assert (settings.log.level, settings.listen.port, settings.listen.host) == ("debug", 2, "10.0.0.1")
    assert (settings.workers, settings.admin.port) == (2, 9090)


def test_every_flag_reaches_its_setting() -> None:
    flags = Flags(
        host="h",
        port=1,
        admin_host="127.0.0.2",
        admin_port=2,
        workers=3,
        redis="redis://r:6379/0",
        store="redis",
        log_level="debug",
        replicas=("http://r:1",),
        policy="rendezvous",
    )
    settings = load(None, {}, flags)
    assert (settings.listen.host, settings.listen.port) == ("h", 1)
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.2", 2)
    assert (settings.workers, settings.log.level) == (3, "debug")
    assert (settings.store.kind, settings.store.url) == ("redis", "redis://r:6379/0")
    assert settings.fleets == (Fleet(name="default", replicas=("http://r:1",), policy="rendezvous"),)


@pytest.mark.parametrize(
    ("name", "raw", "read"),
    [
        ("ROOST_WORKERS", "4", lambda s: s.workers == 4),
        ("roost_workers", "4", lambda s: s.workers == 4),
        ("ROOST_STORE__TIMEOUT_S", "0.2", lambda s: s.store.timeout_s == 0.2),
        ("ROOST_STORE__PREFIX", "7", lambda s: s.store.prefix == "7"),
        ("ROOST_IDENTITY__SESSION_HEADERS", '["A-B"]', lambda s: s.identity.session_headers == ("a-b",)),
        ("ROOST_FLEETS", '[{"name": "x", "replicas": ["http://a:1"]}]', lambda s: s.fleets[0].name == "x"),
        ("ROOST_LIMITS", '{"retries": 0}', lambda s: s.limits.retries == 0 and s.limits.header_max_bytes == 32_768),
        ("ROOST_WORKERS", "", lambda s: s.workers == 1),
    ],
)
def test_environment(name: str, raw: str, read: Any) -> None:
    """`__` goes a level down, case does not matter, lists and groups are JSON, an empty variable says nothing."""
    assert read(load(None, {name: raw}))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("ROOST_SERVICE_HOST", "10.0.0.7"),
        ("ROOST_SERVICE_PORT_HTTP", "8080"),
        ("ROOST_PORT", "tcp://10.0.0.7:8080"),
        ("ROOST_PORT_8080_TCP_ADDR", "10.0.0.7"),
        ("ROOST_ADMIN_PORT", "tcp://10.0.0.8:9090"),
        ("PATH", "/bin"),
    ],
)
def test_what_kubernetes_adds_for_a_service_is_passed_over(name: str, raw: str) -> None:
    """In a pod beside a Service called roost or roost-admin, such variables exist and mean nothing to us."""
    assert load(None, {name: raw}) == Settings()


def test_an_empty_file_an_empty_group_and_an_empty_list_of_fleets_say_nothing(file: Path) -> None:
    assert load(_write(file, ""), {}) == Settings()
    assert load(_write(file, "listen:\nfleets: []\n"), {}) == Settings()


def test_replica_flags_make_the_default_fleet(file: Path) -> None:
    """Also beside a file, as long as that names no fleets."""
    _write(file, "workers: 2\nfleets: []\n")
    settings = load(file, {}, Flags(replicas=("http://A:1/", "http://b:2")))
    assert settings.workers == 2
    assert settings.fleets == (Fleet(name="default", replicas=("http://a:1", "http://b:2")),)


def test_policy_flag_wins_in_every_fleet(file: Path) -> None:
    _write(file, "fleets: [{name: a, policy: rendezvous}, {name: b}]")
    assert [fleet.policy for fleet in load(file, {}, Flags(policy="round_robin")).fleets] == ["round_robin"] * 2
    assert load(None, {}, Flags(policy="round_robin")).fleets == (Fleet(name="default", policy="round_robin"),)


@pytest.mark.parametrize(
    ("text", "env", "flags", "kind", "url"),
    [
        ("", {}, Flags(), "embedded", None),
        ("store: {url: 'redis://f'}", {}, Flags(), "redis", "redis://f"),
        ("store: {kind: memory}", {"ROOST_STORE__URL": "redis://e"}, Flags(), "redis", "redis://e"),
        ("store: {kind: embedded}", {}, Flags(redis="redis://c"), "redis", "redis://c"),
        ("store: {url: 'redis://f'}", {}, Flags(store="memory"), "memory", None),
        ("store: {url: 'redis://f'}", {"ROOST_STORE__KIND": "embedded"}, Flags(), "embedded", None),
        ("store: {url: 'redis://f'}", {}, Flags(store="redis"), "redis", "redis://f"),
    ],
)
def test_a_store_url_implies_redis_and_another_kind_forgets_a_url_below(
    file: Path, text: str, env: dict[str, str], flags: Flags, kind: str, url: str | None
) -> None:
    store = load(_write(file, text), env, flags).store
    assert (store.kind, store.url) == (kind, url)


def test_a_store_built_in_code_follows_its_url_too() -> None:
    assert Store(url="redis://x").kind == "redis"


# --- what is refused -------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str]] = [
    ("lisen: {port: 1}", f"lisen: unknown key, did you mean 'listen'? (allowed: {EVERYTHING}; set by FILE)"),
    ("_env_file: x", f"_env_file: unknown key (allowed: {EVERYTHING}; set by FILE)"),
    ("listen: {prot: 1}", "listen.prot: unknown key, did you mean 'port'? (allowed: host, port; set by FILE)"),
    ("listen: {1: 2}", "listen[1]: unknown key (allowed: host, port; set by FILE)"),
    ('listen: {"a\\nb": 1}', "listen.a\\nb: unknown key (allowed: host, port; set by FILE)"),
    (
        "listen: {port: 99999}",
        "listen.port: 99999 is not allowed (allowed: a whole number from 0 to 65535; set by FILE)",
    ),
    (
        "listen: {port: yes}",
        "listen.port: True is yes or no, not a number (allowed: a whole number from 0 to 65535; set by FILE)",
    ),
    ("listen: {port: }", "listen.port: nothing is not allowed (allowed: a whole number from 0 to 65535; set by FILE)"),
    (
        "listen: {host: 5}",
        "listen.host: 5 is not allowed (allowed: text, in quotes if it looks like a number; set by FILE)",
    ),
    (
        "listen: {host: ''}",
        "listen.host: '' is not allowed (allowed: text, in quotes if it looks like a number; set by FILE)",
    ),
    ("listen: 5", "listen: 5 is not allowed (allowed: a mapping with the keys host, port; set by FILE)"),
    ("workers: 0", "workers: 0 is not allowed (allowed: a whole number from 1; set by FILE)"),
    ("workers: 1.5", "workers: 1.5 is not allowed (allowed: a whole number from 1; set by FILE)"),
    ("workers: {}", "workers: a mapping is not allowed (allowed: a whole number from 1; set by FILE)"),
    (
        "store: {kind: rediss}",
        "store.kind: 'rediss' is not allowed, did you mean 'redis'? (allowed: embedded, redis, memory; set by FILE)",
    ),
    (
        "store: {url: 'http://:secret@x'}",
        f"store.url: the value is not a Redis URL (allowed: {REDIS_URLS}; set by FILE)",
    ),
    (
        "store: {prefix: '{a}'}",
        "store.prefix: '{a}' is not allowed "
        "(allowed: 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first; set by FILE)",
    ),
    (
        "fleets: {a: 1}",
        f"fleets: a mapping is not allowed (allowed: a list of: a mapping with the keys {FLEET_KEYS}; set by FILE)",
    ),
    ("fleets: [5]", f"fleets[0]: 5 is not allowed (allowed: a mapping with the keys {FLEET_KEYS}; set by FILE)"),
    (
        "fleets: [{name: a}, {policy: roost}]",
        "fleets[1].name: missing "
        "(allowed: 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first; set by FILE)",
    ),
    (
        "fleets: [{name: a, polcy: roost}]",
        f"fleets[0].polcy: unknown key, did you mean 'policy'? (allowed: {FLEET_KEYS}; set by FILE)",
    ),
    (
        "fleets: [{name: a, policy: round-robin}]",
        "fleets[0].policy: 'round-robin' is not allowed, did you mean 'round_robin'? "
        f"(allowed: {POLICIES}; set by FILE)",
    ),
    (
        "fleets: [{name: a, repairs: [all]}]",
        "fleets[0].repairs[0]: 'all' is not allowed (allowed: anthropic_thinking_display; set by FILE)",
    ),
    (
        "fleets: [{name: a, profile: {prefill_rate: -1}}]",
        "fleets[0].profile.prefill_rate: -1 is not allowed (allowed: a number above 0; set by FILE)",
    ),
    (
        "fleets: [{name: a, profile: {host_tokens: -1}}]",
        "fleets[0].profile.host_tokens: -1 is not allowed (allowed: a whole number from 0; set by FILE)",
    ),
    (
        "identity: {session_headers: [ok, a b]}",
        "identity.session_headers[1]: 'a b' is not a header name "
        "(allowed: header names: letters, digits, '-' and '_'; set by FILE)",
    ),
    (
        "identity: {session_fields: [a..b]}",
        "identity.session_fields[0]: 'a..b' is not allowed "
        "(allowed: fields of the request body that are no prompt, nested ones with dots as in metadata.user_id; "
        "set by FILE)",
    ),
    (
        "identity: {session_fields: [user, messages]}",
        "identity.session_fields[1]: 'messages' is the prompt, not the name of a session (allowed: fields of the "
        "request body that are no prompt, nested ones with dots as in metadata.user_id; set by FILE)",
    ),
    (
        "auth: {replica_key: 'a b'}",
        "auth.replica_key: the value has a space or an unprintable character in it, or is too long (allowed: 1 to 4096 "
        "visible ASCII characters; set by FILE)",
    ),
    ("timeouts: {idle_s: .inf}", "timeouts.idle_s: inf is not allowed (allowed: a number above 0; set by FILE)"),
    ("timeouts: {idle_s: .nan}", "timeouts.idle_s: nan is not allowed (allowed: a number above 0; set by FILE)"),
    ("placement: {mu: -1}", "placement.mu: -1 is not allowed (allowed: a number from 0; set by FILE)"),
    (
        f"log: {{level: {'x' * 99}}}",
        f"log.level: '{'x' * 59}… is not allowed (allowed: debug, info, warning, error; set by FILE)",
    ),
    # files that are no settings at all
    ("a: [", "FILE, line 1, column 5: expected the node content, but found '<stream end>' (allowed: YAML)"),
    ("- 1", f"FILE: is not a mapping of settings (allowed: the keys {EVERYTHING})"),
    ("1: 2", f"FILE: is not a mapping of settings (allowed: the keys {EVERYTHING})"),
    ("log:\n  level: info\n  level: debug", "FILE, line 3, column 3: 'level' is there twice (allowed: YAML)"),
    ("? [a]\n: 3", "FILE, line 1, column 3: found unhashable key (allowed: YAML)"),
]


@pytest.mark.parametrize(("text", "line"), WRONG, ids=[text[:40] for text, _ in WRONG])
def test_a_wrong_file_is_explained(file: Path, text: str, line: str) -> None:
    """Which key, what was wrong, what is allowed, and where it was set."""
    assert _problems(_write(file, text)) == [line]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://x", "'ftp://x' does not begin with http:// or https://"),
        ("a:30000", "'a:30000' does not begin with http:// or https://"),
        ("http://", "'http://' names no host"),
        ("http://a:0", "'http://a:0' has port 0"),
        ("http://a:99999", "'http://a:99999' is not a URL"),
        ("http://[::1", "'http://[::1' is not a URL"),
        ("http://u:secret@a:1", "'http://u:***@a:1' has a user or password in it"),
        ("http://a:1/v1", "'http://a:1/v1' goes on after HOST:PORT; give the root of the server, without /v1"),
        ("http://a b:1", "'http://a b:1' has a space or an unprintable character in it"),
        ("http://" + "x" * 70, f"'http://{'x' * 52}… is not a URL"),
        (f"http://{'x.' * 130}a:1", f"'http://{'x.' * 26}… names a replica by more than 255 bytes"),
        ("http://a:1?x=1", "'http://a:1?x=1' goes on after HOST:PORT; give the root of the server, without /v1"),
    ],
)
def test_a_wrong_replica_url_is_explained(url: str, why: str) -> None:
    wanted = f"fleets[0].replicas[0]: {why} (allowed: http://HOST:PORT or https://HOST:PORT; set by --replica)"
    assert _problems(None, {}, Flags(replicas=(url,))) == [wanted]


@pytest.mark.parametrize(
    ("url", "root"),
    [("http://A.b:1/", "http://a.b:1"), ("https://[::1]:2", "https://[::1]:2"), ("http://a", "http://a")],
)
def test_replica_urls_have_one_spelling(url: str, root: str) -> None:
    assert Fleet(name="f", replicas=(url,)).replicas == (root,)


CONTRADICTIONS: list[tuple[str, str]] = [
    (
        "workers: 2\nstore: {kind: memory}",
        "store.kind: memory is not shared, and there are 2 workers "
        "(allowed: embedded or redis; or workers: 1; set by FILE)",
    ),
    (
        "store: {kind: redis}",
        "store.url: store.kind is redis and there is no URL (allowed: redis://HOST:PORT/DB; set by FILE)",
    ),
    (
        "store: {kind: memory, url: 'redis://x'}",
        "store.kind: memory does not go with store.url, which names a shared store "
        "(allowed: redis, or no URL; set by FILE)",
    ),
    (
        "store: {lease_ttl_s: 3}",
        "store.lease_renew_s: 3 s is not below store.lease_ttl_s (3 s), so running turns would lose their lease "
        "(allowed: less than 3; a third of it is good; set by FILE)",
    ),
    (
        "limits: {body_max_bytes: 2000, bodies_max_bytes: 1000}",
        "limits.bodies_max_bytes: 1000 is below limits.body_max_bytes (2000), so the largest body would wait for room "
        "that never comes (allowed: at least 2000; set by FILE)",
    ),
    (
        "admin: {port: 8080}",
        "admin.port: 8080 is also listen.port; clients must not reach the admin API "
        "(allowed: a port of its own; set by FILE)",
    ),
    (
        "fleets: [{name: a}, {name: a}]",
        "fleets[1].name: 'a' is already the name of fleets[0] (allowed: another name; set by FILE)",
    ),
    (
        "fleets: [{name: a, models: [m]}, {name: b, models: [n, m]}]",
        "fleets[1].models[1]: 'm' is already served by fleets[0] ('a'), so a turn could not know where to go "
        "(allowed: each model in one fleet, once; set by FILE)",
    ),
    (
        "fleets: [{name: a, replicas: ['http://X:1']}, {name: b, replicas: ['http://x:1/']}]",
        "fleets[1].replicas[0]: http://x:1 is already in fleets[0] ('a'), and its turns would be counted twice "
        "(allowed: each replica in one fleet, once; set by FILE)",
    ),
    (
        "ejection: {max_s: 2}",
        "ejection.max_s: 2 s is below ejection.base_s (5 s), the least that a replica is out "
        "(allowed: 5 or more; set by FILE)",
    ),
]


@pytest.mark.parametrize(("text", "line"), CONTRADICTIONS, ids=[text[:40] for text, _ in CONTRADICTIONS])
def test_a_contradiction_is_explained(file: Path, text: str, line: str) -> None:
    """Settings that are fine one by one and not together."""
    assert _problems(_write(file, text)) == [line]


@pytest.mark.parametrize(
    "text",
    [
        "listen: {port: 0}\nadmin: {port: 0}",
        "listen: {host: 10.0.0.1, port: 80}\nadmin: {host: 10.0.0.2, port: 80, read_token: r}",
        "fleets: [{name: a}, {name: b}]",
        "workers: 4",
        "workers: 3\nlisten: {port: 0}",
    ],
)
def test_what_is_no_contradiction(file: Path, text: str) -> None:
    load(_write(file, text), {})


def test_a_wildcard_address_shares_its_port_with_every_other(file: Path) -> None:
    _write(file, "listen: {host: 0.0.0.0, port: 80}\nadmin: {host: 10.0.0.2, port: 80, read_token: r}")
    assert _problems(file)[0].startswith("admin.port: 80 is also listen.port")


def test_replica_flags_beside_fleets_must_choose(file: Path) -> None:
    _write(file, "fleets: [{name: a}]")
    wanted = "fleets: both --replica flags and a list of fleets ({}) (allowed: one of the two; set by --replica)"
    flags = Flags(replicas=("http://a:1",))
    assert _problems(file, {}, flags) == [wanted.format("FILE")]
    env = {"ROOST_FLEETS": '[{"name": "x"}]'}
    assert _problems(None, env, flags) == [wanted.format("environment ROOST_FLEETS")]


@pytest.mark.parametrize(
    ("name", "raw", "line"),
    [
        (
            "ROOST_LISTN__PORT",
            "1",
            f"listn: unknown key, did you mean 'listen'? (allowed: {EVERYTHING}; set by environment ROOST_LISTN__PORT)",
        ),
        (
            "ROOST_LISTEN__PROT",
            "1",
            "listen.prot: unknown key, did you mean 'port'? "
            "(allowed: host, port; set by environment ROOST_LISTEN__PROT)",
        ),
        (
            "ROOST_LISTEN__PORT__X",
            "1",
            "listen.port: has no keys below it in the environment "
            "(allowed: one value; set by environment ROOST_LISTEN__PORT__X)",
        ),
        (
            "ROOST_FLEETS__0__NAME",
            "a",
            "fleets: has no keys below it in the environment "
            "(allowed: one value; set by environment ROOST_FLEETS__0__NAME)",
        ),
        (
            "ROOST_LISTEN_PORT",
            "1",
            "listen_port: no setting, did you mean ROOST_LISTEN__PORT? "
            "(allowed: names as ROOST_STORE__URL; set by environment ROOST_LISTEN_PORT)",
        ),
        (
            "ROOST_WORKER",
            "1",
            "worker: no setting, did you mean ROOST_WORKERS? "
            "(allowed: names as ROOST_STORE__URL; set by environment ROOST_WORKER)",
        ),
        (
            "ROOST_LISTEN__PORT",
            "http",
            "listen.port: 'http' is not allowed "
            "(allowed: a whole number from 0 to 65535; set by environment ROOST_LISTEN__PORT)",
        ),
        (
            "ROOST_IDENTITY__SESSION_HEADERS",
            "a,b",
            "identity.session_headers: is not JSON of the right kind "
            "(allowed: a JSON list; set by environment ROOST_IDENTITY__SESSION_HEADERS)",
        ),
        (
            "ROOST_STORE",
            "[]",
            "store: is not JSON of the right kind (allowed: a JSON object; set by environment ROOST_STORE)",
        ),
        (
            "ROOST_LIMITS",
            '{"retries": -1}',
            "limits.retries: -1 is not allowed (allowed: a whole number from 0; set by environment ROOST_LIMITS)",
        ),
        (
            "ROOST_FLEETS",
            '[{"name": "a", "policy": "x"}]',
            f"fleets[0].policy: 'x' is not allowed (allowed: {POLICIES}; set by environment ROOST_FLEETS)",
        ),
    ],
)
def test_a_wrong_variable_is_explained(name: str, raw: str, line: str) -> None:
    assert _problems(None, {name: raw}) == [line]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            Flags(port=99999),
            "listen.port: 99999 is not allowed (allowed: a whole number from 0 to 65535; set by --port)",
        ),
        (Flags(policy="x"), f"fleets[0].policy: 'x' is not allowed (allowed: {POLICIES}; set by --policy)"),
        (
            Flags(redis="x"),
            f"store.url: the value is not a Redis URL (allowed: {REDIS_URLS}; set by --redis)",
        ),
        (
            Flags(store="memory", redis="redis://x"),
            "store.kind: memory does not go with store.url, which names a shared store "
            "(allowed: redis, or no URL; set by --store)",
        ),
    ],
)
def test_a_wrong_flag_is_explained(flags: Flags, line: str) -> None:
    assert _problems(None, {}, flags) == [line]


def test_all_problems_are_told_at_once(file: Path) -> None:
    """From every layer, each with its own origin."""
    _write(file, "workers: 0\nlog: {format: xml}")
    told = _problems(file, {"ROOST_LISTEN__PORT": "x", "ROOST_LISTN__PORT": "1"}, Flags(admin_port=-1))
    origins = [line.rpartition("; set by ")[2] for line in told]
    assert sorted(origins) == sorted(
        [
            "environment ROOST_LISTN__PORT)",
            "environment ROOST_LISTEN__PORT)",
            "--admin-port)",
            "FILE)",
            "FILE)",
        ]
    )


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "roost.yaml"
    if kind == "folder":
        path.mkdir()
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00a")
    why = {"missing": "No such file or directory", "folder": "Is a directory", "binary": "is not UTF-8 text"}[kind]
    assert _problems(path) == [f"FILE: {why} (allowed: a readable YAML file)"]


def test_a_policy_flag_does_not_hide_what_is_wrong_with_the_fleets(file: Path) -> None:
    told = _problems(_write(file, "fleets: [5]"), {}, Flags(policy="roost"))
    assert told == [f"fleets[0]: 5 is not allowed (allowed: a mapping with the keys {FLEET_KEYS}; set by FILE)"]
    assert _problems(_write(file, "fleets: x"), {}, Flags(policy="roost"))[0].startswith("fleets: 'x' is not allowed")


_YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*EVERYTHING.split(", "), *FLEET_KEYS.split(", "), "port", "url", "kind", "x"]), inner
        )
    ),
    max_leaves=8,
)


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=_YAML)
def test_no_document_does_worse_than_a_config_error(file: Path, document: Any) -> None:
    """Whatever a file holds: settings or sentences, never another exception."""
    _write(file, yaml.safe_dump(document, allow_unicode=True))
    try:
        load(file, {})
    except ConfigError as error:
        caught = error
    else:
        return
    assert caught.problems
    assert all(problem.wrong and problem.allowed for problem in caught.problems)
    assert len(str(caught).splitlines()) == len(caught.problems)


def test_every_setting_can_say_what_it_allows() -> None:
    for path, field in _fields(Settings):
        assert describe(field.annotation, field.metadata), path


# --- cautions and showing --------------------------------------------------------------------------------------------


def test_a_keepalive_that_outlives_the_engines_is_a_caution() -> None:
    """Not an error: an operator may have raised the engine's."""
    told = cautions(Settings(timeouts=Timeouts(keepalive_s=5)))
    assert [problem.key for problem in told] == ["timeouts.keepalive_s"]
    assert "SGLANG_TIMEOUT_KEEP_ALIVE" in str(told[0])


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:secret@h", "redis://:***@h"),
        ("redis://h:1/0?password=secret&db=1", "redis://h:1/0?password=***&db=1"),
        ("unix:///run/r.sock?db=1&password=secret", "unix:///run/r.sock?db=1&password=***"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis+sentinel://u:secret@h:1,i:2/m/0", "redis+sentinel://u:***@h:1,i:2/m/0"),
        (
            "redis+sentinel://h:1,i:2/m?sentinel_password=secret&sentinel_username=u",
            "redis+sentinel://h:1,i:2/m?sentinel_password=***&sentinel_username=***",
        ),
        (
            "rediss+cluster://h,i?ssl_keyfile=k&ssl_password=secret",
            "rediss+cluster://h,i?ssl_keyfile=k&ssl_password=***",
        ),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
    assert effective(Settings(store=Store(url=url)))["store"]["url"] == masked
    assert "secret" not in repr(Settings(store=Store(url=url)))


def test_a_password_that_makes_a_url_none_is_masked_too() -> None:
    assert mask_url("redis://u:se/cr@et@h") == "redis://u:***@h"
    told = _problems(None, {}, Flags(redis="redis://u:se/cr@et@h"))
    assert told == [
        "store.url: the value has a port that is not a number up to 65535 (in a password, write %2F for '/' and %40 "
        f"for '@') (allowed: {REDIS_URLS}; set by --redis)"
    ]


@pytest.mark.parametrize(
    ("store", "line"),
    [
        (
            {"url": "redis://:x@h", "password_file": "/p"},
            "store.password_file: store.url has a password too (allowed: a password in one place; set by FILE)",
        ),
        (
            {"url": "redis://h", "sentinel_password_file": "/p"},
            "store.sentinel_password_file: store.url names no Sentinels (allowed: redis+sentinel://…, or no file; "
            "set by FILE)",
        ),
        (
            {"url": "redis+sentinel://h/m?sentinel_password=x", "sentinel_password_file": "/p"},
            "store.sentinel_password_file: store.url has that password too (allowed: a password in one place; "
            "set by FILE)",
        ),
        ({"url": "redis+sentinel://h:1"}, f"store.url: the value names no master (allowed: {REDIS_URLS}; set by FILE)"),
    ],
)
def test_a_store_with_a_password_in_two_places_or_no_master_is_explained(
    file: Path, store: dict[str, str], line: str
) -> None:
    assert _problems(_write(file, yaml.safe_dump({"store": store}))) == [line]


def test_what_is_shown_can_be_loaded_again(file: Path) -> None:
    settings = load(None, {}, Flags(replicas=("http://a:1",), redis="redis://r:1", workers=2))
    _write(file, yaml.safe_dump(effective(settings)))
    assert load(file, {}) == settings


def test_a_problem_is_one_line_and_plain_data() -> None:
    problem = Problem(("a", 0, "b"), "x\ny", "z", "FILE")
    assert str(problem) == "a[0].b: x\\ny (allowed: z; set by FILE)"
    assert problem.as_plain() == {"key": "a[0].b", "wrong": "x\ny", "allowed": "z", "origin": "FILE"}
    assert os.linesep not in str(problem)


# --- secrets and who may come in -------------------------------------------------------------------------------------

SECRETS = "auth: {replica_key: planted-1}\nadmin: {read_token: planted-2, write_token: planted-3}\n"
SECRETS += "fleets: [{name: a, replica_key: planted-4}]\n"


def test_no_secret_is_shown(file: Path) -> None:
    """Not by `roost config show`, not by any rendering of settings; a worker gets them all the same."""
    settings = load(_write(file, SECRETS), {"ROOST_ADMIN__READ_TOKEN": "planted-5"})
    for shown in (
        repr(settings),
        str(settings),
        repr(settings.auth),
        str(effective(settings)),
        settings.model_dump_json(),
    ):
        assert "planted" not in shown
    told = settings.model_dump_json(context=SECRETS_TOLD)
    assert Settings.model_validate_json(told) == settings
    assert settings.admin.read_token is not None
    assert settings.admin.read_token.get_secret_value() == "planted-5"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "roost.example", "192.168.0.1"])
def test_an_admin_api_without_tokens_stays_on_loopback(file: Path, host: str) -> None:
    """Anywhere else it is a contradiction, which names the key and what would be allowed."""
    (told,) = _problems(_write(file, f"admin: {{host: '{host}'}}"))
    assert told.startswith("admin.host: ")
    assert "admin.unprotected" in told
    for allowed in (
        "read_token: r",
        "write_token: w",
        "read_token_file: f",
        "write_token_file: f",
        "unprotected: true",
    ):
        load(_write(file, f"admin: {{host: '{host}', {allowed}}}"), {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_the_admin_api_needs_no_token(file: Path, host: str) -> None:
    load(_write(file, f"admin: {{host: '{host}'}}"), {})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("admin: {read_token: a, read_token_file: b}", "admin.read_token"),
        ("admin: {write_token: a, write_token_file: b}", "admin.write_token"),
        ("auth: {replica_key: a, replica_key_file: b}", "auth.replica_key"),
        ("fleets: [{name: a, replica_key: a, replica_key_file: b}]", "fleets[0].replica_key"),
        ("auth: {replica_key: a, client_credentials: pass}", "auth.client_credentials"),
        ("fleets: [{name: a, replica_key: a, client_credentials: pass}]", "fleets[0].client_credentials"),
    ],
)
def test_one_secret_has_one_source_and_a_replica_gets_one_key(file: Path, text: str, key: str) -> None:
    (told,) = _problems(_write(file, text))
    assert told.startswith(f"{key}: ")


def test_files_that_are_named_and_not_there_are_cautioned_all_of_them(tmp_path: Path) -> None:
    """`roost config check` then says more than "fine", and the start finds them one by one."""
    absent = str(tmp_path / "absent")
    (present := tmp_path / "present").write_text("k")
    settings = Settings(
        admin=Admin(read_token_file=absent, write_token_file=str(present)),
        auth=Auth(keys_file=absent, replica_key_file=absent),
        store=Store(kind="redis", url="redis://r:6379/0", password_file=absent),
        fleets=(Fleet(name="f", replica_key_file=absent),),
    )
    assert [caution.key for caution in cautions(settings)] == [
        "admin.read_token_file",
        "auth.keys_file",
        "auth.replica_key_file",
        "store.password_file",
        "fleets[0].replica_key_file",
    ]


def test_letting_everybody_in_is_cautioned() -> None:
    assert [caution.key for caution in cautions(Settings(listen=Listen(host="0.0.0.0")))] == ["listen.host"]


def test_showing_replicas_the_tenants_keys_is_cautioned(file: Path) -> None:
    """Nothing forbids it: the replicas may be the operator's own and check them once more."""
    (keys := file.with_name("keys.yaml")).write_text("")
    settings = load(_write(file, f"auth: {{keys_file: {keys}, client_credentials: pass}}"), {})
    assert [caution.key for caution in cautions(settings)] == ["auth.client_credentials"]
