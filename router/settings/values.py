"""The kinds of value a setting may have, each with the sentence that says what is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr, SerializationInfo

from router.store.url import split_url
from router.upstream.wire import replica_root

__all__ = [
    "SECRETS_TOLD",
    "Allowed",
    "Count",
    "FieldPath",
    "FleetName",
    "HeaderName",
    "KeyPrefix",
    "Port",
    "Positive",
    "RedisUrl",
    "ReplicaUrl",
    "Seconds",
    "Secret",
    "Share",
    "Text",
    "mask_url",
]

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Up to the last @, wherever it stands: hiding too much is better than hiding half of a password with a slash in it.
_USERINFO = re.compile(r"(?<=//)([^/@:]*):?.*@")
_SECRET_QUERY = re.compile(r"(?<=[?&])(\w*(?:password|username)=)[^&#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Metadata of a field: what is allowed, in words. The value of a `secret` one is never repeated in a message."""

    text: str
    secret: bool = False


def mask_url(url: str) -> str:
    """The URL with its password, if it has one, replaced by `***`."""
    masked = _USERINFO.sub(lambda found: f"{found[1]}:***@", url)
    return _SECRET_QUERY.sub(r"\1***", masked)


def _no_bool(value: object) -> object:
    """YAML reads `yes` and `on` as true, and pydantic true as 1: a number must be written as one."""
    if isinstance(value, bool):
        raise ValueError("is yes or no, not a number")  # noqa: TRY004 (pydantic gathers ValueErrors)
    return value


def _header(value: str) -> str:
    if not _HEADER.fullmatch(value):
        raise ValueError("is not a header name")
    return value.lower()


def _redis_url(value: str) -> str:
    split_url(value)
    return value


def _visible(value: SecretStr) -> SecretStr:
    """A secret goes into a header, where a line break would begin another."""
    if not re.fullmatch(r"[!-~]{1,4096}", value.get_secret_value()):
        raise ValueError("has a space or an unprintable character in it, or is too long")
    return value


def _told(value: SecretStr, info: SerializationInfo) -> str:
    return value.get_secret_value() if info.context == SECRETS_TOLD else "***"


def _no_prompt(value: str) -> str:
    if value.partition(".")[0] in PROMPT_FIELDS:
        raise ValueError("is the prompt, not the name of a session")
    return value


SECRETS_TOLD = {"secrets": "told"}
"""Context of `model_dump_json` that has secrets in it; everything else shows `***`."""
PROMPT_FIELDS = frozenset({"messages", "input", "prompt", "text", "input_ids", "system", "instructions", "tools"})

Text = Annotated[str, Field(min_length=1), Allowed("text, in quotes if it looks like a number")]
Port = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65_535)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(ge=0)]

HeaderName = Annotated[str, AfterValidator(_header), Allowed("header names: letters, digits, '-' and '_'")]
FieldPath = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$"),
    AfterValidator(_no_prompt),
    Allowed("fields of the request body that are no prompt, nested ones with dots as in metadata.user_id"),
]
FleetName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"),
    Allowed("1 to 63 letters, digits, '.', '_' and '-', a letter or digit first"),
]
KeyPrefix = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"),  # no braces or colons: the keys have their own
    Allowed("1 to 63 letters, digits, '.', '_' and '-', a letter or digit first"),
]
ReplicaUrl = Annotated[str, AfterValidator(replica_root), Allowed("http://HOST:PORT or https://HOST:PORT")]
Secret = Annotated[
    SecretStr,
    AfterValidator(_visible),
    PlainSerializer(_told),
    Allowed("1 to 4096 visible ASCII characters", secret=True),
]
RedisUrl = Annotated[
    str,
    AfterValidator(_redis_url),
    Allowed(
        "redis://HOST:PORT/DB, unix:///PATH, redis+sentinel://HOST:PORT,…/MASTER or redis+cluster://HOST:PORT,…; "
        "rediss for TLS",
        secret=True,
    ),
]
