"""Tiles of attention: of the wide path's decodes, with how finely their work is cut, and of prompts."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from bench.gpu.steps import Bench, time_prefill
from bench.gpu.sweeps.step import ragged, take, time_step
from octavo.model.gpu.autotune import Wide
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.kernels.attention import prefill
from octavo.model.kernels.attention.decode import DecodeTiles, partial_buffers
from octavo.model.kernels.attention.decode_work import DecodeWork, WorkLimits

DECODE_TILES = [
    (DecodeTiles(tokens=tokens, warps=warps, stages=stages), programs)
    for tokens, warps, stages, programs in (
        (64, 4, 3, 396), (64, 4, 3, 528), (64, 4, 3, 792), (64, 4, 3, 1056), (64, 4, 5, 528), (64, 2, 3, 528),
        (32, 4, 3, 528), (32, 2, 3, 792), (128, 4, 3, 396), (64, 8, 3, 264), (64, 8, 3, 396), (128, 8, 3, 264),
        (32, 4, 4, 396), (32, 4, 4, 528), (64, 4, 3, 264),
    )
]  # fmt: skip
PREFILL_TILES = [
    (128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3),
    (64, 64, 4, 4), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4),
]  # fmt: skip


def tiled(step: DecodeStep, tiles: DecodeTiles) -> Callable[[torch.Tensor], object]:
    """The step's plan with other tiles."""
    plan = type(step).plan
    return lambda rows_B: replace(plan(step, rows_B), tiles=tiles)


def sweep_attention(bench: Bench) -> None:
    """Tiles, and how finely the work is cut, of the wide path's attention."""
    step, config, K = bench.decode, bench.config, bench.config.num_key_value_heads
    cases: dict[str, tuple[int, int | tuple[int, ...]]] = {
        "256x560": (256, 560), "256 ragged": (256, ragged(256)), "64 ragged": (64, ragged(64)), "16x8192": (16, 8192),
        "32x256": (32, 256), "128x256": (128, 256),
    }  # fmt: skip
    for name, (batch, _) in cases.items():
        take(bench, batch, Wide())
        print(f"attention {name}: as it is {time_step(bench, *cases[name]):.4f}", flush=True)
    for tiles, programs in DECODE_TILES:
        limits = WorkLimits(target_items=programs // K)
        rows = len(step.token_B)
        work = DecodeWork.allocate(rows, K, "cuda", limits)
        partials = partial_buffers(rows, config.num_attention_heads, config.head_dim, "cuda", limits)
        with (
            mock.patch.object(step, "_work", work),
            mock.patch.object(step, "_partials", partials),
            mock.patch.object(step, "plan", tiled(step, tiles)),
        ):
            times = [time_step(bench, *case) for case in cases.values()]
        line = f"{tiles.tokens}x{tiles.warps}x{tiles.stages} programs {programs}"
        print(f"attention {line}: " + " ".join(f"{ms:.4f}" for ms in times), flush=True)


def sweep_prefill(bench: Bench) -> None:
    """Tiles of chunk attention."""
    print(f"prefill as it is {time_prefill(bench, 1, 8192):.3f} {time_prefill(bench, 8, 2048):.3f} ms", flush=True)
    for queries, keys, warps, stages in PREFILL_TILES:
        tiles = prefill.PrefillTiles(keys=keys, warps=warps, stages=stages)
        with (
            mock.patch.object(prefill.PrefillTiles, "of", lambda _, tiles=tiles: tiles),
            mock.patch.object(prefill, "QUERY_TILE", queries),
        ):
            times = time_prefill(bench, 1, 8192), time_prefill(bench, 8, 2048)
        print(f"prefill {queries}x{keys}x{warps}x{stages} {times[0]:.3f} {times[1]:.3f} ms", flush=True)
