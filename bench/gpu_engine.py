"""Octavo on a GPU without its network: scheduler, block manager, engine and CUDA runner in one process.

    python -m bench.gpu_engine [--shape 0.5B] [--seeds 0 1 2] [--json out/gpu_engine.json]

nano: 256 requests at once, prompts and outputs U[100,1024], ids U[0,10000], temperature 0.6, end tokens ignored; output
tokens per second; also with Qwen's own wishes: temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05. first
token: from the request in the inbox to its token in the outbox. prefill: 64 prompts of 2048 tokens, a token each.
decode: milliseconds per token of B greedy requests, (time for 257 tokens - time for 1) / 256 at prompt 128. host:
microseconds that the engine's thread works per steady decode step, everything but waiting for the device. The floor
(bench/gpu_floors.py) stands beside each figure. Random weights, bf16.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_floors import Floors
from bench.gpu_step import config_of, copy_rate, random_model
from bench.mailbox import GATEWAY, Mailbox
from blockmgr.config import BlockManagerConfig
from blockmgr.ids import PrefixCache
from blockmgr.manager import BlockManager
from model.gpu.weights import GpuWeights
from wire.messages import Run, Sampling, StepOutput
from worker.config import GPU_BATCH_TOKENS, SchedulerConfig
from worker.cuda_ahead import compile_kernels
from worker.cuda_memory import cuda_memory_needs
from worker.cuda_programs import CudaRunnerConfig, PathChoice
from worker.cuda_runner import CudaRunner
from worker.engine import Engine, EngineConfig
from worker.memory import size_pool
from worker.runner_warmup import warm_up
from worker.scheduler import Scheduler

VOCAB = 151_665
BLOCK_SIZE = 16
QWENS_WISHES = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


class Mail(Mailbox):
    """Only counts. first_s: when the first token came."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.num_finished = 0
        self.first_s = 0.0

    def take(self, output: StepOutput) -> None:
        """Count."""
        if output.tokens and not self.num_tokens:
            self.first_s = time.perf_counter()
        self.num_tokens += len(output.tokens) // 4
        self.num_finished += len(output.finished)


@dataclass(slots=True)
class Spent:
    """Seconds of the engine's thread, by part, and how often. wait: for the device. replay: the part of launch that
    enqueues recorded steps."""

    steps: int = 0
    total: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    replay: float = 0.0
    wait: float = 0.0
    apply: float = 0.0

    def host_us(self) -> dict[str, float]:
        """Microseconds a step without the waiting, and its parts."""
        each = 1e6 / max(self.steps, 1)
        rest = self.total - self.wait - self.plan - self.launch - self.apply
        return {
            "host": (self.total - self.wait) * each, "plan": self.plan * each, "launch": self.launch * each,
            "replay": self.replay * each, "apply": self.apply * each, "rest": rest * each, "wait": self.wait * each,
        }  # fmt: skip


class GpuEngine:
    """An engine over one runner, made anew for every workload that needs another prefix cache."""

    def __init__(self, runner: CudaRunner, *, prefix_cache: PrefixCache) -> None:
        config = runner.config
        self.mail, self.spent, self._num_asked = Mail(), Spent(), 0
        blocks = BlockManager(
            BlockManagerConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_slots=config.max_slots,
                max_blocks_per_slot=config.table_width,
                fingerprint=b"bench",
                prefix_cache=prefix_cache,
            )
        )
        limits = SchedulerConfig(
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            max_num_seqs=config.max_slots,
            max_batch_tokens=config.max_batch_tokens,
            max_in_flight=config.max_in_flight,
        )
        scheduler = Scheduler(limits, blocks)
        self.engine = Engine(
            config=EngineConfig(epoch="bench", audit_every_steps=0),
            scheduler=scheduler,
            blocks=blocks,
            runner=runner,
            inbox=self.mail,
            outbox=self.mail,
            clock=time.perf_counter,
        )
        self._watch(scheduler, "plan", "plan")
        self._watch(scheduler, "apply", "apply")
        self._watch(runner, "launch", "launch")
        self._watch(runner._results, "wait", "wait")
        self._watch(runner.programs, "run_decode", "replay")
        self._watch(runner.programs, "run_mixed", "replay")

    def _watch(self, owner: object, method: str, part: str) -> None:
        plain = getattr(type(owner), method).__get__(owner)

        def timed(*args: object, **named: object) -> object:
            start_s = time.perf_counter()
            try:
                return plain(*args, **named)
            finally:
                setattr(self.spent, part, getattr(self.spent, part) + time.perf_counter() - start_s)

        setattr(owner, method, timed)

    def ask(self, prompt_ids_T: np.ndarray, num_output: int, **wishes: Any) -> None:
        """Put one request into the inbox."""
        self._num_asked += 1
        sampling = Sampling(max_tokens=num_output, ignore_eos=True, seed=self._num_asked * 7919, **wishes)
        run = Run(
            handle=self._num_asked,
            request_id=f"bench-{self._num_asked}",
            prompt_ids=prompt_ids_T.astype(np.int32).tobytes(),
            sampling=sampling,
        )
        self.mail.coming.append((GATEWAY, run))

    def finish(self) -> float:
        """Step until everything asked for is answered; seconds."""
        self.mail.num_tokens, start_s = 0, time.perf_counter()
        while self.mail.num_finished < self._num_asked:
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    def step(self) -> None:
        """One step of the engine, timed."""
        start_s, before = time.perf_counter(), self.engine.num_steps
        self.engine.step()
        self.spent.total += time.perf_counter() - start_s
        self.spent.steps += self.engine.num_steps - before


def nano_lengths(rng: np.random.Generator) -> np.ndarray:
    """[256, 2] prompt and output tokens of nano-vllm's bench.py."""
    return rng.integers(100, 1025, (256, 2))


def nano(engine: GpuEngine, seed: int, wishes: dict[str, Any] | None = None) -> dict[str, float]:
    """The workload of nano-vllm's bench.py. Raises RuntimeError where tokens are missing."""
    wishes = wishes or {"temperature": 0.6}
    rng = np.random.default_rng(seed)
    lengths = nano_lengths(rng)
    for num_prompt, num_output in lengths.tolist():
        engine.ask(rng.integers(0, 10001, num_prompt), num_output, **wishes)
    engine.spent, start_s = Spent(), time.perf_counter()
    seconds = engine.finish()
    wanted = int(lengths[:, 1].sum())
    if engine.mail.num_tokens != wanted:
        raise RuntimeError(f"asked for {wanted} tokens, got {engine.mail.num_tokens}")
    spent = engine.spent
    return {
        "tokens_per_s": wanted / seconds, "seconds": seconds, "steps": spent.steps,
        "first_ms": 1e3 * (engine.mail.first_s - start_s),
        **{f"{name}_us": value for name, value in spent.host_us().items()},
    }  # fmt: skip


def first_token_ms(engine: GpuEngine, length: int) -> float:
    """Median of nine prompts alone."""
    rng, times = np.random.default_rng(length), []
    for _ in range(9):
        engine.ask(rng.integers(0, 10001, length), 1, temperature=0.0)
        start_s = time.perf_counter()
        engine.finish()
        times.append(engine.mail.first_s - start_s)
    return statistics.median(times) * 1e3


def prefill(engine: GpuEngine, num_prompts: int, length: int) -> dict[str, float]:
    """Prompts all at once, one token each: the second of two times."""
    rng = np.random.default_rng(length)
    for _ in range(2):
        for _ in range(num_prompts):
            engine.ask(rng.integers(0, 10001, length), 1, temperature=0.0)
        seconds = engine.finish()
    return {"tokens_per_s": num_prompts * length / seconds, "seconds": seconds}


def decode_ms(engine: GpuEngine, batch: int) -> float:
    """Milliseconds per token of so many greedy requests, median of three."""
    rng = np.random.default_rng(batch)

    def seconds(num_output: int) -> float:
        for _ in range(batch):
            engine.ask(rng.integers(0, 10001, 128), num_output, temperature=0.0)
        return engine.finish()

    return statistics.median((seconds(257) - seconds(1)) / 256 for _ in range(3)) * 1e3


def host_us(engine: GpuEngine, batch: int) -> dict[str, float]:
    """Of a steady decode step with so many running."""
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        engine.ask(rng.integers(0, 10001, 32), 220, temperature=0.6)
    while engine.mail.coming or engine.engine._scheduler.num_waiting:
        engine.step()
    for _ in range(20):
        engine.step()
    engine.spent = Spent()
    for _ in range(100):
        engine.step()
    spent = engine.spent
    engine.finish()
    return spent.host_us()


def make_runner(shape: str, *, max_slots: int, max_batch_tokens: int, max_model_len: int) -> CudaRunner:
    """A runner as a worker makes it, over random weights."""
    start_s = time.perf_counter()
    model = random_model(config_of(shape))
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    config = CudaRunnerConfig(
        num_blocks=1,
        block_size=BLOCK_SIZE,
        max_slots=max_slots,
        max_model_len=max_model_len,
        vocab_size=min(VOCAB, model.config.vocab_size),
        max_batch_tokens=max_batch_tokens,
        path_choice=PathChoice.MEASURED,
    )
    weights = GpuWeights.take(model, max_positions=config.table_width * BLOCK_SIZE)
    drawn_s = time.perf_counter()
    compile_kernels(weights, config, lambda done, total: None)
    compiled_s = time.perf_counter()
    needs = cuda_memory_needs(weights, config, weights_bytes=weights_bytes, memory_fraction=0.9)
    pool = size_pool(needs)
    measured_s = time.perf_counter()
    free_bytes = torch.cuda.mem_get_info()[0] - pool.num_bytes
    runner = CudaRunner(weights, replace(config, num_blocks=pool.num_blocks))
    recorded_s = runner.record(lambda done, total: None)
    warm_up(runner, max_batch_tokens=max_batch_tokens, on_progress=lambda done, total: None)
    gc.collect()
    gc.freeze()
    print(
        f"{shape}: {max_slots} slots, {max_batch_tokens} tokens a step; weights {drawn_s - start_s:.1f} s, kernels "
        f"{compiled_s - drawn_s:.1f} s, rehearsal {measured_s - compiled_s:.1f} s, "
        f"{runner.programs.num_shapes} graphs {recorded_s:.1f} s, in all "
        f"{time.perf_counter() - start_s:.1f} s; steps take {needs.activation_bytes / 2**30:.2f} GiB by rehearsal, "
        f"{(free_bytes - torch.cuda.mem_get_info()[0]) / 2**30:.2f} in fact, pool {pool.num_tokens} tokens",
        flush=True,
    )
    return runner


def profile(engine: GpuEngine, seed: int) -> None:
    """Where the device's time goes in a nano bench, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        nano(engine, seed)
    total = sum(event.device_time_total for event in found.key_averages())
    print(f"-- kernels of nano bench, {total / 1e3:.0f} ms of the device in all")
    for event in sorted(found.key_averages(), key=lambda event: -event.device_time_total)[:16]:
        share = event.device_time_total / total
        print(f"  {event.device_time_total / 1e3:8.1f} ms {share:4.0%} {event.count:7d} x  {event.key[:90]}")


def show(title: str, figures: dict[str, float]) -> None:
    """One line."""
    print(
        title, "  ".join(f"{name} {value:.{3 if value < 100 else 0}f}" for name, value in figures.items()), flush=True
    )


def main() -> None:
    """Print and write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-batch-tokens", type=int, nargs="+", default=[GPU_BATCH_TOKENS])
    parser.add_argument("--max-model-len", type=int, default=10_240)
    parser.add_argument("--only", nargs="+", default=["nano", "wishes", "first", "prefill", "decode", "host"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rate = copy_rate()
    torch.cuda.empty_cache()
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(), "shape": arguments.shape, "copy_bytes_per_s": rate,
    }  # fmt: skip
    for max_batch_tokens in arguments.max_batch_tokens:
        report[f"max_batch_tokens {max_batch_tokens}"] = measure(arguments, max_batch_tokens, rate)
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1))


def measure(arguments: argparse.Namespace, max_batch_tokens: int, rate: float) -> dict[str, object]:
    """All figures of one token budget; the widest batches with a runner of their own."""
    only = set(arguments.only)
    found: dict[str, object] = {}
    sizes = {"max_batch_tokens": max_batch_tokens, "max_model_len": arguments.max_model_len}
    runner = make_runner(arguments.shape, max_slots=256, **sizes)
    engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    floors = Floors(config=config_of(arguments.shape), bytes_per_s=rate)

    def note(
        name: str, measure_one: Callable[..., float | dict[str, float]], *of: object, floor_ms: float | None = None
    ) -> None:
        value = measure_one(*of)
        figures = dict(value) if isinstance(value, dict) else {"ms": value}
        if floor_ms is not None:
            ms = figures["ms"] if "ms" in figures else 1e3 * figures["seconds"]
            figures |= {"floor_ms": floor_ms, "percent_of_floor": 100 * floor_ms / ms}
        found[name] = figures
        show(f"  {name:24s}", figures)

    def nano_floor_ms(seed: int) -> float:
        return floors.serve_ms(nano_lengths(np.random.default_rng(seed)))

    if "nano" in only:
        nano(engine, 99)  # libraries choose their kernels once
        for seed in arguments.seeds:
            note(f"nano seed {seed}", nano, engine, seed, floor_ms=nano_floor_ms(seed))
        engine = GpuEngine(runner, prefix_cache=PrefixCache.ON)
        note("nano seed 0, cache on", nano, engine, 0, floor_ms=nano_floor_ms(0))
        engine = GpuEngine(runner, prefix_cache=PrefixCache.OFF)
    if "wishes" in only:
        note("nano seed 0, Qwen's wishes", nano, engine, 0, QWENS_WISHES, floor_ms=nano_floor_ms(0))
    for length in (16, 512, 2048, 8192) if "first" in only else ():
        if length >= arguments.max_model_len:
            print(f"  first token of {length}: longer than --max-model-len", flush=True)
            continue
        note(f"first token of {length}", first_token_ms, engine, length, floor_ms=floors.prefill_ms([length]))
    if "prefill" in only:
        note("prefill 64 x 2048", prefill, engine, 64, 2048, floor_ms=floors.prefill_ms([2048] * 64))
    for batch in (1, 8, 32, 128, 256) if "decode" in only else ():
        note(f"decode batch {batch}", decode_ms, engine, batch, floor_ms=floors.decode_ms(batch, 256))
    for batch in (1, 64, 256) if "host" in only else ():
        note(f"host at {batch}", host_us, engine, batch)
    if arguments.profile:
        profile(engine, 0)
    if "host" in only:
        del engine, runner
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        wide = GpuEngine(make_runner(arguments.shape, max_slots=1024, **sizes), prefix_cache=PrefixCache.OFF)
        note("host at 1024", host_us, wide, 1024)
    return found


if __name__ == "__main__":
    main()
