"""Octavo against transformers on this CPU, in one run: `python -m bench.cpu.compare [--quick] [--json FILE]`.

A model of Qwen2.5-0.5B's shape with random bf16 weights. The sides take turns, so that whatever else the machine does
hits both; medians are compared. "mixed" is 16 requests at once, prompts and outputs U[20, 200]; it is compared with
the faster of transformers' two ways. Prints a table, writes every turn to out/bench-cpu.json (--json).
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench import figures
from bench.cpu.local_engine import LocalEngine
from bench.cpu.transformers_sides import TransformersPadded, TransformersSequential, make_transformers
from bench.cpu.workloads import Ask, Clock, Figure, Side, decode_ms, mixed, output_rate, prefill_ms
from bench.machine import Machine, this_machine
from bench.shapes import PUBLISHED
from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig
from octavo.worker.loading.memory import prefer_huge_pages

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured. repeats: turns of each side. one_by_one_requests: of "mixed" for the side that answers one
    after the other, in a single turn: its rate does not depend on how many wait."""

    repeats: int = 3
    decode_tokens: int = 48
    prefill_tokens: int = 512
    mixed_requests: int = 16
    one_by_one_requests: int = 4
    longest: int = 200


QUICK = Effort(repeats=1, decode_tokens=16, mixed_requests=16, longest=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One workload. values: of every turn, by side, ours first. ratios: how many times better our median is than that
    of each other side. bar: what the smallest of them must be."""

    workload: str
    unit: str
    values: dict[str, list[float]]
    ratios: dict[str, float]
    bar: float


class Workload:
    """A figure and who is measured on it. sides: ours first."""

    def __init__(self, name: str, unit: str, figure: Figure, sides: Sequence[Side], *, bar: float) -> None:
        self.name, self.unit, self.figure, self.sides, self.bar = name, unit, figure, sides, bar
        self.values: dict[str, list[float]] = {side.name: [] for side in sides}

    def take_turns(self, turn: int, console: Console) -> None:
        """Every side once, on the same requests; who begins changes."""
        for side in self.sides if turn % 2 == 0 else reversed(self.sides):
            if isinstance(side, TransformersSequential) and len(self.sides) > 2 and turn > 0:
                continue
            value = self.figure(side, np.random.default_rng(turn))
            self.values[side.name].append(value)
            console.log(f"turn {turn + 1}: {self.name}, {side.name}: {value:.1f} {self.unit}")

    def line(self) -> Line:
        """Medians compared."""
        ours, *others = ((name, statistics.median(values)) for name, values in self.values.items())
        is_time = self.unit.startswith("ms")
        ratios = {name: value / ours[1] if is_time else ours[1] / value for name, value in others}
        return Line(workload=self.name, unit=self.unit, values=self.values, ratios=ratios, bar=self.bar)


def make_workloads(effort: Effort, ours: Side, theirs: Sequence[Side]) -> list[Workload]:
    """The three of the table. theirs: one by one, then padded."""
    alone = [ours, theirs[0]]
    return [
        Workload(
            "decode, batch 1",
            "ms/token",
            partial(decode_ms, num_prompt=128, num_output=effort.decode_tokens),
            alone,
            bar=1.0,
        ),
        Workload(
            f"prefill, {effort.prefill_tokens} tokens",
            "ms",
            partial(prefill_ms, num_prompt=effort.prefill_tokens),
            alone,
            bar=1.0,
        ),
        Workload(
            f"mixed, {effort.mixed_requests} requests",
            "output tok/s",
            lambda side, rng: output_rate(side, _mixed_asks(effort, side)),
            [ours, *theirs],
            bar=3.0,
        ),
    ]


def _mixed_asks(effort: Effort, side: Side) -> list[Ask]:
    """The same requests in every turn."""
    rng = np.random.default_rng(0)
    asks = mixed(rng, count=effort.mixed_requests, shortest=min(20, effort.longest), longest=effort.longest)
    return asks[: effort.one_by_one_requests] if isinstance(side, TransformersSequential) else asks


def measure(config: ModelConfig, effort: Effort, console: Console, *, clock: Clock) -> list[Line]:
    """Build both models and let the sides take turns."""
    max_model_len = max(effort.prefill_tokens, 128 + effort.decode_tokens, 2 * effort.longest) + 2
    console.log("making the models")
    model = CausalLM.random(config, seed=0, dtype=torch.bfloat16)
    model.pack_weights()
    theirs = make_transformers(config, torch.bfloat16)
    ours = LocalEngine(model, max_num_seqs=effort.mixed_requests, max_model_len=max_model_len, clock=clock)
    sides: list[Side] = [TransformersSequential(theirs, clock=clock), TransformersPadded(theirs, clock=clock)]
    prefill_ms(sides[0], np.random.default_rng(99), num_prompt=effort.prefill_tokens)  # theirs is warm, too
    workloads = make_workloads(effort, ours, sides)
    for turn in range(effort.repeats):
        for workload in workloads:
            workload.take_turns(turn, console)
    return [workload.line() for workload in workloads]


def show(lines: Sequence[Line], machine: Machine, console: Console) -> None:
    """The table: medians, with the spread of the turns."""
    table = Table(title="Qwen2.5-0.5B shape, random bf16 weights, CPU: medians (least to greatest)")
    for heading in ("workload", "side", "figure", "octavo is better by", "bar"):
        table.add_column(heading)
    for line in lines:
        for index, (side, values) in enumerate(line.values.items()):
            figure = f"{statistics.median(values):.1f} {line.unit} ({min(values):.1f} to {max(values):.1f})"
            ratio = f"{line.ratios[side]:.2f}x" if side in line.ratios else ""
            table.add_row("" if index else line.workload, side, figure, ratio, "" if index else f"{line.bar:g}x")
        table.add_section()
    console.print(table)
    console.print(machine.line())


def write_json(path: Path, lines: Sequence[Line], machine: Machine, clock: str, elapsed_s: float) -> None:
    """Everything that was seen."""
    seen = [asdict(line) for line in lines]
    figures.write_json(path, {"machine": machine.as_dict(), "clock": clock, "elapsed_s": elapsed_s, "lines": seen})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit 0 whether or not the bars are met: a benchmark reports."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short turn of each, about a minute")
    parser.add_argument("--repeats", type=int, help="turns of each side")
    parser.add_argument("--threads", type=int, help="of torch; default: one per core")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time; with --threads 1, on a busy machine"
    )
    parser.add_argument("--json", type=Path, default=Path("out/bench-cpu.json"), help="where to write the figures")
    options = parser.parse_args(arguments)
    prefer_huge_pages()
    if options.threads:
        torch.set_num_threads(options.threads)
    effort = QUICK if options.quick else Effort()
    if options.repeats:
        effort = Effort(**(asdict(effort) | {"repeats": options.repeats}))
    console, machine, start_s = Console(), this_machine(), time.perf_counter()
    lines = measure(PUBLISHED["0.5B"].config, effort, console, clock=CLOCKS[options.clock])
    show(lines, machine, console)
    console.print(f"clock: {options.clock}")
    write_json(options.json, lines, machine, options.clock, time.perf_counter() - start_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
