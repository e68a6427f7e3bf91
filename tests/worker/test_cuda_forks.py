"""Several outputs of one prompt, and log-probabilities of prompts, on the CUDA runner against the torch runner."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from model.kernels import decode_work
from tests.support.cuda_twins import DEVICE, prompt, twins, world

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also those without work."""
    if DEVICE == "cpu":
        for name, value in (("TARGET_ITEMS", 8), ("TARGET_PROGRAMS", 16), ("MIN_CHUNK_TOKENS", 16)):
            monkeypatch.setattr(decode_work, name, value, raising=False)
        monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


@pytest.mark.slow
def test_forks_and_scores_of_prompts_are_those_of_the_torch_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(twins(num_blocks=64), monkeypatch, num_blocks=64)
    here.add(1, prompt(1, 9), num_outputs=3, temperature=5.0, seed=5, max_tokens=5, ignore_eos=True)
    here.add(2, prompt(2, 14), temperature=0.0, num_prompt_logprobs=2, max_tokens=2, ignore_eos=True)
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    outputs = [stream.tokens for which, stream in here.streams.items() if which.handle % 1000 == 1]
    assert len({tuple(tokens) for tokens in outputs}) > 1
    assert [len(stream.prompt_logprobs) for stream in here.streams.values()] == [0, 0, 0, 13]
