"""Gate, up and their activation of many tokens: by way of memory and in one product, inside recorded steps of prompts.

    python -m bench.gpu_gate_up [--shape 0.5B 1.5B 3B 7B 14B] [--tiles]

Each line ends as it began: the difference between its two figures of one way is the noise. --tiles: other tiles too.
Prints milliseconds, writes nothing.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from bench.gpu.device import need_cuda
from bench.gpu.steps import Bench, prefill_inputs
from bench.shapes import PUBLISHED
from octavo.model.gpu import layers
from octavo.model.gpu.autotune import time_graph
from octavo.model.kernels.precompile import compiling
from octavo.model.kernels.products.gate_up import TILES, GateUpTiles, gate_up_product

PROMPTS = [(1, 512), (1, 768), (1, 1024), (1, 1536), (1, 2048), (2, 2048), (4, 2048), (14, 564), (1, 8192)]
OTHER_TILES: dict[str, GateUpTiles | None] = {
    "group of 8": replace(TILES, group=8),
    "of 32": replace(TILES, group=32),
    "4 stages": replace(TILES, stages=4),
}
MEMORY, ONE = "by memory", "in one"


@contextmanager
def going(tiles: GateUpTiles | None) -> Iterator[None]:
    """Steps go this way whatever their tokens; None: by memory."""
    product = partial(gate_up_product, tiles=tiles or TILES)
    with (
        mock.patch.object(layers, "is_faster", return_value=tiles is not None),
        mock.patch.object(layers, "gate_up_product", product),
    ):
        yield


def measure(shape: str, ways: dict[str, GateUpTiles | None]) -> None:
    """A line for each number of prompts."""
    bench = Bench(shape, pool_tokens=60_000, num_rows=32)
    with compiling(lambda done, total: None):
        for tiles in ways.values():
            with going(tiles):
                bench.mixed.run(prefill_inputs(bench, 2, 512))
    for prompts, length in PROMPTS:
        inputs, line = prefill_inputs(bench, prompts, length), []
        for name in (*ways, MEMORY):
            with going(ways[name]):
                line.append(f"{name} {time_graph(partial(bench.mixed.run, inputs), steps=3):.3f}")
        print(f"{shape} {prompts} x {length}  {' | '.join(line)}", flush=True)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, nargs="+", default=["0.5B"])
    parser.add_argument("--tiles", action="store_true")
    arguments = parser.parse_args()
    need_cuda()
    for shape in arguments.shape:
        measure(shape, {MEMORY: None, ONE: TILES} | (OTHER_TILES if arguments.tiles else {}))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
