"""URLs of stores: of one server, of a group behind Sentinels, of a cluster.

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]            rediss://… with TLS
    unix://[USER:PASSWORD@]/PATH[?db=DB]
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],…/MASTER[/DB]      rediss+sentinel://… with TLS
    redis+cluster://[USER:PASSWORD@]HOST[:PORT],…                   rediss+cluster://… with TLS

User and password are those of the data servers; Sentinels have `sentinel_username` and `sentinel_password` in the
query. TLS is set by redis-py's `ssl_…` options in the query, for Sentinels and data servers alike.

Nothing here needs redis-py, so that settings can be checked without loading it. What goes to redis-py's parser are the
plain URLs that `split_url` makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

__all__ = ["StoreUrl", "split_url"]

Kind = Literal["single", "sentinel", "cluster"]

_SCHEMES: Final[dict[str, tuple[Kind, str, int]]] = {
    "redis": ("single", "redis", 6379),
    "rediss": ("single", "rediss", 6379),
    "unix": ("single", "unix", 0),
    "redis+sentinel": ("sentinel", "redis", 26379),
    "rediss+sentinel": ("sentinel", "rediss", 26379),
    "redis+cluster": ("cluster", "redis", 6379),
    "rediss+cluster": ("cluster", "rediss", 6379),
}
_LOGIN: Final = frozenset({"username", "password"})
_SENTINEL_LOGIN: Final = frozenset({"sentinel_username", "sentinel_password"})
_TLS: Final = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_data",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_password",
    }
)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """What a URL says."""

    kind: Kind
    server: str = field(repr=False)
    """Plain URL: how to speak with a data server. Its host is right for a single one only."""
    hosts: tuple[tuple[str, int], ...] = ()
    """The Sentinels, or nodes of the cluster, that the URL names."""
    master: str = ""
    """What the Sentinels call the group."""
    sentinel: str = field(default="", repr=False)
    """Plain URL: how to speak with a Sentinel; its host means nothing."""
    has_password: bool = False
    has_sentinel_password: bool = False


def split_url(url: str) -> StoreUrl:
    """Raises ValueError, its text a predicate (`names no master`) that repeats nothing of the URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES or not rest:
        raise ValueError("is not a Redis URL")
    kind, plain, default_port = _SCHEMES[scheme]
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is not a Redis URL") from None  # what was raised may repeat the password
    userinfo, _, named = parts.netloc.rpartition("@")
    query = _query(parts, kind, plain)
    hosts = () if plain == "unix" else _hosts(named, default_port, several=kind != "single")
    path = [unquote(part) for part in parts.path.split("/") if part]
    has_password = ":" in userinfo or "password" in query
    if kind == "single":
        if plain != "unix" and (len(path) > 1 or (path and not path[0].isdigit())):
            raise ValueError("names a database that is not a number")
        return StoreUrl(kind, url, has_password=has_password)
    if kind == "cluster" and (path or query.get("db", "0") != "0"):
        raise ValueError("names a database, and a cluster has only one")
    if kind == "sentinel" and not path:
        raise ValueError("names no master")
    if kind == "sentinel" and (len(path) > 2 or not all(part.isdigit() for part in path[1:])):
        raise ValueError("names a database that is not a number")
    ours = {name: value for name, value in query.items() if name not in _SENTINEL_LOGIN}
    theirs = {name.removeprefix("sentinel_"): query[name] for name in sorted(_SENTINEL_LOGIN & query.keys())}
    theirs |= {name: value for name, value in query.items() if name in _TLS}
    login, database = f"{userinfo}@" if userinfo else "", path[1] if len(path) > 1 else ""
    return StoreUrl(
        kind,
        f"{plain}://{login}host/{database}?{urlencode(ours)}",
        hosts,
        path[0] if path else "",
        f"{plain}://host?{urlencode(theirs)}",
        has_password,
        "sentinel_password" in query,
    )


def _query(parts: SplitResult, kind: Kind, plain: str) -> dict[str, str]:
    if parts.fragment:
        raise ValueError("has a '#' (in a password, write %23)")
    known = _LOGIN | {"db"}
    if plain == "rediss":
        known |= _TLS
    if kind == "sentinel":
        known |= _SENTINEL_LOGIN
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in given.keys() - known:
        if name in _TLS | _SENTINEL_LOGIN:
            raise ValueError(f"has the option {name}, which does not go with its scheme")
        raise ValueError("has an option in its query that is not known (in a password, write %3F for '?')")
    if not given.get("db", "0").isdigit():
        raise ValueError("names a database that is not a number")
    return given


def _hosts(named: str, default_port: int, *, several: bool) -> tuple[tuple[str, int], ...]:
    hosts = []
    for each in named.split(",") if several else [named]:
        try:
            parts = urlsplit(f"//{each}")
            port = default_port if parts.port is None else parts.port
        except ValueError as error:
            raise ValueError(
                "has a port that is not a number up to 65535 (in a password, write %2F for '/' and %40 for '@')"
            ) from error
        if several and not parts.hostname:
            raise ValueError("names no host, or an empty one")
        hosts.append((parts.hostname or "localhost", port))
    return tuple(hosts)
