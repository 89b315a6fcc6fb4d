"""Every row of the table "When something dies" in router/README.md is proved by tests, which are named here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
README = TESTS.parent / "router" / "README.md"
HEADING = "## When something dies"

PROVED_BY: dict[str, tuple[str, ...]] = {
    "a replica refuses connections": (
        "integration/test_gateway_affinity.py::test_a_session_whose_home_died_moves_once",
        "integration/test_relay_failures.py::test_nobody_listens",
        "integration/test_health.py::test_of_a_crowd_one_turn_goes_to_a_replica_on_probation",
    ),
    "a replica dies before its head": (
        "integration/test_gateway_affinity.py::test_a_turn_finds_its_way_past_a_replica_that_dies_before_its_head",
        "integration/test_gateway_deaths.py::test_a_replica_that_dies_before_its_head_is_a_502_in_the_dialect",
        "integration/test_relay_failures.py::test_death_before_the_head",
    ),
    "a replica dies mid-stream": (
        "integration/test_gateway_deaths.py::test_a_stream_that_breaks_ends_in_an_error_of_its_dialect",
        "integration/test_gateway_deaths.py::test_agents_that_do_better_without_words_get_none",
        "integration/test_gateway_deaths.py::test_a_reply_of_given_length_that_breaks_is_cut_short",
        "integration/test_gateway_deaths.py::test_after_a_death_in_the_middle_the_next_turn_finds_another_home",
    ),
    "a replica restarts at the same URL": (
        "integration/test_admin.py::test_a_restarted_replica_is_another_one",
        "integration/test_shared_state.py::test_a_binding_holds_to_its_replicas_life_whichever_router_sees_the_new_one",
    ),
    "a replica is silent": (
        "integration/test_health.py::"
        "test_one_that_answers_nothing_while_nothing_flows_is_dead_within_seconds_and_back_on_probation",
        "integration/test_health.py::test_a_turn_that_waits_at_a_replica_that_falls_silent_is_served_elsewhere",
        "integration/test_health.py::test_a_stream_that_stands_still_at_a_lost_replica_is_broken_in_its_dialect",
        "integration/test_health.py::test_an_engine_that_stands_still_is_left_within_seconds_and_found_again",
        "integration/test_health.py::test_a_host_that_takes_no_connection_is_a_silent_one",
        "unit/test_turn_health.py::test_where_nobody_is_well_turns_wait_on",
    ),
    "a request that is no turn waits at a lost replica": (
        "unit/test_passage.py::test_who_waits_at_a_lost_replica_is_told",
        "unit/test_passage.py::test_what_acts_on_an_engine_waits_on_though_no_probe_is_answered",
        "integration/test_health.py::test_of_what_is_no_turn_only_what_acts_on_an_engine_waits_at_a_lost_replica",
    ),
    "a replica streams but misses its probes": (
        "integration/test_health.py::test_a_replica_that_streams_keeps_its_sessions_though_no_probe_is_answered",
    ),
    "a replica says 503 on /ready": (
        "integration/test_admin.py::test_a_replica_that_says_it_is_not_ready_gets_no_turns_until_it_is",
        "integration/test_admin.py::test_a_stream_outlives_that_its_replica_is_no_longer_ready",
    ),
    "a replica fails turns though it answers probes": (
        "integration/test_health.py::"
        "test_one_that_passes_probes_and_fails_turns_is_out_comes_back_on_probation_and_is_well_again",
        "integration/test_health.py::test_where_every_replica_fails_half_of_the_fleet_stays",
    ),
    "a replica is full": (
        "integration/test_gateway_affinity.py::test_a_full_replica_spills_one_turn_and_keeps_its_branch",
        "integration/test_gateway_affinity.py::test_a_refusal_inside_a_stream_spills_the_turn_unseen",
        "integration/test_gateway_affinity.py::test_where_all_are_full_the_engines_refusal_passes",
        "integration/test_full_responses.py::test_a_full_home_spills_the_turn_and_gets_the_next",
    ),
    "a replica is drained or removed": (
        "integration/test_health.py::test_a_drained_replica_finishes_its_streams_and_each_of_its_branches_moves_once",
        "integration/test_health.py::test_the_connections_of_a_removed_replica_are_closed",
        "integration/test_admin.py::test_what_one_router_is_told_the_other_does_at_once",
        "integration/test_admin.py::test_a_stream_under_way_outlives_its_replicas_drain_and_removal",
    ),
    "a client leaves": (
        "integration/test_client_gone.py::test_a_client_that_leaves_takes_its_turn_along",
        "integration/test_client_gone.py::test_a_client_that_leaves_after_the_terminal_event_has_had_its_turn",
    ),
    "a client stalls": (
        "integration/test_relay_clients.py::test_a_client_that_takes_nothing_is_cut_off",
        "integration/test_memory.py::test_readers_that_stall_hold_back_their_replicas",
        "integration/test_bodies.py::test_a_body_that_dribbles_is_a_408",
        "integration/test_bodies.py::test_a_head_that_does_not_come_is_a_408",
    ),
    "a router dies": (
        "integration/test_shared_state.py::test_turns_of_a_killed_router_are_forgotten_within_its_leases_time",
        "integration/test_shared_state.py::"
        "test_a_router_that_was_killed_and_started_again_moves_nobody_nor_does_a_newcomer",
        "integration/test_gateway_affinity.py::test_two_routers_that_share_a_store_send_a_branch_to_one_replica",
        "contracts/test_permits.py::test_the_permits_of_a_router_that_died_expire",
    ),
    "a router is told to stop": (
        "integration/test_shutdown.py::test_a_router_that_stops_says_so_first_and_lets_what_runs_finish",
        "integration/test_shutdown.py::test_a_turn_that_does_not_finish_is_cut_and_counted",
        "integration/test_shutdown.py::test_idle_connections_do_not_hold_it_up",
        "integration/test_admission.py::test_a_stopping_router_sends_the_waiting_away",
        "integration/test_workers.py::test_sigterm_lets_running_streams_finish",
    ),
    "a part of a router fails": (
        "unit/test_main.py::test_a_router_one_of_whose_loops_fails_says_so_at_once_and_stops",
    ),
    "a worker dies": (
        "integration/test_workers.py::test_a_killed_worker_is_replaced_and_its_counts_stay",
        "integration/test_workers.py::test_a_waiting_connection_survives_the_death_of_a_worker",
        "integration/test_shared_state.py::test_turns_of_a_killed_worker_are_forgotten_within_their_leases_time",
    ),
    "the store is away, hangs or is slow": (
        "integration/test_store_outage.py::test_while_the_store_is_away_nobody_moves_and_afterwards_it_knows",
        "integration/test_store_outage.py::test_turns_that_run_through_an_outage_count_afterwards_and_end_at_zero",
        "integration/test_store_outage.py::test_a_slow_store_is_left_until_it_is_quick_again",
        "integration/test_store_outage.py::test_a_router_that_starts_without_the_store_says_so_once_and_serves",
        "integration/test_store_redis.py::test_a_hanging_server_costs_a_timeout_and_no_connections",
        "unit/test_store_wire.py::test_an_answer_that_lies_there_unread_is_no_silence",
        "unit/test_turnstile.py::test_without_the_store_each_process_holds_the_limit_by_itself",
        "integration/test_store_outage.py::test_without_the_store_a_tenants_stored_response_is_a_503",
    ),
    "the store comes back": (
        "integration/test_store_outage.py::test_while_the_store_is_away_nobody_moves_and_afterwards_it_knows",
        "integration/test_store_outage.py::test_turns_that_run_through_an_outage_count_afterwards_and_end_at_zero",
        "unit/test_returning.py::test_of_two_routers_that_bound_one_branch_the_first_to_write_stands",
        "unit/test_returning.py::test_a_lease_that_expired_meanwhile_is_taken_again_without_its_prefill",
    ),
    "the store comes back empty": (
        "integration/test_store_outage.py::test_while_the_store_is_away_nobody_moves_and_afterwards_it_knows",
        "integration/test_store_outage.py::test_after_a_flush_members_standings_and_homes_are_what_they_were",
    ),
    "the store fails over": (
        "integration/test_store_failover.py::test_writes_come_back_and_go_to_the_new_master_only",
        "integration/test_store_failover.py::test_turns_go_on_at_home_while_the_stores_master_dies",
        "integration/test_store_failover.py::test_turns_go_on_at_home_while_the_stores_address_moves",
    ),
    "the store holds another version's keys": (
        "integration/test_store_outage.py::test_a_router_does_not_start_on_another_versions_keys",
        "integration/test_store_outage.py::test_while_the_store_is_away_nobody_moves_and_afterwards_it_knows",
        "integration/test_store_redis.py::test_keys_of_another_version_are_refused_with_what_to_do",
    ),
    "more sessions than the fleet can hold": (
        "integration/test_admission.py::test_sessions_beyond_the_room_wait_and_known_ones_flow",
        "integration/test_admission.py::test_who_waits_in_vain_is_told_to_come_back_in_its_dialect",
        "integration/test_admission.py::test_beyond_the_queue_clients_are_told_at_once",
        "integration/test_admission.py::test_one_tenant_cannot_fill_the_queue_and_tenants_take_turns",
    ),
}
"""First column of the table, without marks and what stands in brackets, and the tests that prove the second."""


def rows() -> list[str]:
    """The table's first column, as the keys above have it."""
    section = README.read_text().split(f"\n{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [line.split("|")[1].replace("`", "").split(" (")[0].strip() for line in lines]


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's tests."""
    tree = ast.parse((TESTS / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def test_every_row_of_the_failover_table_is_tested() -> None:
    """A row that is new, or says something else now, needs a test and its name here."""
    told = rows()
    assert len(told) == len(set(told)) > 10
    assert sorted(set(told) - set(PROVED_BY)) == [], "rows of router/README.md that no test is named for"
    assert sorted(set(PROVED_BY) - set(told)) == [], "rows that router/README.md does not have"


@pytest.mark.parametrize("row", PROVED_BY)
def test_what_proves_a_row_exists(row: str) -> None:
    assert PROVED_BY[row]
    for proof in PROVED_BY[row]:
        file, _, name = proof.partition("::")
        assert name in names_in(file), proof
