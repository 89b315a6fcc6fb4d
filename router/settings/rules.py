"""What settings must be to each other: contradictions (errors) and cautions (said, and gone on)."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from router.settings.problems import Path, Problem
from router.store.url import split_url

if TYPE_CHECKING:
    from router.settings.model import Settings

__all__ = ["ENGINE_KEEPALIVE_S", "ContradictionError", "cautions", "contradictions", "follow_url"]

ENGINE_KEEPALIVE_S = 5.0
"""SGLang closes an idle connection after this many seconds (SGLANG_TIMEOUT_KEEP_ALIVE, default of 0.5.23)."""

_ANY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 (compared with, not bound to)


class ContradictionError(ValueError):
    """Settings that are fine one by one and not together."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


def follow_url(store: Any) -> Any:
    """Within one layer, a URL alone implies kind redis, and another kind alone forgets the URL of a lower layer.

    So `--redis URL` wins over a file that says `kind: memory`, and `--store memory` over one that names a URL. What is
    not a mapping is left for pydantic to refuse.
    """
    if not isinstance(store, dict):
        return store
    if store.get("url") is not None and "kind" not in store:
        return {**store, "kind": "redis"}
    if store.get("kind") in {"embedded", "memory"} and "url" not in store:
        return {**store, "url": None}
    return store


def contradictions(settings: Settings) -> tuple[Problem, ...]:
    """All of them, in the order of the settings."""
    return (
        *_listeners(settings),
        *_limits(settings),
        *_auth(settings),
        *_store(settings),
        *_fleets(settings),
        *_ejection(settings),
    )


def cautions(settings: Settings) -> tuple[Problem, ...]:
    """What is allowed and probably not meant."""
    found = []
    if settings.timeouts.keepalive_s >= ENGINE_KEEPALIVE_S:
        found.append(
            Problem(
                ("timeouts", "keepalive_s"),
                f"{settings.timeouts.keepalive_s:g} s is not below the {ENGINE_KEEPALIVE_S:g} s after which SGLang "
                "closes an idle connection, so turns will now and then meet a closed one",
                f"less than {ENGINE_KEEPALIVE_S:g}, or a larger SGLANG_TIMEOUT_KEEP_ALIVE on every replica",
            )
        )
    found.extend(_credential_cautions(settings))
    found.extend(_open_door(settings))
    found.extend(_missing_files(settings))
    return tuple(found)


def _open_door(settings: Settings) -> Iterator[Problem]:
    if settings.listen.host in _ANY_ADDRESS and settings.auth.keys_file is None:
        yield Problem(
            ("listen", "host"),
            f"{settings.listen.host} lets in whoever reaches this machine, since no auth.keys_file says who may",
            "auth.keys_file (see `roost keys new`), or something in front that checks",
        )


def _missing_files(settings: Settings) -> Iterator[Problem]:
    """Files that are named and not there: a deployment may bring them later, and the start will want them."""
    named: list[tuple[Path, str | None]] = [
        (("admin", "read_token_file"), settings.admin.read_token_file),
        (("admin", "write_token_file"), settings.admin.write_token_file),
        (("auth", "keys_file"), settings.auth.keys_file),
        (("auth", "replica_key_file"), settings.auth.replica_key_file),
        (("store", "password_file"), settings.store.password_file),
        (("store", "sentinel_password_file"), settings.store.sentinel_password_file),
    ]
    named += [(("fleets", n, "replica_key_file"), fleet.replica_key_file) for n, fleet in enumerate(settings.fleets)]
    for path, name in named:
        if name is not None and not File(name).is_file():
            yield Problem(path, f"there is no file {name} here", "a file that this process can read")


def _credential_cautions(settings: Settings) -> Iterator[Problem]:
    passing = {fleet.client_credentials or settings.auth.client_credentials for fleet in settings.fleets}
    if settings.auth.keys_file is not None and "pass" in passing:
        yield Problem(
            ("auth", "client_credentials"),
            "replicas are shown the keys by which Roost knows its tenants",
            "drop, and auth.replica_key_file where replicas ask for a key",
        )


def _listeners(settings: Settings) -> Iterator[Problem]:
    listen, admin = settings.listen, settings.admin
    one_address = listen.host == admin.host or not _ANY_ADDRESS.isdisjoint({listen.host, admin.host})
    if listen.port == admin.port != 0 and one_address:
        yield Problem(
            ("admin", "port"),
            f"{admin.port} is also listen.port; clients must not reach the admin API",
            "a port of its own",
        )


def _auth(settings: Settings) -> Iterator[Problem]:
    admin, auth = settings.admin, settings.auth
    twice: list[tuple[Path, object, object]] = [
        (("admin", "read_token"), admin.read_token, admin.read_token_file),
        (("admin", "write_token"), admin.write_token, admin.write_token_file),
        (("auth", "replica_key"), auth.replica_key, auth.replica_key_file),
    ]
    twice += [
        (("fleets", number, "replica_key"), fleet.replica_key, fleet.replica_key_file)
        for number, fleet in enumerate(settings.fleets)
    ]
    for path, value, file in twice:
        if value is not None and file is not None:
            yield Problem(
                path, f"there is {path[-1]}_file too, and one secret cannot come from two places", "one of them"
            )
    if not (_is_loopback(admin.host) or has_tokens(settings) or admin.unprotected):
        yield Problem(
            ("admin", "host"),
            f"{admin.host} can be reached from elsewhere, and the admin API has no token, so whoever reaches it could "
            "send prompts to a replica of his own",
            "127.0.0.1, or admin.read_token_file and admin.write_token_file, or admin.unprotected: true where "
            "strangers are kept out otherwise",
        )
    for number, fleet in enumerate(settings.fleets):
        keyed = any((fleet.replica_key, fleet.replica_key_file, auth.replica_key, auth.replica_key_file))
        own = fleet.client_credentials is not None
        if keyed and (fleet.client_credentials or auth.client_credentials) == "pass":
            yield Problem(
                ("fleets", number, "client_credentials") if own else ("auth", "client_credentials"),
                "a replica takes one key, and a replica key is set for it",
                "drop, or no replica key",
            )


def has_tokens(settings: Settings) -> bool:
    """Whether the admin API asks for a token."""
    admin = settings.admin
    return any((admin.read_token, admin.write_token, admin.read_token_file, admin.write_token_file))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _store(settings: Settings) -> Iterator[Problem]:
    store = settings.store
    if store.kind == "redis" and store.url is None:
        yield Problem(("store", "url"), "store.kind is redis and there is no URL", "redis://HOST:PORT/DB")
    if store.kind != "redis" and store.url is not None:
        yield Problem(
            ("store", "kind"),
            f"{store.kind} does not go with store.url, which names a shared store",
            "redis, or no URL",
        )
    if store.kind == "redis" and store.url is not None:
        yield from _login(store.url, store.password_file, store.sentinel_password_file)
    if store.kind == "memory" and settings.workers > 1:
        yield Problem(
            ("store", "kind"),
            f"memory is not shared, and there are {settings.workers} workers",
            "embedded or redis; or workers: 1",
        )
    if store.lease_renew_s >= store.lease_ttl_s:
        yield Problem(
            ("store", "lease_renew_s"),
            f"{store.lease_renew_s:g} s is not below store.lease_ttl_s ({store.lease_ttl_s:g} s), so running turns "
            "would lose their lease",
            f"less than {store.lease_ttl_s:g}; a third of it is good",
        )


def _ejection(settings: Settings) -> Iterator[Problem]:
    given = settings.ejection
    if given.max_s < given.base_s:
        yield Problem(
            ("ejection", "max_s"),
            f"{given.max_s:g} s is below ejection.base_s ({given.base_s:g} s), the least that a replica is out",
            f"{given.base_s:g} or more",
        )


def _login(url: str, password_file: str | None, sentinel_password_file: str | None) -> Iterator[Problem]:
    parts = split_url(url)
    if password_file is not None and parts.has_password:
        yield Problem(("store", "password_file"), "store.url has a password too", "a password in one place")
    if sentinel_password_file is not None:
        path = ("store", "sentinel_password_file")
        if parts.kind != "sentinel":
            yield Problem(path, "store.url names no Sentinels", "redis+sentinel://…, or no file")
        elif parts.has_sentinel_password:
            yield Problem(path, "store.url has that password too", "a password in one place")


def _limits(settings: Settings) -> Iterator[Problem]:
    limits = settings.limits
    if limits.bodies_max_bytes < limits.body_max_bytes:
        yield Problem(
            ("limits", "bodies_max_bytes"),
            f"{limits.bodies_max_bytes} is below limits.body_max_bytes ({limits.body_max_bytes}), so the largest body "
            "would wait for room that never comes",
            f"at least {limits.body_max_bytes}",
        )


def _fleets(settings: Settings) -> Iterator[Problem]:
    names: dict[str, int] = {}
    models: dict[str, str] = {}
    replicas: dict[str, str] = {}
    for i, fleet in enumerate(settings.fleets):
        if fleet.name in names:
            yield Problem(
                ("fleets", i, "name"),
                f"{fleet.name!r} is already the name of fleets[{names[fleet.name]}]",
                "another name",
            )
        names.setdefault(fleet.name, i)
        for j, model in enumerate(fleet.models):
            if model in models:
                yield Problem(
                    ("fleets", i, "models", j),
                    f"{model!r} is already served by {models[model]}, so a turn could not know where to go",
                    "each model in one fleet, once",
                )
            models.setdefault(model, f"fleets[{i}] ({fleet.name!r})")
        for j, url in enumerate(fleet.replicas):
            if url in replicas:
                yield Problem(
                    ("fleets", i, "replicas", j),
                    f"{url} is already in {replicas[url]}, and its turns would be counted twice",
                    "each replica in one fleet, once",
                )
            replicas.setdefault(url, f"fleets[{i}] ({fleet.name!r})")
