"""The last decisions, with every candidate's cost term by term and what then came true."""

from __future__ import annotations

import json

import pytest

from router.lifecycle.recent import Recent, explain
from tests.fakes import prompt, stage, tokens


async def test_the_newest_come_first_and_the_oldest_are_forgotten() -> None:
    world = await stage()
    for number in range(5):
        await world.serve(prompt(f"{number}"))
    records = world.recent.newest(100)
    assert len(records) == 5
    assert records[0].lineage.tip == prompt("4").chain[-1]
    kept = Recent(2)
    for record in reversed(records):
        kept.add(record)
    assert kept.newest(10) == records[:2]
    assert kept.newest(1) == records[:1]
    assert kept.newest(0) == kept.newest(-3) == []


async def test_a_decision_is_explained_with_all_candidates_and_what_came_true() -> None:
    world = await stage(3)
    world.upstream.otherwise = tokens(prompt=4_321, cached=0, words=30)
    await world.serve(prompt("secret words " * 500, session="raw id"))
    (record,) = world.recent.newest(1)
    told = explain(record)
    assert told["came_true"] == {
        "end": "complete",
        "status": 200,
        "prompt_tokens": 4_321,
        "cached_tokens": 0,
        "output_tokens": 30,
        "ttft_s": 0.0,
        "duration_s": 0.0,
    }
    assert (told["reason"], told["store_calls"], told["attempt"], told["blind"]) == ("new", 2, 1, False)
    assert told["candidates"][0]["replica"] == told["replica"]
    assert {candidate["replica"] for candidate in told["candidates"]} == {"r0:1", "r1:1", "r2:1"}
    for candidate in told["candidates"]:
        terms = [value for name, value in candidate.items() if name.endswith("_s") and name != "total_s"]
        assert len(terms) == 8
        assert sum(terms) == pytest.approx(candidate["total_s"], abs=0.001)
    text = json.dumps(told)
    assert "secret" not in text
    assert "raw id" not in text


async def test_a_turn_under_way_has_not_come_true() -> None:
    world = await stage(1)
    await world.serve(prompt("a"))
    (record,) = world.recent.newest(1)
    record.outcome = None
    assert explain(record)["came_true"] is None
