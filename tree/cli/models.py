"""`octavo models`: what a service serves."""

from rich.console import Console
from rich.table import Table

from cli.connect import connect
from cli.settings import ClientSettings


def show_models(settings: ClientSettings) -> int:
    """Print a table, one row per model."""
    table = Table()
    table.add_column("model", no_wrap=True)
    for title in ("dtype", "max tokens", "workers", "KV tokens", "fingerprint"):
        table.add_column(title)
    with connect(settings) as client:
        for model in client.models():
            table.add_row(
                model.name,
                model.dtype,
                f"{model.max_model_len:,}",
                str(model.num_workers),
                f"{model.kv_capacity_tokens:,}",
                model.fingerprint[:12],
            )
    Console().print(table)
    return 0
