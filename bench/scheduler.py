"""What the host spends on one steady decode step: `python -m bench.scheduler [--json FILE]`.

The engine runs with a runner that computes nothing, so all that is measured is Python and numpy: plan, apply, packing
of one message per gateway. Staggered requests cross block borders in every step, as in service; nobody joins or ends.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from blockmgr.config import BlockManagerConfig
from blockmgr.ids import PrefixCache
from blockmgr.manager import BlockManager
from wire.messages import Run, Sampling
from worker.config import SchedulerConfig
from worker.engine import Engine, EngineConfig
from worker.plan import StepPlan, StepResult
from worker.ports import GatewayIndex, InboxMessage, OutboxMessage
from worker.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
PROMPT_TOKENS = 64


class NullRunner:
    """Gives the same token to everybody, at once."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Remember it."""
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Tokens that stop nobody."""
        plan = self._plans.popleft()
        num_sampled = len(plan.sampled_slots)
        return StepResult(
            step=plan.step, tokens_S=np.full(num_sampled, 7, np.int32), is_finite_S=np.ones(num_sampled, np.bool_)
        )

    def close(self) -> None:
        """Nothing."""


class ListInbox:
    """What was put into the list."""

    def __init__(self) -> None:
        self.messages: list[tuple[GatewayIndex, InboxMessage]] = []

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """All of it."""
        messages, self.messages = self.messages, []
        return messages

    def wait(self, timeout_s: float) -> None:
        """Never needed."""


class CountingOutbox:
    """Counts bytes and throws them away."""

    def __init__(self) -> None:
        self.num_messages = 0

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """One message."""
        self.num_messages += 1

    def put_all(self, message: OutboxMessage) -> None:
        """One message."""
        self.num_messages += 1


def make_engine(num_running: int, max_in_flight: int, num_steps: int) -> tuple[Engine, Scheduler]:
    """An engine whose requests are all past their prefill, at staggered positions in their blocks."""
    blocks_each = -(-(PROMPT_TOKENS + 2 * BLOCK_SIZE + num_steps + 64) // BLOCK_SIZE) + 1
    blocks = BlockManager(
        BlockManagerConfig(
            num_blocks=num_running * blocks_each,
            block_size=BLOCK_SIZE,
            max_slots=num_running,
            max_blocks_per_slot=MAX_MODEL_LEN // BLOCK_SIZE,
            fingerprint=b"bench",
            prefix_cache=PrefixCache.ON,
        )
    )
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=1000,
        eos_token_ids=(2, 3),
        max_num_seqs=num_running,
        max_waiting=num_running,
        max_batch_tokens=num_running * (PROMPT_TOKENS + BLOCK_SIZE),
        max_in_flight=max_in_flight,
    )
    scheduler, inbox = Scheduler(config, blocks), ListInbox()
    engine = Engine(
        config=EngineConfig(epoch="bench", audit_every_steps=0),
        scheduler=scheduler,
        blocks=blocks,
        runner=NullRunner(max_in_flight),
        inbox=inbox,
        outbox=CountingOutbox(),
        clock=time.perf_counter,
    )
    rng = np.random.default_rng(0)
    for handle in range(num_running):
        inbox.messages.append((GatewayIndex(0), _run(handle, rng)))
    for _ in range(8):
        engine.step()
    assert scheduler.num_running == num_running
    return engine, scheduler


def _run(handle: int, rng: np.random.Generator) -> Run:
    prompt = rng.integers(10, 1000, PROMPT_TOKENS + handle % BLOCK_SIZE, np.int32)
    sampling = Sampling(max_tokens=MAX_MODEL_LEN, stop_token_ids=(4, 5), seed=handle)
    return Run(handle=handle, request_id=f"bench-{handle}", prompt_ids=prompt.tobytes(), sampling=sampling)


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


def measure(num_running: int, max_in_flight: int, num_steps: int) -> dict[str, float]:
    """One row: the whole engine step, and the scheduler's part of it."""
    engine, _ = make_engine(num_running, max_in_flight, num_steps)
    engine_row = time_steps(engine.step, num_steps)
    engine, scheduler = make_engine(num_running, 1, num_steps)
    runner = NullRunner(1)

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


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(n, depth, arguments.steps) for depth in arguments.in_flight for n in arguments.running]
    print(" ".join(f"{name:>19}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>19}" for value in row.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
