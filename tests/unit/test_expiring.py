"""A dict whose entries expire holds no more than lives."""

from __future__ import annotations

from router.store.expiring import Expiring

TTL_S = 1_000.0


def test_an_entry_lives_until_its_time_is_up() -> None:
    entries: Expiring[int] = Expiring()
    entries.put("a", 1, 0.0, 10.0)
    entries.put("a", 2, 5.0, None)
    assert entries.get("a", 9.9) == 2
    assert entries.get("a", 10.0) is None
    entries.put("b", 3, 5.0, None)
    assert entries.get("b", 5.0) is None


def test_a_prolonged_entry_outlives_its_first_time() -> None:
    entries: Expiring[int] = Expiring()
    entries.put("a", 1, 0.0, 10.0)
    entries.put("a", 1, 8.0, 10.0)
    entries.put("b", 2, 12.0, 10.0)
    assert entries.get("a", 17.9) == 1
    entries.put("c", 3, 19.0, 10.0)
    assert len(entries) == 2


def test_what_was_forgotten_early_takes_no_room() -> None:
    """A conversation gives up a boundary every turn, long before its time is up."""
    entries: Expiring[int] = Expiring()
    for number in range(10_000):
        entries.put(str(number), number, 0.0, TTL_S)
        if number >= 10:
            entries.pop(str(number - 10))
    assert len(entries) == 10
    assert len(entries._due) < 100
    for number in range(100):
        entries.put(f"late {number}", number, TTL_S, TTL_S)
    assert len(entries) == 100


def test_a_key_forgotten_and_set_again_takes_no_room() -> None:
    entries: Expiring[int] = Expiring()
    for number in range(1_000):
        entries.put("a", number, 0.0, TTL_S)
        entries.pop("a")
    assert len(entries._due) < 100
