"""From outcomes to figures, by the names and in the layout of `vllm bench serve`. Pure.

TTFT  from sending to the first message with output       TPOT  from there to the last one, by further tokens
ITL   between two messages of a request                   E2EL  from sending to the end
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from octavo.cli.bench.load import Measured, Outcome, peak

Figures = dict[str, object]
LATENCIES = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
WIDTH = 50
BUSY = 0.9  # of a core: above it a client process may be what is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run was asked for. rate: requests a second; inf: all at once; nan: at the times of a trace."""

    rate: float
    burstiness: float
    max_concurrency: int | None


def figures_of(plan: Plan, measured: Measured) -> Figures:
    """Figures by their names in vLLM's JSON files. Latencies in milliseconds."""
    good = [each for each in measured.outcomes if not each.error]
    duration_s = max((each.begin_s + each.latency_s for each in measured.outcomes), default=0.0)
    per_s = 1 / duration_s if duration_s else 0.0
    num_input, num_output = (sum(count) for count in ([e.num_prompt for e in good], [e.num_output for e in good]))
    figures: Figures = {
        "request_rate": "trace" if math.isnan(plan.rate) else "inf" if math.isinf(plan.rate) else plan.rate,
        "burstiness": plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(measured.outcomes) - len(good),
        "errors_by_reason": dict(Counter(each.error for each in measured.outcomes if each.error)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) * per_s,
        "output_throughput": num_output * per_s,
        "total_token_throughput": (num_input + num_output) * per_s,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": peak([(each.begin_s, each.begin_s + each.latency_s) for each in good]),
        "client_cpu_share": measured.client_cpu_share,
    }
    for name, values in latencies_ms(good).items():
        figures |= _summary(name, values)
    return figures


def latencies_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Every value of each kind of latency."""
    begun = [each for each in outcomes if each.arrivals_s]
    return {
        "ttft": [1e3 * each.arrivals_s[0] for each in begun],
        "tpot": [
            1e3 * (each.arrivals_s[-1] - each.arrivals_s[0]) / (each.num_output - 1)
            for each in begun
            if each.num_output > 1
        ],
        "itl": [1e3 * (after - before) for each in begun for before, after in pairwise(each.arrivals_s)],
        "e2el": [1e3 * each.latency_s for each in begun],
    }


def _summary(name: str, values: Sequence[float]) -> Figures:
    """Zeros if there are no values, as in vLLM."""
    array = np.array(values or [0.0])
    return {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
        f"p99_{name}_ms": float(np.percentile(array, 99)),
    }


def _busiest_second(outcomes: Sequence[Outcome]) -> float:
    """Output tokens in the busiest second, with those of a request spread evenly over its messages."""
    tokens: Counter[int] = Counter()
    for each in outcomes:
        for arrival_s in each.arrivals_s:
            tokens[int(each.begin_s + arrival_s)] += each.num_output / len(each.arrivals_s)  # type: ignore[assignment]
    return float(max(tokens.values(), default=0))


def report(figures: Figures) -> str:
    """vLLM's table."""
    rows = [
        ("Successful requests", figures["completed"]),
        ("Failed requests", figures["failed"]),
        *([("Maximum request concurrency", figures["max_concurrency"])] if figures["max_concurrency"] else []),
        *([("Request rate configured (RPS)", figures["request_rate"])] if figures["request_rate"] != "inf" else []),
        ("Benchmark duration (s)", figures["duration"]),
        ("Total input tokens", figures["total_input_tokens"]),
        ("Total generated tokens", figures["total_output_tokens"]),
        ("Request throughput (req/s)", figures["request_throughput"]),
        ("Output token throughput (tok/s)", figures["output_throughput"]),
        ("Peak output token throughput (tok/s)", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests", figures["max_concurrent_requests"]),
        ("Total Token throughput (tok/s)", figures["total_token_throughput"]),
    ]
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *(_row(label, value) for label, value in rows)]
    for name, short, title in LATENCIES:
        lines.append(f"{title:-^{WIDTH}}")
        for kind, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            lines.append(_row(f"{label} {short} (ms)", figures[f"{kind}_{name}_ms"]))
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *notes(figures)])


def notes(figures: Figures) -> list[str]:
    """What a reader should know about a run."""
    reasons = figures["errors_by_reason"]
    assert isinstance(reasons, dict)
    found = [f"note: {count} requests failed: {reason}" for reason, count in sorted(reasons.items())]
    share = figures["client_cpu_share"]
    if isinstance(share, float) and share > BUSY:
        found.append(f"note: a client process was busy {share:.0%} of the time: measure again with more --processes")
    return found


def _row(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown:<9}".rstrip()


SWEEP = (
    ("rate", "request_rate"),
    ("concurrency", "max_concurrency"),
    ("req/s", "request_throughput"),
    ("output tok/s", "output_throughput"),
    ("failed", "failed"),
    *((f"{short} {kind}", f"{kind}_{name}_ms") for name, short, _ in LATENCIES[:2] for kind in ("median", "p99")),
)


def sweep_table(runs: Sequence[Figures]) -> str:
    """A line for each run of a sweep; latencies in milliseconds."""
    cells = [[_cell(run[key]) for _, key in SWEEP] for run in runs]
    rows = [[head for head, _ in SWEEP], *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(SWEEP))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-" if value is None else str(value)
