"""Rows 1 to 15: a worker, a gateway or the supervisor dies, stands still, fails or lies."""

from tests.faults.rows.row import Row, row

KILLED = "tests/faults/test_rows_killed.py::test_row_"
FROZEN = "tests/faults/test_rows_frozen.py::test_row"
WORKER = "tests/faults/test_rows_worker.py::test_row_"
HOSTILE = "tests/gateway/workers/test_hostile_workers.py::test_"
MAIN = "tests/worker/test_main.py::test_"

ROWS: dict[int, Row] = {
    1: row(
        "an idle worker is killed",
        KILLED + "1_an_idle_worker_that_is_killed_is_missed_at_once_and_replaced",
        figures=("1",),
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
        "tests/e2e/test_migration_of_a_model.py::test_with_deterministic_not_a_token_is_another",
        "tests/e2e/test_migration_of_a_model.py::test_without_it_every_stream_is_whole_and_goes_on_from_what_it_has_given",
        figures=("3", "3 without migration", "kills"),
    ),
    4: row(
        "a worker dies, or fails, while it loads",
        KILLED + "4_a_worker_that_dies_while_it_loads_ends_the_start_and_leaves_nobody_behind",
        "tests/cli/serve/test_serve.py::test_a_worker_that_cannot_start_ends_the_service_with_its_reason",
        figures=("4, load raises", "4, load is killed"),
    ),
    5: row(
        "a request kills every worker that has it, or two workers are killed at a time",
        KILLED + "5_a_request_that_kills_workers_costs_two_and_bystanders_nothing",
        "tests/gateway/workers/test_quarantine.py::test_one_poison_kills_two_workers_or_three_and_everybody_else_comes_through",
        KILLED + "5_two_workers_that_are_killed_together_condemn_nobody",
        "tests/gateway/workers/test_quarantine.py::test_two_workers_that_are_killed_from_outside_condemn_nobody_for_good",
        figures=("5", "5 together 0 s apart", "5 together 0.05 s apart"),
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
        "tests/cli/serve/test_serve.py::test_a_supervisor_that_is_killed_leaves_no_orphan_and_its_ports_free",
        figures=("9",),
    ),
    10: row("a step raises", WORKER + "10_a_step_that_raises_ends_its_own_batch_and_says_so"),
    11: row("memory runs out in a step", WORKER + "11_memory_that_runs_out_costs_the_one_that_wanted_it"),
    12: row(
        "a row's logits are not finite",
        WORKER + "12_a_row_that_is_not_a_number_ends_alone_after_its_good_beginning",
        "tests/worker/scheduler/test_scheduler_faults.py::test_blocks_of_a_request_that_was_not_finite_never_serve_another",
    ),
    13: row(
        "a step never ends and holds Python's lock",
        FROZEN + "_13_a_worker_that_never_ends_its_step_is_given_up_and_replaced",
        "tests/worker/transport/test_heartbeat.py::test_a_hung_process_ends_itself_and_says_where_it_was",
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
}
