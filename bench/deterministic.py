"""The price of deterministic mode: the same steps and the same service with and without it, in one run.

    python -m bench.deterministic gpu [--shape 0.5B] [--json FILE]     a step, prefill, nano bench on a CUDA device
    python -m bench.deterministic tiles [--shape 0.5B]                 tiles of the products: times, and equal bits
    python -m bench.deterministic cpu [--threads 1] [--json FILE]      the bench of bench.cpu on this machine

Random weights, bf16. gpu: medians of CUDA graph replays as in bench.gpu_step; nano bench as in bench.gpu_engine.
Prints tables; --json writes them, too. cpu keeps its checkpoint in out/checkpoint-SHAPE.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.modes import MODES
from worker.config import Deterministic

DECODES = [(1, 256), (8, 256), (32, 256), (128, 256), (256, 560), (1, 8192), (16, 8192)]
PREFILLS = [(1, 512), (1, 8192), (8, 2048)]


def gpu(shape: str) -> dict[str, object]:
    """Milliseconds of steps, tokens per second of nano bench, by mode."""
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
    """By mode and name. Both modes read the same weights, pool and rows."""
    from bench.gpu.steps import Bench, time_decode, time_prefill
    from bench.shapes import NUM_IDS
    from model.gpu.invariant_steps import InvariantDecodeStep, InvariantMixedStep

    bench = Bench(shape)
    fast = bench.decode, bench.mixed
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
    """Output tokens per second of nano bench, seed 0, behind one turn that warms up."""
    from bench.gpu.engine import GpuEngine
    from bench.gpu.models import random_model
    from bench.gpu.runner import BLOCK_SIZE
    from bench.gpu.workloads import nano
    from bench.shapes import NUM_IDS, PUBLISHED
    from blockmgr.ids import PrefixCache
    from model.gpu.weights import GpuWeights
    from worker.cuda_programs import CudaRunnerConfig, PathChoice
    from worker.cuda_runner import CudaRunner

    config = CudaRunnerConfig(
        num_blocks=20_000,
        block_size=BLOCK_SIZE,
        max_slots=256,
        max_model_len=2_304,
        vocab_size=NUM_IDS,
        max_batch_tokens=2048,
        path_choice=PathChoice.KEPT,
        deterministic=mode,
    )
    weights = GpuWeights.take(random_model(PUBLISHED[shape].config), max_positions=config.table_width * BLOCK_SIZE)
    runner = CudaRunner(weights, config)
    runner.record(lambda done, total: None)
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    nano(engine, 99)
    rate = nano(engine, 0)["tokens_per_s"]
    runner.close()
    torch.cuda.empty_cache()
    return rate


def tiles(shape: str) -> dict[str, object]:
    """Microseconds of each product of a layer by tile, and whether its bits are those of the first tile."""
    from bench.shapes import PUBLISHED
    from model.kernels.invariant_product import ProductTiles, invariant_product, part_elements

    config = PUBLISHED[shape].config
    D, I, V, H = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    N, K = config.num_attention_heads, config.num_key_value_heads
    matrices = {"qkv": ((N + 2 * K) * H, D), "o": (D, N * H), "gate_up": (2 * I, D), "down": (D, I), "head": (V, D)}
    candidates = [
        ProductTiles(outputs=o, tokens=t, inputs=i, warps=w, stages=s)
        for o, t, i, w, s in (
            (64, 64, 64, 4, 4), (64, 16, 64, 4, 4), (64, 32, 64, 4, 4), (64, 16, 128, 4, 3), (64, 32, 128, 4, 3),
            (64, 64, 128, 4, 3), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
            (128, 256, 64, 8, 3),
        )
    ]  # fmt: skip
    found: dict[str, object] = {}
    for name, (O, inputs) in matrices.items():
        weight = torch.randn(O, inputs, device="cuda").bfloat16()
        for T in (1, 16, 64, 256, 4096) if name != "head" else (1, 16, 256):
            x = (torch.randn(T, inputs, device="cuda") * torch.rand(T, 1, device="cuda").exp2()).bfloat16()
            part = torch.empty(max(1, part_elements(T, O, inputs)), device="cuda")
            first, line = None, {}
            for tile in candidates:
                if T > 256 and tile.tokens < 64:
                    continue
                out = torch.empty(T, O, dtype=torch.bfloat16, device="cuda")

                def run(
                    tile: ProductTiles = tile, out: torch.Tensor = out, x: torch.Tensor = x,
                    part: torch.Tensor = part, weight: torch.Tensor = weight,
                ) -> None:  # fmt: skip
                    invariant_product(x, weight, out, part, tiles=tile)

                microseconds = time_us(run)
                first = out if first is None else first
                is_same = torch.equal(out, first)
                label = f"{tile.outputs}x{tile.tokens}x{tile.inputs}w{tile.warps}s{tile.stages}"
                line[label] = (microseconds, is_same)
            library_us = time_us(lambda x=x, w=weight: torch.mm(x, w.T))
            best = sorted(line, key=lambda label: line[label][0])[:4]
            shown = "  ".join(f"{label} {line[label][0]:.1f}" for label in best)
            differ = [label for label, (_, is_same) in line.items() if not is_same]
            print(f"{name:8s}{T:6d}  cuBLAS {library_us:8.1f} us  {shown}  other bits: {differ or 'none'}", flush=True)
            found[f"{name} {T}"] = line | {"cuBLAS": (library_us, True)}
    return found


def time_us(work: object) -> float:
    """Median microseconds by a graph of twenty calls."""
    from model.gpu.choice import time_graph

    def many() -> None:
        for _ in range(10):
            work()  # type: ignore[operator]

    return time_graph(many) * 100


def cpu(threads: int, shape: str) -> dict[str, object]:
    """Decode at batch 1, prefill of 512, sixteen mixed requests, by mode; processor time where threads is 1."""
    from bench.local_engine import LocalEngine
    from bench.machine import this_machine
    from bench.random_checkpoint import write_checkpoint
    from bench.shapes import SHAPES
    from bench.workloads import decode_ms, mixed, output_rate, prefill_ms
    from model.invariant import make_invariant
    from model.loading import load_model

    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    folder = Path("out") / f"checkpoint-{shape}"
    if not (folder / "config.json").exists():
        write_checkpoint(folder, SHAPES[shape])
    found: dict[str, object] = {"machine": this_machine().as_dict()}
    print(this_machine().line(), flush=True)
    for mode in MODES:
        model = load_model(folder)
        if MODES[mode] is Deterministic.ON:
            make_invariant(model, max_positions=1025)
        else:
            model.pack_weights()
        backend = "invariant" if MODES[mode] is Deterministic.ON else "sdpa"
        side = LocalEngine(model, max_num_seqs=16, max_model_len=1024, clock=clock, backend=backend)
        rng = np.random.default_rng(0)
        figures = {
            "decode ms": statistics.median(decode_ms(side, rng, num_prompt=32, num_output=24) for _ in range(3)),
            "prefill 512 ms": statistics.median(prefill_ms(side, rng, num_prompt=512) for _ in range(3)),
            "mixed tok/s": output_rate(side, mixed(rng, count=16, shortest=20, longest=100)),
        }
        print(f"{mode:14s}" + "  ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
        found[mode] = figures
        del model, side
    return found


def main() -> None:
    """Print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gpu", "tiles", "cpu"])
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.what != "cpu":
        need_cuda()
    match arguments.what:
        case "gpu":
            with torch.inference_mode():
                found = gpu(arguments.shape)
        case "tiles":
            found = tiles(arguments.shape)
        case _:
            found = cpu(arguments.threads, arguments.shape)
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
