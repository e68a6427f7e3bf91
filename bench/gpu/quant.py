"""Quantised weights and caches on a GPU: whole steps, by how weights and cache are kept.

    python -m bench.gpu.quant [--shape 0.5B 7B] [--only steps nano] [--ways "fp8 weights and cache" …] [--turns 1]
    python -m bench.gpu.quant --only exactness [--model folio-chat] [--text bench/held_out.txt]

Random weights of the published shapes. steps: each figure is a median of replays of a CUDA graph; in brackets the floor
of reading everything once. nano: as in bench/gpu/engine.py, with milliseconds per token of decodes and tokens per
second of prompts, by engines of every way that stand beside each other on the device and take turns, bf16 first.

exactness: perplexity and first choices beside the same checkpoint in float32 on the CPU, of texts as in
bench/cpu/quant_error.py, whose emulation should find nearly the same. Each piece is a prompt, so that its products take
the way of many tokens; "by single tokens" feeds the first pieces through the kernels of decode steps. Prints tables,
writes nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.cpu.quant_error import PIECE_TOKENS, pieces, table
from bench.gpu.device import copy_rate, free_memory, need_cuda
from bench.gpu.models import WEIGHTS
from bench.gpu.recorded_steps import Bench, time_decode, time_prefill
from bench.gpu.runner import BLOCK_SIZE, make_runner
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import NANO_REQUESTS, decode_ms, first_token_ms, nano, prefill
from octavo.blockmgr.ids import PrefixCache
from octavo.model import KvPool, load_model, resolve_checkpoint
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_logits
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.prefill import list_tiles
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from octavo.model.verify.rounding_error import LogitSums, RoundingError
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
EXACTNESS_TOKENS = 16384
MEASURED = ("bf16", "fp8 weights", "fp8 cache", "fp8 weights and cache")
NANO_MODEL_LEN = 2560
NANO_BLOCKS = NANO_REQUESTS * 1152 // BLOCK_SIZE
"""More blocks than the workload's contexts need at any time, yet few enough that both ways' pools fit side by side."""


def time_steps(shape: str) -> None:
    """Time whole steps of decode and prefill; a line for each format of weights and cache."""
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
    """Time nano bench, decodes and prompts; a line for each way and turn."""
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
                nano(engine, 99, requests=64, longest=256)  # warm-up: libraries choose their kernels
            found = nano(engine, 0)
            cells = [f"nano {found['tokens_per_s']:.0f} tok/s"]
            cells += [
                f"{batch} rows {decode_ms(engine, batch, num_steps=DECODE_STEPS):.3f} ms" for batch in DECODE_BATCHES
            ]
            cells.append(f"first token of 2048 {first_token_ms(engine, 2048, times=5):.2f} ms")
            cells.append(f"prefill {prefill(engine, 16, 2048)['tokens_per_s']:.0f} tok/s")
            print(f"{shape} {name}, turn {turn + 1}: " + "  ".join(cells), flush=True)


class Steps:
    """Steps of one row over a pool of its own, as a worker makes them."""

    def __init__(
        self, folder: Path, way: str, *, max_tokens: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        weights, kv_dtype = WAYS[way]
        self._device = device
        model = load_model(folder, dtype=dtype, device=device)
        if kv_dtype is FP8:
            fold_cache_scales(model)
        taken = GpuWeights.take(model, max_positions=max_tokens + BLOCK_SIZE, weight_format=WEIGHTS[weights])
        width = -(-max_tokens // BLOCK_SIZE)
        self._state = RowState(num_slots=1, table_width=width, scratch_block=width, device=torch.device(device))
        kv = KvPool(model.config, width + 1, BLOCK_SIZE, kv_dtype if kv_dtype is FP8 else dtype, device)
        self._decode = DecodeStep(taken, self._state, kv, max_batch=1, vocab_size=model.config.vocab_size)
        self._mixed = MixedStep(self._decode, max_tokens=max_tokens)
        self._state.table_RM[0] = torch.randperm(width, device=device).int()

    def logits_of_prompt(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of all tokens in one step, float32 [T, V] on the CPU."""
        T = len(ids)
        tokens_T = torch.arange(T, dtype=torch.int32, device=self._device)
        ids_T = torch.tensor(ids, dtype=torch.int32, device=self._device)
        tiles_W4 = torch.from_numpy(list_tiles([(0, 0, 0, T)])).to(self._device)
        none = tokens_T[:0]
        inputs = MixedInputs(
            num_decodes=0, ids_T=ids_T, row_T=torch.zeros_like(tokens_T), position_T=tokens_T, tiles_W4=tiles_W4,
            last_tiles_W4=tiles_W4, last_S=none, rows_S=none, ended_E=none, position_E=none,
        )  # fmt: skip
        self._mixed.forward(inputs)
        return self._decode.project(self._mixed.hidden(slice(0, T))).float().cpu()

    def logits_by_tokens(self, ids: Sequence[int]) -> torch.Tensor:
        """The same, with one decode step per token."""
        rows = []
        for position, token in enumerate(ids):
            self._state.position_R[0], self._state.last_token_R[0], self._decode.rows_B[0] = position, token, 0
            self._decode.run(1)
            rows.append(self._decode.logits_BV[:1].to("cpu", torch.float32, copy=True))
        return torch.cat(rows)


def measure_exactness(folder: Path, texts: Sequence[Sequence[int]]) -> dict[str, RoundingError]:
    """A row for each way; and one for the last way by single tokens, over only the first texts."""
    before, backend = load_model(folder, dtype=torch.float32), get_backend("sdpa")
    expected = [paged_logits(before, backend, ids, [len(ids)]) for ids in texts]
    rows: dict[str, RoundingError] = {}
    for way in MEASURED:
        steps = Steps(folder, way, max_tokens=max(map(len, texts)))
        sums = LogitSums()
        for ids, expected_TV in zip(texts, expected, strict=True):
            sums.add(steps.logits_of_prompt(ids), expected_TV, torch.tensor(ids))
        rows[way] = sums.error()
        if way in ("bf16", MEASURED[-1]):
            sums = LogitSums()
            for ids, expected_TV in zip(texts[:4], expected, strict=False):
                sums.add(steps.logits_by_tokens(ids), expected_TV, torch.tensor(ids))
            rows[f"{way}, by single tokens"] = sums.error()
    return rows


def tell_exactness(model: str, files: list[Path]) -> None:
    """Print the table of exactness."""
    folder = resolve_checkpoint(model)
    texts = pieces(folder, files, EXACTNESS_TOKENS)
    rows = measure_exactness(folder, texts)
    print(f"{model}, {sum(map(len, texts))} tokens in pieces of at most {PIECE_TOKENS}\n\n{table(rows)}", flush=True)


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.5B", "7B"])
    parser.add_argument("--only", nargs="+", choices=("steps", "nano", "exactness"), default=["steps", "nano"])
    parser.add_argument("--model", default="folio-chat", help="of exactness")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="of exactness")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["fp8 weights and cache"], help="of nano, beside bf16"
    )
    parser.add_argument("--turns", type=int, default=1, help="of nano")
    arguments = parser.parse_args()
    need_cuda()
    print(torch.cuda.get_device_name())
    if "exactness" in arguments.only:
        tell_exactness(arguments.model, arguments.text)
    for shape in arguments.shape if {"steps", "nano"} & set(arguments.only) else ():
        if "steps" in arguments.only:
            time_steps(shape)
        if "nano" in arguments.only:
            time_engines(shape, arguments.ways, arguments.turns)
        free_memory()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
