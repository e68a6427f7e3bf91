"""Processes of a service without a real model: gateways, fronts, and workers that take as long as a model would.

The workers are real (scheduler, block manager with its prefix cache, engine loop, link); only the runner computes
nothing: it sleeps as long as a model of the given pace takes for the step, and outputs words. Must not know: what is
asked, what is measured.
"""

import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Any

STOP_S = 30.0
POLICIES = ("ours", "random", "round robin")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a step takes: milliseconds, plus microseconds for each of its prompt tokens. late_ms: a delay of up to
    this is made up for by the following steps."""

    step_ms: float = 10.0
    prompt_token_us: float = 100.0
    late_ms: float = 0.0

    def ends_s(self, begun_s: float, former_s: float, num_prompt_tokens: int) -> float:
        """When a step begun at begun_s ends. former_s: when the one before was due to end."""
        begun_s = max(former_s, begun_s - self.late_ms / 1e3)
        return begun_s + self.step_ms / 1e3 + self.prompt_token_us / 1e6 * num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Limits of each worker."""

    num_blocks: int
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_waiting: int = 1024


def serve_worker(
    endpoints: tuple[str, ...], worker_id: str, model: str, pace: Pace, room: Room, token_ids: Sequence[int], port: int
) -> None:
    """Serve until SIGTERM, with metrics at 127.0.0.1:port. Each output has the same words in the same order."""
    import numpy as np

    from octavo.worker.config import RunnerKind, WorkerConfig
    from octavo.worker.main import main
    from octavo.worker.runners.oracle.runner import OracleRunner
    from octavo.worker.scheduler.plan import StepPlan, StepResult

    plans: list[tuple[StepPlan, float]] = []
    num_said: dict[int, int] = {}
    ends_s = 0.0

    def launch(self: OracleRunner, plan: StepPlan) -> None:
        plans.append((plan, time.monotonic()))
        num_said.update(dict.fromkeys((each.slot for each in plan.new_requests), 0))

    def collect(self: OracleRunner) -> StepResult:
        nonlocal ends_s
        plan, begun_s = plans.pop(0)
        ends_s = pace.ends_s(begun_s, ends_s, sum(each.num_tokens for each in plan.prefill))
        time.sleep(max(0.0, ends_s - time.monotonic()))
        slots = plan.sampled_slots.tolist()
        tokens_S = np.asarray([token_ids[(7 * num_said[slot]) % len(token_ids)] for slot in slots], np.int32)
        for slot in slots:
            num_said[slot] += 1
        return StepResult(step=plan.step, tokens_S=tokens_S, is_finite_S=np.ones(len(slots), np.bool_))

    OracleRunner.launch, OracleRunner.collect = launch, collect  # type: ignore[method-assign]
    main(
        WorkerConfig(
            model=model,
            gateway_endpoints=endpoints,
            worker_id=worker_id,
            runner=RunnerKind.ORACLE,
            num_blocks=room.num_blocks,
            max_num_seqs=room.max_num_seqs,
            max_batch_tokens=room.max_batch_tokens,
            max_waiting=room.max_waiting,
            metrics_port=port,
            log_format="json",
            log_level="error",
        )
    )


def serve_gateway(port: int, endpoint: str, policy: str) -> None:
    """Serve until SIGTERM. policy: one of POLICIES; all but our own know neither loads nor prefixes."""
    from octavo.gateway.config import GatewayConfig, LogFormat
    from octavo.gateway.main import main
    from octavo.gateway.workers import pool
    from octavo.gateway.workers.config import WorkerPoolConfig
    from octavo.gateway.workers.stats import RouteReason

    drawn = random.Random(0)
    policies: dict[str, Callable[..., Any]] = {
        "random": lambda candidates, **_: (drawn.choice(candidates), RouteReason.LOAD),
        "round robin": lambda candidates, turn, **_: (candidates[turn % len(candidates)], RouteReason.LOAD),
    }
    if policy in policies:
        vars(pool)["choose"] = policies[policy]
    main(
        GatewayConfig(
            workers=WorkerPoolConfig(endpoints=(endpoint,)),
            listen_address=f"127.0.0.1:{port}",
            metrics_address=None,
            log_format=LogFormat.JSON,
            log_level="error",
        )
    )


def serve_front(port: int, targets: tuple[str, ...]) -> None:
    """Serve OpenAI's HTTP interface in front of gateways until SIGTERM."""
    from octavo.gateway.front.main import FrontConfig, main

    main(FrontConfig(targets=targets, host="127.0.0.1", port=port, log_format="json", log_level="error"))


@contextmanager
def running(*calls: tuple[Any, ...]) -> Iterator[list[SpawnProcess]]:
    """Run each (function, arguments…) in a process of its own; stopped at the end, the last one first."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=function, args=arguments) for function, *arguments in calls]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in reversed(processes):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
