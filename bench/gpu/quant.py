"""Quantised weights and caches on a GPU: whole steps, by how weights and cache are kept.

    python -m bench.gpu.quant [--shape 0.5B 7B]

Random weights of the published shapes. Each figure is a median of replays of a CUDA graph; in brackets the floor of
reading everything once. Prints tables, writes nothing.
"""

import argparse

import torch

from bench.gpu.device import copy_rate, free_memory, need_cuda
from bench.gpu.recorded_steps import Bench, time_decode, time_prefill
from octavo.model.quantization.rounding import FP8

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


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.5B", "7B"])
    arguments = parser.parse_args()
    need_cuda()
    print(torch.cuda.get_device_name())
    for shape in arguments.shape:
        time_steps(shape)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
