"""Exact distributions of small sampling problems, and whether draws follow them."""

import numpy as np

from octavo.wire.messages import SamplingParams
from tests.support.model import slow_sampler

V = 12
LOGITS_V = np.asarray([2.0, 1.5, 1.2, 0.9, 0.5, 0.0, -0.3, -0.7, -1.0, -1.5, -2.0, -3.0], np.float32)
MANY_SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.8),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, typical_p=0.6),
    SamplingParams(
        temperature=1.0, logit_bias={0: -1.0, 9: 2.5}, allowed_token_ids=(0, 2, 4, 9, 11), bad_words=((2,),)
    ),
    SamplingParams(temperature=1.3, min_p=0.02, top_k=9, top_p=0.9),
    SamplingParams(temperature=1.5, top_n_sigma=1.2),
    SamplingParams(temperature=0.8, top_n_sigma=1.5, top_p=0.9, allowed_token_ids=(0, 1, 2, 3, 4, 5, 6)),
]


def exact_distribution(params: SamplingParams) -> np.ndarray:
    x_V = slow_sampler.penalised(LOGITS_V, [], [], params) / params.temperature
    probs_V = np.zeros(V)
    kept = slow_sampler.survivors(x_V, params)
    probs_V[kept] = np.exp(x_V[kept])
    return probs_V / probs_V.sum()


def chi_squared_limit(degrees: int) -> float:
    """The value that chance exceeds once in a thousand times (approximation of Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.0902 * np.sqrt(2 / (9 * degrees))) ** 3


def assert_follows(tokens: np.ndarray, probs_V: np.ndarray) -> None:
    counts_V = np.bincount(tokens, minlength=len(probs_V))
    possible = probs_V > 0
    assert counts_V[~possible].sum() == 0
    expected = probs_V[possible] * len(tokens)
    statistic = float(((counts_V[possible] - expected) ** 2 / expected).sum())
    assert possible.sum() > 1
    assert statistic < chi_squared_limit(int(possible.sum()) - 1)
