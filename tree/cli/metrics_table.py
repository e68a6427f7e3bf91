"""A few figures of /metrics pages, for people. Pure; a figure that no page has is left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from cli.readiness import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A line of the table: its label, the sample that it sums, and how it is printed."""

    label: str
    sample: str
    show: Callable[[float], str] = "{:,.0f}".format


FIGURES = (
    Figure(label="requests finished", sample="octavo_request_success_total"),
    Figure(label="prompt tokens", sample="octavo_prompt_tokens_total"),
    Figure(label="generated tokens", sample="octavo_generation_tokens_total"),
    Figure(label="prefix cache hits (tokens)", sample="octavo_prefix_cache_hits_total"),
    Figure(label="preemptions", sample="octavo_num_preemptions_total"),
    Figure(label="KV blocks leaked", sample="octavo_kv_blocks_leaked"),
)
MEANS = (
    ("time to first token, mean", "octavo_time_to_first_token_seconds"),
    ("inter-token latency, mean", "octavo_inter_token_latency_seconds"),
    ("engine step, mean", "octavo_step_time_seconds"),
)


def metric_rows(pages: Sequence[Samples]) -> list[tuple[str, str]]:
    """Label and value of each figure that is there."""
    rows = []
    for figure in FIGURES:
        values = [value for page in pages for _, value in page.get(figure.sample, ())]
        rows += [(figure.label, figure.show(sum(values)))] if values else []
    for label, name in MEANS:
        total, count = _sum(pages, name + "_sum"), _sum(pages, name + "_count")
        rows += [(label, f"{total / count * 1000:,.2f} ms")] if count else []
    return rows


def metrics_table(pages: Sequence[Samples]) -> Table:
    """For a terminal."""
    table = Table("from /metrics", "value", title_justify="left")
    for label, value in metric_rows(pages):
        table.add_row(label, value)
    return table


def _sum(pages: Sequence[Samples], name: str) -> float:
    return sum(value for page in pages for _, value in page.get(name, ()))
