"""The readers of a replica's surface: right on what SGLang says, and silent but for `problems` on everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.discovery.engine_json import (
    parse_loads,
    parse_model_info,
    parse_models,
    parse_server_info,
)
from router.discovery.engine_metrics import parse_metrics
from router.discovery.incarnation import derive_incarnation
from router.discovery.observation import bounded_problems, printable

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PARSERS = (parse_loads, parse_server_info, parse_models, parse_model_info, parse_metrics)

RANK: dict[str, object] = {
    "dp_rank": 0,
    "num_running_reqs": 2,
    "num_waiting_reqs": 1,
    "num_waiting_uncached_tokens": 700,
    "num_used_tokens": 1360,
    "max_total_num_tokens": 20000,
    "max_running_requests": 8,
    "token_usage": 0.07,
    "total_prefill_uncached_tokens": 4573,
    "total_prefill_busy_us": 450971,
}

INFO: dict[str, object] = {
    "version": "0.5.23",
    "random_seed": 865675210,
    "api_key": "sk-in-the-clear",
    "served_model_name": "tiny",
    "max_total_num_tokens": 20000,
    "page_size": 16,
    "context_length": None,
    "max_running_requests": 8,
    "enable_cache_report": True,
    "enable_response_store": False,
    "enable_hierarchical_cache": False,
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "disaggregation_mode": "null",
    "startup_time": {"load_weight": 0.0151, "scheduler_e2e": 1.8129, "tokenizer_e2e": 12.848, "cuda_graph": {}},
    "internal_states": [
        {
            "startup_time": {"load_weight": 0.0151, "scheduler_e2e": 1.8129, "cuda_graph": {"decode": 0.0}},
            "effective_max_running_requests_per_dp": 8,
            "last_gen_throughput": 162.3,
        }
    ],
}

LABELS = 'engine_type="unified",model_name="a,b{}\\"c",tp_rank="0"'
METRICS = f"""# HELP sglang:page_size Page size.
# TYPE sglang:page_size gauge
sglang:page_size{{{LABELS}}} 16.0
sglang:max_total_num_tokens{{{LABELS}}} 20000.0
sglang:hicache_host_total_tokens{{{LABELS}}} 40000.0
sglang:context_len{{{LABELS}}} 8192.0
sglang:spec_accept_length{{{LABELS}}} 3.25
sglang:fwd_occupancy{{{LABELS}}} NaN
"""


def encoded(payload: object) -> bytes:
    return json.dumps(payload).encode()


# --- what SGLang says -------------------------------------------------------------------------------------------------


def test_loads_of_one_rank() -> None:
    loads = parse_loads(encoded({"version": "0.5.23", "loads": [RANK]}))
    assert loads.understood
    assert (loads.version, loads.dp_ranks) == ("0.5.23", 1)
    assert (loads.running, loads.waiting, loads.used_tokens, loads.waiting_uncached_tokens) == (2, 1, 1360, 700)
    assert (loads.device_tokens, loads.max_running) == (20000, 8)
    assert (loads.prefill_uncached_total, loads.prefill_busy_us_total) == (4573, 450971)
    assert loads.accept_length is None
    assert loads.problems == ()


def test_loads_are_summed_over_dp_ranks_and_accept_lengths_averaged() -> None:
    ranks = [RANK | {"speculative": {"accept_length": length}} for length in (2.0, 3.0)]
    loads = parse_loads(encoded({"version": "0.5.23", "loads": ranks}))
    assert (loads.dp_ranks, loads.device_tokens, loads.running, loads.max_running) == (2, 40000, 4, 16)
    assert loads.accept_length == 2.5


@pytest.mark.parametrize("bad", ["2", None, True, -1, 1e300, [2], {"n": 2}, 2**60])
def test_a_rank_without_a_credible_count_makes_the_sum_unknown_not_too_small(bad: object) -> None:
    loads = parse_loads(encoded({"loads": [RANK, RANK | {"num_running_reqs": bad}]}))
    assert loads.understood
    assert loads.running is None
    assert loads.waiting == 2
    assert loads.problems == ("/v1/loads: num_running_reqs is missing or no count",)


def test_server_info_keeps_the_named_facts_and_never_the_key() -> None:
    info = parse_server_info(encoded(INFO))
    assert info.understood
    assert (info.version, info.models, info.device_tokens, info.page_size) == ("0.5.23", ("tiny",), 20000, 16)
    assert (info.context_length, info.max_running, info.host_tokens) == (None, 8, 0)
    assert (info.cache_report, info.response_store, info.disaggregation_mode) == (True, False, "null")
    assert "sk-in-the-clear" not in repr(info)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"enable_hierarchical_cache": False}, 0),
        ({"enable_hierarchical_cache": True}, 40000),
        ({"enable_hierarchical_cache": True, "hicache_size": 120}, None),
        ({"enable_hierarchical_cache": True, "hicache_ratio": "2"}, None),
        ({"enable_hierarchical_cache": "yes"}, None),
    ],
)
def test_host_tokens_by_the_flags_of_hicache(flags: dict[str, object], tokens: int | None) -> None:
    assert parse_server_info(encoded(INFO | flags)).host_tokens == tokens


def test_models_with_lora_adapters_and_context_length() -> None:
    cards = [{"id": "tiny", "owned_by": "sglang", "max_model_len": 8192}, {"id": "tiny-lora", "parent": "tiny"}]
    models = parse_models(encoded({"object": "list", "data": cards}))
    assert models.models == ("tiny", "tiny-lora")
    assert (models.context_length, models.sglang, models.problems) == (8192, True, ())


@pytest.mark.parametrize("name", ["", None, 7, "x" * 513, "a\nb", "\x1b[31m", "a\u202eb"])
def test_an_unusable_model_name_is_left_out_and_reported(name: object) -> None:
    models = parse_models(encoded({"data": [{"id": name}, {"id": "tiny"}]}))
    assert models.models == ("tiny",)
    assert models.problems


def test_model_info() -> None:
    info = parse_model_info(encoded({"served_model_name": "tiny", "disaggregation_mode": "prefill"}))
    assert (info.understood, info.models, info.disaggregation_mode) == (True, ("tiny",), "prefill")


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_of_one_rank() -> None:
    metrics = parse_metrics(METRICS.encode())
    assert (metrics.page_size, metrics.device_tokens, metrics.host_tokens) == (16, 20000, 40000)
    assert (metrics.context_length, metrics.accept_length, metrics.sglang) == (8192, 3.25, True)
    assert metrics.problems == ()


def test_metrics_sum_dp_ranks_but_count_tensor_parallel_copies_once() -> None:
    lines = [
        f'sglang:max_total_num_tokens{{dp_rank="{dp}",tp_rank="{tp}"}} 1000\n' for dp in (0, 1) for tp in (0, 1, 2)
    ]
    assert parse_metrics("".join(lines).encode()).device_tokens == 2000


def test_metrics_with_a_series_per_priority_take_the_total() -> None:
    text = 'sglang:page_size{priority=""} 16\nsglang:page_size{priority="5"} 99\n'
    assert parse_metrics(text.encode()).page_size == 16


def test_metrics_cut_anywhere_never_give_a_number_that_was_not_there() -> None:
    whole = METRICS.encode()
    for end in range(len(whole)):
        metrics = parse_metrics(whole[:end])
        assert metrics.page_size in (None, 16)
        assert metrics.device_tokens in (None, 20000)
        assert metrics.host_tokens in (None, 40000)
        assert metrics.accept_length in (None, 3.25)
        cut_inside_a_line = end > 0 and not whole[:end].endswith(b"\n")
        assert any("cut short" in problem for problem in metrics.problems) == cut_inside_a_line


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e400", "0x10", "16.0.0", "", "sixteen"])
def test_an_incredible_gauge_is_left_out_and_reported(value: str) -> None:
    metrics = parse_metrics(f"sglang:page_size {value}\nsglang:context_len 8192\n".encode())
    assert metrics.page_size is None
    assert metrics.context_length == 8192
    assert metrics.problems == ("/metrics: line 1 is no sample",)


# --- nonsense ---------------------------------------------------------------------------------------------------------

NONSENSE = [
    b"",
    b"\x00\xff\xfe",
    b"<html><body>nginx</body></html>",
    b"null",
    b"[]",
    b"42",
    b'"loads"',
    b'{"loads": [',
    b'{"loads": {}, "data": 1, "internal_states": 3, "version": 5}',
    b'{"loads": [1], "data": [1], "internal_states": [1], "version": "x"}',
    b'{"loads": [], "data": {}, "internal_states": {}, "version": ""}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    '{"data": [{"id": "caf\xe9"}]}'.encode("latin-1"),
    b'{"loads": [{"num_running_reqs": ' + b"9" * 400 + b"}]}",
    b'{"loads": [{"num_running_reqs": NaN}]}',
    b'{"version": "0.5.23", "random_seed": ' + b"9" * 60 + b', "internal_states": [{"startup_time": {"x": 1.5}}]}',
]


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("body", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_raises_nothing(parse: object, body: bytes) -> None:
    assert callable(parse)
    parse(body)


@pytest.mark.parametrize("parse", PARSERS[:-1])
@pytest.mark.parametrize("body", NONSENSE[:9], ids=range(9))
def test_what_is_not_understood_is_reported(parse: object, body: bytes) -> None:
    assert callable(parse)
    parsed = parse(body)
    assert not parsed.understood
    assert parsed.problems


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*RANK, *INFO, "loads", "data", "id", "speculative", "accept_length"]), inner)
    ),
    max_leaves=20,
)


@UNTIMED
@given(body=st.binary(max_size=400))
def test_arbitrary_bytes_raise_nothing(body: bytes) -> None:
    for parse in PARSERS:
        parse(body)
        parse(b"sglang:page_size" + body + b"\n")


@UNTIMED
@given(payload=JSON)
def test_arbitrary_json_raises_nothing_and_yields_only_credible_counts(payload: object) -> None:
    body = json.dumps(payload).encode()
    for parse in PARSERS:
        parse(body)
    for wrapped in ({"loads": [payload, payload]}, {"loads": payload}):
        loads = parse_loads(json.dumps(wrapped).encode())
        for count in (loads.running, loads.device_tokens, loads.prefill_uncached_total):
            assert count is None or 0 <= count < 2**65


# --- incarnation ------------------------------------------------------------------------------------------------------


def restarted(load_weight: float = 0.0151, seed: int = 865675210) -> dict[str, object]:
    return INFO | {"random_seed": seed, "internal_states": [{"startup_time": {"load_weight": load_weight}}]}


def test_an_incarnation_is_stable_within_a_life_and_whichever_worker_answers() -> None:
    later = json.loads(json.dumps(INFO))
    later["internal_states"][0]["last_gen_throughput"] = 0.0
    later["startup_time"]["tokenizer_e2e"] = 99.5
    other_worker = INFO | {"startup_time": None}
    assert derive_incarnation(INFO) == derive_incarnation(later) == derive_incarnation(other_worker)
    assert derive_incarnation(INFO) is not None


def test_a_new_life_has_another_incarnation_even_under_a_fixed_seed() -> None:
    first = derive_incarnation(restarted())
    assert derive_incarnation(restarted(load_weight=0.015100000000001)) != first
    assert derive_incarnation(restarted(seed=1)) != first


def test_the_order_of_ranks_does_not_matter() -> None:
    ranks = [{"startup_time": {"scheduler_e2e": seconds}} for seconds in (1.5, 2.5)]
    forth = derive_incarnation(INFO | {"internal_states": ranks})
    assert forth == derive_incarnation(INFO | {"internal_states": ranks[::-1]})


@pytest.mark.parametrize("startup", [None, {}, [], "x", {"a": 0.0}, {"a": True}, {"a": -1.5}])
def test_no_incarnation_is_made_up_without_start_durations(startup: object) -> None:
    assert derive_incarnation(INFO | {"startup_time": startup, "internal_states": [{"startup_time": startup}]}) is None


# --- problems ---------------------------------------------------------------------------------------------------------


def test_problems_are_few_short_distinct_and_printable() -> None:
    problems = bounded_problems([f"{n % 20}\r\n\x1b[2J\u202e" + "x" * 1000 for n in range(1000)])
    assert len(problems) == len(set(problems)) == 8
    assert all(len(problem) <= 160 and problem.isprintable() for problem in problems)


@UNTIMED
@given(text=st.text())
def test_printable_texts_are_printable(text: str) -> None:
    assert printable(text).isprintable()
