"""An engine over a runner (or a group of ranks) that counts tokens and times the parts of its thread: methods are
replaced by ones that read the clock before and after.

Must not know: workloads, floors.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.in_process import GATEWAY, Mailbox, assemble, run_of
from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import StepOutput
from octavo.worker.loading.warmup import WarmRunner
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.group import GroupRunner
from octavo.worker.runners.rank_figures import MeasuredRunner


@dataclass(slots=True)
class Spent:
    """Seconds of the engine's thread, by part, and numbers of calls. wait: for the device. replay: the part of launch
    that enqueues recorded steps."""

    steps: int = 0
    total: float = 0.0
    plan: float = 0.0
    launch: float = 0.0
    replay: float = 0.0
    wait: float = 0.0
    apply: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to one of the fields."""
        setattr(self, part, getattr(self, part) + seconds)

    def host_us(self) -> dict[str, float]:
        """Microseconds per step without waiting, and its parts."""
        each = 1e6 / max(self.steps, 1)
        rest = self.total - self.wait - self.plan - self.launch - self.apply
        return {
            "host": (self.total - self.wait) * each, "plan": self.plan * each, "launch": self.launch * each,
            "replay": self.replay * each, "apply": self.apply * each, "rest": rest * each, "wait": self.wait * each,
        }  # fmt: skip


class Stopwatch:
    """spent: time since it was last set to zero."""

    def __init__(self) -> None:
        self.spent = Spent()

    def set_to_zero(self) -> None:
        """Start counting anew."""
        self.spent = Spent()

    def watch(self, owner: object, method: str, part: str) -> None:
        """Count the time of this method of this object as a part; replaces an earlier watch of it."""
        plain = getattr(type(owner), method).__get__(owner)

        def timed(*args: object, **named: object) -> object:
            start_s = time.perf_counter()
            try:
                return plain(*args, **named)
            finally:
                self.spent.add(part, time.perf_counter() - start_s)

        setattr(owner, method, timed)


class CountingMail(Mailbox):
    """Only counts tokens. first_s: when the first token came."""

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


def own_runner(runner: Any) -> Any:
    """The runner that makes steps and waits: the runner itself, or rank 0's if there are several."""
    while isinstance(runner, GroupRunner | MeasuredRunner):
        runner = runner._runner
    return runner


class GpuEngine:
    """An engine over one runner, made anew for each workload that needs another prefix cache."""

    def __init__(self, runner: WarmRunner, *, prefix_cache: PrefixCache, max_batch_tokens: int | None = None) -> None:
        """max_batch_tokens: None: the runner's own, which CUDA runners have."""
        config, own = runner.config, own_runner(runner)
        budget = max_batch_tokens or own.config.max_batch_tokens
        self.mail, self.stopwatch, self._num_asked = CountingMail(), Stopwatch(), 0
        parts = assemble(runner, config, self.mail, max_batch_tokens=budget, prefix_cache=prefix_cache)
        self._engine, self._scheduler = parts.engine, parts.scheduler
        watched = [(parts.scheduler, "plan", "plan"), (parts.scheduler, "apply", "apply"), (runner, "launch", "launch")]
        if isinstance(own, CudaRunner):
            watched += [(own._results, "wait", "wait")]
            watched += [(own.graphs, "run_decode", "replay"), (own.graphs, "run_mixed", "replay")]
        for owner, method, part in watched:
            self.stopwatch.watch(owner, method, part)

    def ask(self, prompt_ids_T: np.ndarray, num_output: int, **sampling: Any) -> None:
        """Put one request into the inbox."""
        self._num_asked += 1
        seed = self._num_asked * 7919
        run = run_of(self._num_asked, prompt_ids_T, max_tokens=num_output, ignore_eos=True, seed=seed, **sampling)
        self.mail.coming.append((GATEWAY, run))

    @property
    def is_steady(self) -> bool:
        """Whether no request waits: all that were sent are running."""
        return not self.mail.coming and not self._scheduler.num_waiting

    def step(self) -> None:
        """Run one step of the engine, timed."""
        start_s, before, spent = time.perf_counter(), self._engine.num_steps, self.stopwatch.spent
        self._engine.step()
        spent.total += time.perf_counter() - start_s
        spent.steps += self._engine.num_steps - before

    def finish(self) -> float:
        """Step until all requests are answered; seconds."""
        self.mail.num_tokens, start_s = 0, time.perf_counter()
        while self.mail.num_finished < self._num_asked:
            self.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start_s
