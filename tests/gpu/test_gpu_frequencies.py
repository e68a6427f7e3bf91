"""Tokens drawn on a GPU against the exact distribution: chi-squared tests with fixed seeds."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.gpu.sampling_columns import plan_row
from octavo.model.gpu.sampling_state import SampledBatch, SamplingState
from octavo.model.kernels.sampling.sample import SampleParts, sample_and_advance
from octavo.model.sampling.params import features_of
from octavo.wire.messages import SamplingParams
from tests.support.model.frequencies import LOGITS_V, MANY_SAMPLINGS, assert_follows, exact_distribution

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BATCH, STEPS = 256, 240
REAL, COMMON = 151_665, 100


def draw(params: SamplingParams, logits_V: torch.Tensor) -> np.ndarray:
    """Tokens of 256 rows over 240 positions of one seed. logits_V: on the device."""
    vocab = len(logits_V)
    state = SamplingState(num_rows=BATCH + 1, max_batch=BATCH, vocab_size=vocab, device="cuda")
    plan = plan_row(params, features_of(params), vocab_size=vocab)
    assert plan is not None
    for row in range(BATCH):
        state.put(row, params, np.zeros(1, np.int32), 1)
    columns = state.state
    columns.temperature_R[:BATCH], columns.seed_R[:], columns.num_prompt_R[:] = params.temperature, 7, 1
    columns.position_R[:BATCH] = torch.arange(BATCH) * STEPS
    drawn, parts = [], SampleParts(BATCH, vocab, "cuda")
    for _ in range(STEPS):
        batch = SampledBatch(
            logits_BV=logits_V.repeat(BATCH, 1),
            rows_B=torch.arange(BATCH, dtype=torch.int32, device="cuda"),
            token_B=torch.empty(BATCH, dtype=torch.int32, device="cuda"),
            is_finite_B=torch.empty(BATCH, dtype=torch.int8, device="cuda"),
        )
        sample_and_advance(
            batch.logits_BV, batch.rows_B, columns.temperature_R, columns.seed_R, columns.num_prompt_R,
            columns.last_token_R, columns.position_R, batch.token_B, batch.is_finite_B, parts,
        )  # fmt: skip
        state.run(plan.stages, batch)
        drawn.append(batch.token_B)
    return torch.cat(drawn).cpu().numpy()


@pytest.mark.parametrize("params", MANY_SAMPLINGS, ids=str)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    assert_follows(draw(params, torch.from_numpy(LOGITS_V).cuda()), exact_distribution(params))


def real_logits() -> torch.Tensor:
    """Of a real vocabulary, in falling order, so that a token is its rank."""
    return (9.0 - 1.2 * torch.arange(1, REAL + 1, dtype=torch.float64).log()).float().cuda()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, top_k=1000),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.95, min_p=1e-4),
    ],
    ids=str,
)
def test_draws_of_a_real_vocabulary_follow_the_exact_distribution(params: SamplingParams) -> None:
    """The most common tokens one by one, the others together."""
    logits_V = real_logits()
    probs_V = torch.softmax(logits_V.double() / params.temperature, dim=0).cpu().numpy()
    probs_V[params.top_k or REAL :] = 0.0
    probs_V[probs_V < params.min_p * probs_V[0]] = 0.0
    probs_V /= probs_V.sum()
    if params.top_p < 1:
        probs_V[1:][np.cumsum(probs_V)[:-1] >= params.top_p] = 0.0
        probs_V /= probs_V.sum()
    tokens = draw(params, logits_V)
    assert probs_V[tokens].min() > 0
    rest = probs_V[COMMON:].sum()
    expected = np.append(probs_V[:COMMON], rest) if rest > 0 else probs_V[:COMMON]
    assert_follows(np.minimum(tokens, COMMON), expected)
