"""transformers beside Octavo on the same GPU, in one process: `generate` and its continuous batching.

    python -m bench.gpu.hf [--shape 0.5B] [--batches 1 8 32] [--json out/gpu_hf.json]

Milliseconds per token of B greedy requests at prompt 128, (time for 65 tokens - time for 1) / 64, random bf16 weights
of one shape on both sides. Continuous batching: output tokens a second of 32 requests, prompt and output U[20, 200].
Prints a line for each figure; --json writes them, too.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from bench.cpu.transformers_sides import make_transformers
from bench.figures import write_json
from bench.gpu.device import free_memory, need_cuda
from bench.gpu.runner import make_runner
from bench.gpu.timed_engine import GpuEngine
from bench.shapes import PUBLISHED
from octavo.blockmgr.ids import PrefixCache
from octavo.worker.config import GPU_BATCH_TOKENS

PROMPT, OUTPUT, REQUESTS = 128, 65, 32


def ms_per_token(seconds: Callable[[int], float]) -> float:
    """Milliseconds of each token after the first. seconds: time for this many output tokens; its first call is a
    warm-up."""
    seconds(2)
    return (seconds(OUTPUT) - seconds(1)) / (OUTPUT - 1) * 1e3


def our_ms(engine: GpuEngine, batch: int) -> float:
    """Octavo's side."""

    def seconds(num_output: int) -> float:
        rng = np.random.default_rng(batch)
        for _ in range(batch):
            engine.ask(rng.integers(0, 10001, PROMPT), num_output, temperature=0.0)
        return engine.finish()

    return ms_per_token(seconds)


def their_ms(model: Any, batch: int) -> float:
    """`generate` with a batch of equal prompts, so that nothing is padded."""
    ids_ST = torch.randint(0, 10001, (batch, PROMPT), device="cuda")
    mask_ST = torch.ones_like(ids_ST)

    def seconds(num_output: int) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        model.generate(ids_ST, attention_mask=mask_ST, max_new_tokens=num_output, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    return ms_per_token(seconds)


def mixed_lengths() -> np.ndarray:
    """[32, 2] prompt and output tokens."""
    return np.random.default_rng(0).integers(20, 201, (REQUESTS, 2))


def our_mixed(engine: GpuEngine) -> float:
    """Octavo's output tokens per second, the second time."""
    rng = np.random.default_rng(1)
    for _ in range(2):
        for num_prompt, num_output in mixed_lengths().tolist():
            engine.ask(rng.integers(0, 10001, num_prompt), num_output, temperature=0.0)
        seconds = engine.finish()
    return float(mixed_lengths()[:, 1].sum()) / seconds


def their_mixed(model: Any) -> float:
    """The same through `generate_batch`, which has one output length for all: each prompt gets the longest, and only
    requested tokens count."""
    rng, lengths = np.random.default_rng(1), mixed_lengths()
    longest = int(lengths[:, 1].max())
    prompts = [rng.integers(0, 10001, length).tolist() for length in lengths[:, 0].tolist()]
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=prompts[:2], generation_config=config)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=config)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start_s
    found = sum(len(output.generated_tokens) for output in outputs.values())
    if found != REQUESTS * longest:
        raise RuntimeError(f"asked for {REQUESTS * longest} tokens, got {found}")
    return float(lengths[:, 1].sum()) / seconds


def main() -> None:
    """Measure ours first: its pool takes all free memory, so theirs is made after it is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    runner = make_runner(arguments.shape, max_slots=256, max_batch_tokens=GPU_BATCH_TOKENS, max_model_len=4096)
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    ours = {f"ms per token, batch {batch}": our_ms(engine, batch) for batch in arguments.batches}
    ours["mixed, tok/s"] = our_mixed(engine)
    del engine, runner
    free_memory()
    model = make_transformers(PUBLISHED[arguments.shape].config, torch.bfloat16).to("cuda")
    with torch.inference_mode():
        theirs = {f"ms per token, batch {batch}": their_ms(model, batch) for batch in arguments.batches}
    theirs["mixed, tok/s"] = their_mixed(model)
    for name, value in ours.items():
        print(f"{name:28s} octavo {value:10.3f}  transformers {theirs[name]:10.3f}", flush=True)
    write_json(arguments.json, {"octavo": ours, "transformers": theirs})


if __name__ == "__main__":
    main()
