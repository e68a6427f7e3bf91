"""Several outputs of one prompt, and log-probabilities of prompts, on the CUDA runner against the torch runner."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.model.interpreter import WARNINGS
from tests.support.worker.cuda_runners import prompt, runner_pair, world

pytestmark = [*WARNINGS, pytest.mark.usefixtures("few_items")]


@pytest.mark.slow
def test_forks_and_scores_of_prompts_are_those_of_the_torch_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(runner_pair(num_blocks=64), monkeypatch, num_blocks=64)
    here.add(1, prompt(1, 9), num_outputs=3, temperature=5.0, seed=5, max_tokens=5, ignore_eos=True)
    here.add(2, prompt(2, 14), temperature=0.0, num_prompt_logprobs=2, max_tokens=2, ignore_eos=True)
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    outputs = [stream.tokens for which, stream in here.streams.items() if which.handle % 1000 == 1]
    assert len({tuple(tokens) for tokens in outputs}) > 1
    assert [len(stream.prompt_logprobs) for stream in here.streams.values()] == [0, 0, 0, 13]
