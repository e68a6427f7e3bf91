"""The price of deterministic mode on a CPU: the same requests with and without it, in one run.

    python -m bench.cpu.deterministic [--shape 0.5B] [--threads 1] [--json FILE]

Random weights, bf16; the workloads of bench.cpu.compare. Prints a line for each mode; --json writes the figures, too.
Keeps its checkpoint in out/checkpoint-SHAPE. A CUDA device: bench.gpu.deterministic.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench.cpu.local_engine import LocalEngine
from bench.cpu.workloads import decode_ms, mixed, output_rate, prefill_ms
from bench.figures import write_json
from bench.machine import this_machine
from bench.random_checkpoint import write_checkpoint
from bench.shapes import MODES, PUBLISHED
from octavo.model.checkpoint.loading import load_model
from octavo.model.invariant import make_invariant
from octavo.worker.config import Deterministic

TURNS = 3
PROMPTS = (128, 512, 2048)
MAX_MODEL_LEN = 2304


def compare_modes(threads: int, shape: str) -> dict[str, object]:
    """Decode at batch 1, prefills and sixteen mixed requests, by mode; processor time if threads is 1."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    folder = Path("out") / f"checkpoint-{shape}"
    if not (folder / "config.json").exists():
        write_checkpoint(folder, PUBLISHED[shape])
    found: dict[str, object] = {"machine": this_machine().as_dict()}
    print(this_machine().line(), flush=True)
    sides = {mode: _side(folder, MODES[mode], clock) for mode in MODES}
    turns: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for turn in range(TURNS):  # in turns, so that other work on the machine affects both
        for mode, side in sides.items():
            rng = np.random.default_rng(turn)
            prefills = {f"prefill {length} ms": prefill_ms(side, rng, num_prompt=length) for length in PROMPTS}
            turns[mode].append(
                {"decode ms": decode_ms(side, rng, num_prompt=32, num_output=24)}
                | prefills
                | {"mixed tok/s": output_rate(side, mixed(rng, count=16, shortest=20, longest=100))}
            )
    for mode in MODES:
        figures = {name: statistics.median(each[name] for each in turns[mode]) for name in turns[mode][0]}
        print(f"{mode:14s}" + "  ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
        found[mode] = figures
    return found


def _side(folder: Path, mode: Deterministic, clock: Callable[[], float]) -> LocalEngine:
    model = load_model(folder)
    if mode is Deterministic.ON:
        make_invariant(model, max_positions=MAX_MODEL_LEN + 1)
    else:
        model.pack_weights()
    backend = "invariant" if mode is Deterministic.ON else "sdpa"
    return LocalEngine(model, max_num_seqs=16, max_model_len=MAX_MODEL_LEN, clock=clock, backend=backend)


def main() -> None:
    """Print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    write_json(arguments.json, compare_modes(arguments.threads, arguments.shape))


if __name__ == "__main__":
    main()
