"""Rows 32 to 43: hostile and broken callers at the port."""

from tests.faults.rows.row import Row, row

FRONT = "tests/faults/test_rows_front_door.py::test_row_"
HTTP2 = "tests/faults/test_rows_front_door_http2.py::test_row_"

ROWS: dict[int, Row] = {
    32: row(
        "a connection is reset, a client killed",
        FRONT + "32_a_connection_that_is_reset_frees_its_streams",
        FRONT + "32_a_killed_client_frees_its_streams",
        figures=("32 RST", "32 kill -9"),
    ),
    33: row(
        "connections that say nothing",
        FRONT + "33_a_thousand_connections_that_say_nothing_or_half_a_word",
        HTTP2 + "33_calls_whose_message_never_comes_take_nobodys_place",
        "tests/gateway/rpc/test_interceptor.py::test_a_request_that_never_comes_is_not_waited_for_for_ever",
        figures=("33", "33 half calls"),
    ),
    34: row(
        "messages above the limit",
        FRONT + "34_a_message_above_the_limit_is_refused_by_its_length_alone",
        "tests/gateway/rpc/test_interceptor.py::test_a_message_above_the_limit_never_reaches_a_handler",
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
        "tests/gateway/rpc/test_interceptor.py::test_metadata_above_the_limit_is_refused_before_a_message_comes",
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
        "tests/gateway/rpc/test_interceptor.py::test_malformed_requests_to_every_real_method",
        "tests/gateway/rpc/test_interceptor.py::test_unknown_methods_are_unimplemented",
        "tests/gateway/rpc/test_interceptor.py::test_calls_without_a_request_get_a_status",
        figures=("39 connections 500", "39 calls 600", "39 connections 50000", "39 calls 50000"),
    ),
    40: row(
        "handlers with defects",
        "tests/gateway/rpc/test_interceptor.py::test_defects_are_internal_with_our_trailer_and_no_secret",
        "tests/gateway/rpc/test_interceptor.py::test_streams_end_with_the_tables_status_after_what_they_sent",
        "tests/gateway/rpc/test_interceptor.py::test_defects_of_generators_are_internal_after_what_they_sent",
        "tests/gateway/rpc/test_interceptor.py::test_a_generator_whose_caller_leaves_is_closed_and_counted",
        "tests/gateway/requests/test_generate_ends.py::test_a_defect_of_ours_is_internal_and_never_unknown",
        "tests/gateway/rpc/test_interceptor.py::test_a_second_abort_changes_nothing",
        "tests/gateway/rpc/test_interceptor.py::test_a_stream_without_messages_ends_well",
    ),
    41: row(
        "connections that only cost descriptors, and more than there are descriptors",
        HTTP2 + "41_connections_that_only_cost_descriptors_keep_neither_callers_nor_scrapers_out",
        "tests/gateway/rpc/test_connections.py::"
        "test_what_is_left_is_within_the_limits_and_no_request_is_lost_to_the_total",
        "tests/gateway/rpc/test_connections.py::test_a_connection_without_a_call_is_closed_though_it_answers_pings",
        "tests/wire/test_scrape_server.py::test_half_requests_keep_no_scraper_out_and_the_oldest_give_way",
        HTTP2 + "41_connections_beyond_the_descriptors_are_not_let_in_and_the_others_go_on",
        figures=("41 answers pings", "41 returning", "41", "41 5000"),
    ),
    42: row(
        "parameters of all kinds",
        "tests/gateway/validation/test_fields.py::test_any_bytes_that_parse_are_good_or_refused_and_never_crash",
        "tests/gateway/validation/test_fields.py::"
        "test_every_field_of_generate_is_in_the_tables_above_or_refers_to_the_model",
        "tests/gateway/requests/test_generate_refusals.py::test_a_duplicate_id_is_refused_and_the_first_request_is_not_disturbed",
    ),
    43: row(
        "callers without rights",
        "tests/gateway/auth/test_real_calls.py::test_nobody_gets_past_the_door_without_a_good_key",
        "tests/gateway/auth/test_tenants.py::test_a_tenant_cannot_end_anothers_request",
        "tests/gateway/auth/test_tenants.py::test_a_caller_ends_the_request_of_its_own_that_has_the_id_and_no_other",
        "tests/gateway/rpc/test_interceptor.py::test_no_handler_of_any_kind_is_reached_without_a_key",
        "tests/gateway/auth/test_keys.py::test_every_entry_is_compared_whatever_matches",
        "tests/gateway/auth/test_tls.py::test_with_mutual_tls_only_good_certificates_of_the_authority_get_through",
    ),
}
