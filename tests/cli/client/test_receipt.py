from octavo.cli.client.receipt import receipt_line, receipt_rows
from octavo.cli.serve.readiness import Samples
from octavo.cli.tools.tour import metric_rows
from octavo.v1 import common_pb2, inference_pb2

FINISHED = inference_pb2.Finished(
    reason=inference_pb2.FINISH_REASON_STOP,
    stop=inference_pb2.StopMatch(text="\n"),
    usage=common_pb2.Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=16),
    receipt=common_pb2.Receipt(
        worker_id="w", model_fingerprint="0123456789abcdef", gateway_s=0.001, queue_s=0.002, prefill_s=0.003,
        decode_s=0.04, time_to_first_token_s=0.006, total_s=1.5, computed_tokens=4, preemptions=2, seed=7,
        inter_token_p50_s=0.009, inter_token_p99_s=0.0125, block_seconds=0.125, migrations=1,
    ),
)  # fmt: skip


def test_a_receipt_tells_where_the_time_went() -> None:
    assert receipt_rows(FINISHED) == [
        ("finished", "stop at '\\n'"),
        ("tokens", "20 prompt (16 cached) + 5 generated"),
        ("first token", "6.0 ms"),
        ("per token", "10.0 ms (100 tokens/s)"),
        ("between tokens", "p50 9.0 ms, p99 12.5 ms"),
        ("gateway", "1.0 ms"),
        ("queue", "2.0 ms"),
        ("prefill", "3.0 ms (4 tokens computed)"),
        ("decode", "40.0 ms"),
        ("total", "1,500.0 ms"),
        ("memory", "0.12 block-seconds"),
        ("preemptions", "2"),
        ("migrations", "1"),
        ("worker", "w, model 0123456789ab"),
        ("seed", "7"),
    ]


def test_one_line_has_the_most_important_of_it() -> None:
    assert receipt_line(FINISHED) == (
        "tokens 20 prompt (16 cached) + 5 generated · first token 6.0 ms · per token 10.0 ms (100 tokens/s) · "
        "total 1,500.0 ms · finished stop at '\\n'"
    )


def test_a_single_token_has_no_time_per_token() -> None:
    single = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH)
    assert [dict(receipt_rows(single))[label] for label in ("per token", "between tokens")] == ["–", "–"]


def test_the_metrics_table_sums_over_pages_and_leaves_out_what_is_absent() -> None:
    name = "octavo_time_to_first_token_seconds"
    pages: list[Samples] = [
        {"octavo_generation_tokens_total": [({}, 1000.0), ({}, 234.0)]},
        {"octavo_generation_tokens_total": [({}, 1.0)], f"{name}_sum": [({}, 0.5)], f"{name}_count": [({}, 4.0)]},
        {},
    ]
    assert metric_rows(pages) == [("generated tokens", "1,235"), ("time to first token, mean", "125.00 ms")]
