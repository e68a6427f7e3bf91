"""Quantised weights and caches on a GPU: products one by one against cuBLAS in bf16 (what FEW_TOKENS and QuantTiles
rest on), and whole steps.

    python -m bench.gpu_quant [tiles] [tokens] [steps]

Random weights of 7B's and 0.5B's shapes, several copies in turn so that none is in the cache. Microseconds, median of
replays of a CUDA graph; the bf16 floor is 2 bytes a weight at 3 TB/s. Prints tables, writes nothing.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton

from bench.gpu.device import copy_rate, free_memory, need_cuda
from bench.gpu.steps import Bench, time_decode, time_prefill
from octavo.model.gpu.autotune import time_graph
from octavo.model.gpu.quant_products import QuantProducts
from octavo.model.kernels.products.quantized import QuantizedWeight, QuantScratch, QuantTiles, quant_product
from octavo.model.quantization.rounding import FP8, Fp8Weight, round_to_groups

SHAPES = {"7B qkv": (4608, 3584), "7B down": (3584, 18944), "0.5B gate_up": (9728, 896), "0.5B o": (896, 896)}
TILES = [
    QuantTiles(outputs=outputs, stages=stages, programs=programs)
    for outputs, stages, programs in (
        (32, 4, 264), (32, 4, 528), (64, 4, 132), (64, 4, 264), (64, 4, 528), (64, 6, 264), (128, 3, 132),
        (128, 4, 264),
    )
]  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 2048)
COLD_BYTES = 160e6
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


def quantized(kind: str, O: int, I: int) -> QuantizedWeight:
    """Random weights of a kind."""
    weight = torch.randn(O, I, device="cuda", dtype=torch.bfloat16) * I**-0.5
    if kind == "fp8":
        return Fp8Weight.quantize(weight)
    return round_to_groups(weight, bits=int(kind[-1]), group_size=128)


def copies(kind: str, O: int, I: int) -> list[QuantizedWeight]:
    """As many as the cache does not hold."""
    first = quantized(kind, O, I)
    return [first] + [quantized(kind, O, I) for _ in range(int(COLD_BYTES // first.num_bytes))]


def microseconds(run: Callable[[Any], None], weights: Sequence[Any]) -> float:
    """Of `run` with one of the weights, all of them in one graph."""

    def run_all() -> None:
        for weight in weights:
            run(weight)

    return time_graph(run_all, steps=2) * 1e3 / len(weights)


class Product:
    """Tokens and room for one product; every method takes a weight."""

    def __init__(self, T: int, O: int, I: int) -> None:
        self.x_TI, self.out_TO = (torch.randn(T, n, device="cuda", dtype=torch.bfloat16) for n in (I, O))
        self.scratch = QuantScratch.allocate(max_outputs=O, max_tokens=256, device="cuda")
        self.many = QuantProducts(self.scratch, torch.empty(O * I, dtype=torch.bfloat16, device="cuda"), few_tokens=0)
        self.tiles: QuantTiles | None = None

    def plain(self, weight: torch.Tensor) -> None:
        """cuBLAS."""
        torch.mm(self.x_TI, weight.T, out=self.out_TO)

    def in_registers(self, weight: QuantizedWeight) -> None:
        """Our kernel."""
        quant_product(self.x_TI, weight, self.out_TO, self.scratch, tiles=self.tiles)

    def unpacked(self, weight: QuantizedWeight) -> None:
        """By way of a plain matrix; e4m3 by e4m3."""
        self.many.multiply(self.x_TI, weight, self.out_TO)


def sweep_tiles() -> None:
    """Every cut of a few products."""
    for name, (O, I) in SHAPES.items():
        for kind in ("int4", "fp8"):
            weights = copies(kind, O, I)
            for T in (1, 64):
                product, cells = Product(T, O, I), []
                for tiles in TILES:
                    product.tiles = replace(tiles, tokens=max(16, T))
                    try:
                        time = microseconds(product.in_registers, weights)
                    except triton.runtime.errors.OutOfResources:
                        time = float("nan")
                    cells.append(f"{tiles.outputs}/{tiles.stages}/{tiles.programs} {time:.1f}")
                print(f"{name} {kind} T={T}: " + "  ".join(cells), flush=True)


def sweep_tokens() -> None:
    """Every way by the number of tokens."""
    for name, (O, I) in SHAPES.items():
        count = int(COLD_BYTES // (2 * O * I)) + 1
        plain = [torch.randn(O, I, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        print(f"{name}: floor of bf16 {2 * O * I / 3e6:.1f}")
        sets = {kind: copies(kind, O, I) for kind in ("int4", "int8", "fp8")}
        for T in TOKENS:
            product = Product(T, O, I)
            cells = [f"bf16 {microseconds(product.plain, plain):.1f}"]
            for kind, weights in sets.items():
                if T <= 256:
                    cells.append(f"{kind} {microseconds(product.in_registers, weights):.1f}")
                if kind == "fp8" or T >= 64:
                    cells.append(f"{kind} for many {microseconds(product.unpacked, weights):.1f}")
            print(f"  T={T}: " + "  ".join(cells), flush=True)


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
    """Print the tables asked for, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["tiles", "tokens", "steps"])
    parser.add_argument("--shape", nargs="+", default=["0.5B", "7B"])
    arguments = parser.parse_args()
    need_cuda()
    what = arguments.what
    print(torch.cuda.get_device_name())
    if "tiles" in what:
        sweep_tiles()
    if "tokens" in what:
        sweep_tokens()
    for shape in arguments.shape if "steps" in what else ():
        time_steps(shape)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
