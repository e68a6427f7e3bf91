"""Octavo on a GPU without its network: scheduler, block manager, engine and CUDA runner in one process.

    python -m bench.gpu.engine [--shape 0.5B] [--seeds 0 1 2] [--json out/gpu_engine.json]

nano: 256 requests at once, prompts and outputs U[100,1024], ids U[0,10000], temperature 0.6, end tokens ignored; output
tokens per second; also with Qwen's own sampling: temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05. first
token: from the request in the inbox to its token in the outbox. prefill: 64 prompts of 2048 tokens, a token each.
decode: milliseconds per token of B greedy requests, (time for 257 tokens - time for 1) / 256 at prompt 128. host:
microseconds that the engine's thread works per steady decode step, everything but waiting for the device. The floor
(bench/gpu/floors.py) stands beside each figure. Random weights, bf16.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import copy_rate, free_memory, kernels_of, need_cuda
from bench.gpu.floors import Floors
from bench.gpu.runner import make_runner
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import QWENS_SAMPLING, decode_ms, first_token_ms, host_us, nano, nano_lengths, prefill
from bench.shapes import PUBLISHED
from octavo.blockmgr.ids import PrefixCache
from octavo.worker.config import GPU_BATCH_TOKENS
from octavo.worker.runners.cuda.runner import CudaRunner

WORKLOADS = ["nano", "sampling", "first", "prefill", "decode", "host"]
FIRST_LENGTHS = (16, 512, 2048, 8192, 30_000)
MODEL_LEN = 32_768
DECODE_BATCHES = (1, 8, 32, 128, 256)
HOST_BATCHES = (1, 64, 256)
WIDEST = 1024  # rows at once: more than the slots of other workloads
Figures = dict[str, float]


class Report:
    """found: all figures noted so far."""

    def __init__(self) -> None:
        self.found: dict[str, Figures] = {}

    def note(self, name: str, value: float | Figures, *, floor_ms: float | None = None) -> None:
        """Keep and print a figure. value: milliseconds, or figures, which include `seconds` if there is a floor."""
        figures = dict(value) if isinstance(value, dict) else {"ms": value}
        if floor_ms is not None:
            ms = figures["ms"] if "ms" in figures else 1e3 * figures["seconds"]
            figures |= {"floor_ms": floor_ms, "percent_of_floor": 100 * floor_ms / ms}
        self.found[name] = figures
        cells = [f"{name} {value:.{3 if value < 100 else 0}f}" for name, value in figures.items()]
        print(f"  {name:24s}", "  ".join(cells), flush=True)


def measure(arguments: argparse.Namespace, max_batch_tokens: int, bytes_per_s: float) -> dict[str, Figures]:
    """All figures of one token budget; the widest batch gets a runner of its own."""
    make = partial(
        make_runner, arguments.shape, max_batch_tokens=max_batch_tokens, max_model_len=arguments.max_model_len
    )
    report = Report()
    floors = Floors(config=PUBLISHED[arguments.shape].config, bytes_per_s=bytes_per_s)
    measure_runner(make(max_slots=256), report, floors, arguments)
    if "host" in arguments.only:
        free_memory()  # the runner's pool has most of it
        widest = GpuEngine(make(max_slots=WIDEST), prefix_cache=PrefixCache.OFF)
        report.note(f"host at {WIDEST}", host_us(widest, WIDEST))
    return report.found


def measure_runner(runner: CudaRunner, report: Report, floors: Floors, arguments: argparse.Namespace) -> None:
    """Measure what was asked for, one after the other, with one runner."""
    only = arguments.only
    if "nano" in only:
        measure_nano(runner, report, floors, arguments.seeds)
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    if "sampling" in only:
        report.note("nano seed 0, Qwen's sampling", nano(engine, 0, QWENS_SAMPLING), floor_ms=nano_floor_ms(floors, 0))
    if "first" in only:
        measure_first_tokens(engine, report, floors, arguments.max_model_len)
    if "prefill" in only:
        report.note("prefill 64 x 2048", prefill(engine, 64, 2048), floor_ms=floors.prefill_ms([2048] * 64))
    for batch in DECODE_BATCHES if "decode" in only else ():
        report.note(f"decode batch {batch}", decode_ms(engine, batch), floor_ms=floors.decode_ms(batch, 256))
    for batch in HOST_BATCHES if "host" in only else ():
        report.note(f"host at {batch}", host_us(engine, batch))
    if arguments.profile:
        profile(engine, 0)


def measure_nano(runner: CudaRunner, report: Report, floors: Floors, seeds: list[int]) -> None:
    """Measure every seed, and once more with the prefix cache, which finds nothing."""
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    nano(engine, 99)  # warm-up: libraries choose their kernels
    for seed in seeds:
        report.note(f"nano seed {seed}", nano(engine, seed), floor_ms=nano_floor_ms(floors, seed))
    engine = GpuEngine(runner, prefix_cache=PrefixCache.ON)
    report.note("nano seed 0, cache on", nano(engine, 0), floor_ms=nano_floor_ms(floors, 0))


def nano_floor_ms(floors: Floors, seed: int) -> float:
    """The floor for the requests of this seed."""
    return floors.serve_ms(nano_lengths(np.random.default_rng(seed)))


def measure_first_tokens(engine: GpuEngine, report: Report, floors: Floors, max_model_len: int) -> None:
    """Measure first tokens of prompts that fit."""
    for length in FIRST_LENGTHS:
        if length >= max_model_len:
            print(f"  first token of {length}: longer than --max-model-len", flush=True)
            continue
        ms = first_token_ms(engine, length)
        report.note(f"first token of {length}", ms, floor_ms=floors.prefill_ms([length]))


def profile(engine: GpuEngine, seed: int) -> None:
    """Print where the device's time goes in nano bench, by kernel."""
    kernels = kernels_of(partial(nano, engine, seed))
    total_us = sum(kernel.total_us for kernel in kernels)
    print(f"-- kernels of nano bench, {total_us / 1e3:.0f} ms of the device in all")
    for kernel in kernels[:16]:
        share = kernel.total_us / total_us
        print(f"  {kernel.total_us / 1e3:8.1f} ms {share:4.0%} {kernel.num_launches:7d} x  {kernel.name[:90]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-batch-tokens", type=int, nargs="+", default=[GPU_BATCH_TOKENS])
    parser.add_argument("--max-model-len", type=int, default=MODEL_LEN)
    parser.add_argument("--only", nargs="+", default=WORKLOADS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Print and write everything."""
    arguments = parse()
    need_cuda()
    rate = copy_rate()
    torch.cuda.empty_cache()
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(), "shape": arguments.shape, "copy_bytes_per_s": rate,
    }  # fmt: skip
    for max_batch_tokens in arguments.max_batch_tokens:
        report[f"max_batch_tokens {max_batch_tokens}"] = measure(arguments, max_batch_tokens, rate)
        free_memory()
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
