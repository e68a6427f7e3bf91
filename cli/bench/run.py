"""`octavo bench`: one run for each rate and concurrency that was asked for, its table, its file, its picture."""

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from octavo import Client
from octavo.cli.bench.datasets import Ask, Lengths, random_asks, read_asks
from octavo.cli.bench.load import Job, Measured, due_times, run_load
from octavo.cli.bench.picture import picture
from octavo.cli.bench.report import Figures, Plan, figures_of, latencies_ms, report, sweep_table
from octavo.cli.client.connect import connect
from octavo.cli.client.generate_options import request_fields
from octavo.cli.errors import usage
from octavo.cli.progress import Bars, PlainSteps, Step, can_redraw
from octavo.cli.settings.addresses import join_address
from octavo.cli.settings.groups import ClientSettings
from octavo.client.requests import GenerateFields
from octavo.v1 import model_pb2
from octavo.wire.regular_file import blaming


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is asked for. dataset: None draws random lengths. rates: requests a second, inf for all at once; empty takes
    a trace's own times, else inf. ignore_eos: None if the dataset decides whether lengths are exact."""

    dataset: Path | None
    num_prompts: int
    lengths: Lengths
    rates: Sequence[float]
    concurrencies: Sequence[int | None]
    burstiness: float
    ignore_eos: bool | None
    dataset_seed: int
    num_warmups: int
    processes: int
    save: Path | None
    picture: Path | None


def bench(settings: ClientSettings, asked: Bench) -> int:
    """Print a table for each run. Returns 1 if no request succeeded. Raises CliError, OctavoError."""
    _check_files(asked)
    console = Console(stderr=True, highlight=False)
    with connect(settings) as client:
        model = _model(client, settings)
        asks = _asks(client, model, asked)
        fields = [_fields(ask, settings, asked, model.name) for ask in asks]
        for index in range(asked.num_warmups):
            warmup = GenerateFields(**{**fields[index % len(fields)], "cache_salt": secrets.token_hex(8)})
            client.complete(timeout_s=settings.timeout_s, **warmup)
    runs, measured = [], Measured(outcomes=[], client_cpu_share=0.0)
    plans = _plans(asked, asks)
    for number, plan in enumerate(plans, 1):
        # A salt of its own: requests of a run share prefixes as the dataset has it, and find none of a former run.
        salt = secrets.token_hex(8)
        jobs = [
            Job(fields=GenerateFields(**{**each, "cache_salt": salt}), due_s=due)
            for each, due in zip(fields, _due(plan, asked, asks), strict=True)
        ]
        with _progress(console, len(jobs), f"run {number} of {len(plans)}") as on_done:
            measured = run_load(
                settings,
                jobs,
                processes=asked.processes,
                max_concurrency=plan.max_concurrency,
                timeout_s=settings.timeout_s,
                on_done=on_done,
            )
        runs.append(figures_of(plan, measured))
        print(report(runs[-1]), flush=True)  # noqa: T201
    if len(runs) > 1:
        print(sweep_table(runs))  # noqa: T201
    _write(asked, settings, model.name, runs, measured)
    return 0 if any(run["completed"] for run in runs) else 1


def _model(client: Client, settings: ClientSettings) -> model_pb2.ModelInfo:
    """The named model, or the only one. Raises CliError."""
    models = client.models()
    found = [each for each in models if settings.model_name in ("", each.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.name for each in models) or "none yet"
    numbers = f"--model-name is {settings.model_name!r}, and the service has {names}"
    raise usage("which model?", numbers, "give one of them with --model-name")


def _asks(client: Client, model: model_pb2.ModelInfo, asked: Bench) -> list[Ask]:
    if asked.dataset is None:
        return random_asks(asked.num_prompts, asked.lengths, vocab_size=model.vocab_size, seed=asked.dataset_seed)
    return read_asks(
        asked.dataset,
        asked.num_prompts,
        asked.lengths,
        vocab_size=model.vocab_size,
        seed=asked.dataset_seed,
        count_tokens=lambda text: len(client.tokenize(text, model=model.name)),
    )


def _fields(ask: Ask, settings: ClientSettings, asked: Bench, model: str) -> GenerateFields:
    """Greedy unless something else was asked for, so that runs can be compared."""
    is_exact = ask.is_exact if asked.ignore_eos is None else asked.ignore_eos
    fields = GenerateFields(temperature=0.0, max_tokens=ask.num_output, ignore_eos=is_exact)
    return GenerateFields(**{**fields, **request_fields(settings), **ask.prompt, "model": model})


def _plans(asked: Bench, asks: Sequence[Ask]) -> list[Plan]:
    rates = asked.rates or [math.nan if asks[0].due_s is not None else math.inf]
    return [
        Plan(rate=rate, burstiness=asked.burstiness, max_concurrency=concurrency)
        for rate, concurrency in product(rates, asked.concurrencies or [None])
    ]


def _due(plan: Plan, asked: Bench, asks: Sequence[Ask]) -> list[float]:
    """rate nan: the trace's own times."""
    if math.isnan(plan.rate):
        return [ask.due_s or 0.0 for ask in asks]
    return due_times(len(asks), plan.rate, plan.burstiness, seed=asked.dataset_seed)


@contextmanager
def _progress(console: Console, total: int, title: str) -> Iterator[Callable[[int], None]]:
    """How many requests have ended: a bar on a terminal, plain lines elsewhere."""
    bars = Bars(console, {title: title}, stage="connecting") if can_redraw(console) else None
    plain = PlainSteps()

    def on_done(done: int) -> None:
        step = Step(stage="requests", done=done, total=total)
        if bars is not None:
            bars.show(title, step)
        elif (line := plain.line(title, step)) is not None:
            console.print(f"{title}: {line}", soft_wrap=True)

    try:
        yield on_done
    finally:
        if bars is not None:
            bars.close()


def _check_files(asked: Bench) -> None:
    """Check that files can be written, before anything is measured. Raises CliError."""
    if asked.picture is not None and asked.picture.suffix != ".svg":
        raise usage("bad value for --picture", f"--picture is {asked.picture}", "give a file name that ends in .svg")
    for flag, path in (("--save", asked.save), ("--picture", asked.picture)):
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise usage(f"bad value for {flag}", f"there is no folder {path.parent}", "make it, or give another file")
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            why = "is a folder" if path.is_dir() else "cannot be written"
            raise usage(f"bad value for {flag}", f"{path} {why}", "give another file")


def _write(asked: Bench, settings: ClientSettings, model: str, runs: list[Figures], measured: Measured) -> None:
    target = join_address(settings.host, settings.port)
    if asked.save is not None:
        content = {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "target": target,
            "model_id": model,
            "dataset": "random" if asked.dataset is None else str(asked.dataset),
            "num_prompts": asked.num_prompts,
            "runs": runs,
        }
        with blaming(asked.save):
            asked.save.write_text(json.dumps(content, indent=1) + "\n")
    if asked.picture is not None:
        latencies = latencies_ms([each for each in measured.outcomes if not each.error])
        with blaming(asked.picture):
            asked.picture.write_text(picture(f"octavo bench: {model} at {target}", runs, latencies))
