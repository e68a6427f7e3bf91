"""The summary shown once the service is ready: where everything is, what is served, and a command to copy."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

EXAMPLE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """One served model; counts are over all its workers. products: how its matrices are multiplied, as reported by its
    workers; may be empty. num_host_blocks, host_bytes: of one worker. notes: warnings of its workers."""

    name: str
    device: str
    dtype: str
    num_workers: int
    num_blocks: int
    block_size: int
    max_model_len: int
    notes: Sequence[str] = ()
    products: str = ""
    num_host_blocks: int = 0
    host_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the KV pools."""
        return self.num_blocks * self.block_size

    @property
    def num_requests(self) -> int:
        """How many requests of `example_tokens` tokens fit at once."""
        return self.num_blocks // -(-self.example_tokens // self.block_size)

    @property
    def example_tokens(self) -> int:
        """The length of a request that `num_requests` assumes."""
        return min(EXAMPLE_TOKENS, self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSummary:
    """A service that is ready. gateways: how many there are and why, if the number was chosen automatically. elsewhere:
    name and address of gateways on other hosts."""

    address: str
    admin_address: str | None
    metrics: Sequence[tuple[str, str]]
    models: Sequence[ModelSummary]
    ready_after_s: float
    access: Sequence[str] = ()
    openai_url: str | None = None
    gateways: str = ""
    elsewhere: Sequence[tuple[str, str]] = ()
    page: str | None = None

    @property
    def client_line(self) -> str:
        """A command to copy."""
        host, _, port = self.address.rpartition(":")
        place = [f"--host {host}"] * (host != "127.0.0.1") + [f"--port {port}"] * (port != "50051")
        model = [f"--model-name {self.models[0].name}"] * (len(self.models) > 1)
        secure = ["--tls on"] * ("TLS" in self.access)
        return " ".join(["octavo chat", *place, *secure, *model])


def summary_rows(summary: ServiceSummary) -> list[tuple[str, str]]:
    """(label, text) of each line."""
    rows = [("gRPC", summary.address), *(("gRPC", f"{address}  ({name})") for name, address in summary.elsewhere)]
    rows += [("OpenAI", summary.openai_url)] if summary.openai_url else []
    rows += [("admin", summary.admin_address)] if summary.admin_address else []
    rows += [("page", summary.page)] if summary.page else []
    rows += [("gateways", summary.gateways)] if summary.gateways else []
    rows += [("access", " + ".join(summary.access))] if summary.access else []
    rows += [("metrics", f"http://{address}/metrics  ({name})") for name, address in summary.metrics]
    for model in summary.models:
        workers = f", {model.num_workers} workers" if model.num_workers > 1 else ""
        rows += [
            ("model", f"{model.name}  ({model.device}, {model.dtype}{workers})"),
            *([("products", model.products)] if model.products else []),
            ("KV pool", f"{model.num_blocks:,} blocks × {model.block_size} = {model.num_tokens:,} tokens"),
            *([("host KV", _host(model))] if model.num_host_blocks else []),
            ("room for", _room(model)),
            *(("note", note) for note in model.notes),
        ]
    return [*rows, ("try", summary.client_line)]


def _host(model: ModelSummary) -> str:
    """Host memory for blocks, per worker."""
    tokens = model.num_host_blocks * model.block_size
    return f"{model.host_bytes / (1 << 30):.2f} GiB for {tokens:,} tokens more, behind the KV pool"


def _room(model: ModelSummary) -> str:
    if model.num_requests:
        return f"{model.num_requests:,} requests of {model.example_tokens:,} tokens at once"
    longest = f"the model takes {model.max_model_len:,}, but --num-blocks is too small for them"
    return f"one request of {model.num_tokens:,} tokens at most: {longest}"


def boxed(summary: ServiceSummary) -> RenderableType:
    """The summary for a terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for label, text in summary_rows(summary):
        table.add_row(label, f"[bold green]{escape(text)}[/]" if label == "try" else escape(text))
    title = f"[bold]Octavo is ready[/] [dim]after {summary.ready_after_s:.1f} s[/]"
    return Group(Panel(table, title=title, title_align="left", border_style="green", expand=False))


def plain(summary: ServiceSummary) -> str:
    """The summary for a file or a pipe, one line for each row."""
    rows = [f"  {label + ':':<10}{text}" for label, text in summary_rows(summary)]
    return "\n".join([f"Octavo is ready after {summary.ready_after_s:.1f} s", *rows])


def show_summary(summary: ServiceSummary) -> None:
    """Print it to stdout: a box on a terminal, else plain lines."""
    if sys.stdout.isatty():
        Console().print(boxed(summary))
    else:
        print(plain(summary), flush=True)  # noqa: T201
