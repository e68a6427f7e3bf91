"""Two runners that get the same plans and must give the same results."""

from collections import deque

import numpy as np

from octavo.worker.runners.interface import Runner, StepMasks
from octavo.worker.scheduler.plan import StepPlan, StepResult


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

    def constrain(self, masks: StepMasks) -> None:
        """Both."""
        self.slow.constrain(masks)
        self.fast.constrain(masks)

    def collect(self) -> StepResult:
        """Both. AssertionError where they differ in more than rounding."""
        plan = self._plans.popleft()
        slow, fast = self.slow.collect(), self.fast.collect()
        self.num_steps += 1
        assert (fast.step, fast.tokens_S.dtype) == (slow.step, np.dtype(np.int32))
        assert fast.is_finite_S.tolist() == slow.is_finite_S.tolist(), plan
        exhausted = [
            np.zeros(len(fast.tokens_S), np.bool_) if each is None else each
            for each in (fast.is_exhausted_S, slow.is_exhausted_S)
        ]
        assert exhausted[0].tolist() == exhausted[1].tolist(), plan
        has_token_S = ~exhausted[0]
        assert fast.tokens_S[has_token_S].tolist() == slow.tokens_S[has_token_S].tolist(), plan
        assert fast.logprobs.keys() == slow.logprobs.keys()
        for index, wanted in slow.logprobs.items():
            got = fast.logprobs[index]
            assert got.top_ids == wanted.top_ids
            np.testing.assert_allclose(
                [got.logprob, *got.top_logprobs], [wanted.logprob, *wanted.top_logprobs], atol=2e-3, rtol=1e-3
            )
        assert fast.prompt_logprobs.keys() == slow.prompt_logprobs.keys()
        for index, positions in slow.prompt_logprobs.items():
            assert [each.top_ids for each in fast.prompt_logprobs[index]] == [each.top_ids for each in positions]
            np.testing.assert_allclose(
                [each.logprob for each in fast.prompt_logprobs[index]],
                [each.logprob for each in positions],
                atol=2e-3,
                rtol=1e-3,
            )
        assert fast.embeddings.keys() == slow.embeddings.keys()
        for index, embedding_D in slow.embeddings.items():
            np.testing.assert_allclose(fast.embeddings[index], embedding_D, atol=2e-3, rtol=1e-3)
        return fast

    def close(self) -> None:
        """Both."""
        self.slow.close()
        self.fast.close()
