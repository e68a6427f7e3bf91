"""Penalties and filters on the device against the whole sampler, which sorts and penalises the obvious way."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.model.sampling_references import SamplingPair

VOCAB, WIDTH = 5000, 5120
SAMPLING: list[dict[str, Any]] = [
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


def spread_logits(rows: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A few logits stand out, as a language model has it; ids past the vocabulary would win."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, WIDTH, generator=generator) * 2
    logits += 6 * torch.rand(rows, WIDTH, generator=generator).pow(40)
    logits[:, VOCAB:] = 1e6
    return logits.to(dtype)


@pytest.mark.sanitize(only=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_whole_sampler_step_after_step(dtype: torch.dtype) -> None:
    both = SamplingPair(SAMPLING, seed=1, vocab=VOCAB)
    for step in range(3):
        logits = spread_logits(len(SAMPLING), seed=step, dtype=dtype)
        logits[:, :VOCAB][both.seen()] += 4.0  # so that penalties decide
        wanted, got = both.choose(logits)
        assert got == wanted, step


@pytest.mark.sanitize
def test_a_flat_distribution_is_cut_past_the_candidates() -> None:
    both = SamplingPair(FLAT, seed=2, vocab=VOCAB)
    for step in range(2):
        wanted, got = both.choose(spread_logits(len(FLAT), seed=step, dtype=torch.float32))
        assert got == wanted, step


@pytest.mark.sanitize
def test_any_number_of_candidates_and_any_temperature() -> None:
    sampling = [
        {"temperature": 1.0, "top_k": 65},
        {"temperature": 4.0, "top_k": 700, "top_p": 0.95},
        {"temperature": 9.0, "top_k": 4999},
        {"temperature": 2.0, "top_k": 4500, "min_p": 0.001, "frequency_penalty": 1.0},
        {"temperature": 1e-5},
        {"temperature": 9e-5, "top_k": 3},
        {"temperature": 1e-30, "top_p": 0.9},
        {"temperature": 5e-5, "presence_penalty": 0.5},
    ]
    both = SamplingPair(sampling, seed=7, vocab=VOCAB)
    for step in range(2):
        logits = spread_logits(len(sampling), seed=step, dtype=torch.float32)
        logits[4, :1000] = logits[4, :1000].clamp(max=3.0)
        wanted, got = both.choose(logits)
        assert got == wanted, step


def test_a_hot_row_draws_among_all_that_top_k_leaves() -> None:
    both = SamplingPair([{"temperature": 100.0, "top_k": 200}], seed=8, vocab=VOCAB)
    logits = spread_logits(1, seed=3, dtype=torch.float32)
    best = set(logits[0, :VOCAB].topk(200).indices.tolist())
    drawn = set()
    for _ in range(12):
        wanted, got = both.choose(logits)
        assert got == wanted
        drawn |= set(got.tokens)
    assert drawn <= best
    assert not drawn <= set(logits[0, :VOCAB].topk(64).indices.tolist())


@pytest.mark.sanitize
def test_typical_tokens_are_kept_after_the_other_filters() -> None:
    sampling = [
        {"temperature": 1.0, "typical_p": 0.5},
        {"temperature": 0.7, "typical_p": 0.05},
        {"temperature": 3.0, "typical_p": 0.9, "top_k": 300},
        {"temperature": 1.0, "typical_p": 0.3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.2, "typical_p": 0.6, "repetition_penalty": 1.3},
    ]
    both = SamplingPair(sampling, seed=9, vocab=VOCAB)
    for step in range(3):
        wanted, got = both.choose(spread_logits(len(sampling), seed=step, dtype=torch.float32))
        assert got == wanted, step


@pytest.mark.sanitize(only=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_within_so_many_deviations_of_the_largest_are_kept_before_the_other_filters(dtype: torch.dtype) -> None:
    """Near and far cuts, those past the candidates included; masks and biases change what deviates."""
    sampling = [
        {"temperature": 1.0, "top_n_sigma": 1.0},
        {"temperature": 4.0, "top_n_sigma": 0.5, "top_p": 0.8},
        {"temperature": 9.0, "top_n_sigma": 3.5},
        {"temperature": 5.0, "top_n_sigma": 3.0, "top_k": 300, "min_p": 0.001},
        {"temperature": 2.0, "top_n_sigma": 2.0, "typical_p": 0.5, "repetition_penalty": 1.3},
        {"temperature": 9.0, "top_n_sigma": 1.0, "allowed_token_ids": tuple(range(0, 5000, 9)), "top_p": 0.9},
        {"temperature": 9.0, "top_n_sigma": 2.5, "logit_bias": {7: 9.0, 4100: -50.0}, "bad_words": ((8,), (9,))},
        {"temperature": 1e-30, "top_n_sigma": 0.1},
        {"temperature": 0.0, "top_n_sigma": 1.0, "frequency_penalty": 0.5},
        {"temperature": 100.0, "top_n_sigma": 100.0},
    ]
    both = SamplingPair(sampling, seed=10, vocab=VOCAB)
    for step in range(2):
        wanted, got = both.choose(spread_logits(len(sampling), seed=step, dtype=dtype))
        assert got == wanted, step


def test_the_tokens_that_top_n_sigma_leaves_are_the_same_at_any_temperature() -> None:
    logits = spread_logits(1, seed=4, dtype=torch.float32)
    row = logits[0, :VOCAB].double()
    kept = set((row >= row.max() - 1.5 * row.std(correction=0)).nonzero().flatten().tolist())
    assert 3 < len(kept) < 60
    for temperature in (0.5, 100.0):
        both = SamplingPair([{"temperature": temperature, "top_n_sigma": 1.5}], seed=11, vocab=VOCAB)
        drawn = set()
        for _ in range(6):
            wanted, got = both.choose(logits.clone())
            assert got == wanted
            drawn |= set(got.tokens)
        assert drawn <= kept
    assert len(drawn) > 3  # hot: any of those that are left


def test_equal_logits_stay_or_fall_together() -> None:
    sampling = [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 64}]
    both = SamplingPair(sampling, seed=3, vocab=VOCAB)
    logits = torch.zeros(3, WIDTH)
    logits[0, 100:4000:300] = 5.0
    logits[1, 7:4500:450] = 9.0
    for _ in range(3):
        wanted, got = both.choose(logits)
        assert got == wanted


@pytest.mark.sanitize
def test_a_vocabulary_of_a_few_groups_and_rows_without_a_finite_logit() -> None:
    both = SamplingPair(SAMPLING[:8], seed=4, vocab=150)
    logits = torch.randn(8, 160, generator=torch.Generator().manual_seed(1))
    wanted, got = both.choose(logits)
    assert got == wanted
    logits[3] = torch.nan
    logits[4] = -torch.inf
    wanted, got = both.choose(logits)
    others = (0, 1, 2, 5, 6, 7)
    assert [got.tokens[i] for i in others] == [wanted.tokens[i] for i in others]
    assert got.is_finite == wanted.is_finite == [row not in (3, 4) for row in range(8)]
    assert not any(got.is_exhausted)
    assert all(0 <= token < 150 for token in got.tokens)


def test_more_ties_at_the_cut_than_candidates_are_all_in_the_draw() -> None:
    both = SamplingPair([{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5}] * 4, seed=5, vocab=VOCAB)
    logits = torch.zeros(8, WIDTH)
    logits[:, 10 : 10 + 64 * 77 : 64] = 5.0
    winners = set()
    for _ in range(3):
        wanted, got = both.choose(logits)
        assert got == wanted
        winners |= set(got.tokens)
    assert max(winners) > 10 + 64 * 64


def test_a_token_of_the_prompt_is_repeated_but_not_present() -> None:
    sampling = [{"temperature": 0.0, "presence_penalty": 3.0}, {"temperature": 0.0, "repetition_penalty": 2.0}]
    both = SamplingPair(sampling, seed=6, vocab=VOCAB)
    for row in range(2):
        ids = np.asarray([7, 8, 9], np.int32)
        both.put(row, ids, 2)
    logits = torch.zeros(2, WIDTH)
    logits[:, 7], logits[:, 9], logits[:, 11] = 10.0, 11.0, 9.0
    wanted, got = both.choose(logits)
    assert got == wanted
    assert got.tokens == [7, 11]
