"""Rows 16 to 31: cancels, preemption, shared prefixes, callers that do not read, deadlines, overload."""

from tests.faults.rows.row import Row, row

KILLED = "tests/faults/test_rows_killed.py::test_row_"
CALLERS = "tests/faults/test_rows_callers.py::test_row_"
MANAGER = "tests/blockmgr/test_manager.py::test_"
MAIN = "tests/worker/test_main.py::test_"

ROWS: dict[int, Row] = {
    16: row(
        "a cancel at each point of a life",
        "tests/worker/scheduler/test_scheduler_ends.py::test_a_cancel_at_any_moment_frees_everything_and_disturbs_nobody",
        "tests/gateway/requests/test_generate_ends.py::test_a_cancel_while_the_prompt_is_tokenized_leaves_nothing_behind",
        "tests/gateway/workers/test_migration.py::test_a_cancel_ends_it_wherever_it_is",
    ),
    17: row(
        "10,000 cancels",
        "tests/faults/test_long_cancels.py::"
        "test_row_17_ten_thousand_cancels_leave_nothing_and_change_no_byte_of_a_canary",
        "tests/e2e/test_cancellation.py::test_a_thousand_cancels_leak_nothing_and_disturb_nobody",
        figures=("17",),
    ),
    18: row(
        "every request is preempted",
        "tests/e2e/test_equality.py::test_every_output_equals_the_oracle_although_every_request_was_preempted",
        "tests/worker/scheduler/test_scheduler_progress.py::test_every_request_of_a_crowd_is_preempted_and_none_notices",
    ),
    19: row(
        "a request that can never fit",
        "tests/worker/scheduler/test_scheduler_refusals.py::"
        "test_a_request_too_long_for_the_pool_is_refused_at_once_and_nobody_waits_behind_it",
        "tests/gateway/requests/test_generate_refusals.py::test_what_can_never_fit_is_refused_at_once",
    ),
    20: row(
        "an output grows to the ceiling of the pool",
        CALLERS + "20_alone_at_the_ceiling_of_the_pool_an_output_ends_by_length",
        figures=("20",),
    ),
    21: row(
        "preemption that waits for itself",
        "tests/sim/test_exhaustive.py::test_there_is_no_deadlock_and_no_way_round_in_circles",
        "tests/worker/scheduler/test_scheduler_progress.py::"
        "test_tiny_pools_come_to_an_end_and_every_output_is_what_the_reference_says",
    ),
    22: row(
        "the donor of a shared prefix leaves",
        "tests/blockmgr/test_machine.py::test_any_order_of_calls_keeps_every_invariant",
        "tests/blockmgr/test_fork.py::test_the_source_of_a_copy_is_not_handed_out_before_the_copy_is_done",
        "tests/worker/scheduler/test_scheduler_forks.py::test_an_output_that_is_cancelled_leaves_the_others",
    ),
    23: row(
        "prefix hits after churn, and of whole prompts",
        MANAGER + "a_prompt_that_is_cached_whole_computes_its_last_block_again",
        "tests/worker/scheduler/test_scheduler_progress.py::test_chunks_lookahead_cache_and_pool_size_change_no_token",
    ),
    24: row(
        "colliding hashes and salts",
        "tests/blockmgr/test_prefix_index.py::test_a_colliding_hash_gives_no_wrong_hit",
        "tests/blockmgr/test_prefix_index.py::test_roots_depend_on_fingerprint_salt_and_secret_apart",
        "tests/e2e/test_front_door.py::test_cached_tokens_come_from_ones_own_tenant_or_group_only",
    ),
    25: row(
        "the state of the block manager is lost",
        KILLED + "3_where_nothing_may_move_victims_are_told_and_bystanders_notice_nothing",
        MAIN + "a_restarted_gateway_is_joined_by_itself_and_the_former_requests_are_dropped",
    ),
    26: row(
        "messages that repeat or are lost on the way to blocks",
        "tests/sim/test_seeds.py::test_every_seed_ends_and_balances_and_one_of_six_repeats",
        MANAGER + "a_second_release_and_a_strangers_do_nothing",
        "tests/worker/scheduler/test_scheduler_refusals.py::test_a_key_in_use_is_ignored_and_counted",
    ),
    27: row(
        "a caller vanishes without a word",
        CALLERS + "27_the_blocks_of_a_caller_that_vanished_without_a_word_are_free_soon",
        figures=("27",),
    ),
    28: row(
        "a caller does not read",
        CALLERS + "28_a_caller_that_does_not_read_is_ended_costs_little_and_disturbs_nobody",
        CALLERS + "28_a_caller_that_stops_reading_and_reads_on_gets_every_token_and_holds_nobody_up",
        "tests/gateway/peers/test_operation.py::test_too_many_unread_tokens_end_the_stream",
        figures=("28", "28 reads on"),
    ),
    29: row(
        "a long prompt beside short ones",
        CALLERS + "29_short_requests_do_not_wait_for_a_long_prompt",
        "tests/worker/scheduler/test_scheduler.py::test_a_chunk_limit_lets_short_prompts_pass_a_long_one",
        "tests/faults/test_rows_tenants.py::test_row_29_a_small_tenant_gets_its_share_beside_a_crowd",
        figures=("29", "29 tenants"),
    ),
    30: row(
        "deadlines of all kinds",
        CALLERS + "30_any_deadline_is_kept_and_what_is_late_costs_nothing_more",
        "tests/e2e/test_deadlines.py::test_time_that_is_over_in_the_queue_costs_no_prefill",
        "tests/e2e/test_deadlines.py::test_at_the_deadline_decoding_stops_and_the_blocks_are_free",
        figures=("30",),
    ),
    31: row(
        "five times the load that can be served",
        CALLERS + "31_what_is_too_much_is_refused_at_once_and_the_rest_is_served_as_fast_as_ever",
        figures=("31",),
    ),
}
