"""Time of one decode step on a GPU, whole and by kernel, and prefill throughput: the steps alone, without an engine.

    python -m bench.gpu.step [--shape 0.5B] [--weights bf16 fp8 int4] [--json out/gpu_step.json] [--profile]

Random weights of the published shapes, bf16 or rounded: fp8 and int8 as `--quantization` does, int4 with groups of 128
as in GPTQ's checkpoints. Each figure is the median of five timings of replays of one CUDA graph, by the way that a
start chooses; `floor` is what reading the weights and the live keys and values once would take at the measured copy
rate.
Prints a line for each figure, with --profile also the kernels of a step; --json writes the figures, too.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from bench.figures import write_json
from bench.gpu.device import copy_rate, kernels_of, need_cuda
from bench.gpu.floors import Floors
from bench.gpu.models import WEIGHTS
from bench.gpu.recorded_steps import Bench, capture, time_decode, time_prefill
from bench.shapes import PUBLISHED

DECODES = [(1, 256), (8, 256), (32, 256), (128, 256), (256, 256), (256, 560), (1, 8192), (16, 8192), (1, 30000)]
PREFILLS = [(1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (1, 2048), (1, 8192), (8, 2048)]
PROFILES = [(1, 256), (32, 256), (256, 560)]
Figures = dict[str, float]


def measure(shape: str, weights: str, rate: float, *, with_profile: bool) -> Figures:
    """All figures of one shape. rate: bytes per second of a copy."""
    bench = Bench(shape, weights=weights)
    bench.choose_ways()
    print(f"{shape}, {weights}: copy {rate / 1e12:.2f} TB/s, weights {bench.weight_bytes / 1e9:.2f} GB")
    figures = measure_decodes(bench, rate) | measure_prefills(bench, rate)
    for batch, context in PROFILES if with_profile else ():
        profile(bench, batch, context)
    return figures


def measure_decodes(bench: Bench, rate: float) -> Figures:
    """Milliseconds of a step, greedy and sampled, for every batch that fits."""
    figures: Figures = {}
    for batch, context in DECODES:
        if not bench.holds(batch, context):
            print(f"  decode {batch:4d} x {context:5d}  does not fit into this device's memory", flush=True)
            continue
        greedy, drawn = (time_decode(bench, batch, context, temperature) for temperature in (0.0, 0.6))
        floor, name = bench.floor_ms(batch, context, rate), f"decode {batch}x{context}"
        figures |= {f"{name} floor": floor, name: greedy, f"{name} sampled": drawn}
        line = f"  decode {batch:4d} x {context:5d}  {greedy:7.3f} ms  sampled {drawn:7.3f}"
        print(f"{line}  floor {floor:6.3f}  {floor / greedy:4.0%}", flush=True)
    return figures


def measure_prefills(bench: Bench, rate: float) -> Figures:
    """Milliseconds of whole prompts in one step."""
    floors, figures = Floors(config=bench.config, bytes_per_s=rate), Figures()
    for prompts, length in PREFILLS:
        ms, floor = time_prefill(bench, prompts, length), floors.prefill_ms([length] * prompts)
        figures |= {f"prefill {prompts}x{length}": ms, f"prefill {prompts}x{length} floor": floor}
        line = f"  prefill {prompts:3d} x {length:5d}  {ms:7.2f} ms  {prompts * length / ms * 1e3:10.0f} tok/s"
        print(f"{line}  floor {floor:7.2f}  {floor / ms:4.0%}", flush=True)
    return figures


def profile(bench: Bench, batch: int, context: int) -> None:
    """Print microseconds of each kernel in one step, the mean of five."""
    bench.spread(batch, context)
    graph = capture(lambda: bench.decode.run(batch))
    print(f"-- kernels of a step, batch {batch}, context {context}")
    for kernel in kernels_of(partial(repeat, graph, 5))[:12]:
        print(f"  {kernel.total_us / 5:9.1f} us {kernel.num_launches / 5:6.0f} x  {kernel.name[:100]}")


def repeat(graph: torch.cuda.CUDAGraph, count: int) -> None:
    """Replay the graph this many times."""
    for _ in range(count):
        graph.replay()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, nargs="+", default=["0.5B"])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["bf16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    need_cuda()
    rate = copy_rate()
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": rate}
    for shape in arguments.shape:
        for weights in arguments.weights:
            name = shape if weights == "bf16" else f"{shape} {weights}"
            report[name] = measure(shape, weights, rate, with_profile=arguments.profile)
    write_json(arguments.json, report)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
