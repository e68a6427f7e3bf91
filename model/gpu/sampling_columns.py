"""What a row's sampling parameters need on the device: values of its columns, and kernels to run after a step.

Must not know: tensors, the device.

Legend: V vocabulary · T tokens of a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

import numpy as np

from octavo.model.kernels.sampling.bad_words import MAX_LENGTH, MAX_WORDS
from octavo.model.kernels.sampling.columns import MAX_BIASES
from octavo.model.kernels.sampling.filter import FILTERS, KEEP, RACE
from octavo.model.kernels.sampling.logprobs import MAX_TOP
from octavo.model.kernels.sampling.mask import ALWAYS, WHILE_SHORT
from octavo.model.sampling.params import COLUMNS, MASKS, OF_RANDOM, Feature, SamplingParams, column_values

LEAST_TEMPERATURE = 1e-4
"""Below it, logits divided by the temperature exceed what float32 can hold accurately; differences from the largest
logit do not."""
_FILTERS = [name for name, column in COLUMNS.items() if column.feature & OF_RANDOM]


class Stage(IntFlag):
    """Kernels after the step, in order."""

    NONE = 0
    LOGPROBS = 1  # before all others, and again after them
    MASK = 2
    BAD_WORDS = 4
    GRAMMAR = 8  # the mask comes from the host, later than the rest of the step
    BIAS = 16
    CHOICE = 32
    SPECIAL = 64  # no kernel: the whole sampler, after all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """features: what the row needs. stages: what a step runs for it. columns: by name in
    model.gpu.state.SAMPLING_COLUMNS. biases: by id.

    forbidden: ids never chosen. words: bad words of two tokens or more. All ids are in the vocabulary, except that
    tokens of a word before its last may be any.
    """

    features: Feature
    stages: Stage
    columns: dict[str, float]
    biases: dict[int, float]
    forbidden: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]


def plan_row(params: SamplingParams, features: Feature, *, vocab_size: int) -> RowPlan | None:
    """The plan of a row; None if only model/sampling/sampler.py can do it: more log-probabilities, biases or bad words
    than fit into a row. features: the params' own, and GRAMMAR if the row has one."""
    biases = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < vocab_size}
    known = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]
    words = tuple(word for word in known if len(word) > 1)
    is_large = len(biases) > MAX_BIASES or len(words) > MAX_WORDS or (params.num_logprobs or 0) > MAX_TOP
    if is_large or any(len(word) > MAX_LENGTH + 1 for word in words):
        return None
    forbidden = tuple(word[0] for word in known if len(word) == 1)
    mask = ALWAYS if params.allowed_token_ids or forbidden else 0
    if Feature.MIN_TOKENS in features:
        mask |= WHILE_SHORT
    columns = column_values(params, vocab_size=vocab_size)
    columns |= {
        "method": _method(features, columns), "num_biases": len(biases), "mask": mask, "num_words": len(words),
        "logprobs": 0 if params.num_logprobs is None else min(params.num_logprobs, vocab_size) + 1,
    }  # fmt: skip
    stages = _stages(features, columns)
    return RowPlan(features=features, stages=stages, columns=columns, biases=biases, forbidden=forbidden, words=words)


def _method(features: Feature, columns: Mapping[str, float]) -> int:
    is_filtered = any(columns[name] != COLUMNS[name].off for name in _FILTERS)
    if columns["temperature"] > 0 and (is_filtered or columns["temperature"] < LEAST_TEMPERATURE):
        return FILTERS
    return RACE if features & (Feature.PENALTY | Feature.BIAS | MASKS) else KEEP


def _stages(features: Feature, columns: dict[str, float]) -> Stage:
    wanted = {
        Stage.LOGPROBS: columns["logprobs"], Stage.MASK: columns["mask"], Stage.BAD_WORDS: columns["num_words"],
        Stage.GRAMMAR: features & Feature.GRAMMAR, Stage.BIAS: columns["num_biases"], Stage.CHOICE: columns["method"],
    }  # fmt: skip
    stages = Stage.NONE
    for stage, value in wanted.items():
        if value:
            stages |= stage
    return stages


def allowed_always(params: SamplingParams, forbidden: tuple[int, ...], *, vocab_size: int) -> np.ndarray:
    """bool [V]: the allowed ids (all if none are given) without the forbidden ones."""
    is_allowed_V = np.zeros(vocab_size, np.bool_)
    ids = np.asarray(params.allowed_token_ids, np.int64)
    is_allowed_V[ids[(ids >= 0) & (ids < vocab_size)] if len(ids) else slice(None)] = True
    is_allowed_V[list(forbidden)] = False
    return is_allowed_V


def allowed_while_short(params: SamplingParams, *, vocab_size: int) -> np.ndarray:
    """bool [V]: everything but the stop ids."""
    is_allowed_V = np.ones(vocab_size, np.bool_)
    is_allowed_V[[token for token in params.stop_token_ids if 0 <= token < vocab_size]] = False
    return is_allowed_V
