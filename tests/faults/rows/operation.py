"""Rows 57 to 62: checkpoints, the host, the soak, and the host's memory for blocks."""

from tests.faults.rows.row import Row, row

MEMORY = "tests/worker/loading/test_host_memory.py::test_"
TIER = "tests/sim/test_host_tier.py::test_"
HOST = "tests/faults/test_rows_host.py::test_row_"

ROWS: dict[int, Row] = {
    57: row(
        "bad checkpoints",
        "tests/model/checkpoint/test_safetensors_file.py::test_a_file_truncated_anywhere_is_refused_by_name",
        "tests/model/checkpoint/test_safetensors_file.py::"
        "test_any_changed_byte_of_the_header_is_refused_or_read_as_safetensors_reads_it",
        "tests/model/checkpoint/test_loading.py::"
        "test_missing_unexpected_misshapen_and_wrongly_typed_tensors_are_named_in_one_error",
        "tests/model/checkpoint/test_loading.py::test_weights_that_are_not_finite_are_found_where_asked_for",
    ),
    58: row(
        "paths that lead elsewhere",
        "tests/model/checkpoint/test_loading.py::test_an_index_that_leads_out_of_the_folder_is_refused",
        "tests/model/checkpoint/test_loading.py::test_pickled_weights_and_remote_code_are_never_touched",
        "tests/model/checkpoint/test_checkpoint.py::test_what_is_no_hub_id_never_reaches_the_hub",
        HOST + "58_names_that_lead_elsewhere_open_nothing",
        HOST + "58_callers_learn_nothing_from_names_of_models",
        figures=("58 names", "58 callers"),
    ),
    59: row(
        "a full disk, a broken pipe, a scrape flood, a clock that jumps",
        "tests/cli/serve/test_serve.py::test_a_log_that_nobody_reads_stops_nothing",
        "tests/cli/serve/test_lines.py::test_a_log_that_cannot_be_written_stops_nothing",
        "tests/gateway/auth/test_real_calls.py::test_metrics_have_closed_labels_for_every_caller",
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
        "tests/bench/worker/test_soak.py::test_a_soak_ends_with_everything_answered_and_says_what_it_saw",
        "tests/sim/test_seeds.py::test_every_seed_ends_and_balances_and_one_of_six_repeats",
        figures=("60", "60 leak"),
        awaits="60",
    ),
    61: row(
        "memory of the host for blocks is refused, or is not there",
        MEMORY + "memory_that_the_system_refuses_ends_the_start_where_it_was_asked_for",
        MEMORY + "where_nobody_asked_the_start_goes_on_without",
        MEMORY + "more_than_the_machine_has_is_refused_in_a_sentence_with_what_would_do",
        MEMORY + "less_than_a_block_is_refused_in_a_sentence_with_what_would_do",
    ),
    62: row(
        "a worker is killed, or its step fails, while blocks are copied to the host or back",
        TIER + "a_worker_that_is_killed_while_it_copies_blocks_costs_nobody_a_token",
        TIER + "a_failed_step_with_copies_is_trusted_by_nobody",
        TIER + "a_block_that_is_read_before_it_is_back_is_found",
        "tests/worker/scheduler/test_host_traffic.py::"
        "test_any_traffic_over_two_tiers_gives_the_tokens_of_one_that_never_evicts",
        "tests/worker/scheduler/test_host_traffic.py::test_a_planted_bug_is_found",
        "tests/blockmgr/test_host_tier.py::test_a_failed_plan_did_none_of_its_copies",
    ),
}
