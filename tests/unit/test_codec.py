"""Records of the store that no router wrote count as absent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.domain.replica import Capacity
from router.domain.shared import Member
from router.store.codec import pack_member, unpack_member

MEMBER = Member("r", "http://r:1", "admin", capacity=Capacity(750_000, 0, 64))


def test_a_member_is_read_as_it_was_written() -> None:
    assert unpack_member(b"r", pack_member(MEMBER)) == MEMBER


@pytest.mark.parametrize("room", [Capacity(750_000, 0, 0), Capacity(-1, 0, 64), Capacity(750_000, -1, 64)])
def test_a_member_with_an_impossible_room_is_none(room: Capacity) -> None:
    """No turn may fail or be drawn there by a division by what an operator mistyped."""
    assert unpack_member(b"r", pack_member(replace(MEMBER, capacity=room))) is None
