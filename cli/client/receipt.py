"""A request's receipt and usage as people read them. Pure."""

from rich.markup import escape
from rich.table import Table

from octavo.v1 import common_pb2, inference_pb2


def receipt_rows(finished: inference_pb2.Finished) -> list[tuple[str, str]]:
    """Label and value of each line; durations in milliseconds."""
    usage, receipt = finished.usage, finished.receipt
    reason = inference_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    prompt = f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached)"
    ranks = f" of {receipt.tensor_parallel_size} ranks" if receipt.tensor_parallel_size > 1 else ""
    per_token_s = receipt.decode_s / max(1, usage.completion_tokens - 1)
    return [
        ("finished", reason + _stop(finished.stop)),
        (
            "tokens",
            f"{prompt} + {usage.completion_tokens} generated",
        ),
        ("first token", _ms(receipt.time_to_first_token_s)),
        ("per token", f"{_ms(per_token_s)} ({1 / per_token_s:,.0f} tokens/s)" if per_token_s else "–"),
        ("between tokens", _gaps(receipt)),
        ("gateway", _ms(receipt.gateway_s)),
        ("queue", _ms(receipt.queue_s)),
        ("prefill", f"{_ms(receipt.prefill_s)} ({receipt.computed_tokens} tokens computed)"),
        ("decode", _ms(receipt.decode_s)),
        ("total", _ms(receipt.total_s)),
        ("memory", f"{receipt.block_seconds:,.2f} block-seconds"),
        (
            "preemptions",
            f"{receipt.preemptions} ({receipt.swaps} by swap)" if receipt.swaps else str(receipt.preemptions),
        ),
        ("migrations", str(receipt.migrations)),
        ("worker", f"{receipt.worker_id}{ranks}, model {receipt.model_fingerprint[:12]}"),
        ("seed", str(receipt.seed)),
    ]


def receipt_table(finished: inference_pb2.Finished) -> Table:
    """The receipt as a table for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    for label, value in receipt_rows(finished):
        table.add_row(label, escape(value))
    return table


def receipt_line(finished: inference_pb2.Finished) -> str:
    """The receipt in one line."""
    rows = dict(receipt_rows(finished))
    names = ("tokens", "first token", "per token", "total", "finished")
    return " · ".join(f"{name} {rows[name]}" for name in names)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


def _gaps(receipt: common_pb2.Receipt) -> str:
    if not receipt.inter_token_p50_s:
        return "–"
    return f"p50 {_ms(receipt.inter_token_p50_s)}, p99 {_ms(receipt.inter_token_p99_s)}"


def _stop(stop: inference_pb2.StopMatch) -> str:
    match stop.WhichOneof("match"):
        case "token_id":
            return f" at token {stop.token_id}"
        case "text":
            return f" at {stop.text!r}"
    return ""
