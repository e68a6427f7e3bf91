"""The batch sampler against its slow reference: tokens, isolation of rows, logprobs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.sampling.logits_processors import TokenHistory
from octavo.model.sampling.params import COLUMNS, Feature, column_values, features_of
from octavo.model.sampling.sampler import Sampler
from octavo.wire.messages import SamplingParams
from tests.support.model import slow_sampler

V = 300


class Rows:
    """Rows of a batch with their histories, and a sampler that knows them."""

    def __init__(self, sampling: list[SamplingParams], *, vocab_size: int = V, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.sampling = sampling
        self.history = TokenHistory(max_rows=len(sampling) + 3, max_len=64)
        self.sampler = Sampler(vocab_size=vocab_size, history=self.history)
        self.prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in sampling]
        self.outputs = [rng.integers(0, vocab_size, rng.integers(0, 9)).tolist() for _ in sampling]
        for row in range(len(sampling)):
            self.join(row)

    def join(self, row: int) -> None:
        tokens = np.asarray(self.prompts[row] + self.outputs[row], np.int32)
        self.history.put(row, tokens, len(self.prompts[row]))
        self.sampler.join(row, self.sampling[row], tokens[len(self.prompts[row]) :])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray([len(self.prompts[r]) + len(self.outputs[r]) for r in rows], np.int64)

    def sample(self, logits_SV: torch.Tensor, rows: list[int] | None = None) -> list[int]:
        rows_S = np.asarray(range(len(self.sampling)) if rows is None else rows, np.int32)
        return self.sampler.sample(logits_SV.clone(), rows_S, self.lengths(rows_S)).tokens_S.tolist()

    def append(self, row: int, token: int) -> None:
        self.history.tokens_RT[row, len(self.prompts[row]) + len(self.outputs[row])] = token
        self.outputs[row].append(token)

    def slow(self, logits_SV: torch.Tensor) -> list[int]:
        return [
            slow_sampler.sample(logits_V[: self.sampler.vocab_size].numpy(), prompt, output, params)
            for logits_V, prompt, output, params in zip(
                logits_SV, self.prompts, self.outputs, self.sampling, strict=True
            )
        ]


sampling_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 64, 100, 299, 5000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 1.5]),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=9).map(tuple),
    typical_p=st.sampled_from([0.2, 0.9, 1.0, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 3.0]), max_size=5),
    allowed_token_ids=st.one_of(st.just(()), st.lists(st.integers(0, V - 1), min_size=30, max_size=60).map(tuple)),
    bad_words=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)


@settings(max_examples=60)
@given(
    sampling=st.lists(sampling_strategy, min_size=1, max_size=6), seed=st.integers(0, 10**6), spread=st.floats(0.05, 8)
)
def test_every_row_of_a_mixed_batch_gets_the_token_of_the_slow_reference(
    sampling: list[SamplingParams], seed: int, spread: float
) -> None:
    rows = Rows(sampling, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        logits_SV = torch.randn(len(sampling), V + 17, generator=generator) * spread
        expected = rows.slow(logits_SV)
        tokens = rows.sample(logits_SV)
        assert tokens == expected
        for row, token in enumerate(tokens):
            rows.append(row, token)


@settings(max_examples=8)
@given(
    sampling=st.lists(sampling_strategy, min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
)
def test_a_vocabulary_larger_than_all_candidates_changes_nothing(
    sampling: list[SamplingParams], seed: int, spread: float
) -> None:
    rows = Rows(sampling, vocab_size=9_000, seed=seed)
    logits_SV = torch.randn(len(sampling), 9_000, generator=torch.Generator().manual_seed(seed)) * spread
    assert rows.sample(logits_SV) == rows.slow(logits_SV)


def test_equal_logits_beyond_the_candidates_race_too() -> None:
    sampling = [SamplingParams(temperature=1.0, seed=seed, top_k=5) for seed in range(40)]
    rows = Rows(sampling, vocab_size=9_000)
    logits_SV = torch.zeros(40, 9_000)
    tokens = rows.sample(logits_SV)
    assert tokens == rows.slow(logits_SV)
    assert len(set(tokens)) > 30


def test_a_row_gets_the_same_tokens_alone_in_any_batch_and_after_a_new_join() -> None:
    sampling = [
        SamplingParams(temperature=0.9, seed=11),
        SamplingParams(temperature=0.9, seed=12, top_p=0.95),
        SamplingParams(temperature=1.5, seed=13, top_k=7, frequency_penalty=0.5),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, seed=14, top_k=1500, min_p=0.001),
    ]
    rows = Rows(sampling, vocab_size=20_000)
    logits_SV = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(3)) * 2
    together = rows.sample(logits_SV)
    for row in range(5):
        rows.join(row)
    alone = [rows.sample(logits_SV[row : row + 1], [row])[0] for row in range(5)]
    for row in range(5):
        rows.join(row)
    order = [4, 2, 0, 3, 1]
    shuffled = rows.sample(logits_SV[order], order)
    assert alone == together
    assert [shuffled[order.index(row)] for row in range(5)] == together


def test_the_next_index_of_the_output_draws_anew() -> None:
    rows = Rows([SamplingParams(temperature=1.0, seed=5)])
    tokens: list[int] = []
    for _ in range(20):
        tokens += rows.sample(torch.zeros(1, V))
        rows.append(0, tokens[-1])
    assert len(set(tokens)) > 15


def test_ids_past_the_vocabulary_are_never_sampled_however_large_their_logits() -> None:
    rows = Rows([SamplingParams(temperature=0), SamplingParams(temperature=1, seed=1, top_p=0.9)])
    logits_SV = torch.randn(2, V + 50)
    logits_SV[:, V:] = 1e9
    assert max(rows.sample(logits_SV)) < V


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_flagged_and_hurts_nobody(poison: float) -> None:
    sampling = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=1, num_logprobs=2),
        SamplingParams(temperature=0.7, seed=2, top_k=20, top_p=0.8, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=3, min_p=0.1, min_tokens=99, stop_token_ids=(1, 2)),
    ]
    logits_SV = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    good = Rows(sampling).sample(logits_SV)
    for victim in range(4):
        rows = Rows(sampling)
        poisoned_SV = logits_SV.clone()
        poisoned_SV[victim, slice(None) if poison == -torch.inf else slice(17, 18)] = poison
        rows_S = np.arange(4)
        sampled = rows.sampler.sample(poisoned_SV, rows_S, rows.lengths(rows_S))
        assert sampled.is_finite_S.tolist() == [row != victim for row in range(4)]
        tokens = sampled.tokens_S.tolist()
        assert all(0 <= token < V for token in tokens)
        assert [t for r, t in enumerate(tokens) if r != victim] == [t for r, t in enumerate(good) if r != victim]


def test_one_finite_logit_among_minus_infinities_is_taken() -> None:
    rows = Rows([SamplingParams(temperature=1.0, seed=1)])
    logits_SV = torch.full((1, V), -torch.inf)
    logits_SV[0, 42] = 1.0
    sampled = rows.sampler.sample(logits_SV, np.arange(1), rows.lengths(np.arange(1)))
    assert (sampled.tokens_S.tolist(), sampled.is_finite_S.tolist()) == ([42], [True])


def test_a_greedy_batch_does_nothing_but_find_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([SamplingParams(temperature=0, top_k=5, top_p=0.5, seed=9)] * 3)
    for stage in ("_adjust", "_mask", "_draw_random", "_count"):
        monkeypatch.setattr(Sampler, stage, None)
    monkeypatch.setattr(Sampler, "_raw_logprobs", None)
    logits_SV = torch.randn(3, V)
    assert rows.sample(logits_SV) == logits_SV.argmax(dim=-1).tolist()


def test_min_tokens_masks_stop_ids_until_enough_are_out() -> None:
    rows = Rows([SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7, 8, 9, 10, 11, 400))])
    rows.outputs[0] = []
    rows.join(0)
    logits_SV = torch.zeros(1, V)
    logits_SV[0, 7:12], logits_SV[0, 50] = 5.0, 1.0
    tokens: list[int] = []
    for _ in range(3):
        tokens += rows.sample(logits_SV)
        rows.append(0, tokens[-1])
    assert tokens == [50, 50, 7]


def test_a_bad_word_is_never_completed_and_its_beginning_in_the_prompt_does_not_count() -> None:
    rows = Rows([SamplingParams(temperature=0, bad_words=((5, 6), (5, 8, 7), (9,), (400,), ()))])
    rows.prompts[0], rows.outputs[0] = [1, 5], []
    rows.join(0)
    wanted, got = [6, 5, 6, 5, 8, 7, 9], []
    for token in wanted:
        logits_SV = torch.zeros(1, V)
        logits_SV[0, token], logits_SV[0, 50] = 5.0, 1.0
        got += rows.sample(logits_SV)
        rows.append(0, token)
    assert got == [6, 5, 50, 5, 8, 50, 50]


def test_a_row_whose_masks_leave_nothing_is_exhausted_and_harms_no_other() -> None:
    sampling = [
        SamplingParams(temperature=0.7, seed=3, allowed_token_ids=(4, 5), bad_words=((4,), (5,))),
        SamplingParams(temperature=0.7, seed=3, allowed_token_ids=(4, 5), bad_words=((4,),)),
        SamplingParams(temperature=0, allowed_token_ids=(7,), min_tokens=60, stop_token_ids=(7,)),
        SamplingParams(temperature=0),
    ]
    rows = Rows(sampling)
    logits_SV = torch.randn(4, V)
    sampled = rows.sampler.sample(logits_SV.clone(), np.arange(4), rows.lengths(np.arange(4)))
    assert sampled.is_exhausted_S is not None
    assert sampled.is_exhausted_S.tolist() == [True, False, True, False]
    assert sampled.is_finite_S.tolist() == [True] * 4
    assert sampled.tokens_S.tolist()[1::2] == [5, int(logits_SV[3].argmax())]


def test_a_row_that_joins_anew_has_nothing_of_what_the_row_had_forbidden() -> None:
    rows = Rows([SamplingParams(temperature=0, logit_bias={3: 50.0}, allowed_token_ids=(3,), bad_words=((9,),))])
    rows.sampling[0] = SamplingParams(temperature=0, logit_bias={4: 50.0})
    logits_SV = torch.zeros(1, V)
    assert rows.sample(logits_SV) == [3]
    rows.join(0)
    assert rows.sample(logits_SV) == [4]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampling = [
        SamplingParams(temperature=0, num_logprobs=0),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, seed=1, repetition_penalty=2.0, top_k=3, num_logprobs=5),
    ]
    rows = Rows(sampling)
    logits_SV = torch.randn(3, V + 5)
    raw_SV = torch.log_softmax(logits_SV[:, :V].double(), dim=-1)
    sampled = rows.sampler.sample(logits_SV.clone(), np.arange(3), rows.lengths(np.arange(3)))
    got = sampled.logprobs
    assert got is not None
    assert (got.index_N.tolist(), got.count_N.tolist()) == ([0, 2], [0, 5])
    chosen = [float(raw_SV[row, sampled.tokens_S[row]]) for row in (0, 2)]
    assert got.chosen_N == pytest.approx(chosen, abs=1e-5)
    best = raw_SV[2].topk(5)
    assert got.top_ids_NK[1].tolist() == best.indices.tolist()
    assert got.top_NK[1] == pytest.approx(best.values.numpy(), abs=1e-5)


def test_rows_that_ask_for_nothing_leave_logprobs_out() -> None:
    rows = Rows([SamplingParams(temperature=1.0, seed=1)])
    assert rows.sampler.sample(torch.randn(1, V), np.arange(1), rows.lengths(np.arange(1))).logprobs is None


def test_a_row_that_leaves_gives_its_counts_to_the_next() -> None:
    rows = Rows([SamplingParams(temperature=0, frequency_penalty=1.0)] * 9)
    for row in range(9):
        rows.sampler.join(row, SamplingParams(temperature=0), np.empty(0, np.int32))
    for row in range(9):
        rows.join(row)
    logits_SV = torch.randn(9, V)
    assert rows.sample(logits_SV) == rows.slow(logits_SV)


def test_every_column_is_a_parameter_of_a_request_and_a_default_asks_for_a_temperature_alone() -> None:
    defaults = SamplingParams()
    assert {column.parameter for column in COLUMNS.values()} <= set(SamplingParams.__struct_fields__)
    values = column_values(defaults, vocab_size=V)
    assert values == {name: column.off for name, column in COLUMNS.items()} | {"temperature": 1.0}
    assert features_of(defaults) is Feature.RANDOM
