"""Cuts of one row's products, varied one product at a time in the engine: what is faster than what a start takes.

    python -m bench.gpu.cuts [--shape 0.5B] [--rounds 2] [--json out/gpu_cuts.json]

How fast a cut is depends on all others of a layer, since it decides how many programs of the next kernels find room
beside it. So each cut that may be fast is tried in the whole step, in the engine, as milliseconds a token of one greedy
request; the fastest ones are timed again, and the best is kept for the next product's turn if it gains 0.5 %. Random
weights, bf16. Prints each turn, and at the end what would stand in `MEASURED` (model/gpu/small_batch_layers.py).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.gpu.runner import make_runner
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import decode_ms
from bench.shapes import PUBLISHED
from octavo.blockmgr.ids import PrefixCache
from octavo.model.config import ModelConfig
from octavo.model.gpu.autotune import SmallBatch
from octavo.model.gpu.small_batch_layers import LANES, cuts_of
from octavo.model.kernels.precompile import compiling
from octavo.model.kernels.small_batch.launch import Cut
from octavo.worker.runners.cuda.graph_runner import Autotune
from octavo.worker.runners.cuda.runner import CudaRunner

TURNS = ("output", "down", "qkv", "gate_up")
SIZES = (1, 2, 4, 8, 16)
"""Rows and warps."""
BLOCKS = (256, 512)
"""Elements, instead of the widest block; a row has at most MAX_TILES of them, which are held all at once."""
MAX_TILES = 12
LEAST_ELEMENTS, MOST_ELEMENTS = 24, 448
"""Of a thread: with fewer it waits more than it reads, more do not fit into its registers."""
NUM_STEPS, NUM_AGAIN, TIMES_AGAIN = 96, 4, 3
LEAST_GAIN = 0.005
Cuts = Mapping[str, Cut]


def options_of(config: ModelConfig) -> dict[str, list[Cut]]:
    """The cuts to try, by product."""
    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    # Elements of a row, and how many rows a program reads for one of its own: gate and up, or two halves of a head.
    rows_of = {"output": (A, 1), "down": (I, 1), "qkv": (D, 2), "gate_up": (D, 2)}
    return {name: _options(length, matrices) for name, (length, matrices) in rows_of.items()}


def _options(length: int, matrices: int) -> list[Cut]:
    widest = Cut(rows=1, warps=1).block_of(length)
    blocks = [None, *(block for block in BLOCKS if block < widest and -(-length // block) <= MAX_TILES)]
    return [
        Cut(rows=rows, warps=warps, block=block)
        for rows in SIZES
        for warps in SIZES
        for block in blocks
        if LEAST_ELEMENTS <= rows * matrices * length / (LANES * warps) <= MOST_ELEMENTS
    ]


def descend(
    start: Cuts,
    options: Mapping[str, Sequence[Cut]],
    ms_of: Callable[[Cuts], float],
    *,
    rounds: int,
    note: Callable[[str], None] = print,
) -> dict[str, Cut]:
    """The start with each product's best cut in turn, as often as there are rounds or until none gains. ms_of: the time
    with these cuts. note: called with a line for each turn."""
    now = dict(start)
    for number in range(rounds):
        before = dict(now)
        for name in TURNS:
            ms_by_cut = {cut: ms_of(now | {name: cut}) for cut in options[name]}
            best = sorted(ms_by_cut, key=ms_by_cut.__getitem__)[:NUM_AGAIN]
            again = {
                cut: min(ms_of(now | {name: cut}) for _ in range(TIMES_AGAIN))
                for cut in dict.fromkeys([now[name], *best])
            }
            fastest = min(again, key=again.__getitem__)
            told = ", ".join(f"{_text(cut)} {ms:.4f}" for cut, ms in again.items())
            note(f"round {number + 1}, {name}: {told} ms")
            if again[fastest] < (1 - LEAST_GAIN) * again[now[name]]:
                now[name] = fastest
        if now == before:
            break
    return now


def _text(cut: Cut) -> str:
    return f"{cut.rows}x{cut.warps}" + (f" in {cut.block}" if cut.block else "")


class CutTimer:
    """One row in an engine over this runner, whose decode step is recorded anew for each choice of cuts."""

    def __init__(self, runner: CudaRunner) -> None:
        self._graphs, self._engine = runner.graphs, GpuEngine(runner, prefix_cache=PrefixCache.OFF)
        self.config = runner.graphs.step.weights.config
        self._all = cuts_of(self.config)

    @property
    def cuts(self) -> dict[str, Cut]:
        """Those that a start takes."""
        return {name: getattr(self._all, name) for name in TURNS}

    def compile(self, options: Mapping[str, Sequence[Cut]]) -> None:
        """Compile all of them, in parallel."""
        with compiling(lambda done, total: None):
            for name, cuts in options.items():
                for cut in cuts:
                    self._take({name: cut})
                    self._graphs.step.run(1)

    def ms(self, cuts: Cuts, *, num_steps: int = NUM_STEPS) -> float:
        """Milliseconds a token of one greedy request."""
        self._take(cuts)
        self._graphs._decodes[1] = self._graphs._recorder.record(self._graphs._decode_work(1))
        return decode_ms(self._engine, 1, num_steps=num_steps)

    def _take(self, cuts: Cuts) -> None:
        autotuner = self._graphs.step.autotuner
        autotuner._candidates["small_batch"] = SmallBatch(replace(self._all, **cuts))  # type: ignore[arg-type]
        autotuner.names[1] = "small_batch"


def main() -> None:
    """Print the turns and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    runner = make_runner(
        arguments.shape, max_slots=8, max_batch_tokens=2048, max_model_len=10_240, autotune=Autotune.CACHED
    )
    timer = CutTimer(runner)
    options = options_of(timer.config)
    timer.compile(options)
    lines = list[str]()

    def note(line: str) -> None:
        lines.append(line)
        print(f"  {line}", flush=True)

    found = descend(timer.cuts, options, timer.ms, rounds=arguments.rounds, note=note)
    before_ms, after_ms = timer.ms(timer.cuts, num_steps=256), timer.ms(found, num_steps=256)
    changed = {name: _text(cut) for name, cut in found.items() if cut != timer.cuts[name]}
    note(f"{arguments.shape}: {before_ms:.4f} to {after_ms:.4f} ms with {changed or 'the same cuts'}")
    write_json(arguments.json, {"turns": lines, "before_ms": before_ms, "after_ms": after_ms, "cuts": changed})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
