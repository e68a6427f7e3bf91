"""How evenly outputs come while prompts flood in, and what that costs: `python -m bench.worker.pace [--json FILE]`.

The real scheduler and block manager on a virtual clock, with a device whose steps take what a model of their cost says,
which was fitted to figures of one H200 (../RESULTS.md): nothing of the host, the network or callers is in it. Rows:
requests as they come in a code assistant (long prompts, short outputs) at several rates and all at once; the same with
prompts of 30,000 tokens among them; and nano bench, which must not lose. For each: the longest wait of a caller for the
next token (gap), for the first (ttft), and tokens a second, without a bound and with it.
"""

import argparse
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.figures import percentile, write_json
from bench.in_process import GATEWAY, blocks_of, run_of
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.worker.config import GPU_MAX_GAP_S, GPU_MAX_GAP_STEPS, SchedulerConfig
from octavo.worker.scheduler.plan import StepPlan, StepResult
from octavo.worker.scheduler.scheduler import Scheduler

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_BATCH_TOKENS = 16, 32_768, 256, 8192
NUM_BLOCKS = 400_000  # enough for all requests at once
MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Costs in milliseconds. decode: by rows. mixed: extra, if a step has prompts. token, attended, context: per prompt
    token, per token that it attends to, and per context token of an output."""

    decode: dict[int, float]
    mixed: float
    token: float
    attended: float
    context: float

    def step_ms(self, plan: StepPlan) -> float:
        """The time of a whole step."""
        rows, chunks = len(plan.decode_slots_S), plan.prefill
        found = float(np.interp(rows, list(self.decode), list(self.decode.values())))
        found += int(plan.decode_positions_S.sum()) * self.context
        if chunks:
            found += self.mixed + sum(
                each.num_tokens * (self.token + (each.start + each.num_tokens / 2) * self.attended) for each in chunks
            )
        return found


H200 = {
    "0.5B": Device(
        decode={0: 0.4, 1: 0.48, 8: 0.78, 32: 0.85, 128: 1.0, 256: 1.25}, mixed=1.4, token=1.31e-3, attended=2.2e-7,
        context=3.75e-6,
    ),
    "7B": Device(
        decode={0: 3.4, 1: 3.77, 32: 4.5, 128: 6.0, 256: 7.4}, mixed=1.4, token=1.9e-2, attended=8e-7, context=1.75e-5
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    at_s: float
    num_prompt: int
    num_output: int


def nano(seed: int) -> list[Asked]:
    """256 requests at once."""
    lengths = np.random.default_rng(seed).integers(100, 1025, (256, 2)).tolist()
    return [Asked(at_s=0.0, num_prompt=prompt, num_output=output) for prompt, output in lengths]


def code(seed: int, *, count: int, rate: float | None, long_share: float = 0.0) -> list[Asked]:
    """Prompts around 2,000 tokens, outputs around 24. rate: requests per second; None: all at once. long_share: share
    of prompts with 30,000 tokens."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(7.25, 0.9, count), 3, 7437).astype(int)
    prompts[rng.random(count) < long_share] = 30_000
    outputs = np.clip(rng.lognormal(2.8, 0.9, count), 1, 600).astype(int)
    at_s = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return [
        Asked(at_s=float(at), num_prompt=int(prompt), num_output=int(output))
        for at, prompt, output in zip(at_s, prompts, outputs, strict=True)
    ]


def scheduler_of(num_requests: int, **pace: float) -> Scheduler:
    """A scheduler with room for all requests and two plans in flight, as on a GPU."""
    blocks = BlockManager(
        BlockManagerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_slots=MAX_NUM_SEQS,
            max_blocks_per_slot=blocks_of(MAX_MODEL_LEN, BLOCK_SIZE),
            fingerprint=b"bench",
            prefix_cache=PrefixCache.OFF,
        )
    )
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=10_000,
        max_num_seqs=MAX_NUM_SEQS,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_waiting=num_requests,
        max_chunks=32,
        max_in_flight=MAX_IN_FLIGHT,
        aging_s=1e9,
        **pace,  # type: ignore[arg-type]
    )
    return Scheduler(config, blocks)


def simulate(asked: list[Asked], device: Device, **pace: float) -> dict[str, float]:
    """Serve all requests; times are the device's."""
    scheduler = scheduler_of(len(asked), **pace)
    coming, in_flight = deque(sorted(enumerate(asked), key=lambda each: each[1].at_s)), deque[StepPlan]()
    now_s = free_s = 0.0
    came_s: dict[int, list[float]] = {index: [] for index in range(len(asked))}
    gaps, steps = [], 0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now_s = max(now_s, coming[0][1].at_s)
        while coming and coming[0][1].at_s <= now_s:
            index, each = coming.popleft()
            prompt = np.full(each.num_prompt, 7, np.int32)
            run = run_of(index, prompt, max_tokens=each.num_output, ignore_eos=True, temperature=0.0, seed=index)
            scheduler.add(GATEWAY, run, now_s=now_s)
        while len(in_flight) < MAX_IN_FLIGHT and (plan := scheduler.plan(now_s=now_s)) is not None:
            in_flight.append(plan)
        if not in_flight:
            continue
        plan = in_flight.popleft()
        free_s = now_s = max(free_s, now_s) + device.step_ms(plan) / 1e3
        steps += 1
        num_sampled = len(plan.sampled_slots)
        result = StepResult(
            step=plan.step, tokens_S=np.full(num_sampled, 7, np.int32), is_finite_S=np.ones(num_sampled, np.bool_)
        )
        for output in scheduler.apply(result, now_s=now_s).values():
            for handle in output.handles_N.tolist():
                if came_s[handle]:
                    gaps.append(now_s - came_s[handle][-1])
                came_s[handle].append(now_s)
    firsts = [came_s[index][0] - each.at_s for index, each in enumerate(asked)]
    return {
        "gap_p50_ms": 1e3 * percentile(gaps, 50),
        "gap_p99_ms": 1e3 * percentile(gaps, 99),
        "ttft_p50_ms": 1e3 * percentile(firsts, 50),
        "ttft_p99_ms": 1e3 * percentile(firsts, 99),
        "tokens_per_s": sum(each.num_output for each in asked) / now_s,
        "steps": float(steps),
    }


def workloads(shape: str, count: int) -> dict[str, list[Asked]]:
    """The workloads by name. Rates are fractions of the device's capacity."""
    rates = {"0.5B": (50, 100, 150, 200), "7B": (4, 8, 14, 20)}[shape]
    made = {f"code, {rate} a second": code(0, count=count, rate=rate) for rate in rates}
    made["code, all at once"] = code(0, count=count, rate=None)
    made["the same, one in fifty of 30,000 tokens"] = code(0, count=count, rate=None, long_share=0.02)
    made[f"code, {rates[0] // 2} a second, one in fifty of 30,000 tokens"] = code(
        1, count=count // 2, rate=rates[0] / 2, long_share=0.02
    )
    return made | {f"nano, seed {seed}": nano(seed) for seed in (0, 1, 2)}


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(prog="python -m bench.worker.pace", description=__doc__)
    parser.add_argument("--shape", choices=H200, nargs="+", default=list(H200))
    parser.add_argument("--requests", type=int, default=1000, help="of a row; default: %(default)s")
    parser.add_argument("--max-gap-ms", type=float, default=1e3 * GPU_MAX_GAP_S)
    parser.add_argument("--max-gap-steps", type=float, default=GPU_MAX_GAP_STEPS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pace = {"max_gap_s": options.max_gap_ms / 1e3, "max_gap_steps": options.max_gap_steps}
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for shape in options.shape:
        table = Table("requests", "gap p50, ms", "gap p99, ms", "ttft p50, ms", "ttft p99, ms", "tok/s", title=shape)
        for name, asked in workloads(shape, options.requests).items():
            pair = {"before": simulate(asked, H200[shape]), "after": simulate(asked, H200[shape], **pace)}
            found.setdefault(shape, {})[name] = pair
            keys = ("gap_p50_ms", "gap_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_s")
            table.add_row(name, *(f"{pair['before'][key]:.1f} → {pair['after'][key]:.1f}" for key in keys))
        Console(width=160).print(table)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
