"""Facts of a request: dialect, model, tenant, session and the prompt's chain, read without changing a byte.

*Tenant* comes from the API key (hashed; the key itself is never kept). *Session* comes from the first configured header
that is present, else the first configured body field, else there is none. Its raw value is hashed with the tenant
before anything else sees it: tenants cannot meet, and no raw id reaches the store, a log or a metric. *Branch* comes
from the prompt: see `prefix` and `lineage`.

Reading is lenient: a field of an unexpected type counts as absent, because the engine is the judge of the body. Only a
body that is not JSON at all is refused, on paths that require JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

import msgspec

from router.domain.errors import MalformedRequest
from router.domain.session import NO_CHAIN, Chain
from router.domain.turn import Dialect, Facts
from router.placement.prefix import ITEM_KEYS_UNSEEN, Canon, chain_messages, chain_text, chain_token_ids, seed

__all__ = ["ANONYMOUS", "Identity", "Rules", "session_key", "session_token", "tenant_of"]

ANONYMOUS: Final = "anonymous"
"""The tenant of requests without an API key."""
BOUNDARIES_MAX: Final = 512
"""Deepest boundaries kept of a chain; older ones could only be met by rewinding further than any branch remembers."""

_TOKEN_HEADER: Final = b"x-roost-session"
_PARENT_HEADER: Final = b"x-parent-session-id"
"""OpenCode and Kilo give each subagent a session of its own and name here the one it works for."""
_SESSION_KEY: Final = re.compile(r"[0-9a-f]{24}")
_RAW: Final = msgspec.Raw()
_NULLISH: Final = (b"", b"null")


@dataclass(frozen=True, slots=True)
class Rules:
    """Where a session id may stand."""

    session_headers: tuple[str, ...]
    """Lower-case header names, the first present one wins."""
    session_fields: tuple[str, ...]
    """Body fields, dotted (`metadata.user_id`), tried in order when no header is present."""


class Identity:
    """Reads facts; holds only the rules, compiled, and the digest memory."""

    def __init__(self, rules: Rules) -> None:
        self._headers = tuple(name.lower().encode() for name in rules.session_headers)
        self._canon = Canon()
        self._canon_items = Canon(ITEM_KEYS_UNSEEN)
        self._fields = tuple(tuple(field.split(".")) for field in rules.session_fields)
        extra = {path[0] for path in self._fields}
        self._typed = {dialect: _decoder(extra, lists) for dialect, lists in _LISTS.items()}
        self._loose = _decoder(extra, ())

    def facts(
        self,
        dialect: Dialect,
        headers: Mapping[bytes, bytes],
        body: bytes,
        *,
        encoded: bool = False,
        scope: str | None = None,
    ) -> Facts:
        """Read a request. `headers` has lower-case names; `encoded`: the body is compressed and is not looked into;
        `scope`: of the tenant, where its key was looked up; None: whoever has the key is the tenant.

        Raises MalformedRequest where the dialect needs JSON and the body is not.
        """
        tenant = scope or tenant_of(headers)
        session, source = self._from_headers(tenant, headers)
        if dialect is Dialect.OTHER or encoded or not body:
            model = None if encoded else _peek_model(body)
            return Facts(dialect, model, stream=False, tenant=tenant, session=session, session_source=source)
        fields = self._read(dialect, body)
        if session is None:
            session, source = self._from_fields(tenant, fields)
        model = _string(fields.model)
        chain, head = self._chain(dialect, fields, tenant, model or "")
        return Facts(
            dialect=dialect,
            model=model,
            stream=bytes(fields.stream) == b"true",
            tenant=tenant,
            session=session,
            session_source=source,
            chain=chain[-BOUNDARIES_MAX:],
            head=max(0, head - max(0, len(chain) - BOUNDARIES_MAX)),
            max_output_tokens=_output_limit(dialect, fields),
            refers_to=_string(fields.previous_response_id) if dialect is Dialect.RESPONSES else None,
            stores_response=dialect is Dialect.RESPONSES and bytes(fields.store) != b"false",
            priority=_signed(fields.priority),
            parent=session_key(tenant, parent) if (parent := headers.get(_PARENT_HEADER)) else None,
            steers_engine=any(bytes(getattr(fields, name)) not in _NULLISH for name in _STEERING),
        )

    def _read(self, dialect: Dialect, body: bytes) -> Any:
        for decoder in (self._typed[dialect], self._loose):
            try:
                return decoder.decode(body)
            except msgspec.ValidationError:
                continue
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                paired = _LONE_SURROGATE.sub(_paired, body)
                if paired != body:
                    return self._read(dialect, paired)
                raise MalformedRequest(f"the body is not valid JSON: {_where(error)}") from None
        raise MalformedRequest("the body must be a JSON object")

    def _from_headers(self, tenant: str, headers: Mapping[bytes, bytes]) -> tuple[str | None, str]:
        for name in self._headers:
            value = headers.get(name)
            if value:
                made_here = _sealed_session(tenant, value) if name == _TOKEN_HEADER else None
                return made_here or session_key(tenant, value), name.decode()
        return None, "none"

    def _from_fields(self, tenant: str, fields: Any) -> tuple[str | None, str]:
        for path in self._fields:
            raw = getattr(fields, _safe(path[0]))
            value = _dig(raw, path[1:])
            if value:
                return session_key(tenant, value.encode("utf-8", "surrogatepass")), ".".join(path)
        return None, "none"

    def _chain(self, dialect: Dialect, fields: Any, tenant: str, model: str) -> tuple[Chain, int]:
        tools = bytes(fields.tools)
        if tools in (b"null", b"[]") or _chooses_no_tools(fields.tool_choice):
            tools = b""
        start = seed(tenant, model, tools)
        match dialect:
            case Dialect.CHAT | Dialect.MESSAGES | Dialect.RESPONSES:
                messages, leading = _messages(dialect, fields)
                canon = self._canon_items if dialect is Dialect.RESPONSES else self._canon
                chain = chain_messages(start, len(tools), messages, canon)
                return chain, min(leading, len(chain))
            case _:
                return _raw_prompt(start, fields), 0


# --- tenant and session ----------------------------------------------------------------------------------------------


def tenant_of(headers: Mapping[bytes, bytes]) -> str:
    """A digest of the API key (`Authorization: Bearer` or `x-api-key`), or `ANONYMOUS`. The key cannot be read back."""
    key = headers.get(b"authorization", b"")
    if key[:7].lower() == b"bearer ":
        key = key[7:]
    key = key.strip() or headers.get(b"x-api-key", b"").strip()
    return blake2b(key, digest_size=12, person=b"roost-tenant").hexdigest() if key else ANONYMOUS


def session_key(tenant: str, raw: bytes) -> str:
    """The tenant-scoped key of a session id, however long or malformed."""
    return blake2b(raw.strip(), digest_size=12, key=tenant.encode()[:64], person=b"roost-session").hexdigest()


def session_token(tenant: str, session: str) -> str:
    """A session's key as a client may send it back in `x-roost-session`: it names that session again, for its tenant
    only.
    """
    return f"{session}-{_seal(tenant, session)}"


def _seal(tenant: str, session: str) -> str:
    return blake2b(session.encode(), digest_size=8, key=tenant.encode()[:64], person=b"roost-token").hexdigest()


def _sealed_session(tenant: str, value: bytes) -> str | None:
    session, _, seal = value.strip().decode("ascii", "replace").partition("-")
    if not _SESSION_KEY.fullmatch(session):  # who knows its scope can seal anything, and keys are shown in logs
        return None
    return session if compare_digest(seal.encode(), _seal(tenant, session).encode()) else None


def _dig(raw: msgspec.Raw | list[msgspec.Raw], path: tuple[str, ...]) -> str | None:
    """The string at `path` below a raw JSON value. JSON inside a string is looked through once (Claude Code's
    user_id). A list has none: it is the prompt.
    """
    if isinstance(raw, list):
        return None
    data = bytes(raw)
    if data in _NULLISH:
        return None
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        return None
    if value[0] == "{":
        return _session_in(value) or value
    return value


def _session_in(value: str) -> str | None:
    """`session_id` inside Claude Code's `metadata.user_id`, a JSON string {"device_id":…,"session_id":…}."""
    try:
        inner = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = inner.get("session_id") if isinstance(inner, dict) else None
    return found if isinstance(found, str) and found else None


# --- reading bodies --------------------------------------------------------------------------------------------------

_FIELDS: Final = (
    "model",
    "stream",
    "tools",
    "tool_choice",
    "system",
    "instructions",
    "messages",
    "input",
    "prompt",
    "text",
    "input_ids",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "sampling_params",
    "previous_response_id",
    "store",
    "priority",
    "session_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)
_STEERING: Final = ("session_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields by which a turn reaches state in an engine that another turn made, or has the engine fetch KV from a host
(SGLang 0.5.23 srt/managers/io_struct.py `GenerateReqInput`; openai/protocol.py has them too)."""
_LISTS: Final[dict[Dialect, tuple[str, ...]]] = {
    Dialect.CHAT: ("messages",),
    Dialect.MESSAGES: ("messages",),
    Dialect.RESPONSES: ("input",),
    Dialect.COMPLETIONS: (),
    Dialect.GENERATE: (),
}
_FIELD_PREFIX: Final = "field_"


def _safe(name: str) -> str:
    """Struct attribute of a JSON field: configured names may be anything, attributes must be identifiers."""
    return name if name in _FIELDS else _FIELD_PREFIX + name.encode().hex()


def _decoder(extra: set[str], lists: tuple[str, ...]) -> Any:
    names = {name: name for name in _FIELDS} | {_safe(name): name for name in extra}
    fields: list[tuple[str, Any, Any]] = [
        (attribute, list[msgspec.Raw], msgspec.field(default_factory=list, name=name))
        if attribute in lists
        else (attribute, msgspec.Raw, msgspec.field(default=_RAW, name=name))
        for attribute, name in names.items()
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields, gc=False))


def _messages(dialect: Dialect, fields: Any) -> tuple[list[bytes | memoryview], int]:
    """The prompt's messages in template order, and how many of them are the leading system prompt."""
    value = fields.input if dialect is Dialect.RESPONSES else fields.messages
    if isinstance(value, list):
        messages: list[Any] = list(value)
    else:
        messages = [] if bytes(value) in _NULLISH else [value]
    before = (
        fields.system if dialect is Dialect.MESSAGES else fields.instructions if dialect is Dialect.RESPONSES else _RAW
    )
    if bytes(before) not in _NULLISH:
        messages.insert(0, b'{"role":"system","content":%b}' % bytes(before))
        leading = 1
    else:
        leading = 0
    while leading < len(messages) and _role(messages[leading]) in ("system", "developer"):
        leading += 1
    return [memoryview(message) for message in messages], leading


class _Role(msgspec.Struct):
    role: str = ""


_role_decoder = msgspec.json.Decoder(_Role)


def _role(raw: msgspec.Raw) -> str:
    try:
        return _role_decoder.decode(raw).role
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _raw_prompt(start: bytes, fields: Any) -> Chain:
    for raw in (fields.prompt, fields.text, fields.input_ids):
        data = memoryview(raw)  # no copy: a prompt may be as large as a body
        if len(data) <= len(b"null") and bytes(data) in _NULLISH:
            continue
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return chain_text(start, bytes(data))
        if isinstance(value, str):
            return chain_text(start, value.encode("utf-8", "surrogatepass"))
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return chain_token_ids(start, value)
        return chain_text(start, bytes(data))
    return NO_CHAIN


def _string(raw: msgspec.Raw) -> str | None:
    data = bytes(raw)
    if data[:1] != b'"':
        return None
    try:
        return msgspec.json.decode(data, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _integer(raw: msgspec.Raw) -> int | None:
    data = bytes(raw)
    return int(data) if data.isdigit() and len(data) < 10 else None


def _signed(raw: msgspec.Raw) -> int | None:
    data = bytes(raw)
    return int(data) if data.removeprefix(b"-").isdigit() and len(data) < 11 else None


def _output_limit(dialect: Dialect, fields: Any) -> int | None:
    if dialect is Dialect.GENERATE:
        try:
            found = msgspec.json.decode(bytes(fields.sampling_params)).get("max_new_tokens")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
            return None
        return found if isinstance(found, int) else None
    for raw in (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens):
        found = _integer(raw)
        if found is not None:
            return found
    return None


def _chooses_no_tools(raw: msgspec.Raw) -> bool:
    """Under `tool_choice: none` SGLang leaves the tools out of the prompt (openai/serving_chat.py:1855)."""
    data = bytes(raw)
    return data == b'"none"' or (data[:1] == b"{" and _dig(raw, ("type",)) == "none")


class _Model(msgspec.Struct):
    model: str = ""


_model_decoder = msgspec.json.Decoder(_Model)


def _peek_model(body: bytes) -> str | None:
    """The model of a body of an unknown dialect, if it is JSON and names one."""
    if body[:1] != b"{":
        return None
    try:
        return _model_decoder.decode(body).model or None
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_SURROGATES: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE: Final = re.compile(rb"(\\\\|" + _SURROGATES + rb")|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def _paired(found: re.Match[bytes]) -> bytes:
    """Half a character, as JavaScript clients write it where they cut a text in an emoji, reads as one that is unknown:
    JSON's grammar allows it, this decoder does not, and the engine is the judge.
    """
    return found.group(1) or b"\\ufffd"


def _where(error: Exception) -> str:
    """The decoder's words without any of the body's content (msgspec names positions, never text)."""
    return str(error)[:120]
