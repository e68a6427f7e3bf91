"""Two runners that get the same plans and must give the same results."""

from collections import deque

import numpy as np

from worker.plan import StepPlan, StepResult
from worker.runner import Runner


class TwinRunner:
    """Launches both, compares what they give, and hands the second one's result on."""

    def __init__(self, slow: Runner, fast: Runner) -> None:
        self.slow, self.fast = slow, fast
        self.max_in_flight = min(slow.max_in_flight, fast.max_in_flight)
        self.num_steps = 0
        self._plans: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Both."""
        self.slow.launch(plan)
        self.fast.launch(plan)
        self._plans.append(plan)

    def collect(self) -> StepResult:
        """Both. AssertionError where they differ in more than rounding."""
        plan = self._plans.popleft()
        slow, fast = self.slow.collect(), self.fast.collect()
        self.num_steps += 1
        assert (fast.step, fast.tokens_S.dtype) == (slow.step, np.dtype(np.int32))
        assert fast.is_finite_S.tolist() == slow.is_finite_S.tolist(), plan
        assert fast.tokens_S.tolist() == slow.tokens_S.tolist(), plan
        assert fast.logprobs.keys() == slow.logprobs.keys()
        for index, wanted in slow.logprobs.items():
            got = fast.logprobs[index]
            assert got.top_ids == wanted.top_ids
            np.testing.assert_allclose(
                [got.logprob, *got.top_logprobs], [wanted.logprob, *wanted.top_logprobs], atol=2e-3, rtol=1e-3
            )
        return fast

    def close(self) -> None:
        """Both."""
        self.slow.close()
        self.fast.close()
