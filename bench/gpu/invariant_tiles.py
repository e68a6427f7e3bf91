"""Tiles of the products of deterministic mode: how long each takes, and whether all give the same bits.

Legend: T tokens · O outputs · I inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.shapes import PUBLISHED
from octavo.model.config import Qwen2Config
from octavo.model.gpu.autotune import time_graph
from octavo.model.kernels.products.invariant import ProductTiles, invariant_product, part_elements

TILES = [
    ProductTiles(outputs=outputs, tokens=tokens, inputs=inputs, warps=warps, stages=stages)
    for outputs, tokens, inputs, warps, stages in (
        (64, 64, 64, 4, 4), (64, 16, 64, 4, 4), (64, 32, 64, 4, 4), (64, 16, 128, 4, 3), (64, 32, 128, 4, 3),
        (64, 64, 128, 4, 3), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    )
]  # fmt: skip
TOKENS, HEAD_TOKENS = (1, 16, 64, 256, 4096), (1, 16, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """is_same: the bits are those of the first tile."""

    us: float
    is_same: bool


def compare_tiles(shape: str) -> dict[str, object]:
    """Every tile of each product of a layer and of the head, by product and tokens."""
    found: dict[str, object] = {}
    for name, (O, I) in matrices_of(PUBLISHED[shape].config).items():
        weight_OI = torch.randn(O, I, device="cuda").bfloat16()
        for T in HEAD_TOKENS if name == "head" else TOKENS:
            x_TI = (torch.randn(T, I, device="cuda") * torch.rand(T, 1, device="cuda").exp2()).bfloat16()
            line = time_tiles(x_TI, weight_OI)
            library_us = time_us(partial(torch.mm, x_TI, weight_OI.T))
            show(name, T, line, library_us)
            figures = {label: (timed.us, timed.is_same) for label, timed in line.items()}
            found[f"{name} {T}"] = figures | {"cuBLAS": (library_us, True)}
    return found


def matrices_of(config: Qwen2Config) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each, as a step multiplies them."""
    D, I, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K = config.num_attention_heads, config.num_key_value_heads
    return {
        "qkv": ((N + 2 * K) * H, D), "o": (D, N * H), "gate_up": (2 * I, D), "down": (D, I),
        "head": (config.vocab_size, D),
    }  # fmt: skip


def time_tiles(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> dict[str, Timed]:
    """By tile; for many tokens without those of few."""
    (T, I), O = x_TI.shape, len(weight_OI)
    part = torch.empty(max(1, part_elements(T, O, I)), device="cuda")
    first, line = None, {}
    for tiles in TILES:
        if T > 256 and tiles.tokens < 64:
            continue
        out_TO = torch.empty(T, O, dtype=torch.bfloat16, device="cuda")
        us = time_us(partial(invariant_product, x_TI, weight_OI, out_TO, part, tiles=tiles))
        first = out_TO if first is None else first
        label = f"{tiles.outputs}x{tiles.tokens}x{tiles.inputs}w{tiles.warps}s{tiles.stages}"
        line[label] = Timed(us=us, is_same=torch.equal(out_TO, first))
    return line


def show(name: str, num_tokens: int, line: dict[str, Timed], library_us: float) -> None:
    """The four fastest, and those with other bits."""
    best = sorted(line, key=lambda label: line[label].us)[:4]
    shown = "  ".join(f"{label} {line[label].us:.1f}" for label in best)
    differ = [label for label, timed in line.items() if not timed.is_same]
    print(f"{name:8s}{num_tokens:6d}  cuBLAS {library_us:8.1f} us  {shown}  other bits: {differ or 'none'}", flush=True)


def time_us(work: Callable[[], object]) -> float:
    """Median microseconds of a call, by a graph of ten."""

    def ten() -> None:
        for _ in range(10):
            work()

    return time_graph(ten) * 100
