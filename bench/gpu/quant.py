"""Quantised weights and caches on a GPU: whole steps, by how weights and cache are kept.

    python -m bench.gpu.quant [--shape 0.5B 7B] [--only steps nano] [--ways "fp8 weights and cache" …] [--turns 1]

Random weights of the published shapes. steps: each figure is a median of replays of a CUDA graph; in brackets the floor
of reading everything once. nano: as in bench/gpu/engine.py, with milliseconds per token of decodes and tokens per
second of prompts, by engines of every way that stand beside each other on the device and take turns, bf16 first.
Prints tables, writes nothing.
"""

import argparse

import torch

from bench.gpu.device import copy_rate, free_memory, need_cuda
from bench.gpu.recorded_steps import Bench, time_decode, time_prefill
from bench.gpu.runner import BLOCK_SIZE, make_runner
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import NANO_REQUESTS, decode_ms, first_token_ms, nano, prefill
from octavo.blockmgr.ids import PrefixCache
from octavo.model.quantization.rounding import FP8
from octavo.worker.config import GPU_BATCH_TOKENS
from octavo.worker.runners.cuda.graph_runner import Autotune

WAYS = {
    "bf16": ("bf16", torch.bfloat16),
    "fp8 weights": ("fp8", torch.bfloat16),
    "int8 weights": ("int8", torch.bfloat16),
    "int4 weights": ("int4", torch.bfloat16),
    "fp8 cache": ("bf16", FP8),
    "fp8 weights and cache": ("fp8", FP8),
}
STEPS = [(1, 256), (4, 256), (8, 256), (32, 256), (128, 256), (256, 560), (1, 8192), (16, 8192)]
PROMPTS = [(1, 512), (8, 2048)]
DECODE_BATCHES, DECODE_STEPS = (1, 32, 128, 256), 64
NANO_MODEL_LEN = 2560
NANO_BLOCKS = NANO_REQUESTS * 1152 // BLOCK_SIZE
"""More than the workload's contexts have at any time, so that both ways' pools fit beside each other."""


def time_steps(shape: str) -> None:
    """Decode and prefill of whole steps, a line for each way to keep weights and cache."""
    rate = copy_rate()
    for name, (weights, kv_dtype) in WAYS.items():
        bench = Bench(shape, weights=weights, kv_dtype=kv_dtype)
        cells = []
        for batch, context in STEPS:
            ms, floor = time_decode(bench, batch, context, 0.0), bench.floor_ms(batch, context, rate)
            cells.append(f"{batch}x{context} {ms:.3f} ({floor:.2f})")
        for prompts, length in PROMPTS:
            ms = time_prefill(bench, prompts, length)
            cells.append(f"prefill {prompts}x{length} {prompts * length / ms:.0f}k tok/s")
        print(f"{shape} {name}, weights {bench.weight_bytes / 1e9:.2f} GB: " + "  ".join(cells), flush=True)
        del bench
        free_memory()


def time_engines(shape: str, ways: list[str], turns: int) -> None:
    """Nano bench, decodes and prompts, a line for each way and turn."""
    runners = {}
    for name in ("bf16", *(way for way in ways if way != "bf16")):
        weights, kv_dtype = WAYS[name]
        print(f"{shape} {name}: ", end="", flush=True)
        runners[name] = make_runner(
            shape, max_slots=NANO_REQUESTS, max_batch_tokens=GPU_BATCH_TOKENS, max_model_len=NANO_MODEL_LEN,
            autotune=Autotune.CACHED, weights=weights, kv_dtype=kv_dtype, num_blocks=NANO_BLOCKS,
        )  # fmt: skip
    for turn in range(turns):
        for name, runner in runners.items():
            engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
            if turn == 0:
                nano(engine, 99, requests=64, longest=256)  # libraries choose their kernels once
            found = nano(engine, 0)
            cells = [f"nano {found['tokens_per_s']:.0f} tok/s"]
            cells += [
                f"{batch} rows {decode_ms(engine, batch, num_steps=DECODE_STEPS):.3f} ms" for batch in DECODE_BATCHES
            ]
            cells.append(f"first token of 2048 {first_token_ms(engine, 2048, times=5):.2f} ms")
            cells.append(f"prefill {prefill(engine, 16, 2048)['tokens_per_s']:.0f} tok/s")
            print(f"{shape} {name}, turn {turn + 1}: " + "  ".join(cells), flush=True)


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.5B", "7B"])
    parser.add_argument("--only", nargs="+", choices=("steps", "nano"), default=["steps", "nano"])
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["fp8 weights and cache"], help="of nano, beside bf16"
    )
    parser.add_argument("--turns", type=int, default=1, help="of nano")
    arguments = parser.parse_args()
    need_cuda()
    print(torch.cuda.get_device_name())
    for shape in arguments.shape:
        if "steps" in arguments.only:
            time_steps(shape)
        if "nano" in arguments.only:
            time_engines(shape, arguments.ways, arguments.turns)
        free_memory()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
