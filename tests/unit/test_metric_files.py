"""The workers' metric files: what a scrape reads, and what is left of a worker that died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict

from router.supervisor.metric_files import exposition, retire


def _key(metric: str, name: str, **labels: str) -> str:
    return json.dumps([metric, name, labels, "help"], sort_keys=True)


TURNS = _key("roost_turns", "roost_turns_total", fleet="a")
OTHER_TURNS = _key("roost_turns", "roost_turns_total", fleet="b")
IN_FLIGHT = _key("roost_in_flight", "roost_in_flight", replica="r")
BUCKET = _key("roost_ttft", "roost_ttft_bucket", le="1.0")
SUM = _key("roost_ttft", "roost_ttft_sum")


def _write(file: Path, values: dict[str, float]) -> None:
    mapped = MmapedDict(str(file))  # type: ignore[no-untyped-call]
    for key, value in values.items():
        mapped.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    mapped.close()  # type: ignore[no-untyped-call]


def _worker(folder: Path, pid: int, turns: float) -> None:
    _write(folder / f"counter_{pid}.db", {TURNS: turns})
    _write(folder / f"gauge_livesum_{pid}.db", {IN_FLIGHT: 1.0})
    _write(folder / f"histogram_{pid}.db", {BUCKET: turns, SUM: turns / 4})


def _lines(folder: Path) -> set[str]:
    told = exposition(folder)
    assert told is not None
    return {line for line in told.decode().splitlines() if not line.startswith("#")}


def test_the_dead_keep_their_counts_in_one_file_and_hold_nothing(tmp_path: Path) -> None:
    """However many died: the sums stay, gauges go, and the number of files does not grow."""
    _worker(tmp_path, 1, turns=8)
    for pid in (2, 3, 4):
        _worker(tmp_path, pid, turns=100)
        before = _lines(tmp_path)
        retire(tmp_path, pid)
        assert _lines(tmp_path) == (before - {'roost_in_flight{replica="r"} 2.0'}) | {
            'roost_in_flight{replica="r"} 1.0'
        }
    assert _lines(tmp_path) >= {'roost_turns_total{fleet="a"} 308.0', "roost_ttft_count 308.0", "roost_ttft_sum 77.0"}
    assert len(list(tmp_path.iterdir())) == 5


def test_a_process_id_that_comes_again_counts_on(tmp_path: Path) -> None:
    """What a dead process counted is not counted again when its id returns, and new labels join the old."""
    _worker(tmp_path, 1, turns=8)
    retire(tmp_path, 1)
    _write(tmp_path / "counter_1.db", {TURNS: 1, OTHER_TURNS: 2})
    retire(tmp_path, 1)
    assert _lines(tmp_path) >= {'roost_turns_total{fleet="a"} 9.0', 'roost_turns_total{fleet="b"} 2.0'}


def test_a_file_just_being_made_means_ask_again(tmp_path: Path) -> None:
    """For a moment it has no bytes; afterwards the scrape is whole."""
    _worker(tmp_path, 1, turns=8)
    (tmp_path / "counter_2.db").touch()
    assert exposition(tmp_path) is None
    _write(tmp_path / "counter_2.db", {TURNS: 1})
    assert 'roost_turns_total{fleet="a"} 9.0' in _lines(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x07", b"\x40\x00\x00\x00\x00\x00\x00\x00\xff\xff\xff\x7f" + b"x" * 52])
def test_an_unreadable_file_of_the_dead_spoils_no_scrape(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes, with a line in the log, and nothing of it is added to the sums."""
    _worker(tmp_path, 1, turns=8)
    (tmp_path / "counter_2.db").write_bytes(content)
    retire(tmp_path, 2)
    assert 'roost_turns_total{fleet="a"} 8.0' in _lines(tmp_path)
    assert "counters of the worker with pid 2 are lost" in caplog.text


def test_one_worker_that_cannot_reach_the_store_is_enough_and_a_dead_one_says_nothing(tmp_path: Path) -> None:
    up = _key("roost_store_up", "roost_store_up")
    for pid, value in ((1, 1.0), (2, 0.0)):
        _write(tmp_path / f"gauge_livemin_{pid}.db", {up: value})
    assert _lines(tmp_path) == {"roost_store_up 0.0"}
    retire(tmp_path, 2)
    assert _lines(tmp_path) == {"roost_store_up 1.0"}
