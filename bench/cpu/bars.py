"""Octavo's own figures beside the bars for CPUs: `python -m bench.cpu.bars [--weights int8] [--only NAME]`.

A model of Qwen2.5-0.5B's shape with random weights, greedy, prefix cache off, through engine, scheduler, block manager
and runner. Each figure is the best of a few short turns: other work on the machine disturbs it least. The bars are
what the best of others (OpenVINO, vLLM, llama.cpp) reach on two cores with AMX; this command runs anywhere.
Set OMP_WAIT_POLICY=passive, as the worker does: torch's own threads then sleep while they wait. The kernels' threads
(model/cpu/team.c) find out by themselves whether others use the machine. Prints a table, writes every turn to
out/bench-cpu-bars.json (--json).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.cpu.local_engine import LocalEngine
from bench.cpu.workloads import CLOCKS, Clock, ask, mixed, output_rate, prefill_ms
from bench.figures import write_json
from bench.machine import this_machine
from bench.shapes import PUBLISHED
from octavo.model.causal_lm import CausalLM
from octavo.model.layers.linear import WeightFormat
from octavo.worker.loading.memory import prefer_huge_pages

NUM_PROMPT = 128
MAX_MODEL_LEN = 516


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure. bar: by weight format; a format without one is reported only. best: of several turns."""

    name: str
    unit: str
    bars: dict[str, float]
    best: Callable[[Sequence[float]], float]
    measure: Callable[[LocalEngine], float]


def decode_rate(engine: LocalEngine, *, batch: int, num_prompt: int, num_steps: int) -> float:
    """Output tokens per second without prefill. Use short prompts and many steps: it is a difference of two times."""
    rng = np.random.default_rng(batch)
    many = [ask(rng, num_prompt=num_prompt, num_output=num_steps + 1) for _ in range(batch)]
    one = [ask(rng, num_prompt=num_prompt, num_output=1) for _ in range(batch)]
    return batch * num_steps / (engine.serve(many) - engine.serve(one))


def whole_rate(engine: LocalEngine, *, batch: int, num_output: int) -> float:
    """Output tokens per second, prefill included."""
    rng = np.random.default_rng(batch)
    return output_rate(engine, [ask(rng, num_prompt=NUM_PROMPT, num_output=num_output) for _ in range(batch)])


BARS = (
    Bar(
        name="first",
        unit="ms to the first token of 512",
        bars={"bf16": 219},
        best=min,
        measure=lambda engine: prefill_ms(engine, np.random.default_rng(0), num_prompt=512),
    ),
    Bar(
        name="batch-1",
        unit="ms a token",
        bars={"bf16": 41, "int8": 22},
        best=min,
        measure=lambda engine: 1e3 / decode_rate(engine, batch=1, num_prompt=96, num_steps=64),
    ),
    Bar(
        name="batch-8",
        unit="tok/s",
        bars={"bf16": 180},
        best=max,
        measure=partial(decode_rate, batch=8, num_prompt=48, num_steps=31),
    ),
    Bar(
        name="batch-32",
        unit="tok/s",
        bars={"bf16": 494},
        best=max,
        measure=partial(decode_rate, batch=32, num_prompt=48, num_steps=31),
    ),
    Bar(
        name="batch-32-whole",
        unit="tok/s with prefill (128 in, 128 out)",
        bars={"bf16": 346},
        best=max,
        measure=partial(whole_rate, batch=32, num_output=128),
    ),
    Bar(
        name="mixed",
        unit="output tok/s",
        bars={"bf16": 179},
        best=max,
        measure=lambda engine: output_rate(engine, mixed(np.random.default_rng(0), count=16, shortest=20, longest=200)),
    ),
)


def make_engine(weights: WeightFormat, clock: Clock) -> LocalEngine:
    """The whole worker without its network."""
    model = CausalLM.random(PUBLISHED["0.5B"].config, seed=0, dtype=torch.bfloat16)
    model.pack_weights(weights)
    return LocalEngine(model, max_num_seqs=32, max_model_len=MAX_MODEL_LEN, clock=clock)


def measure(engine: LocalEngine, bars: Sequence[Bar], turns: int, console: Console) -> dict[str, list[float]]:
    """Measure all bars once per turn."""
    values: dict[str, list[float]] = {bar.name: [] for bar in bars}
    for turn in range(turns):
        for bar in bars:
            values[bar.name].append(bar.measure(engine))
            console.log(f"turn {turn + 1}: {bar.name}: {values[bar.name][-1]:.1f} {bar.unit}")
    return values


def show(values: dict[str, list[float]], weights: str, console: Console) -> None:
    """Print the best of each beside its bar."""
    table = Table("figure", "best", "all", "bar", "met", title=f"{weights} weights")
    for bar in BARS:
        if seen := values.get(bar.name):
            best, wanted = bar.best(seen), bar.bars.get(weights)
            met = "" if wanted is None else "yes" if bar.best((best, wanted)) == best else "no"
            every = ", ".join(f"{value:.1f}" for value in seen)
            table.add_row(f"{bar.name}, {bar.unit}", f"{best:.1f}", every, f"{wanted or ''}", met)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. The exit code is 0 whether or not the bars are met: a benchmark only reports."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.bars", description=__doc__)
    parser.add_argument("--weights", choices=("bf16", "int8", "int8-weights"), default="bf16")
    parser.add_argument("--only", action="append", choices=[bar.name for bar in BARS], help="may be repeated")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; default: one per core")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1, on a busy machine")
    parser.add_argument("--json", type=Path, default=Path("out/bench-cpu-bars.json"))
    options = parser.parse_args(arguments)
    prefer_huge_pages()
    if options.threads:
        torch.set_num_threads(options.threads)
    console, machine, start_s = Console(), this_machine(), time.perf_counter()
    engine = make_engine(WeightFormat(options.weights), CLOCKS[options.clock])
    bars = [bar for bar in BARS if not options.only or bar.name in options.only]
    values = measure(engine, bars, options.turns, console)
    show(values, options.weights, console)
    console.print(machine.line(), f"clock: {options.clock}, weights: {options.weights}")
    seen = {"machine": machine.as_dict(), "options": {"clock": options.clock, "weights": options.weights}}
    elapsed_s = time.perf_counter() - start_s
    write_json(options.json, seen | {"values": values, "elapsed_s": elapsed_s})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
