"""What a router remembers of the branches it placed: bounded, newest first, found by their ends."""

from __future__ import annotations

from router.domain.session import Binding
from router.domain.shared import Ask
from router.lifecycle.remembered import CHAIN_KEPT, TIPS_KEPT, Remembered
from tests.contracts.worlds import boundary, claim, settlement


def ask(*numbers: int) -> Ask:
    return Ask(None, tuple(boundary(number).hash for number in numbers))


def test_a_branch_is_found_by_its_newest_ends_and_no_other() -> None:
    kept = Remembered()
    kept.note("f", claim("l", "b", *(boundary(n) for n in range(9, 0, -1))), 0.0, written=True)
    found = kept.recall("f", ask(20, 8))
    assert found is not None
    assert (found.entry.claim.branch, found.depth) == ("b", 1)
    assert kept.recall("f", ask(9 - TIPS_KEPT)) is None
    assert kept.recall("another", ask(9)) is None
    kept.note("f", claim("l", "b", boundary(30)), 0.0, written=True)
    assert kept.recall("f", ask(9)) is None
    assert kept.recall("f", ask(30)) is not None


def test_an_end_that_another_branch_took_over_is_that_ones() -> None:
    kept = Remembered()
    kept.note("f", claim("l", "b1", boundary(1)), 0.0, written=True)
    kept.note("f", claim("l", "b2", boundary(1)), 0.0, written=True)
    kept.note("f", claim("l", "b1", boundary(2)), 0.0, written=True)
    found = kept.recall("f", ask(1))
    assert found is not None
    assert found.entry.claim.branch == "b2"


def test_the_oldest_are_forgotten_with_their_ends() -> None:
    kept = Remembered(branches_max=3)
    for number in range(5):
        kept.note("f", claim("l", f"b{number}", boundary(number)), 0.0, written=number % 2 == 0)
    assert len(kept) == 3
    assert kept.recall("f", ask(0, 1)) is None
    assert [entry.claim.branch for entry in kept.unwritten("f")] == ["b3"]
    assert [entry.claim.branch for entry in kept.sample("f", 9, 0.0)] == ["b4", "b2"]
    kept.note("f", claim("l", "b2", boundary(2)), 0.0, written=True)
    kept.note("f", claim("l", "b9", boundary(9)), 0.0, written=True)
    assert kept.recall("f", ask(2)) is not None
    assert kept.recall("f", ask(3)) is None


def test_a_turn_without_ends_is_nothing_to_remember() -> None:
    kept = Remembered()
    kept.note("f", claim("l", "b"), 0.0, written=False)
    assert len(kept) == 0
    assert not kept.owed.is_set()


def test_what_is_bound_without_the_store_is_owed_with_what_its_turns_left() -> None:
    kept = Remembered()
    kept.note("f", claim("l", "b", boundary(1)), 0.0, written=True)
    assert not kept.owed.is_set()
    chain = [boundary(n).hash for n in range(1, 99)]
    kept.note("f", claim("l", "b", boundary(1)), 0.0, written=False, chain=chain)
    assert kept.owed.is_set()
    kept.settled("f", settlement("l", "b", tokens=500, prompt_tokens=450, admitted_tokens=90), counted=False)
    kept.note("f", claim("l", "b", boundary(2)), 0.0, written=False, chain=chain)
    kept.settled("f", settlement("l", "b", tokens=0, prompt_tokens=0, admitted_tokens=5), counted=False)
    kept.settled("g", settlement("l", "b", tokens=9), counted=False)
    (entry,) = kept.unwritten("f")
    assert (entry.tokens, entry.owed_tokens) == (450, 95)
    assert entry.left is not None
    assert entry.left.tokens == 500
    assert entry.chain == tuple(each for each in chain if each != boundary(2).hash)[:CHAIN_KEPT]
    branch = entry.branch()
    assert (branch.version, branch.tokens, branch.home) == (0, 450, Binding("r1", "i1"))
    kept.wrote(entry, "b")
    assert kept.unwritten("f") == []
    assert entry.owed_tokens == 0


def test_a_branch_that_the_store_knows_by_another_id_takes_it() -> None:
    kept = Remembered()
    kept.note("f", claim("l", "mine", boundary(1)), 0.0, written=False)
    (entry,) = kept.unwritten("f")
    kept.wrote(entry, "theirs")
    assert kept.name_of("mine") == "theirs"
    assert kept.name_of("other") == "other"
    found = kept.recall("f", ask(1))
    assert found is not None
    assert (found.entry.claim.branch, found.entry.written) == ("theirs", True)
    assert len(kept) == 1


def test_a_store_that_lost_all_is_owed_all() -> None:
    kept = Remembered()
    for number in range(3):
        kept.note("f", claim("l", f"b{number}", boundary(number)), 0.0, written=True)
    kept.note("g", claim("l", "other", boundary(9)), 0.0, written=True)
    kept.lost("f", 0.0)
    assert [entry.claim.branch for entry in kept.unwritten("f")] == ["b2", "b1", "b0"]
    assert kept.unwritten("g") == []


def test_a_sample_goes_evenly_over_what_the_store_should_have() -> None:
    kept = Remembered()
    for number in range(20):
        kept.note("f", claim("l", f"b{number}", boundary(number)), float(number), written=number != 17)
    assert [entry.claim.branch for entry in kept.sample("f", 4, 2.0)] == ["b19", "b13", "b8", "b3"]
    assert len(kept.sample("f", 8, 0.0)) <= 8
    assert kept.sample("f", 4, 99.0) == []
    kept.lost("f", since_s=18.0)
    assert [entry.claim.branch for entry in kept.unwritten("f")] == ["b19", "b18", "b17"]


def test_a_sessions_home_stays_with_its_branch() -> None:
    """Only a session's first claim says it; after a flush it is said again."""
    kept = Remembered()
    kept.note("f", claim("l", "b", boundary(1), session_home=Binding("r1", "i1")), 0.0, written=True)
    kept.note("f", claim("l", "b", boundary(2)), 0.0, written=True)
    (entry,) = kept.sample("f", 1, 0.0)
    assert entry.claim.session_home == Binding("r1", "i1")


def test_holders_of_stored_responses_are_known() -> None:
    kept = Remembered()
    kept.settled("f", settlement("l", "b", response_id="resp_1"), counted=True)
    assert kept.holder("resp_1") == Binding("r1", "i1")
    assert kept.holder("resp_2") is None
    assert kept.holder(None) is None
