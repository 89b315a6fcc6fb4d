"""Chained page keys of token sequences: the key of a page stands for it and for all before it.

64-bit xxh3 over the previous key and the page's bytes. SGLang's own chain is sha256 (`disaggregation/kv_events.py`);
a simulation needs no protection from an adversary, and this is twenty times as fast.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["chained", "keys_of_bytes", "keys_of_ids"]

_MASK = (1 << 64) - 1


def chained(previous: int, block: int) -> int:
    """The key of a block with an identity of its own (a trace's block id) that follows `previous`."""
    return xxh3_64_intdigest(block.to_bytes(8, "little"), previous & _MASK)


def keys_of_bytes(text: bytes, page_bytes: int, seed: int = 0) -> array[int]:
    """Keys of the whole pages of `text`; a page is `page_bytes` long. `seed` separates namespaces (`extra_key`)."""
    keys = array("Q")
    key = seed & _MASK
    view = memoryview(text)
    for start in range(0, len(text) - page_bytes + 1, page_bytes):
        key = xxh3_64_intdigest(view[start : start + page_bytes], key)
        keys.append(key)
    return keys


def keys_of_ids(ids: Sequence[int], page_tokens: int, seed: int = 0) -> array[int]:
    """Keys of the whole pages of a token id sequence."""
    packed = array("I", [each & 0xFFFFFFFF for each in ids]).tobytes()
    return keys_of_bytes(packed, page_tokens * 4, seed)
