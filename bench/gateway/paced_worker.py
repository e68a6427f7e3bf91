"""A real worker whose runner gives tokens at a fixed pace, and writes down when each request's tokens were known.

Must not know: gateways, callers.
"""

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "model" / "embedded" / "folio-chat"
_MAX_LATE_S = 0.1  # steps that are late are made up for, if they are not later than that


@dataclass(frozen=True, kw_only=True)
class Pace:
    """reads_back: the oracle's tokens, else any."""

    steps_per_s: float
    reads_back: bool


def worker_process(endpoints: tuple[str, ...], pace: Pace, num_streams: int, times: Path) -> None:
    """A worker at a fixed pace, which writes down when each request's tokens were known."""
    import numpy as np

    from octavo.worker.config import RunnerKind, WorkerConfig
    from octavo.worker.main import main
    from octavo.worker.runners.oracle.runner import OracleRunner
    from octavo.worker.scheduler.plan import StepPlan, StepResult

    names: dict[int, str] = {}
    known: dict[str, list[float]] = defaultdict(list)
    plans: list[StepPlan] = []
    launch, collect = OracleRunner.launch, OracleRunner.collect
    due_s = time.monotonic()

    def timed_launch(self: OracleRunner, plan: StepPlan) -> None:
        names.update({join.slot: join.request_id for join in plan.new_requests})
        plans.append(plan)
        if pace.reads_back:
            launch(self, plan)

    def timed_collect(self: OracleRunner) -> StepResult:
        nonlocal due_s
        plan = plans.pop(0)
        slots, count = plan.sampled_slots, len(plan.sampled_slots)
        tokens_S = np.full(count, 400 + plan.step % 1000, np.int32)
        result = StepResult(step=plan.step, tokens_S=tokens_S, is_finite_S=np.ones(count, np.bool_))
        result = collect(self) if pace.reads_back else result
        due_s = max(due_s + 1 / pace.steps_per_s, time.monotonic() - _MAX_LATE_S)
        time.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        for slot in slots.tolist():
            known[names[slot]].append(now_s)
        return result

    def write_times(self: OracleRunner) -> None:
        times.write_text(json.dumps(known))

    OracleRunner.launch, OracleRunner.collect = timed_launch, timed_collect  # type: ignore[method-assign]
    OracleRunner.close = write_times  # type: ignore[method-assign]
    main(
        WorkerConfig(
            model=str(MODEL),
            gateway_endpoints=endpoints,
            runner=RunnerKind.ORACLE,
            max_num_seqs=num_streams,
            max_batch_tokens=max(2048, num_streams),
            num_blocks=num_streams * 128,
            metrics_port=None,
            log_format="json",
            log_level="warning",
        )
    )
