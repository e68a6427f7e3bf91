"""The price of deterministic mode on a CUDA device: the same steps and nano bench with and without it, in one run.

    python -m bench.gpu.deterministic [--shape 0.5B] [--json FILE]

Random weights, bf16. Medians of CUDA graph replays as in bench.gpu.step, prompts too, each batch the way that is
chosen before serving; nano bench as in bench.gpu.engine. Prints tables; --json writes the figures, too.
"""

import argparse
from pathlib import Path

import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.gpu.models import random_model
from bench.gpu.recorded_steps import Bench, time_decode, time_prefill
from bench.gpu.runner import BLOCK_SIZE
from bench.gpu.timed_engine import GpuEngine
from bench.gpu.workloads import nano
from bench.shapes import MODES, NUM_IDS, PUBLISHED
from octavo.blockmgr.ids import PrefixCache
from octavo.model.gpu.invariant_steps import InvariantDecodeStep, InvariantMixedStep
from octavo.model.gpu.weights import GpuWeights
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import Autotune, CudaRunnerConfig
from octavo.worker.runners.cuda.runner import CudaRunner

DECODES = [(1, 256), (8, 256), (32, 256), (128, 256), (256, 560), (1, 8192), (16, 8192)]
PREFILLS = [(1, 512), (1, 8192), (8, 2048)]


def compare_modes(shape: str) -> dict[str, object]:
    """Milliseconds of steps and tokens per second of nano bench, by mode."""
    found: dict[str, object] = {"device": torch.cuda.get_device_name(), "shape": shape}
    steps = gpu_steps(shape)
    found["ms"] = steps
    print(f"{'ms, ' + shape:24s}{'fast':>12s}{'determin.':>12s}")
    for name in steps["fast"]:
        fast, fixed = (steps[mode][name] for mode in MODES)
        print(f"{name:24s}{fast:12.3f}{fixed:12.3f}{fixed / fast:8.2f}x", flush=True)
    if shape == "0.5B":
        found["nano tokens_per_s"] = rates = {mode: nano_rate(shape, kind) for mode, kind in MODES.items()}
        print(f"nano bench, tok/s: {rates['fast']:.0f} fast, {rates['deterministic']:.0f} deterministic")
    return found


def gpu_steps(shape: str) -> dict[str, dict[str, float]]:
    """Milliseconds by mode and name. Both modes read the same weights, pool and rows."""
    bench = Bench(shape)
    fast = bench.decode, bench.mixed
    bench.choose_ways()
    invariant = InvariantDecodeStep(
        bench.decode.weights, bench.state, bench.kv, max_batch=len(bench.decode.rows_B),
        vocab_size=min(NUM_IDS, bench.config.vocab_size),
    )  # fmt: skip
    fixed = invariant, InvariantMixedStep(invariant, max_tokens=16384)
    found: dict[str, dict[str, float]] = {}
    for mode, (bench.decode, bench.mixed) in zip(MODES, (fast, fixed), strict=True):
        times = {f"decode {b} x {context}": time_decode(bench, b, context, 0.0) for b, context in DECODES}
        times |= {f"prefill {count} x {length}": time_prefill(bench, count, length) for count, length in PREFILLS}
        found[mode] = times
    return found


def nano_rate(shape: str, mode: Deterministic) -> float:
    """Output tokens per second of nano bench with seed 0, after one warm-up turn."""
    config = CudaRunnerConfig(
        num_blocks=20_000,
        block_size=BLOCK_SIZE,
        max_slots=256,
        max_model_len=2_304,
        vocab_size=NUM_IDS,
        max_batch_tokens=2048,
        autotune=Autotune.CACHED,
        deterministic=mode,
    )
    weights = GpuWeights.take(random_model(PUBLISHED[shape].config), max_positions=config.table_width * BLOCK_SIZE)
    runner = CudaRunner(weights, config)
    runner.record()
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    nano(engine, 99)
    rate = nano(engine, 0)["tokens_per_s"]
    runner.close()
    torch.cuda.empty_cache()
    return rate


def main() -> None:
    """Print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    with torch.inference_mode():
        write_json(arguments.json, compare_modes(arguments.shape))


if __name__ == "__main__":
    main()
