"""`octavo verify`: a checkpoint here against transformers, as a table."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from model.checkpoint import resolve_checkpoint
from model.config import load_config
from model.dtypes import parse_dtype
from model.rounding_error import RoundingError
from model.verify import VerifyReport, find_numeric_fault, verify_checkpoint
from model.verify_checks import VerifyRow
from model.verify_rounding import verify_rounding


def verify(
    name: str,
    *,
    revision: str | None,
    dtype: str | None,
    backends: Sequence[str],
    num_prompts: int,
    max_new_tokens: int,
) -> int:
    """Compare and print; the exit code is 0 where every row is within its limit, else 1."""
    console = Console()
    folder = resolve_checkpoint(name, revision=revision)
    chosen = {"backends": tuple(backends)} if backends else {}
    with console.status(f"comparing {folder} with transformers"):
        report = verify_checkpoint(
            folder, dtype=dtype, num_prompts=num_prompts, max_new_tokens=max_new_tokens, **chosen
        )
    console.print(report_table(report))
    failed = sum(not row.is_ok for row in report.rows)
    if failed:
        console.print(f"[bold red]{failed} of {len(report.rows)} comparisons are beyond their limit[/]")
    else:
        console.print(f"[bold green]all {len(report.rows)} comparisons are within their limits[/]")
    return 1 if failed else 0


def check_numerics(name: str, *, revision: str | None, dtype: str | None, limit: float | None, num_prompts: int) -> int:
    """Run prompts and name the first bad layer; the exit code is 1 where there is one."""
    console = Console()
    folder = resolve_checkpoint(name, revision=revision)
    with console.status(f"watching every activation of {folder}"):
        finding = find_numeric_fault(folder, dtype=dtype, limit=limit, num_prompts=num_prompts)
    if finding is None:
        console.print("[bold green]every activation is finite and within the limit[/]")
        return 0
    console.print(f"[bold red]{finding}[/]", soft_wrap=True)
    return 1


def rounding(
    name: str,
    *,
    revision: str | None,
    dtype: str | None,
    against: str | None,
    quantization: str | None,
    kv_cache_dtype: str | None,
    num_prompts: int,
    max_new_tokens: int,
) -> int:
    """Print what rounding costs; there is no limit to be beyond, so the exit code is 0."""
    console = Console()
    folder = resolve_checkpoint(name, revision=revision)
    with console.status(f"comparing {folder} with itself before it was rounded"):
        error = verify_rounding(
            folder,
            against=None if against is None else resolve_checkpoint(against),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            dtype=parse_dtype(dtype),
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
    console.print(rounding_table(error))
    return 0


def is_packed(name: str, *, revision: str | None) -> bool:
    """Whether the checkpoint is GPTQ's or AWQ's, which transformers cannot load without more packages."""
    return load_config(resolve_checkpoint(name, revision=revision)).quantization is not None


def rounding_table(error: RoundingError) -> Table:
    """One line per figure."""
    table = Table("against float32", "")
    table.add_row("perplexity of the prompts", f"{error.perplexity:.3f} (before: {error.before:.3f})")
    table.add_row("logits, relative error", f"{error.relative_error:.2e}")
    table.add_row("divergence, nats a token", f"{error.divergence:.2e}")
    table.add_row("same first choice", f"{error.same_choice:.1%}")
    prefix = f"{error.mean_prefix:.1f} tokens alike on average"
    table.add_row("greedy outputs", f"{error.same_outputs} of {error.num_outputs} equal; {prefix}")
    return table


def report_table(report: VerifyReport) -> Table:
    """One row per comparison."""
    table = Table("check", "backend", "fed", "max abs error", "relative error", "limit", "equal", "")
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: VerifyRow) -> tuple[str, ...]:
    equal = "" if row.num_compared is None else f"{row.num_equal}/{row.num_compared}"
    verdict = "[green]ok[/]" if row.is_ok else "[bold red]beyond[/]"
    errors = (f"{row.max_abs_error:.2e}", f"{row.relative_error:.2e}", f"{row.limit:.0e}")
    return (row.check, row.backend, row.mode, *errors, equal, verdict)
