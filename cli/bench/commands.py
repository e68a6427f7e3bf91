"""The command that measures a service: bench."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.bench.limits import (
    HIGHEST_RATE,
    LEAST_BURSTINESS,
    LOWEST_RATE,
    MOST_BURSTINESS,
    MOST_DRAWN_TOKENS,
    MOST_REQUESTS,
)
from octavo.cli.errors import shorten, usage
from octavo.cli.help import PlainCommand
from octavo.cli.settings.groups import ALL_KEYS, ClientSettings
from octavo.cli.settings.options import PATH, given_path, with_settings
from octavo.cli.settings.resolve import Resolved
from octavo.cli.whole_number import whole_number

PANEL = "Watch a service"
LOAD = "Load"
DATASET = "Dataset"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How requests come."""

    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            "--request-rate",
            help="Requests a second, or inf for all at once; repeat, or 1,2,4, for a run each. Unset: inf, or the "
            "times of a trace.",
            rich_help_panel=LOAD,
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option(help="1 is a Poisson process, less comes in bursts, more evenly.", rich_help_panel=LOAD),
    ] = 1.0
    max_concurrency: Annotated[
        list[str] | None,
        typer.Option(
            "--max-concurrency",
            help="Requests in flight at most; repeat, or 1,8,64, for a run each. Unset: no limit.",
            rich_help_panel=LOAD,
        ),
    ] = None
    warmups: Annotated[
        int,
        typer.Option(
            help="Requests before the first run, not measured.", min=0, max=MOST_REQUESTS, rich_help_panel=LOAD
        ),
    ] = 1
    processes: Annotated[
        int, typer.Option(help="Client processes that share the requests.", min=1, max=64, rich_help_panel=LOAD)
    ] = 1


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What requests are."""

    dataset: Annotated[
        Path | None,
        typer.Option(
            help="ShareGPT JSON, JSONL of prompts, or a trace (CSV, JSONL); unset: random prompts.",
            rich_help_panel=DATASET,
            parser=given_path,
            metavar=PATH,
        ),
    ] = None
    num_prompts: Annotated[
        int,
        typer.Option("--num-prompts", help="Requests of a run.", min=1, max=MOST_REQUESTS, rich_help_panel=DATASET),
    ] = 100
    input_len: Annotated[
        int,
        typer.Option(
            "--input-len", help="Tokens of random prompts.", min=1, max=MOST_DRAWN_TOKENS, rich_help_panel=DATASET
        ),
    ] = 512
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len",
            help="Tokens of outputs, where the dataset does not say.",
            min=1,
            max=MOST_DRAWN_TOKENS,
            rich_help_panel=DATASET,
        ),
    ] = 128
    range_ratio: Annotated[
        float,
        typer.Option(
            "--range-ratio",
            help="Random lengths are up to this part shorter or longer.",
            min=0,
            max=1,
            rich_help_panel=DATASET,
        ),
    ] = 0.0
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Whether outputs go on after the model's end tokens; unset: random prompts and traces do.",
            rich_help_panel=DATASET,
        ),
    ] = None
    dataset_seed: Annotated[
        int,
        typer.Option(
            "--dataset-seed", help="Draws prompts, lengths and arrivals.", min=0, max=2**64 - 1, rich_help_panel=DATASET
        ),
    ] = 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", cls=PlainCommand, rich_help_panel=PANEL)(with_settings(ClientSettings, ALL_KEYS)(bench))


def bench(
    resolved: Resolved[ClientSettings],
    *,
    load: LoadOptions,
    data: DatasetOptions,
    save: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file.", parser=given_path, metavar=PATH)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw them into this SVG file.", parser=given_path, metavar=PATH)
    ] = None,
) -> int:
    """Measure a running service as `vllm bench serve` does: throughput, TTFT, TPOT, ITL, E2EL.

    Several rates or concurrencies are a run each, with a table of all at the end. Unset, --temperature is 0 here, and
    --max-tokens what the dataset or --output-len says.
    """
    from octavo.cli.bench.datasets import Lengths
    from octavo.cli.bench.run import Bench
    from octavo.cli.bench.run import bench as run

    if not LEAST_BURSTINESS <= load.burstiness <= MOST_BURSTINESS:
        advice = f"give a number from {LEAST_BURSTINESS:g} to {MOST_BURSTINESS:g}"
        raise usage("bad value for --burstiness", f"--burstiness is {load.burstiness:g}", advice)
    lengths = Lengths(num_prompt=data.input_len, num_output=data.output_len, range_ratio=data.range_ratio)
    asked = Bench(
        dataset=data.dataset,
        num_prompts=data.num_prompts,
        lengths=lengths,
        rates=[_rate(word) for word in _words(load.request_rate)],
        concurrencies=[_concurrency(word) for word in _words(load.max_concurrency)],
        burstiness=load.burstiness,
        ignore_eos=data.ignore_eos,
        dataset_seed=data.dataset_seed,
        num_warmups=load.warmups,
        processes=load.processes,
        save=save,
        picture=picture,
    )
    return run(resolved.settings, asked)


def _words(given: list[str] | None) -> list[str]:
    return [word.strip() for each in given or () for word in each.split(",")]


def _rate(word: str) -> float:
    try:
        rate = float(word)
    except ValueError:
        rate = math.nan
    if not (LOWEST_RATE <= rate <= HIGHEST_RATE or word.lower() == "inf"):
        advice = f"give a number from {LOWEST_RATE:g} to {HIGHEST_RATE:,}, or inf"
        raise usage("bad value for --request-rate", f"{shorten(word)} is no rate", advice)
    return rate


def _concurrency(word: str) -> int:
    count = whole_number(word, least=1, most=MOST_REQUESTS)
    if count is None:
        advice = f"give a whole number from 1 to {MOST_REQUESTS:,}"
        raise usage("bad value for --max-concurrency", f"{shorten(word)} is no count", advice)
    return count
