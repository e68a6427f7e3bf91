"""The fault matrix: sixty things that go wrong, and the tests that show what callers see of each.

`python -m tests.faults.page` writes docs/reliability.md from it. `figures`: keys of docs/reliability.json.
"""

from dataclasses import dataclass, field

FRONT = "tests/faults/test_rows_front_door.py::test_row_"
ZMQ = "tests/faults/test_rows_zmq.py::test_row_"
HOST = "tests/faults/test_rows_host.py::test_row_"
HTTP2 = "tests/faults/test_rows_front_door_http2.py::test_row_"
KILLED = "tests/faults/test_rows_killed.py::test_row_"
FROZEN = "tests/faults/test_rows_frozen.py::test_row"
CALLERS = "tests/faults/test_rows_callers.py::test_row_"
WORKER = "tests/faults/test_rows_worker.py::test_row_"
MANAGER = "tests/blockmgr/test_manager.py::test_"
POOL = "tests/gateway/workers/test_pool.py::test_"
LOST = "tests/gateway/workers/test_lost_workers.py::test_"
HOSTILE = "tests/gateway/workers/test_hostile_workers.py::test_"
SOCKETS = "tests/gateway/workers/test_sockets.py::test_"
MAIN = "tests/worker/test_main.py::test_"
CODEC = "tests/wire/test_codec.py::test_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """tests: `path::name`. missing: what of the row nothing shows yet. awaits: figures without which the row is not
    whole, of a run that no test makes."""

    title: str
    tests: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    missing: str = ""
    awaits: str = ""
    heading: str = field(default="")


def row(
    title: str, *tests: str, figures: tuple[str, ...] = (), missing: str = "", awaits: str = "", heading: str = ""
) -> Row:
    return Row(title=title, tests=tests, figures=figures, missing=missing, awaits=awaits, heading=heading)


ROWS: dict[int, Row] = {
    1: row(
        "an idle worker is killed",
        KILLED + "1_an_idle_worker_that_is_killed_is_missed_at_once_and_replaced",
        figures=("1",),
        heading="Worker processes",
    ),
    2: row(
        "a worker is killed in the middle of a prompt",
        KILLED + "2_a_prompt_half_computed_is_computed_elsewhere_and_its_caller_only_waits",
        figures=("2",),
    ),
    3: row(
        "a worker is killed under 64 streams",
        KILLED + "3_streams_of_a_killed_worker_go_on_and_nobody_loses_a_token",
        KILLED + "3_where_nothing_may_move_victims_are_told_and_bystanders_notice_nothing",
        "tests/faults/test_long_kills.py::test_row_3_every_stream_of_fifty_killed_workers_is_complete",
        "tests/gateway/workers/test_migration.py::test_an_output_goes_on_behind_what_it_has_given_and_counts_it",
        figures=("3", "3 without migration", "kills"),
    ),
    4: row(
        "a worker dies, or fails, while it loads",
        KILLED + "4_a_worker_that_dies_while_it_loads_ends_the_start_and_leaves_nobody_behind",
        "tests/cli/test_serve.py::test_a_worker_that_cannot_start_ends_the_service_with_its_reason",
        figures=("4, load raises", "4, load is killed"),
    ),
    5: row(
        "a request kills every worker that has it",
        KILLED + "5_a_request_that_kills_workers_costs_two_and_bystanders_nothing",
        "tests/gateway/test_quarantine.py::test_one_poison_kills_two_workers_at_most_and_everybody_else_comes_through",
        figures=("5",),
    ),
    6: row(
        "a worker stands still for half its timeout",
        FROZEN + "s_6_and_7_a_short_freeze_is_a_pause_and_a_long_one_moves_the_streams_for_good",
        MAIN + "a_short_freeze_is_only_a_pause",
        figures=("6",),
    ),
    7: row(
        "a worker stands still too long, and comes back",
        FROZEN + "s_6_and_7_a_short_freeze_is_a_pause_and_a_long_one_moves_the_streams_for_good",
        MAIN + "a_frozen_worker_is_given_up_and_leaves_when_it_thaws",
        figures=("7",),
    ),
    8: row(
        "SIGTERM under load",
        FROZEN + "_8_a_service_that_is_asked_to_end_finishes_what_it_has",
        FROZEN + "_8_what_is_not_done_when_the_grace_is_over_ends_and_says_why",
        FROZEN + "_8_a_worker_that_is_asked_to_leave_hands_over_what_its_grace_does_not_suffice_for",
        figures=("8", "8, one worker"),
    ),
    9: row(
        "a gateway, or the supervisor, is killed",
        KILLED + "9_a_killed_gateway_is_back_its_workers_stay_and_hold_nothing_of_it",
        "tests/cli/test_serve.py::test_a_supervisor_that_is_killed_leaves_no_orphan_and_its_ports_free",
        figures=("9",),
    ),
    10: row("a step raises", WORKER + "10_a_step_that_raises_ends_its_own_batch_and_says_so"),
    11: row("memory runs out in a step", WORKER + "11_memory_that_runs_out_costs_the_one_that_wanted_it"),
    12: row(
        "a row's logits are not finite",
        WORKER + "12_a_row_that_is_not_a_number_ends_alone_after_its_good_beginning",
        "tests/worker/test_scheduler_faults.py::test_blocks_of_a_request_that_was_not_finite_never_serve_another",
    ),
    13: row(
        "a step never ends and holds Python's lock",
        FROZEN + "_13_a_worker_that_never_ends_its_step_is_given_up_and_replaced",
        "tests/worker/test_heartbeat.py::test_a_hung_process_ends_itself_and_says_where_it_was",
        figures=("13",),
    ),
    14: row(
        "a worker lies",
        HOSTILE + "a_lie_costs_its_victim_and_the_worker_is_told_to_stop_it",
        HOSTILE + "another_worker_cannot_speak_for_ours",
        "tests/gateway/workers/test_outputs.py::test_a_lie_is_counted_and_costs_only_its_victim",
    ),
    15: row(
        "no CPU is left",
        FROZEN + "_15_without_cpu_nobody_is_taken_for_dead_and_deadlines_hold",
        figures=("15",),
    ),
    16: row(
        "a cancel at each point of a life",
        "tests/worker/test_scheduler_ends.py::test_a_cancel_at_any_moment_frees_everything_and_disturbs_nobody",
        "tests/gateway/test_generate_ends.py::test_a_cancel_while_the_prompt_is_tokenized_leaves_nothing_behind",
        "tests/gateway/workers/test_migration.py::test_a_cancel_ends_it_wherever_it_is",
        heading="Scheduler and blocks",
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
        "tests/worker/test_scheduler_progress.py::test_every_request_of_a_crowd_is_preempted_and_none_notices",
    ),
    19: row(
        "a request that can never fit",
        "tests/worker/test_scheduler_refusals.py::"
        "test_a_request_too_long_for_the_pool_is_refused_at_once_and_nobody_waits_behind_it",
        "tests/gateway/test_generate_refusals.py::test_what_can_never_fit_is_refused_at_once",
    ),
    20: row(
        "an output grows to the ceiling of the pool",
        CALLERS + "20_alone_at_the_ceiling_of_the_pool_an_output_ends_by_length",
        figures=("20",),
    ),
    21: row(
        "preemption that waits for itself",
        "tests/sim/test_exhaustive.py::test_there_is_no_deadlock_and_no_way_round_in_circles",
        "tests/worker/test_scheduler_progress.py::"
        "test_tiny_pools_come_to_an_end_and_every_output_is_what_the_twin_says",
    ),
    22: row(
        "the donor of a shared prefix leaves",
        "tests/blockmgr/test_machine.py::test_any_order_of_calls_keeps_every_invariant",
        "tests/blockmgr/test_fork.py::test_the_source_of_a_copy_is_not_handed_out_before_the_copy_is_done",
        "tests/worker/test_scheduler_forks.py::test_an_output_that_is_cancelled_leaves_the_others",
    ),
    23: row(
        "prefix hits after churn, and of whole prompts",
        MANAGER + "a_prompt_that_is_cached_whole_computes_its_last_block_again",
        "tests/worker/test_scheduler_progress.py::test_chunks_lookahead_cache_and_pool_size_change_no_token",
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
        "tests/sim/test_seeds.py::test_every_seed_ends_balances_and_repeats",
        MANAGER + "a_second_release_and_a_strangers_do_nothing",
        "tests/worker/test_scheduler_refusals.py::test_a_key_in_use_is_ignored_and_counted",
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
        "tests/gateway/test_operation.py::test_too_many_unread_tokens_end_the_stream",
        figures=("28", "28 reads on"),
    ),
    29: row(
        "a long prompt beside short ones",
        CALLERS + "29_short_requests_do_not_wait_for_a_long_prompt",
        "tests/worker/test_scheduler.py::test_a_chunk_limit_lets_short_prompts_pass_a_long_one",
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
    32: row(
        "a connection is reset, a client killed",
        FRONT + "32_a_connection_that_is_reset_frees_its_streams",
        FRONT + "32_a_killed_client_frees_its_streams",
        figures=("32 RST", "32 kill -9"),
        heading="gRPC and HTTP/2",
    ),
    33: row(
        "connections that say nothing",
        FRONT + "33_a_thousand_connections_that_say_nothing_or_half_a_word",
        HTTP2 + "33_calls_whose_message_never_comes_take_nobodys_place",
        "tests/gateway/rpc/test_guard.py::test_a_request_that_never_comes_is_not_waited_for_for_ever",
        figures=("33", "33 half calls"),
    ),
    34: row(
        "messages above the limit",
        FRONT + "34_a_message_above_the_limit_is_refused_by_its_length_alone",
        "tests/gateway/rpc/test_guard.py::test_a_message_above_the_limit_never_reaches_a_handler",
        figures=("34",),
    ),
    35: row(
        "compression bombs, unknown encodings",
        FRONT + "35_what_unpacks_to_gigabytes_is_not_unpacked",
        FRONT + "35_encodings_that_nobody_knows_end_the_call_alone",
        figures=("35 512 MiB", "35 4096 MiB", "35 unknown"),
    ),
    36: row(
        "metadata and header blocks",
        FRONT + "36_metadata_above_the_limit_is_refused_also_of_clients_that_acknowledge_nothing",
        FRONT + "36_hostile_header_blocks_cost_only_their_connection",
        "tests/gateway/rpc/test_guard.py::test_metadata_above_the_limit_is_refused_before_a_message_comes",
        figures=("36", "36 HPACK"),
    ),
    37: row(
        "streams that are reset at once",
        HTTP2 + "37_streams_that_are_reset_at_once_leave_nothing",
        figures=("37 2000 × 1", "37 50000 × 1", "37 5000 × 10"),
    ),
    38: row(
        "frames of one byte, floods, windows beyond the limit",
        HTTP2 + "38_a_message_in_frames_of_one_byte_costs_little_memory",
        HTTP2 + "38_frames_that_mean_nothing_cost_bounded_memory",
        HTTP2 + "38_a_window_beyond_two_gigabytes_is_no_reason_to_send_for_ever",
        figures=(
            "38 DATA 20000",
            "38 DATA 1000000",
            "38 pings 1000000",
            "38 pings 20000",
            "38 settings 1000000",
            "38 windows 1000000",
            "38 overflow",
        ),
    ),
    39: row(
        "garbage on the port",
        HTTP2 + "39_connections_that_begin_with_garbage_are_closed_and_harm_nobody",
        HTTP2 + "39_calls_that_are_garbage_end_each_with_a_status",
        "tests/gateway/rpc/test_guard.py::test_malformed_requests_to_every_real_method",
        "tests/gateway/rpc/test_guard.py::test_unknown_methods_are_unimplemented",
        "tests/gateway/rpc/test_guard.py::test_calls_without_a_request_get_a_status",
        figures=("39 connections 500", "39 calls 600", "39 connections 50000", "39 calls 50000"),
    ),
    40: row(
        "handlers with defects",
        "tests/gateway/rpc/test_guard.py::test_defects_are_internal_with_our_trailer_and_no_secret",
        "tests/gateway/rpc/test_guard.py::test_streams_end_with_the_tables_status_after_what_they_sent",
        "tests/gateway/test_generate_ends.py::test_a_defect_of_ours_is_internal_and_never_unknown",
        "tests/gateway/rpc/test_guard.py::test_a_second_abort_changes_nothing",
        "tests/gateway/rpc/test_guard.py::test_a_stream_without_messages_ends_well",
    ),
    41: row(
        "connections beyond the descriptors",
        HTTP2 + "41_connections_beyond_the_descriptors_are_not_let_in_and_the_others_go_on",
        figures=("41", "41 5000"),
    ),
    42: row(
        "parameters of all kinds",
        "tests/gateway/validation/test_fields.py::test_any_bytes_that_parse_are_good_or_refused_and_never_crash",
        "tests/gateway/validation/test_fields.py::"
        "test_every_field_of_generate_is_in_the_tables_above_or_refers_to_the_model",
        "tests/gateway/test_generate_refusals.py::test_a_duplicate_id_is_refused_and_the_first_request_is_not_disturbed",
    ),
    43: row(
        "callers without rights",
        "tests/gateway/access/test_real_calls.py::test_nobody_gets_past_the_door_without_a_good_key",
        "tests/gateway/access/test_real_calls.py::test_a_tenant_cannot_end_anothers_request",
        "tests/gateway/access/test_keys.py::test_every_entry_is_compared_whatever_matches",
        "tests/gateway/access/test_tls.py::test_with_mutual_tls_only_good_certificates_of_the_authority_get_through",
    ),
    44: row(
        "texts that are slow to tokenize",
        "tests/gateway/test_responsiveness.py::test_the_loop_goes_on_turning",
        "tests/gateway/test_generate_refusals.py::test_a_text_above_the_limit_is_refused_before_it_is_tokenized",
        "tests/gateway/test_real_tokenizer.py::test_row_44_time_grows_with_the_text_and_the_loop_goes_on",
        figures=("44 a", "44 ^", "44 spaces", "44 CJK", "44 marks"),
        heading="Input",
    ),
    45: row(
        "characters cut anywhere",
        "tests/gateway/text/test_detokenizer.py::test_no_piece_ever_has_a_part_of_a_character",
        "tests/gateway/text/test_detokenizer.py::"
        "test_two_thousand_texts_stream_as_they_decode_whole_however_they_are_cut",
    ),
    46: row(
        "stop strings of all kinds",
        "tests/gateway/text/test_stop_matcher.py::"
        "test_streaming_equals_reading_the_whole_text_and_never_holds_back_more_than_it_must",
        "tests/gateway/text/test_stop_matcher.py::test_sixty_four_long_stops_are_matched_in_one_pass",
    ),
    47: row(
        "control tokens in texts",
        "tests/gateway/text/test_model_text.py::test_no_message_can_write_a_control_token",
        "tests/gateway/text/test_model_text.py::test_a_template_cannot_reach_out_of_its_sandbox",
        "tests/gateway/test_generate_refusals.py::test_ids_that_the_model_does_not_have_are_named_by_their_place",
    ),
    48: row(
        "hostile schemas and expressions",
        "tests/e2e/test_structured_output.py::"
        "test_hostile_constraints_change_no_token_of_a_bystander_and_delay_it_little",
        "tests/worker/test_grammar_engine.py::test_hostile_grammars_cost_their_own_requests_and_little_time",
        "tests/faults/test_long_schemas.py::test_row_48_ten_thousand_schemas_cost_bounded_memory_and_no_worker",
        figures=("48 10000",),
    ),
    49: row(
        "the same request in any company",
        "tests/worker/test_deterministic.py::test_on_a_cpu_an_answer_does_not_depend_on_the_batch",
        "tests/worker/test_torch_runner.py::test_a_seeded_output_is_the_same_alone_in_a_batch_and_after_a_preemption",
    ),
    50: row(
        "another tenant's cache by its timing",
        "tests/gateway/access/test_real_calls.py::test_tenants_have_salts_of_their_own_and_their_own_ids",
        "tests/e2e/test_front_door.py::test_cached_tokens_come_from_ones_own_tenant_or_group_only",
    ),
    51: row(
        "garbage on the workers' sockets",
        HOSTILE + "ten_thousand_garbage_frames_leave_it_serving",
        CODEC + "random_bytes_raise_only_protocol_error",
        CODEC + "deep_nesting_where_elements_are_skipped_does_not_overflow_the_stack",
        ZMQ + "51_hostile_frames_are_counted_and_nothing_else",
        ZMQ + "51_bytes_that_are_no_zeromq_reach_nobody",
        figures=("51 20000", "51 1000000", "51 raw"),
        heading="ZeroMQ",
    ),
    52: row(
        "a pickle to every endpoint",
        "tests/e2e/test_canary.py::test_no_endpoint_unpickles_anything",
        "tests/test_layering.py::test_nothing_deserializes_code",
    ),
    53: row(
        "frames above the limit, a worker that reads nothing",
        "tests/wire/test_options.py::test_an_oversized_frame_cuts_its_sender_off_and_nobody_else",
        POOL + "a_worker_that_reads_nothing_fills_its_queue_and_blocks_nobody",
        ZMQ + "53_a_frame_above_the_limit_cuts_its_sender_and_takes_no_memory",
        figures=("53",),
    ),
    54: row(
        "steps that repeat, or are missing",
        "tests/gateway/workers/test_registry.py::test_numbers_in_order_pass_and_a_gap_ends_the_worker",
        "tests/gateway/workers/test_registry.py::test_a_repeated_or_early_number_ends_the_worker",
        LOST + "a_gap_in_the_numbers_recycles_the_worker",
        ZMQ + "54_changed_order_of_steps_never_changes_a_token",
        figures=("54 replayed", "54 duplicated", "54 swapped", "54 lost"),
    ),
    55: row(
        "a worker that pretends to be another",
        LOST + "an_id_whose_process_lives_is_not_taken_over",
        HOSTILE + "another_worker_cannot_speak_for_ours",
        MAIN + "a_wrong_token_ends_the_worker_with_the_reason",
        ZMQ + "55_strangers_that_claim_a_workers_name_get_nothing",
        ZMQ + "55_four_hundred_handshakes_that_stall_keep_nobody_out",
        figures=("55", "55 stalled"),
    ),
    56: row(
        "the run directory is open, the socket gone or stale",
        SOCKETS + "an_open_run_directory_stops_the_start",
        SOCKETS + "a_socket_that_vanished_is_bound_again_and_running_streams_do_not_notice",
        "tests/wire/test_run_dir.py::test_the_socket_of_a_dead_process_is_removed",
        ZMQ + "56_a_socket_that_vanishes_is_bound_again",
        figures=("56",),
    ),
    57: row(
        "bad checkpoints",
        "tests/model/test_safetensors_file.py::test_a_file_truncated_anywhere_is_refused_by_name",
        "tests/model/test_safetensors_file.py::"
        "test_any_changed_byte_of_the_header_is_refused_or_read_as_safetensors_reads_it",
        "tests/model/test_loading.py::"
        "test_missing_unexpected_misshapen_and_wrongly_typed_tensors_are_named_in_one_error",
        "tests/model/test_loading.py::test_weights_that_are_not_finite_are_found_where_asked_for",
        heading="Checkpoints, host, operation",
    ),
    58: row(
        "paths that lead elsewhere",
        "tests/model/test_loading.py::test_an_index_that_leads_out_of_the_folder_is_refused",
        "tests/model/test_loading.py::test_pickled_weights_and_remote_code_are_never_touched",
        "tests/model/test_checkpoint.py::test_what_is_no_hub_id_never_reaches_the_hub",
        HOST + "58_names_that_lead_elsewhere_open_nothing",
        HOST + "58_callers_learn_nothing_from_names_of_models",
        figures=("58 names", "58 callers"),
    ),
    59: row(
        "a full disk, a broken pipe, a scrape flood, a clock that jumps",
        "tests/cli/test_serve.py::test_a_log_that_nobody_reads_stops_nothing",
        "tests/cli/test_lines.py::test_a_log_that_cannot_be_written_stops_nothing",
        "tests/gateway/access/test_real_calls.py::test_metrics_have_closed_labels_whoever_calls",
        HOST + "59_a_hundred_scrapers_and_five_hundred_names_add_no_series",
        HOST + "59_a_log_that_cannot_be_written_stops_nobody",
        "tests/faults/test_rows_clock.py::test_row_59_a_clock_that_jumps_ends_nothing_but_keys",
        "tests/test_clocks.py::test_only_dates_ask_for_the_date",
        figures=("59 metrics", "59 log full", "59 log broken", "59 clock"),
    ),
    60: row(
        "a soak under a random mix",
        "tests/soak/test_soak_run.py::test_row_60_a_short_soak_under_random_faults_violates_nothing",
        "tests/soak/test_soak_run.py::test_violations_that_are_planted_are_told",
        "tests/bench/test_soak.py::test_a_soak_ends_with_everything_answered_and_says_what_it_saw",
        "tests/sim/test_seeds.py::test_every_seed_ends_balances_and_repeats",
        figures=("60", "60 leak"),
        awaits="60",
    ),
}
