"""The message-boundary chain: one hash at the end of every message, so that a prompt is recognised by what it extends.

h_i = xxh3_128(h_{i-1} ‖ xxh3_128(canonical bytes of message i)), seeded with tenant, model and tools.

Canonical means: what the chat template would see. Between two turns Claude Code moves `cache_control` marks and
rewrites earlier content from ``[{"type":"text","text":…}]`` to a plain string; the tokens are the same, so the hash
must be too. Hence `cache_control` never counts, a string equals its one-block list, empty text blocks and nulls do not
count, and the order of a message's own keys does not count. Keys that SGLang 0.5.23 drops before the template
(`UNSEEN_KEYS`; srt/entrypoints/anthropic/serving.py, openai/serving_chat.py) do not count either. Below a message's own
keys order counts: templates print a tool call's arguments as they come. Anything that cannot be read is hashed as it
stands.

Raw text prompts (`/v1/completions`, `/generate`) have no messages. They are cut on a fixed grid, so that a prompt which
extends another shares all its full cells; the ragged end is not a boundary. The grid is fine all the way, because
conversations behind one long system prompt are told apart only by a cell that reaches beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from xxhash import xxh3_128_digest

from router.domain.session import Chain

__all__ = ["Canon", "chain_messages", "chain_text", "chain_token_ids", "seed"]

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

UNSEEN_KEYS: Final = frozenset({"cache_control", "signature", "is_error", "citations", "annotations"})
"""Message and block keys that never reach a prompt."""

ITEM_KEYS_UNSEEN: Final = frozenset({"id", "status"})
"""Keys of a Responses item that never reach a prompt (serving_responses.py). Codex gives the same text other ids in
every thread."""

CELL_BYTES: Final = 512
"""A raw prompt's grid: two prompts that part less than this before their end may count as one (0.5 ms for 400 KB)."""
TOKEN_BYTES: Final = 4
"""Text bytes that one token id stands for, where a prompt comes as ids."""
MEDIA: Final = frozenset(
    {"audio_url", "document", "file", "image", "image_url", "input_audio", "input_file", "input_image", "video_url"}
)
"""Types of content blocks that are no text, in the three dialects of messages."""
MEDIA_BYTES: Final = 8_000
"""Text bytes that a larger block of media stands for: 2,000 tokens, as a vision model makes of a picture, however many
bytes it has. By its bytes a picture of 4 MB would be a prompt of a million tokens that no replica has room for."""


def seed(tenant: str, model: str, tools: bytes) -> bytes:
    """The chain's start: two tenants, models or tool sets never share a boundary. `tools` is raw JSON or empty."""
    return xxh3_128_digest(
        b"\x1e".join((tenant.encode(), model.encode("utf-8", "surrogatepass"), _canonical_tools(tools)))
    )


class Canon:
    """Digests of canonical messages, remembered by the hash of their raw bytes.

    A history is resent every turn, so nearly every message has been seen before; remembering saves decoding it again
    (about 4 µs a message). Invisible but for speed; bounded by two generations of `size` entries.
    """

    __slots__ = ("_new", "_old", "_size", "_unseen")

    def __init__(self, unseen: frozenset[str] = frozenset(), size: int = 32_768) -> None:
        """`unseen`: further keys of a message itself that do not count."""
        self._unseen = unseen
        self._new: dict[bytes, tuple[bytes, int]] = {}
        self._old: dict[bytes, tuple[bytes, int]] = {}
        self._size = size

    def digest(self, raw: bytes | memoryview) -> tuple[bytes, int]:
        """(digest of the canonical bytes, bytes of prompt text) of one raw JSON message."""
        key = xxh3_128_digest(raw)
        found = self._new.get(key)
        if found is not None:
            return found
        found = self._old.get(key)
        if found is None:
            parts = canonical(raw, self._unseen)
            found = (xxh3_128_digest(b"\x1e".join(parts)), sum(map(len, parts)))
        if len(self._new) >= self._size:
            self._old, self._new = self._new, {}
        self._new[key] = found
        return found


def chain_messages(start: bytes, start_bytes: int, messages: Iterable[bytes | memoryview], canon: Canon) -> Chain:
    """A boundary after each message. `start_bytes` is the text that precedes them all (the tools)."""
    hashes: list[str] = []
    sizes: list[int] = []
    link = start
    total = start_bytes
    for raw in messages:
        digest, size = canon.digest(raw)
        link = xxh3_128_digest(link + digest)
        total += size
        hashes.append(link.hex())
        sizes.append(total)
    return Chain(hashes, sizes)


def chain_text(start: bytes, text: bytes) -> Chain:
    """A boundary after each full grid cell of a raw prompt; a prompt shorter than one cell has one, its end."""
    ends = range(CELL_BYTES, len(text) + 1, CELL_BYTES)
    if not ends:
        return Chain((xxh3_128_digest(start + text).hex(),), (len(text),))
    hashes: list[str] = []
    link = start
    for end in ends:
        link = xxh3_128_digest(link + text[end - CELL_BYTES : end])
        hashes.append(link.hex())
    return Chain(hashes, ends)


def chain_token_ids(start: bytes, ids: Sequence[int]) -> Chain:
    """As `chain_text`, for a prompt given as token ids (each counts as `TOKEN_BYTES` of text)."""
    packed = b"".join(
        i.to_bytes(TOKEN_BYTES, "little", signed=True) if -(2**31) <= i < 2**31 else b"\xff" * TOKEN_BYTES for i in ids
    )
    return chain_text(start, packed)


def canonical(raw: bytes | memoryview, unseen: frozenset[str] = frozenset()) -> list[bytes]:
    """The parts of one message that a chat template would see. Unreadable bytes are returned as they are."""
    try:
        message = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [bytes(raw)]
    if isinstance(message, str):
        return [b"user", _text(message)]
    if not isinstance(message, dict):
        return [bytes(raw)]
    role = message.pop("role", None)
    parts = [_text(role) if isinstance(role, str) else b""]
    content = message.pop("content", None)
    parts += _content(content)
    rest = _seen({key: item for key, item in message.items() if key not in unseen})
    if rest:
        parts.append(_encode(dict(sorted(rest.items()))))
    return parts


def _content(content: Any) -> list[bytes]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [_text(content)]
    if isinstance(content, list):
        return _blocks(content)
    return [_encode(_seen(content))]


def _blocks(blocks: list[Any]) -> list[bytes]:
    parts = []
    for block in blocks:
        if isinstance(block, dict):
            text = block.get("text")
            if isinstance(text, str) and block.get("type") in ("text", "input_text", "output_text", None):
                if text:
                    parts.append(_text(text))
                continue
            nested = block.pop("content", None) if "content" in block else None
            told = _encode(dict(sorted(_seen(block).items())))
            kind = block.get("type")
            media = len(told) > MEDIA_BYTES and isinstance(kind, str) and kind in MEDIA
            parts.append(xxh3_128_digest(told).ljust(MEDIA_BYTES, b"\0") if media else told)
            parts += _content(nested)
        elif block:
            parts.append(_text(block) if isinstance(block, str) else _encode(block))
    return parts


def _seen(value: Any) -> Any:
    """The value without what no template renders, at any depth of objects and lists."""
    if isinstance(value, dict):
        return {key: _seen(item) for key, item in value.items() if item is not None and key not in UNSEEN_KEYS}
    if isinstance(value, list):
        return [_seen(item) for item in value]
    return value


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _canonical_tools(tools: bytes) -> bytes:
    if not tools:
        return b""
    try:
        return _encode(_seen(_decode(tools)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return tools
