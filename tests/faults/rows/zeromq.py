"""Rows 51 to 56: the sockets between workers and gateways."""

from tests.faults.rows.row import Row, row

ZMQ = "tests/faults/test_rows_zmq.py::test_row_"
POOL = "tests/gateway/workers/test_pool.py::test_"
LOST = "tests/gateway/workers/test_lost_workers.py::test_"
HOSTILE = "tests/gateway/workers/test_hostile_workers.py::test_"
SOCKETS = "tests/gateway/workers/test_sockets.py::test_"
MAIN = "tests/worker/test_main.py::test_"
CODEC = "tests/wire/test_codec.py::test_"

ROWS: dict[int, Row] = {
    51: row(
        "garbage on the workers' sockets",
        HOSTILE + "ten_thousand_garbage_frames_leave_it_serving",
        CODEC + "random_bytes_raise_only_protocol_error",
        CODEC + "deep_nesting_where_elements_are_skipped_does_not_overflow_the_stack",
        ZMQ + "51_hostile_frames_are_counted_and_nothing_else",
        ZMQ + "51_bytes_that_are_no_zeromq_reach_nobody",
        figures=("51 20000", "51 1000000", "51 raw"),
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
}
