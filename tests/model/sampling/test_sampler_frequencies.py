"""Sampled frequencies against the exact distribution: chi-squared tests with fixed seeds."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from octavo.model.sampling.logits_processors import TokenHistory
from octavo.model.sampling.noise import hash_bits, log_exponential, row_keys
from octavo.model.sampling.sampler import Sampler
from octavo.wire.messages import SamplingParams
from tests.support.model import slow_sampler
from tests.support.model.frequencies import LOGITS_V, MANY_SAMPLINGS, V, assert_follows, exact_distribution

DRAWS = 60_000
BATCH = 3_000


def sampler_with(params: SamplingParams, seeds: np.ndarray) -> Sampler:
    sampler = Sampler(vocab_size=V, history=TokenHistory(max_rows=BATCH, max_len=2))
    for row, seed in enumerate(seeds):
        sampler.join(row, replace(params, seed=int(seed)), np.empty(0, np.int32))
    return sampler


@pytest.mark.parametrize(
    "params",
    MANY_SAMPLINGS,
    ids=lambda p: (
        f"t{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p} y{p.typical_p} n{p.top_n_sigma} b{len(p.logit_bias)}"
    ),
)
def test_positions_of_one_seed_follow_the_exact_distribution(params: SamplingParams) -> None:
    sampler = sampler_with(params, np.full(BATCH, 7))
    logits_SV = torch.from_numpy(np.tile(LOGITS_V, (BATCH, 1)))
    rows_S = np.arange(BATCH)
    draws = [
        sampler.sample(logits_SV.clone(), rows_S, rows_S + start).tokens_S.numpy() for start in range(0, DRAWS, BATCH)
    ]
    assert_follows(np.concatenate(draws), exact_distribution(params))


@pytest.mark.parametrize("params", MANY_SAMPLINGS[:1] + MANY_SAMPLINGS[-1:], ids=["open", "filtered"])
def test_first_tokens_of_many_seeds_follow_the_exact_distribution(params: SamplingParams) -> None:
    logits_SV = torch.from_numpy(np.tile(LOGITS_V, (BATCH, 1)))
    rows_S = np.arange(BATCH)
    draws = [
        sampler_with(params, rows_S + start).sample(logits_SV.clone(), rows_S, rows_S * 0).tokens_S.numpy()
        for start in range(0, DRAWS, BATCH)
    ]
    assert_follows(np.concatenate(draws), exact_distribution(params))


def test_two_positions_of_one_seed_are_independent() -> None:
    keys_S2 = torch.from_numpy(row_keys(np.full(2 * DRAWS, 99, np.uint64), np.arange(2 * DRAWS)))
    tokens_S = log_exponential(keys_S2, torch.arange(6, dtype=torch.int32)).argmin(dim=-1).numpy()
    assert_follows(tokens_S[0::2] * 6 + tokens_S[1::2], np.full(36, 1 / 36))


def test_the_winner_of_a_race_over_a_real_vocabulary_lies_everywhere_alike() -> None:
    keys_S2 = torch.from_numpy(row_keys(np.arange(2000, dtype=np.uint64), np.zeros(2000, np.int64)))
    ids_V = torch.arange(151_665, dtype=torch.int32)
    winners = torch.cat([log_exponential(chunk, ids_V).argmin(dim=-1) for chunk in keys_S2.split(50)])
    assert_follows(winners.numpy() * 20 // 151_665, np.full(20, 1 / 20))


def test_the_hash_has_the_bits_of_the_plain_python_reference() -> None:
    seeds_S = np.asarray([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    indices_S = np.asarray([0, 1, 31, 2**31, 100_000])
    ids = [0, 1, 2, 63, 64, 151_664]
    bits_SV = hash_bits(torch.from_numpy(row_keys(seeds_S, indices_S)), torch.tensor(ids, dtype=torch.int32))
    expected = [
        [slow_sampler.hash_bits(int(s), int(i), t) for t in ids] for s, i in zip(seeds_S, indices_S, strict=True)
    ]
    assert (bits_SV.numpy().view(np.uint32) == np.asarray(expected, np.uint32)).all()


def test_the_noise_is_finite_and_has_the_moments_of_an_exponential() -> None:
    keys_S2 = torch.from_numpy(row_keys(np.arange(300, dtype=np.uint64), np.zeros(300, np.int64)))
    noise_SV = log_exponential(keys_S2, torch.arange(20_000, dtype=torch.int32))
    assert bool(torch.isfinite(noise_SV).all())
    assert float(noise_SV.min()) < -14  # the rare large Gumbel values are there: 6e6 draws reach about ln(6e6) = 15.6
    exponential_SV = noise_SV.double().exp()
    assert float(exponential_SV.mean()) == pytest.approx(1.0, abs=2e-3)
    assert float(exponential_SV.var()) == pytest.approx(1.0, abs=6e-3)
