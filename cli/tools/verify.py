"""`octavo verify`: a checkpoint as a worker serves it, and a service that runs, against transformers, as a table."""

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.cli.errors import usage
from octavo.cli.serve.combinations import check_combinations
from octavo.cli.serve.preflight import check_device_here, check_model, check_numbers
from octavo.cli.settings.groups import WorkerSettings
from octavo.cli.settings.resolve import validated
from octavo.cli.settings.worker_config import default_batch_tokens, pick_device
from octavo.cli.tools.doctor_model import multiply_on_a_cpu
from octavo.model.attention.interface import get_backend
from octavo.model.causal_lm import CausalLM
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.config import ModelConfig, load_config
from octavo.model.cpu.products import multiplies_integers
from octavo.model.dtypes import parse_dtype
from octavo.model.layers.linear import WeightFormat
from octavo.model.verify.checks import VerifyRow
from octavo.model.verify.prompts import make_prompts
from octavo.model.verify.reference import Reference, Rounded
from octavo.model.verify.rounding import verify_rounding
from octavo.model.verify.rounding_error import RoundingError
from octavo.model.verify.served import MISTAKE, ServedPass, ServedRow, judge
from octavo.model.verify.verify import VerifyReport, find_numeric_fault, verify_checkpoint
from octavo.wire.logs import configure_logs
from octavo.worker.config import Deterministic, WorkerConfig
from octavo.worker.loading.group import check_cut, load_group
from octavo.worker.loading.memory import available_host_bytes
from octavo.worker.loading.model_card import Described, describe
from octavo.worker.loading.verification import blocks_wanted, serve_known_tokens
from octavo.worker.loading.warmup import WarmRunner

BLOCK_SIZE = 16

_ROUNDED = frozenset({"dtype", "quantization", "kv_cache_dtype"})
_READ = {
    "--check-numerics": frozenset({"dtype"}),
    "--rounding": _ROUNDED,
    "--against": _ROUNDED,
    "--address": frozenset({"device", "quantization", "kv_cache_dtype"}),
}
"""Of how the checkpoint is served, what each looks at that is given instead of the comparison. Threads change no
figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is verified: the checkpoint, and how it is served. Names are those of the flags of `octavo worker`."""

    model: str
    revision: str | None = None
    device: str = "auto"
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    deterministic: Deterministic = Deterministic.OFF
    attention_backend: str | None = None
    max_model_len: int | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1

    @property
    def rounded(self) -> Rounded:
        """What has fewer bits than the dtype on this machine: not every CPU rounds inputs for int8."""
        is_gpu = pick_device(self.device) != "cpu" and self.attention_backend is None
        weights = self.quantization
        if weights == WeightFormat.INT8.value and not is_gpu and not multiplies_integers():
            weights = WeightFormat.INT8_WEIGHTS.value
        return Rounded(weights=weights, cache=self.kv_cache_dtype, on_gpu=is_gpu)


def verify(served: Served, *, backends: Sequence[str], num_prompts: int, max_new_tokens: int) -> int:
    """Compare and print. Returns 0 if every row is within its limit, else 1."""
    configure_logs("auto", "warning")
    check_device_here(served.device)
    check_settings(served, backends)
    console, start_s = Console(), time.monotonic()
    folder = resolve_checkpoint(served.model, revision=served.revision)
    check_cut(folder, served.tensor_parallel_size, served.model)
    config = load_config(folder)
    verdicts: list[bool] = []
    if (why := _why_no_layers(config)) is None:
        with console.status(f"comparing the layers of {escape(str(folder))} with transformers, in float32"):
            report = verify_checkpoint(
                folder,
                dtype=torch.float32,
                num_prompts=min(num_prompts, 3),
                max_new_tokens=min(max_new_tokens, 8),
                context_len=_context_len(served, describe(folder)),
                **({"backends": tuple(backends)} if backends else {}),
            )
        console.print(report_table(report))
        verdicts += [row.is_ok for row in report.rows]
    else:
        console.print(f"[dim]layers are not compared one by one: {why}[/]")
    with console.status(f"running {escape(str(folder))} as a worker does, and by transformers"):
        rows = compare_served(served, folder, num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    print_rows(console, rows)
    verdicts += [row.is_ok for row in rows]
    return print_verdict(console, verdicts.count(False), len(verdicts), time.monotonic() - start_s)


def check_settings(served: Served, backends: Sequence[str] = ()) -> None:
    """Check that a worker could be started with these settings, as far as they and a local checkpoint tell: starting
    one takes minutes. backends: of the layers' comparison. Raises CliError, CheckpointError, CardError, BackendName,
    InvarianceUnavailable, FormatUnavailable."""
    for name in backends:
        get_backend(name)
    settings = _worker_settings(served)
    check_numbers(settings)
    check_combinations(settings)
    folder = check_model(served.model, settings)
    if folder is not None and settings.device == "cpu":
        check_cut(folder, served.tensor_parallel_size, served.model)
        multiply_on_a_cpu(folder, settings)


def check_instead(served: Served, chosen: Sequence[str]) -> None:
    """Check that at most one alternative to the comparison was chosen, and that it uses all other options given. Raises
    CliError."""
    if len(chosen) > 1:
        raise usage("these exclude each other", f"{' and '.join(chosen)} are given", "give one of them")
    _worker_settings(served)
    ours = {"model", "revision", "num_threads", *_READ[chosen[0]]}
    given = [each.name for each in fields(served) if getattr(served, each.name) != each.default]
    idle = [f"--{name.replace('_', '-')}" for name in given if name not in ours]
    if idle and (idle, served.device) != (["--device"], "cpu"):
        raise usage(f"{chosen[0]} does not look at that", f"{', '.join(idle)} would change nothing", "leave it out")


def _worker_settings(served: Served) -> WorkerSettings:
    """The settings of `octavo worker`. Raises CliError for an invalid value."""
    values = {
        "model": (served.model,),
        "revision": served.revision,
        "device": pick_device(served.device),
        "dtype": served.dtype,
        "quantization": served.quantization,
        "kv_cache_dtype": served.kv_cache_dtype,
        "deterministic": served.deterministic is Deterministic.ON,
        "attention_backend": served.attention_backend,
        "max_model_len": served.max_model_len,
        "tensor_parallel_size": served.tensor_parallel_size,
    }
    return validated(WorkerSettings, {name: each for name, each in values.items() if each is not None}, {})


def compare_served(served: Served, folder: Path, *, num_prompts: int, max_new_tokens: int) -> list[ServedRow]:
    """Load and run as a worker does, once as asked for and once in float32, and compare with transformers on the same
    tokens. Only one model is in memory at a time. Raises what a worker's start raises, CheckpointError."""
    config, described = load_config(folder), describe(folder)
    longest = max(_context_len(served, described) // 2, 1)
    prompts = [
        [token % described.vocab_size for token in prompt[:longest]]
        for prompt in make_prompts(folder, config, num_prompts)
    ]
    passes = [_serve(each, folder, prompts, max_new_tokens) for each in _passes(served, config)]
    return judge(Reference(folder), passes, vocab_size=described.vocab_size)


def _context_len(served: Served, described: Described) -> int:
    """Raises CliError if it has no room for a token and the one that follows."""
    length = min(served.max_model_len or described.max_model_len, described.max_model_len)
    check_context(served.model, length)
    return length


def check_context(model: str, length: int) -> None:
    """Raises CliError if a context has no room for a token and the one that follows."""
    if length < 2:
        numbers = f"{model} is served with {length} position, and the tokens that follow are what is compared"
        raise usage("there is nothing to compare", numbers, "verify it with 2 or more, as --max-model-len gives them")


def print_verdict(console: Console, failed: int, num_rows: int, seconds: float) -> int:
    """Print the last line, and return the exit code."""
    if failed:
        console.print(f"[bold red]{failed} of {num_rows} comparisons are beyond their limit[/]")
        return 1
    console.print(f"[bold green]all {num_rows} comparisons are within their limits[/] [dim]({seconds:.0f} s)[/]")
    return 0


def _why_no_layers(config: ModelConfig) -> str | None:
    """Why transformers' layers cannot be loaded next to ours; None if they can."""
    if config.quantization is not None:
        return "transformers does not load packed checkpoints without more packages"
    wanted = 9 * _num_parameters(config)  # two models in float32, and what their steps need
    if wanted > (available := available_host_bytes()):
        return f"two models in float32 need {wanted / 1e9:.0f} GB, {available / 1e9:.0f} are free"
    return None


def _num_parameters(config: ModelConfig) -> int:
    return sum(parameter.numel() for parameter in CausalLM(config, device="meta").parameters())


def _passes(served: Served, config: ModelConfig) -> list[Served]:
    """As asked for; and in float32, where errors cannot be mistaken for rounding."""
    dtype = config.computed_in(parse_dtype(served.dtype))
    as_asked = replace(served, dtype=str(dtype).removeprefix("torch."))
    if dtype == torch.float32 and not served.quantization and not served.kv_cache_dtype:
        return [as_asked]
    exact = replace(served, dtype="float32", quantization=None, kv_cache_dtype=None)
    if config.quantization is not None and pick_device(served.device) != "cpu":  # its kernels multiply halves only
        exact = replace(exact, attention_backend="sdpa", deterministic=Deterministic.OFF)
    return [as_asked, exact]


def _serve(served: Served, folder: Path, prompts: list[list[int]], max_new_tokens: int) -> ServedPass:
    """Load as a worker does, run, and release the memory."""
    device = pick_device(served.device)
    max_num_seqs = max(len(prompts), 8)
    config = WorkerConfig(
        model=str(folder),
        gateway_endpoints=(),
        device=device,
        dtype=served.dtype,
        quantization=served.quantization,
        kv_cache_dtype=served.kv_cache_dtype,
        deterministic=served.deterministic,
        attention_backend=served.attention_backend,
        num_threads=served.num_threads,
        tensor_parallel_size=served.tensor_parallel_size,
        max_model_len=served.max_model_len,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=default_batch_tokens(device, max_num_seqs),
        block_size=BLOCK_SIZE,
        num_blocks=blocks_wanted(prompts, max_new_tokens=max_new_tokens, block_size=BLOCK_SIZE),
    )
    loaded = load_group(config, lambda _stage, _done, _total: None)
    try:
        sequences = serve_known_tokens(
            cast(WarmRunner, loaded.runner),
            prompts,
            max_new_tokens=max_new_tokens,
            max_batch_tokens=config.max_batch_tokens,
        )
    finally:
        loaded.runner.close()
        label = f"{loaded.device}, {served.dtype}"
        del loaded
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    dtype = parse_dtype(served.dtype)
    assert dtype is not None
    return ServedPass(
        label=label,
        dtype=dtype,
        sequences=sequences,
        rounded=served.rounded,
        is_deterministic=served.deterministic is Deterministic.ON,
    )


def check_numerics(name: str, *, revision: str | None, dtype: str | None, limit: float | None, num_prompts: int) -> int:
    """Run prompts and name the first bad layer. Returns 1 if there is one."""
    if limit is not None and not 0 < limit < math.inf:
        raise usage("bad value for --limit", f"--limit is {limit:g}", "give a number above 0")
    console = Console()
    folder = resolve_checkpoint(name, revision=revision)
    with console.status(f"watching every activation of {escape(str(folder))}"):
        finding = find_numeric_fault(folder, dtype=dtype, limit=limit, num_prompts=num_prompts)
    if finding is None:
        console.print("[bold green]every activation is finite and within the limit[/]")
        return 0
    console.print(f"[bold red]{finding}[/]", soft_wrap=True)
    return 1


def rounding(served: Served, *, against: str | None, num_prompts: int, max_new_tokens: int) -> int:
    """Print what rounding costs. There is no limit, so it returns 0."""
    console = Console()
    folder = resolve_checkpoint(served.model, revision=served.revision)
    with console.status(f"comparing {escape(str(folder))} with itself before it was rounded"):
        error = verify_rounding(
            folder,
            against=None if against is None else resolve_checkpoint(against),
            quantization=served.quantization,
            kv_cache_dtype=served.kv_cache_dtype,
            dtype=parse_dtype(served.dtype),
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
        )
    console.print(rounding_table(error))
    return 0


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
    """One row per comparison of the layers."""
    table = _table("layer by layer, in float32", "largest error", "relative", "limit", "greedy")
    for row in report.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: VerifyRow) -> tuple[str, ...]:
    equal = "" if row.num_compared is None else f"{row.num_equal}/{row.num_compared}"
    errors = (f"{row.max_abs_error:.2e}", f"{row.relative_error:.2e}", f"{row.limit:.0e}")
    where = row.mode if row.backend == "-" else f"{row.mode}, {row.backend}"
    return (f"{row.check}: {where}", *errors, equal, _verdict(row.is_ok))


def print_rows(console: Console, rows: Sequence[ServedRow]) -> None:
    """A table for each way of serving."""
    for label in dict.fromkeys(row.label for row in rows):
        console.print(served_table(label, [row for row in rows if row.label == label]))
    console.print(
        "[dim]errors are of log-probabilities, in nats (root mean square), against transformers in float32[/]"
    )


def served_table(label: str, rows: Sequence[ServedRow]) -> Table:
    """One row per comparison of what was served this way."""
    table = _table(escape(f"as served: {label}"), "error", "transformers", "limit", "greedy")
    for row in rows:
        if row.check == MISTAKE:
            figures = tuple(f"{100 * share:.3g} %" for share in (row.error, row.own, row.limit))
        else:
            figures = tuple(f"{error:.2e}" for error in (row.error, row.own, row.limit))
        equal = f"{row.num_equal}/{row.num_sampled}" if row.num_sampled else ""
        beyond = f" {row.gap:.2g} off" if row.gap > row.gap_limit else ""
        table.add_row(f"{row.check}: {row.mode}", *figures, equal + beyond, _verdict(row.is_ok))
    return table


def _table(title: str, *figures: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("check", overflow="fold")
    for name in (*figures, ""):
        table.add_column(name, no_wrap=True)
    return table


def _verdict(is_ok: bool) -> str:
    return "[green]ok[/]" if is_ok else "[bold red]beyond[/]"
