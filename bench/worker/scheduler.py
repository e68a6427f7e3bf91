"""What the host spends on one steady decode step: `python -m bench.worker.scheduler [--json FILE]`.

The engine runs with a runner that computes nothing, so all that is measured is Python and numpy: plan, apply, packing
of one message per gateway. In the first table staggered requests cross block borders in every step, as in service, and
nobody joins or ends. In the second one all requests arrive at once and run to their end: admission, prefix hashing,
chunks, ends and evictions included. In the third one tenants wait for one another: a step in which nobody can come in,
and a burst. Prints the three tables; --json writes them, too.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.figures import write_json
from bench.in_process import GATEWAY, Mailbox, assemble
from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import Run, SamplingParams, StepOutput
from octavo.worker.engine.engine import Engine
from octavo.worker.engine.interfaces import InboxMessage
from octavo.worker.scheduler.plan import GatewayIndex, StepMasks, StepPlan, StepResult
from octavo.worker.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 64
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 10_000


class NullRunner:
    """Gives every request the same token, at once."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Remember the plan."""
        self._plans.append(plan)

    def constrain(self, masks: StepMasks) -> None:
        """Never called: no request has a grammar."""

    def collect(self) -> StepResult:
        """Tokens that end no request."""
        plan = self._plans.popleft()
        num_sampled = len(plan.sampled_slots)
        return StepResult(
            step=plan.step, tokens_S=np.full(num_sampled, 7, np.int32), is_finite_S=np.ones(num_sampled, np.bool_)
        )

    def close(self) -> None:
        """Nothing to close."""


class DiscardingMailbox(Mailbox):
    """Throws the output of steps away."""

    def take(self, output: StepOutput) -> None:
        """Drop the output: packing it is part of what is measured, and is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits that the null runner claims to have."""

    num_blocks: int
    max_slots: int
    block_size: int = BLOCK_SIZE
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE


class Bench(NamedTuple):
    """The parts that a measurement drives."""

    engine: Engine
    scheduler: Scheduler
    mail: DiscardingMailbox


def make_engine(*, num_blocks: int, max_num_seqs: int, max_in_flight: int, max_batch_tokens: int) -> Bench:
    """An engine around the null runner."""
    sizes, mail = Sizes(num_blocks=num_blocks, max_slots=max_num_seqs), DiscardingMailbox()
    parts = assemble(
        NullRunner(max_in_flight),
        sizes,
        mail,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=PrefixCache.ON,
        eos_token_ids=(2, 3),
        max_waiting=1_000_000,
    )
    return Bench(parts.engine, parts.scheduler, mail)


def make_steady(num_running: int, max_in_flight: int, num_steps: int) -> Bench:
    """An engine with all requests past their prefill, at staggered positions in their blocks."""
    blocks_each = -(-(PROMPT_TOKENS + 2 * BLOCK_SIZE + num_steps + 64) // BLOCK_SIZE) + 1
    bench = make_engine(
        num_blocks=num_running * blocks_each,
        max_num_seqs=num_running,
        max_in_flight=max_in_flight,
        max_batch_tokens=num_running * (PROMPT_TOKENS + BLOCK_SIZE),
    )
    rng = np.random.default_rng(0)
    for handle in range(num_running):
        bench.mail.coming.append(_run(handle, PROMPT_TOKENS + handle % BLOCK_SIZE, MAX_MODEL_LEN, rng))
    for _ in range(8):
        bench.engine.step()
    assert bench.scheduler.num_running == num_running
    return bench


def _run(
    handle: int, prompt: int, output: int, rng: np.random.Generator, num_tenants: int = 1
) -> tuple[GatewayIndex, InboxMessage]:
    run = Run(
        handle=handle,
        request_id=f"bench-{handle}",
        prompt_ids=rng.integers(10, VOCAB_SIZE, prompt, np.int32).tobytes(),
        sampling=SamplingParams(max_tokens=output, stop_token_ids=(4, 5), seed=handle),
        tenant=str(handle % num_tenants),
    )
    return GATEWAY, run


def time_steps(step: Callable[[], object], num_steps: int) -> dict[str, float]:
    """Microseconds per call: median, mean and 99th percentile."""
    times = np.empty(num_steps)
    for index in range(num_steps):
        start = time.perf_counter()
        step()
        times[index] = time.perf_counter() - start
    return {
        "median_us": round(float(np.median(times)) * 1e6, 1),
        "mean_us": round(float(times.mean()) * 1e6, 1),
        "p99_us": round(float(np.quantile(times, 0.99)) * 1e6, 1),
    }


def measure_steady(num_running: int, max_in_flight: int, num_steps: int) -> dict[str, float]:
    """One row: the whole engine step, and the scheduler's part of it."""
    engine_row = time_steps(make_steady(num_running, max_in_flight, num_steps).engine.step, num_steps)
    scheduler, runner = make_steady(num_running, 1, num_steps).scheduler, NullRunner(1)

    def plan_and_apply() -> None:
        plan = scheduler.plan(now_s=0.0)
        assert plan is not None
        runner.launch(plan)
        scheduler.apply(runner.collect(), now_s=0.0)

    scheduler_row = time_steps(plan_and_apply, num_steps)
    return {
        "running": num_running,
        "in_flight": max_in_flight,
        **{f"engine_{name}": value for name, value in engine_row.items()},
        **{f"scheduler_{name}": value for name, value in scheduler_row.items()},
    }


def measure_queue(num_tenants: int, num_steps: int) -> dict[str, float]:
    """One row: 256 requests running and 1,000 waiting, of this many tenants; and a burst of these tenants."""
    bench, rng = make_steady(256, 1, num_steps), np.random.default_rng(1)
    bench.mail.coming = [_run(handle, 64, 8, rng, num_tenants) for handle in range(10_000, 11_000)]
    bench.engine.step()
    steps, burst = time_steps(bench.engine.step, num_steps), measure_burst(1024, 64, 16, num_tenants)
    return {
        "tenants": num_tenants,
        "waiting": 1000,
        **{f"engine_{name}": value for name, value in steps.items()},
        "burst_us_per_request": burst["us_per_request"],
    }


def measure_burst(num_requests: int, prompt: int, output: int, num_tenants: int = 1) -> dict[str, float]:
    """One row: a burst of equal requests, 256 at a time, two steps in flight."""
    bench = make_engine(num_blocks=20_000, max_num_seqs=256, max_in_flight=2, max_batch_tokens=8192)
    rng = np.random.default_rng(0)
    bench.mail.coming = [_run(handle, prompt, output, rng, num_tenants) for handle in range(num_requests)]
    times: list[float] = []
    while not times or bench.scheduler.has_work:
        start = time.perf_counter()
        bench.engine.step()
        times.append(time.perf_counter() - start)
    return {
        "requests": num_requests,
        "prompt": prompt,
        "output": output,
        "steps": len(times),
        "total_s": round(sum(times), 3),
        "us_per_request": round(sum(times) / num_requests * 1e6, 1),
        "us_per_step": round(sum(times) / len(times) * 1e6, 1),
        "longest_step_ms": round(max(times) * 1e3, 1),
        "tokens_per_s": round(num_requests * output / sum(times)),
    }


def print_table(rows: list[dict[str, float]]) -> None:
    """Print rows, with columns as wide as their names."""
    print("  ".join(rows[0]))
    for row in rows:
        print("  ".join(f"{value:>{len(name)}}" for name, value in row.items()))
    print()


def main() -> None:
    """Print the tables; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--requests", type=int, default=1024, help="of each burst")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2, 10, 100])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steady = [measure_steady(n, depth, arguments.steps) for depth in arguments.in_flight for n in arguments.running]
    print_table(steady)
    bursts = [measure_burst(arguments.requests, prompt, output) for prompt, output in ((64, 128), (512, 512))]
    print_table(bursts)
    queues = [measure_queue(num_tenants, arguments.steps) for num_tenants in arguments.tenants]
    print_table(queues)
    write_json(arguments.json, {"steady": steady, "bursts": bursts, "queues": queues})


if __name__ == "__main__":
    main()
