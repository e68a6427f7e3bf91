"""Workloads for an engine on a GPU: every function drives the engine until it is done and returns figures.

Must not know: floors, runners, what is printed.
"""

import statistics
import time
from typing import Any

import numpy as np

from bench.gpu.timed_engine import GpuEngine

LARGEST_ID = 10_000
NANO_REQUESTS, NANO_LONGEST = 256, 1024
NANO_SAMPLING = {"temperature": 0.6}
QWENS_SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def random_prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    """A prompt of ids U[0, 10000]."""
    return rng.integers(0, LARGEST_ID + 1, length)


def nano_lengths(rng: np.random.Generator, *, requests: int = NANO_REQUESTS, longest: int = NANO_LONGEST) -> np.ndarray:
    """[256, 2] prompt and output tokens of nano-vllm's bench.py, or fewer and shorter ones."""
    return rng.integers(min(100, longest // 2), longest + 1, (requests, 2))


def nano(
    engine: GpuEngine,
    seed: int,
    sampling: dict[str, Any] | None = None,
    *,
    requests: int = NANO_REQUESTS,
    longest: int = NANO_LONGEST,
) -> dict[str, float]:
    """The workload of nano-vllm's bench.py, all requests at once. Raises RuntimeError if tokens are missing."""
    rng = np.random.default_rng(seed)
    lengths = nano_lengths(rng, requests=requests, longest=longest)
    for num_prompt, num_output in lengths.tolist():
        engine.ask(random_prompt(rng, num_prompt), num_output, **(sampling or NANO_SAMPLING))
    engine.stopwatch.set_to_zero()
    start_s = time.perf_counter()
    seconds = engine.finish()
    wanted = int(lengths[:, 1].sum())
    if engine.mail.num_tokens != wanted:
        raise RuntimeError(f"asked for {wanted} tokens, got {engine.mail.num_tokens}")
    spent = engine.stopwatch.spent
    return {
        "tokens_per_s": wanted / seconds, "seconds": seconds, "steps": spent.steps,
        "first_ms": 1e3 * (engine.mail.first_s - start_s),
        **{f"{name}_us": value for name, value in spent.host_us().items()},
    }  # fmt: skip


def first_token_ms(engine: GpuEngine, length: int, *, times: int = 9) -> float:
    """Median over single prompts (nine by default) of the time from the request in the inbox to its token in the
    outbox."""
    rng, seconds = np.random.default_rng(length), []
    for _ in range(times):
        engine.ask(random_prompt(rng, length), 1, temperature=0.0)
        start_s = time.perf_counter()
        engine.finish()
        seconds.append(engine.mail.first_s - start_s)
    return statistics.median(seconds) * 1e3


def prefill(engine: GpuEngine, num_prompts: int, length: int) -> dict[str, float]:
    """All prompts at once, one token each: the second of two runs."""
    rng = np.random.default_rng(length)
    for _ in range(2):
        for _ in range(num_prompts):
            engine.ask(random_prompt(rng, length), 1, temperature=0.0)
        seconds = engine.finish()
    return {"tokens_per_s": num_prompts * length / seconds, "seconds": seconds}


def decode_ms(engine: GpuEngine, batch: int, *, num_steps: int = 256) -> float:
    """Milliseconds per token of this many greedy requests, the median of three runs."""
    rng = np.random.default_rng(batch)

    def seconds(num_output: int) -> float:
        for _ in range(batch):
            engine.ask(random_prompt(rng, 128), num_output, temperature=0.0)
        return engine.finish()

    return statistics.median((seconds(num_steps + 1) - seconds(1)) / num_steps for _ in range(3)) * 1e3


def host_us(engine: GpuEngine, batch: int, *, num_steps: int = 220) -> dict[str, float]:
    """Microseconds of a decode step with this many requests, by part of the engine's thread: the mean of the last two
    hundred steps, including those in which all requests end."""
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        engine.ask(random_prompt(rng, 32), num_steps, temperature=0.6)
    while not engine.is_steady:
        engine.step()
    for _ in range(num_steps // 10):
        engine.step()
    engine.stopwatch.set_to_zero()
    engine.finish()
    return engine.stopwatch.spent.host_us()
