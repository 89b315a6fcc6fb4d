"""Fake tokens: four bytes of the rendered prompt each.

Token i of a text is its bytes 4i to 4i+4, and its id is those bytes as a little-endian number. So a prompt that extends
another shares its tokens exactly, a text and the list of its ids are the same prompt, and an output of n tokens is 4n
bytes, whose next appearance inside a prompt is again the same bytes. Real text has about four bytes per token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from statistics import NormalDist

from xxhash import xxh3_64_digest, xxh3_64_intdigest

__all__ = ["TOKEN_BYTES", "bytes_of_ids", "count", "ids", "natural_output_tokens", "said"]

TOKEN_BYTES = 4
_LEAD = b"[simulated] "
_POOL_BYTES = 1 << 16
# Lognormal with the quartiles of real coding agents: p50 216, p75 426 output tokens (WEKA, kv-cache-tester @94f6046).
_MEDIAN_TOKENS = 216
_SIGMA = 1.0


def count(text: bytes) -> int:
    """Tokens of a text."""
    return -(-len(text) // TOKEN_BYTES)


def ids(text: bytes) -> list[int]:
    """Token ids of a text; the last token is filled up with zero bytes."""
    numbers = array("I", text + bytes(-len(text) % TOKEN_BYTES))
    return numbers.tolist()


def bytes_of_ids(numbers: Sequence[int]) -> bytes:
    """The text that these ids stand for. Ids beyond 32 bits are cut."""
    return array("I", [number & 0xFFFFFFFF for number in numbers]).tobytes()


def natural_output_tokens(seed: int, prompt: bytes) -> int:
    """How long the model's answer to a prompt would be if nothing cut it."""
    share = (xxh3_64_intdigest(prompt, seed & (1 << 64) - 1) + 0.5) / (1 << 64)
    return max(4, round(_MEDIAN_TOKENS * math.exp(_SIGMA * NormalDist().inv_cdf(share))))


def said(seed: int, prompt: bytes, tokens: int) -> bytes:
    """The answer to a prompt: ASCII, four bytes a token, "[simulated]" first, nothing to escape, no space last."""
    size = tokens * TOKEN_BYTES
    start = xxh3_64_intdigest(prompt, (seed + 1) & (1 << 64) - 1) % _POOL_BYTES
    pool = _POOL[start:] + _POOL * (size // _POOL_BYTES + 1)
    text = (_LEAD + pool)[:size]
    return text if size <= len(_LEAD) else text[:-1] + b"."


def _prose(size: int) -> bytes:
    """Made-up words, always the same."""
    words = bytearray()
    number = 0
    while len(words) < size:
        for byte in xxh3_64_digest(number.to_bytes(8, "little")):
            words += bytes((b"bcdfgklmnprstvwz"[byte >> 4], b"aeiou"[byte % 5]))
            if byte % 3 == 0:
                words += b" "
        number += 1
    return bytes(words[:size])


_POOL = _prose(_POOL_BYTES)
