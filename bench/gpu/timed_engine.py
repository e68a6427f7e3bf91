"""An engine over a CUDA runner that counts its tokens and knows where its thread's time went.

Must not know: workloads, floors.
"""

import time
from typing import Any

import numpy as np
import torch

from bench.assembly import assemble, run_of
from bench.gpu.spent import Stopwatch
from bench.mailbox import GATEWAY, Mailbox
from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import StepOutput
from octavo.worker.runners.cuda.runner import CudaRunner


class CountingMail(Mailbox):
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


class GpuEngine:
    """An engine over one runner, made anew for every workload that needs another prefix cache."""

    def __init__(self, runner: CudaRunner, *, prefix_cache: PrefixCache) -> None:
        config = runner.config
        self.mail, self.stopwatch, self._num_asked = CountingMail(), Stopwatch(), 0
        parts = assemble(runner, config, self.mail, max_batch_tokens=config.max_batch_tokens, prefix_cache=prefix_cache)
        self._engine, self._scheduler = parts.engine, parts.scheduler
        for owner, method, part in (
            (parts.scheduler, "plan", "plan"),
            (parts.scheduler, "apply", "apply"),
            (runner, "launch", "launch"),
            (runner._results, "wait", "wait"),
            (runner.programs, "run_decode", "replay"),
            (runner.programs, "run_mixed", "replay"),
        ):
            self.stopwatch.watch(owner, method, part)

    def ask(self, prompt_ids_T: np.ndarray, num_output: int, **sampling: Any) -> None:
        """Put one request into the inbox."""
        self._num_asked += 1
        seed = self._num_asked * 7919
        run = run_of(self._num_asked, prompt_ids_T, max_tokens=num_output, ignore_eos=True, seed=seed, **sampling)
        self.mail.coming.append((GATEWAY, run))

    @property
    def is_steady(self) -> bool:
        """Nobody waits: whoever asked is running."""
        return not self.mail.coming and not self._scheduler.num_waiting

    def step(self) -> None:
        """One step of the engine, timed."""
        start_s, before, spent = time.perf_counter(), self._engine.num_steps, self.stopwatch.spent
        self._engine.step()
        spent.total += time.perf_counter() - start_s
        spent.steps += self._engine.num_steps - before

    def finish(self) -> float:
        """Step until everything asked for is answered; seconds."""
        self.mail.num_tokens, start_s = 0, time.perf_counter()
        while self.mail.num_finished < self._num_asked:
            self.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start_s
