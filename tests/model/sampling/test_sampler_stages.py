"""Each stage of the sampler against transformers' processors, element by element on the same logits."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from octavo.model.sampling.filters import TOP_K_OFF, Filters, keep_typical, largest, masses, thresholds
from octavo.model.sampling.logits_processors import AllowedIds, BadWords, LogitBias, Penalties, TokenHistory
from octavo.model.sampling.params import SamplingRows
from octavo.model.sampling.sampler import scaled
from octavo.wire.messages import SamplingParams

V = 300
S = 16


def filters_of(*, top_k: int = TOP_K_OFF, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        top_k_S=torch.full((S,), top_k),
        top_p_S=torch.full((S,), top_p, dtype=torch.float64),
        floor_S=torch.full((S,), math.log(min_p) if min_p else -math.inf),
        typical_p_S=torch.ones(S, dtype=torch.float64),
    )


def logits(seed: int, *, spread: float = 2.0) -> torch.Tensor:
    x_SV = torch.randn(S, 1000, generator=torch.Generator().manual_seed(seed)) * spread
    return scaled(x_SV, torch.ones(S))


def survivors(x_SV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """bool [S, V] by our thresholds, from all the candidates and, where those suffice, from the first 64."""
    mass_S = masses(x_SV, filters)
    ordered_SV = x_SV.sort(dim=-1, descending=True).values
    least_S, is_right_S = thresholds(ordered_SV, mass_S, filters, vocab_size=x_SV.shape[1])
    assert bool(is_right_S.all())
    few_S, is_right_S = thresholds(ordered_SV[:, :64], mass_S, filters, vocab_size=x_SV.shape[1])
    assert torch.equal(few_S[is_right_S], least_S[is_right_S])
    return x_SV >= least_S.unsqueeze(1)


@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.0, 2.0])
def test_temperature_equals_that_of_transformers(temperature: float) -> None:
    logits_SV = torch.randn(8, 1000) * 4
    theirs_SV = TemperatureLogitsWarper(temperature)(None, logits_SV)
    ours_SV = scaled(logits_SV, torch.full((8,), temperature))
    torch.testing.assert_close(ours_SV, theirs_SV - theirs_SV.amax(dim=-1, keepdim=True), rtol=1e-5, atol=1e-4)


def test_the_smallest_temperature_does_not_overflow() -> None:
    x_SV = scaled(torch.tensor([[3e4, 2e4, -3e4]]), torch.tensor([1e-38]))
    assert x_SV.tolist() == [[0.0, -math.inf, -math.inf]]


@pytest.mark.parametrize("top_k", [1, 2, 20, 63, 64, 65, 999, 1000])
def test_top_k_keeps_what_transformers_keeps_equal_logits_included(top_k: int) -> None:
    x_SV = logits(0)
    x_SV[:, 100:200] = x_SV[:, 300:400]
    theirs_SV = TopKLogitsWarper(top_k)(None, x_SV)
    assert torch.equal(survivors(x_SV, filters_of(top_k=top_k)), theirs_SV > -torch.inf)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_top_p_keeps_what_transformers_keeps(top_p: float, spread: float) -> None:
    x_SV = logits(1, spread=spread)
    theirs_SV = TopPLogitsWarper(top_p)(None, x_SV)
    assert torch.equal(survivors(x_SV, filters_of(top_p=top_p)), theirs_SV > -torch.inf)


def test_top_p_of_nothing_keeps_the_most_likely() -> None:
    assert survivors(logits(2), filters_of(top_p=0.0)).sum(dim=-1).tolist() == [1] * S


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    x_SV = logits(3)
    theirs_SV = MinPLogitsWarper(min_p)(None, x_SV)
    assert torch.equal(survivors(x_SV, filters_of(min_p=min_p)), theirs_SV > -torch.inf)


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"), [(0.01, 50, 0.9), (0.05, 500, 0.5), (0.001, 10, 0.99), (0.0001, 700, 0.6)]
)
def test_the_chain_keeps_what_transformers_keeps_in_the_same_order(min_p: float, top_k: int, top_p: float) -> None:
    x_SV = logits(4)
    chain = LogitsProcessorList([MinPLogitsWarper(min_p), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)])
    theirs_SV = chain(None, x_SV)
    ours_SV = survivors(x_SV, filters_of(min_p=min_p, top_k=top_k, top_p=top_p))
    assert torch.equal(ours_SV, theirs_SV > -torch.inf)


@pytest.mark.parametrize("penalty", [0.5, 1.05, 1.8])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    rows = SamplingRows(max_rows=4, vocab_size=V)
    history = TokenHistory(max_rows=4, max_len=40)
    penalties = Penalties(rows, history, torch.device("cpu"))
    ids_ST = torch.randint(0, V, (4, 40))
    for row in range(4):
        rows.put(row, SamplingParams(repetition_penalty=penalty))
        history.put(row, ids_ST[row].numpy().astype(np.int32), 25)
        penalties.put(row, ids_ST[row, 25:].numpy())
    logits_SV = torch.randn(4, V)
    theirs_SV = RepetitionPenaltyLogitsProcessor(penalty)(ids_ST, logits_SV)
    penalties.apply(logits_SV, np.arange(4), np.arange(4), np.full(4, 40))
    assert torch.equal(logits_SV, theirs_SV)


@pytest.mark.parametrize(("width", "count"), [(10, 20), (5000, 20), (20_000, 64), (20_001, 64), (151_665, 64)])
def test_largest_equals_a_whole_topk(width: int, count: int) -> None:
    x_SV = torch.randn(3, width)
    values_SK, ids_SK = largest(x_SV, count)
    assert torch.equal(values_SK, x_SV.topk(min(count, width), dim=-1).values)
    assert torch.equal(x_SV.gather(1, ids_SK), values_SK)
    assert all(len(set(row.tolist())) == min(count, width) for row in ids_SK)


@pytest.mark.parametrize("top_n_sigma", [0.1, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("temperature", [1e-38, 0.7, 3.0])
def test_top_n_sigma_keeps_what_is_so_many_deviations_below_the_largest_at_any_temperature(
    top_n_sigma: float, temperature: float
) -> None:
    logits_SV = torch.randn(S, 1000, generator=torch.Generator().manual_seed(6)) * 3
    logits_SV[:, ::3] = -torch.inf  # masked tokens do not count
    rows = SamplingRows(max_rows=S, vocab_size=1000)
    for row in range(S):
        rows.put(row, SamplingParams(temperature=temperature, top_n_sigma=top_n_sigma))
    filters = Filters.of(logits_SV, {name: torch.from_numpy(column_R) for name, column_R in rows.columns.items()})
    for row in range(S):
        left = [x for x in logits_SV[row].tolist() if x > -math.inf]
        mean = sum(left) / len(left)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in left) / len(left))
        floor = -top_n_sigma * sigma / temperature
        assert float(filters.floor_S[row]) == pytest.approx(floor if floor > -3.4e38 else -math.inf, rel=1e-6)
    alone = Filters.of(
        logits_SV[3:4], {name: torch.from_numpy(column_R[3:4]) for name, column_R in rows.columns.items()}
    )
    assert torch.equal(alone.floor_S, filters.floor_S[3:4])


@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_typical_p_keeps_what_transformers_keeps(typical_p: float, spread: float) -> None:
    x_SV = logits(5, spread=spread)
    theirs_SV = TypicalLogitsWarper(typical_p)(None, x_SV.double()).float()  # its float32 sums miss the border's token
    ours_SV = keep_typical(x_SV, torch.full((S,), typical_p, dtype=torch.float64))
    assert torch.equal(ours_SV, theirs_SV)


def test_typical_p_after_the_other_filters_keeps_what_transformers_keeps() -> None:
    x_SV = logits(6)
    chain = LogitsProcessorList(
        [MinPLogitsWarper(0.001), TopKLogitsWarper(400), TopPLogitsWarper(0.9), TypicalLogitsWarper(0.7)]
    )
    ours_SV = x_SV.masked_fill(~survivors(x_SV, filters_of(min_p=0.001, top_k=400, top_p=0.9)), -torch.inf)
    assert torch.equal(keep_typical(ours_SV, torch.full((S,), 0.7, dtype=torch.float64)), chain(None, x_SV))


def test_bias_equals_that_of_transformers() -> None:
    bias = {3: 4.5, 17: -100.0, 299: 0.25}
    theirs_SV = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    logits_SV, ids_ST = torch.randn(4, V), torch.randint(0, V, (4, 7))
    ours = LogitBias(vocab_size=V, device=torch.device("cpu"))
    ours.put(2, bias)
    expected_SV = logits_SV.clone()
    expected_SV[1] = theirs_SV(ids_ST[1:2], logits_SV[1:2])
    ours.apply(logits_SV, np.array([1]), np.array([2]))
    assert torch.equal(logits_SV, expected_SV)


@pytest.mark.parametrize("seed", range(5))
def test_bad_words_are_masked_as_transformers_masks_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids_ST = rng.integers(0, 6, (4, 12))
    words = [tuple(rng.integers(0, 6, rng.integers(1, 4)).tolist()) for _ in range(8)]
    history = TokenHistory(max_rows=4, max_len=12)
    ours = BadWords(history, vocab_size=V, device=torch.device("cpu"))
    for row in range(4):
        history.put(row, ids_ST[row].astype(np.int32), 0)
        ours.put(row, tuple(words[: 2 * row + 2]))
    logits_SV = torch.randn(4, V)
    theirs = [NoBadWordsLogitsProcessor([list(word) for word in words[: 2 * row + 2]]) for row in range(4)]
    expected = [each(torch.from_numpy(ids_ST[[row]]), logits_SV[[row]]) for row, each in enumerate(theirs)]
    ours.apply(logits_SV, np.arange(4), np.arange(4), np.full(4, 12))
    assert torch.equal(logits_SV, torch.cat(expected))


def test_allowed_ids_are_those_that_a_prefix_constraint_of_transformers_leaves() -> None:
    ids = (4, 9, 250)
    theirs = PrefixConstrainedLogitsProcessor(lambda row, tokens: list(ids), num_beams=1)
    logits_SV = torch.randn(3, V)
    expected_SV = logits_SV.clone()
    expected_SV[[0, 2]] = theirs(torch.zeros(2, 1, dtype=torch.long), logits_SV[[0, 2]])
    ours = AllowedIds(max_rows=5, vocab_size=V, device=torch.device("cpu"))
    for row in (4, 1):
        ours.put(row, ids)
    ours.apply(logits_SV, np.array([0, 2]), np.array([4, 1]))
    assert torch.equal(logits_SV, expected_SV)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, 0.3), (-1.0, 0.5)])
def test_presence_and_frequency_penalties_equal_their_definition(presence: float, frequency: float) -> None:
    """transformers has none; the definition is OpenAI's: logit - count * frequency - (count > 0) * presence."""
    rows, history = SamplingRows(max_rows=4, vocab_size=V), TokenHistory(max_rows=4, max_len=40)
    penalties = Penalties(rows, history, torch.device("cpu"))
    ids_ST = torch.randint(0, 20, (4, 40))
    for row in range(4):
        rows.put(row, SamplingParams(presence_penalty=presence, frequency_penalty=frequency))
        history.put(row, ids_ST[row].numpy().astype(np.int32), 10)
        penalties.put(row, ids_ST[row, 10:].numpy())
    logits_SV = torch.randn(4, V)
    counts_SV = torch.stack([torch.bincount(ids_ST[row, 10:], minlength=V) for row in range(4)])
    expected_SV = logits_SV - counts_SV * frequency - (counts_SV > 0) * presence
    penalties.apply(logits_SV, np.arange(4), np.arange(4), np.full(4, 40))
    torch.testing.assert_close(logits_SV, expected_SV)
