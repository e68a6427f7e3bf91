"""Penalties and filters on the device against the whole sampler, which sorts and penalises the obvious way."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from model.gpu.wish_plan import Stage
from model.gpu.wishes import SampledBatch, WishState
from model.sampler import Sampler
from model.sampling import SamplingParams
from model.sampling_penalties import TokenHistory

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, WIDTH = 5000, 5120
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_k": 64},
    {"temperature": 0.8, "top_k": 63, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.3, "min_p": 0.1, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 3.0, "frequency_penalty": 1.0},
    {"temperature": 0.9, "frequency_penalty": -2.0},
    {"temperature": 0.9, "repetition_penalty": 0.7, "top_p": 0.9},
]
FLAT: list[dict[str, Any]] = [
    {"temperature": 5.0, "top_p": 0.9},
    {"temperature": 50.0, "top_p": 0.3, "presence_penalty": 2.0},
    {"temperature": 5.0, "min_p": 0.0001, "top_p": 0.97},
    {"temperature": 5.0, "min_p": 0.0001},
]


class Both:
    """Rows with wishes, prompts and outputs, in the slow sampler and on the device."""

    def __init__(self, wishes: list[dict[str, Any]], *, seed: int, vocab: int = VOCAB) -> None:
        rng, R = np.random.default_rng(seed), len(wishes)
        self.vocab = vocab
        self.history = TokenHistory(max_rows=R, max_len=64)
        self.slow = Sampler(vocab_size=vocab, history=self.history)
        self.state = WishState(num_rows=R + 1, max_batch=R + 2, vocab_size=vocab, device=DEVICE)
        self.lengths = rng.integers(6, 30, R)
        self.seeds = rng.integers(0, 2**63, R)
        self.params = [SamplingParams(seed=int(self.seeds[row]), **wish) for row, wish in enumerate(wishes)]
        self.num_prompt = np.minimum(self.lengths, 5)
        for row, params in enumerate(self.params):
            ids = rng.integers(0, vocab, self.lengths[row]).astype(np.int32)
            ids[-1] = ids[-2]
            self.history.put(row, ids, int(self.num_prompt[row]))
            self.slow.join(row, params, ids[self.num_prompt[row] :])
            self.state.put(row, params, ids, int(self.num_prompt[row]))

    def seen(self) -> torch.Tensor:
        """bool [R, vocab]: tokens that a row has."""
        seen = torch.zeros(len(self.params), self.vocab, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            seen[row, torch.from_numpy(self.history.tokens_RT[row, :length].astype(np.int64))] = True
        return seen

    def choose(self, logits: torch.Tensor) -> tuple[list[int], list[int]]:
        """The slow sampler's tokens and the device's; both go on by one token."""
        R = len(self.params)
        rows = np.arange(R)
        wanted = self.slow.sample(logits.float().clone(), rows, self.lengths).tokens_S.tolist()
        order = torch.randperm(R, generator=torch.Generator().manual_seed(R))
        rows_B = torch.cat([order, torch.tensor([R, R])]).to(torch.int32)
        padded = torch.cat([logits[order], torch.full((2, logits.shape[1]), torch.nan, dtype=logits.dtype)])
        end = np.append(self.lengths, 0)

        def put(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        state = self.state.state
        state.temperature_R.copy_(put([params.temperature for params in self.params] + [0.0], torch.float32))
        state.seed_R.copy_(put([*self.seeds.tolist(), 0], torch.int64))
        state.position_R.copy_(put(end, torch.int32))
        state.num_prompt_R.copy_(put([*self.num_prompt.tolist(), 0], torch.int32))
        last_R = state.last_token_R.fill_(-5)
        batch = SampledBatch(
            logits_BV=padded.to(DEVICE),
            rows_B=rows_B.to(DEVICE),
            token_B=put([-7] * (R + 2), torch.int32),
            is_finite_B=put([1] * (R + 2), torch.int8),
        )
        token_B = batch.token_B
        self.state.run(Stage.CHOICE, batch)
        got = last_R[:R].tolist()
        assert token_B.tolist() == [got[row] for row in order.tolist()] + [-7, -7]
        assert last_R[R] == -5
        self.history.tokens_RT[rows, self.lengths] = wanted
        self.lengths = self.lengths + 1
        return wanted, got


def spread_logits(rows: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A few logits stand out, as a language model has it; ids past the vocabulary would win."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, WIDTH, generator=generator) * 2
    logits += 6 * torch.rand(rows, WIDTH, generator=generator).pow(40)
    logits[:, VOCAB:] = 1e6
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_whole_sampler_step_after_step(dtype: torch.dtype) -> None:
    both = Both(WISHES, seed=1)
    for step in range(3):
        logits = spread_logits(len(WISHES), seed=step, dtype=dtype)
        logits[:, :VOCAB][both.seen()] += 4.0  # so that penalties decide
        wanted, got = both.choose(logits)
        assert got == wanted, step


def test_a_flat_distribution_is_cut_past_the_candidates() -> None:
    both = Both(FLAT, seed=2)
    for step in range(2):
        wanted, got = both.choose(spread_logits(len(FLAT), seed=step, dtype=torch.float32))
        assert got == wanted, step


def test_equal_logits_stay_or_fall_together() -> None:
    wishes = [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 64}]
    both = Both(wishes, seed=3)
    logits = torch.zeros(3, WIDTH)
    logits[0, 100:4000:300] = 5.0
    logits[1, 7:4500:450] = 9.0
    for _ in range(3):
        wanted, got = both.choose(logits)
        assert got == wanted


def test_a_vocabulary_of_a_few_groups_and_rows_without_a_finite_logit() -> None:
    both = Both(WISHES[:8], seed=4, vocab=150)
    logits = torch.randn(8, 160, generator=torch.Generator().manual_seed(1))
    wanted, got = both.choose(logits)
    assert got == wanted
    logits[3] = torch.nan
    logits[4] = -torch.inf
    wanted, got = both.choose(logits)
    assert [got[i] for i in (0, 1, 2, 5, 6, 7)] == [wanted[i] for i in (0, 1, 2, 5, 6, 7)]
    assert all(0 <= token < 150 for token in got)


def test_more_ties_at_the_cut_than_candidates_are_all_in_the_draw() -> None:
    both = Both([{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}] * 4, seed=5)
    logits = torch.zeros(8, WIDTH)
    logits[:, 10 : 10 + 64 * 77 : 64] = 5.0
    winners = set()
    for _ in range(3):
        wanted, got = both.choose(logits)
        assert got == wanted
        winners |= set(got)
    assert max(winners) > 10 + 64 * 64


def test_a_token_of_the_prompt_is_repeated_but_not_present() -> None:
    both = Both(
        [{"temperature": 0.0, "presence_penalty": 3.0}, {"temperature": 0.0, "repetition_penalty": 2.0}], seed=6
    )
    for row in range(2):
        ids = np.asarray([7, 8, 9], np.int32)
        both.history.put(row, ids, 2)
        both.slow.join(row, both.params[row], ids[2:])
        both.state.put(row, both.params[row], ids, 2)
    both.lengths[:], both.num_prompt[:] = 3, 2
    logits = torch.zeros(2, WIDTH)
    logits[:, 7], logits[:, 9], logits[:, 11] = 10.0, 11.0, 9.0
    wanted, got = both.choose(logits)
    assert got == wanted == [7, 11]
