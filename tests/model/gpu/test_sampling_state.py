"""Every sampling parameter, on the device against the whole sampler, mixed in one batch."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.model.gpu.sampling_columns import Stage, plan_row
from octavo.model.kernels.sampling.mask import packed_mask
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.params import Feature, features_of
from octavo.wire.messages import SamplingParams
from tests.support.model.sampling_references import Outcome, SamplingPair

V = 300
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 1.0, "num_logprobs": 20},
    {"temperature": 1.0, "num_logprobs": 0, "top_k": 5},
    {"temperature": 1.0, "num_logprobs": 5, "logit_bias": {3: 9.5, 7: -100.0, 299: 4.0, 4000: 1.0}},
    {"temperature": 0.0, "logit_bias": {token: (token * 37 % 11) - 5.0 for token in range(290)}},
    {"temperature": 1.5, "logit_bias": {5: 8.0, 6: 8.0}, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 250, 5000), "num_logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": (4, 8), "logit_bias": {8: 50.0, 9: 50.0}},
    {"temperature": 2.0, "bad_words": ((5,), (6,), (900,)), "top_p": 0.9},
    {"temperature": 1.0, "min_tokens": 40, "stop_token_ids": tuple(range(0, 300, 2)), "num_logprobs": 4},
    {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": tuple(range(0, 300, 2))},
    {"temperature": 3.0, "typical_p": 0.4, "logit_bias": {1: 3.0}, "bad_words": ((2,),)},
]


def logits_of(rows: int, *, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(rows, V + 20, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, V:] = 1e6
    return logits.to(dtype)


def assert_same(got: Outcome, wanted: Outcome) -> None:
    """The token of a row that its masks leave nothing means nothing."""
    assert (got.is_finite, got.is_exhausted) == (wanted.is_finite, wanted.is_exhausted)
    assert [*zip(got.tokens, got.is_exhausted, strict=True)] == [
        (mine if exhausted else theirs, exhausted)
        for mine, theirs, exhausted in zip(got.tokens, wanted.tokens, wanted.is_exhausted, strict=True)
    ]
    assert got.logprobs.keys() == wanted.logprobs.keys()
    for row, (chosen, ids, top) in wanted.logprobs.items():
        assert got.logprobs[row][1] == ids
        np.testing.assert_allclose(got.logprobs[row][2], top, atol=2e-5, rtol=2e-6)
        if not wanted.is_exhausted[row]:
            np.testing.assert_allclose(got.logprobs[row][0], chosen, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_parameters_get_the_tokens_and_log_probabilities_of_the_whole_sampler(dtype: torch.dtype) -> None:
    pair = SamplingPair(SAMPLING, seed=1, vocab=V)
    for step in range(4):
        logits = logits_of(len(SAMPLING), seed=step, dtype=dtype)
        if dtype is torch.bfloat16:  # of equal logits, any may be told first
            distinct = torch.arange(0x3F80, 0x3F80 + V, dtype=torch.int16).view(dtype)
            logits[:, :V] = distinct[torch.randperm(V, generator=torch.Generator().manual_seed(step))]
        wanted, got = pair.choose(logits)
        assert_same(got, wanted)


def test_masks_of_a_step_are_for_their_rows_alone() -> None:
    sampling = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 1.0, "top_k": 9, "logit_bias": {11: 60.0}}]
    pair = SamplingPair(sampling, seed=2, vocab=V)
    for row, params in enumerate(pair.params):  # as a runner has it where the request has a grammar
        plan = plan_row(params, features_of(params) | Feature.GRAMMAR, vocab_size=V)
        assert plan is not None
        assert Stage.GRAMMAR | Stage.CHOICE in plan.stages
        pair.state.state.sampling_columns["method"][row] = int(plan.columns["method"])
    rng = np.random.default_rng(0)
    for step in range(3):
        allowed = rng.random((2, V)) < 0.05
        masks = TokenMasks(index_N=np.asarray([1, 2]), bits_NW=np.stack([packed_mask(row) for row in allowed]))
        wanted, got = pair.choose(logits_of(3, seed=step), masks)
        assert_same(got, wanted)
        assert [allowed[0][got.tokens[1]], allowed[1][got.tokens[2]]] == [True, True]


def test_a_bad_word_is_forbidden_only_where_its_beginning_was_just_said() -> None:
    words = ((10, 11), (11, 12, 13), (10, 11, 12, 13), tuple(range(20, 53)), (1, 1))
    pair = SamplingPair([{"temperature": 0.0, "bad_words": words}] * 6, seed=3, vocab=V, num_ids=6)
    long = np.asarray([10, *range(20, 52)], np.int32)
    endings = ([10], [11, 12], [10, 11, 12], long.tolist(), [1], [11, 12])
    for row, said in enumerate(endings):
        num_prompt = 4 if row < 5 else 6
        pair.put(row, np.asarray([1, 10, 11, 12, *said], np.int32), num_prompt)
    logits = torch.zeros(6, V + 20)
    favourites = ([11, 40], [13, 40], [13, 40], [52, 40], [1, 40], [13, 40])
    for row, (first, second) in enumerate(favourites):
        logits[row, first], logits[row, second] = 9.0, 8.0
    wanted, got = pair.choose(logits)
    assert_same(got, wanted)
    assert got.tokens == [40, 40, 40, 40, 40, 13]  # the last row's words begin in its prompt: allowed
    for step in range(8):
        logits = torch.zeros(6, V + 20)
        logits[:, 10 + step % 4] = 5.0
        wanted, got = pair.choose(logits)
        assert_same(got, wanted)


def test_rows_that_their_masks_leave_nothing_are_told() -> None:
    sampling = [
        {"temperature": 0.0, "allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))},
        {"temperature": 1.0, "allowed_token_ids": (7,), "bad_words": ((7,),), "top_k": 3, "logit_bias": {7: 3.0}},
        {"temperature": 1.0, "allowed_token_ids": (7,)},
    ]
    wanted, got = SamplingPair(sampling, seed=4, vocab=V).choose(logits_of(3, seed=1))
    assert got.is_exhausted == wanted.is_exhausted == [True, True, False]
    assert got.is_finite == wanted.is_finite == [True, True, True]
    assert got.tokens[2] == wanted.tokens[2] == 7


def test_what_a_row_has_no_room_for_is_left_to_the_whole_sampler() -> None:
    def plan(**sampling: Any) -> object:
        params = SamplingParams(**sampling)
        return plan_row(params, features_of(params), vocab_size=5000)

    assert plan(logit_bias=dict.fromkeys(range(1024), 1.0)) is not None
    assert plan(logit_bias=dict.fromkeys(range(1025), 1.0)) is None
    assert plan(bad_words=(tuple(range(33)),)) is not None
    assert plan(bad_words=(tuple(range(34)),)) is None
    assert plan(bad_words=((1, 2),) * 128) is not None
    assert plan(bad_words=((1, 2),) * 129) is None
    assert plan(num_logprobs=20) is not None
    assert plan(num_logprobs=21) is None


def test_a_row_with_a_temperature_alone_needs_no_kernel() -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)):
        plan = plan_row(params, features_of(params), vocab_size=V)
        assert plan is not None
        assert (plan.stages, plan.columns["method"]) == (Stage.NONE, 0)


@pytest.mark.timeout(1500)  # half a minute of one core in the interpreter
@settings(max_examples=25)
@given(
    sampling=st.lists(
        st.fixed_dictionaries(
            {"temperature": st.sampled_from([0.0, 1e-5, 0.5, 1.0, 4.0]), "seed": st.integers(0, 2**64 - 1)},
            optional={
                "top_k": st.integers(1, V + 5),
                "top_p": st.floats(0.05, 1.0),
                "min_p": st.floats(0.0, 0.5),
                "top_n_sigma": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
                "repetition_penalty": st.sampled_from([0.8, 1.3]),
                "presence_penalty": st.sampled_from([-1.0, 2.0]),
                "num_logprobs": st.integers(0, 20),
                "logit_bias": st.dictionaries(st.integers(0, V + 9), st.sampled_from([-3.0, 2.5, 7.0]), max_size=6),
                "allowed_token_ids": st.lists(st.integers(0, V - 1), min_size=2, max_size=90).map(tuple),
                "bad_words": st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=4).map(
                    tuple
                ),
                "min_tokens": st.integers(0, 30),
                "stop_token_ids": st.lists(st.integers(0, V - 1), max_size=40).map(tuple),
            },
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_any_mixture_agrees(sampling: list[dict[str, Any]], seed: int) -> None:
    pair = SamplingPair(sampling, seed=seed, vocab=V)
    for step in range(2):
        wanted, got = pair.choose(logits_of(len(sampling), seed=seed + step))
        assert_same(got, wanted)
