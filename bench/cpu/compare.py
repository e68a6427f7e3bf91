"""Octavo and others on this CPU, in one run: `python -m bench.cpu.compare [--quick] [--only NAME]`.

Prints the class of the CPU, its measured limits, and a table: Octavo, transformers, and, where `make bench-peers` has
installed them, OpenVINO GenAI and llama.cpp, all with random weights of Qwen2.5-0.5B's shape, on the same requests.
The sides take turns, so that whatever else the machine does hits all of them, and the least times are compared. A ratio
says how many times better Octavo is with weights of the same size. `OCTAVO_CPU_ISA=avx2` holds all of them back,
llama.cpp where it was compiled so. Where others use the machine, `--threads 1 --clock cpu` counts processor time.
Writes every turn to out/bench-cpu.json (--json).
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.cpu.limits import Limits, measure_limits
from bench.cpu.local_engine import LocalEngine
from bench.cpu.peers.sides import PeerMissing, PeerSide, llama, openvino
from bench.cpu.transformers_sides import TransformersPadded, make_transformers
from bench.cpu.workloads import CLOCKS, Ask, Clock, Side, ask, mixed
from bench.figures import write_json
from bench.machine import Machine, this_machine
from bench.shapes import PUBLISHED, Shape
from octavo.model.causal_lm import CausalLM
from octavo.model.cpu.isa import cpu_isa
from octavo.model.layers.linear import FormatUnavailable, WeightFormat
from octavo.worker.loading.memory import prefer_huge_pages

MAX_MODEL_LEN = 516
MAX_NUM_SEQS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. repeats: turns of each side."""

    repeats: int = 3
    first_tokens: int = 512
    decode_tokens: int = 64
    batch_tokens: int = 32
    mixed_requests: int = 16
    longest: int = 200


QUICK = Effort(repeats=1, first_tokens=256, decode_tokens=16, batch_tokens=8, mixed_requests=8, longest=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something that each side is measured on. legs: requests sent at once, each leg timed. figure: computed from the
    legs' seconds."""

    name: str
    unit: str
    legs: Sequence[Sequence[Ask]]
    figure: Callable[[Sequence[float]], float]


def workloads(effort: Effort) -> list[Workload]:
    """The workloads of the table. A decode rate is the rate after first tokens, measured by two legs, one of which ends
    with the first token."""
    rng, more = np.random.default_rng(0), effort.decode_tokens

    def asks(count: int, num_prompt: int, num_output: int) -> list[Ask]:
        return [ask(rng, num_prompt=num_prompt, num_output=num_output) for _ in range(count)]

    several = mixed(rng, count=effort.mixed_requests, shortest=min(20, effort.longest), longest=effort.longest)
    num_output = sum(each.num_output for each in several)
    return [
        Workload(
            name=f"first token of {effort.first_tokens}",
            unit="ms",
            legs=[asks(1, effort.first_tokens, 1)],
            figure=lambda seconds: 1e3 * seconds[0],
        ),
        Workload(
            name="batch 1",
            unit="ms/token",
            legs=[asks(1, 96, more + 1), asks(1, 96, 1)],
            figure=lambda seconds: 1e3 * (seconds[0] - seconds[1]) / more,
        ),
        *(
            Workload(
                name=f"batch {batch}",
                unit="tok/s",
                legs=[asks(batch, 48, effort.batch_tokens), asks(batch, 48, 1)],
                figure=partial(_rate, batch * (effort.batch_tokens - 1)),
            )
            for batch in (8, 32)
        ),
        Workload(
            name=f"mixed, {effort.mixed_requests} requests",
            unit="output tok/s",
            legs=[several],
            figure=lambda seconds: num_output / seconds[0],
        ),
    ]


def _rate(num_tokens: int, seconds: Sequence[float]) -> float:
    return num_tokens / (seconds[0] - seconds[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A side and what it is compared with. rival_of: the name of our side with weights of the same size; "" for our
    own."""

    side: Side
    rival_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One workload. seconds: by side, for each leg those of every turn. figures: from the least seconds of each leg,
    which other work on the machine disturbed least. ratios: how many times better ours is, by rival."""

    workload: str
    unit: str
    seconds: dict[str, list[list[float]]]
    figures: dict[str, float]
    ratios: dict[str, float]


def measure(
    entries: Sequence[Entry], wanted: Sequence[Workload], repeats: int, tell: Callable[[str], None]
) -> list[Line]:
    """Measure every side once per turn, on the same requests; a different side begins each time."""
    seconds: dict[str, dict[str, list[list[float]]]] = {
        each.name: {entry.side.name: [[] for _ in each.legs] for entry in entries} for each in wanted
    }
    for turn in range(repeats):
        for each in wanted:
            for entry in entries if turn % 2 == 0 else reversed(entries):
                seen = [entry.side.serve(leg) for leg in each.legs]
                for leg, value in zip(seconds[each.name][entry.side.name], seen, strict=True):
                    leg.append(value)
                tell(f"turn {turn + 1}: {each.name}, {entry.side.name}: {each.figure(seen):.1f} {each.unit}")
    return [_line(each, seconds[each.name], entries) for each in wanted]


def _line(workload: Workload, seconds: dict[str, list[list[float]]], entries: Sequence[Entry]) -> Line:
    figures = {name: workload.figure([min(leg) for leg in legs]) for name, legs in seconds.items()}
    is_time = workload.unit.startswith("ms")
    ratios = {}
    for entry in entries:
        if entry.rival_of in figures:
            ours, theirs = figures[entry.rival_of], figures[entry.side.name]
            ratios[entry.side.name] = theirs / ours if is_time else ours / theirs
    return Line(workload=workload.name, unit=workload.unit, seconds=seconds, figures=figures, ratios=ratios)


def our_side(shape: Shape, weights: WeightFormat, clock: Clock) -> LocalEngine:
    """The whole worker without its network. Raises FormatUnavailable."""
    model = CausalLM.random(shape.config, seed=0, dtype=torch.bfloat16)
    model.pack_weights(weights)
    engine = LocalEngine(model, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, clock=clock)
    engine.name = f"octavo, {weights.value} weights"
    return engine


def all_entries(shape: Shape, threads: int, clock: str, tell: Callable[[str], None]) -> list[Entry]:
    """Every side that is available here; for each of the others a sentence is printed."""
    entries, ours = [], dict[WeightFormat, str]()
    for weights in (WeightFormat.BF16, WeightFormat.INT8):
        try:
            engine = our_side(shape, weights, CLOCKS[clock])
        except FormatUnavailable as error:
            tell(f"octavo, {weights.value} weights, is left out: {error}")
            continue
        entries.append(Entry(side=engine))
        ours[weights] = engine.name
    plain, rounded = ours.get(WeightFormat.BF16, "-"), ours.get(WeightFormat.INT8, "-")
    theirs = TransformersPadded(make_transformers(shape.config, torch.bfloat16), clock=CLOCKS[clock])
    theirs.name = "transformers, bf16 weights"
    entries.append(Entry(side=theirs, rival_of=plain))
    missing = dict[str, None]()  # a set that keeps order: each reason once
    for start in (openvino, llama):
        for weights_name, rival in (("f16", plain), ("q8_0", rounded)):
            try:
                entries.append(Entry(side=start(shape, weights_name, threads, clock), rival_of=rival))
            except PeerMissing as error:
                missing[str(error)] = None
    for why in missing:
        tell(why)
    return entries


def warm(entries: Sequence[Entry], asks: Sequence[Ask], tell: Callable[[str], None]) -> list[Entry]:
    """The entries that answer, each warmed up by one round of requests. A peer that fails is left out, and a sentence
    says so: not all of them work with fewer instructions."""
    ready = []
    for entry in entries:
        try:
            entry.side.serve(asks)
        except (RuntimeError, OSError) as error:
            if not isinstance(entry.side, PeerSide):
                raise
            tell(f"{entry.side.name} is left out: {error}")
        else:
            ready.append(entry)
    return ready


def show(lines: Sequence[Line], machine: Machine, limits: Limits | None, console: Console) -> None:
    """Print the CPU's class and limits, then the table."""
    console.print(f"class of this CPU, as far as it is used: {cpu_isa().word}")
    if limits is not None:
        huge = "no huge pages here" if limits.huge_gb_s is None else f"{limits.huge_gb_s:.1f} GB/s from huge pages"
        products = ", ".join(f"{name} {value:,.0f}" for name, value in limits.products.items())
        console.print(f"reads {limits.read_gb_s:.1f} GB/s, {huge}; products, GFLOP/s: {products}")
    table = Table(title="Qwen2.5-0.5B shape, random weights")
    for heading in ("workload", "side", "figure", "octavo is better by"):
        table.add_column(heading)
    for line in lines:
        for index, (side, figure) in enumerate(line.figures.items()):
            ratio = f"{line.ratios[side]:.2f}x" if side in line.ratios else ""
            table.add_row("" if index else line.workload, side, f"{figure:.1f} {line.unit}", ratio)
        table.add_section()
    console.print(table)
    console.print(machine.line())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. The exit code is 0 whoever is faster: a benchmark only reports."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short turn of each, about a minute")
    parser.add_argument("--repeats", type=int, help="turns of each side")
    parser.add_argument("--threads", type=int, help="of each side; default: one per core")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time; with --threads 1, on a busy machine"
    )
    parser.add_argument("--only", action="append", help="sides whose names begin like this; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("out/bench-cpu.json"), help="where to write the figures")
    options = parser.parse_args(arguments)
    prefer_huge_pages()
    if options.threads:
        torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else Effort()
    console = Console(width=None if sys.stdout.isatty() else 140)
    machine, start_s = this_machine(), time.perf_counter()
    limits = measure_limits(CLOCKS[options.clock])
    entries = all_entries(PUBLISHED["0.5B"], torch.get_num_threads(), options.clock, console.log)
    if options.only:
        entries = [each for each in entries if each.side.name.startswith(tuple(options.only))]
    try:
        wanted = workloads(effort)
        ready = warm(entries, wanted[0].legs[0], console.log)
        lines = measure(ready, wanted, options.repeats or effort.repeats, console.log)
    finally:
        for entry in entries:
            if isinstance(entry.side, PeerSide):
                entry.side.close()
    show(lines, machine, limits, console)
    console.print(f"clock: {options.clock}")
    seen = {"machine": machine.as_dict(), "class": cpu_isa().word, "clock": options.clock, "limits": asdict(limits)}
    elapsed_s = time.perf_counter() - start_s
    write_json(options.json, seen | {"lines": [asdict(line) for line in lines], "elapsed_s": elapsed_s})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
