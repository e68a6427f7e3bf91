"""Rows 44 to 50: texts, stop strings, control tokens, schemas, and what one request learns of another."""

from tests.faults.rows.row import Row, row

ROWS: dict[int, Row] = {
    44: row(
        "texts that are slow to tokenize",
        "tests/gateway/test_responsiveness.py::test_the_loop_goes_on_turning",
        "tests/gateway/requests/test_generate_refusals.py::test_a_text_above_the_limit_is_refused_before_it_is_tokenized",
        "tests/gateway/text/test_real_tokenizer.py::test_row_44_time_grows_with_the_text_and_the_loop_goes_on",
        figures=("44 a", "44 ^", "44 spaces", "44 CJK", "44 marks"),
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
        "tests/gateway/requests/test_generate_refusals.py::test_ids_that_the_model_does_not_have_are_named_by_their_place",
    ),
    48: row(
        "hostile schemas and expressions",
        "tests/e2e/test_structured_output.py::"
        "test_hostile_constraints_change_no_token_of_a_bystander_and_delay_it_little",
        "tests/worker/grammar/test_grammar_engine.py::test_hostile_grammars_cost_their_own_requests_and_little_time",
        "tests/faults/test_long_schemas.py::test_row_48_ten_thousand_schemas_cost_bounded_memory_and_no_worker",
        figures=("48 10000",),
    ),
    49: row(
        "the same request in any company",
        "tests/worker/runners/test_deterministic.py::test_on_a_cpu_an_answer_does_not_depend_on_the_batch",
        "tests/worker/runners/test_torch_runner.py::test_a_seeded_output_is_the_same_alone_in_a_batch_and_after_a_preemption",
    ),
    50: row(
        "another tenant's cache by its timing",
        "tests/gateway/auth/test_tenants.py::test_tenants_have_salts_of_their_own_and_their_own_ids",
        "tests/e2e/test_front_door.py::test_cached_tokens_come_from_ones_own_tenant_or_group_only",
    ),
}
