"""What the sampler reads of a request's parameters, and their numbers for many requests side by side.

A parameter that is a number is one row of COLUMNS; the sampler (`Sampler`) and the state of a CUDA device
(`model.gpu.state`) have a column for each. Must not know: requests, slots' lifetimes, text, logits.

Legend: R rows (stable, one per running request) · W widest list of stop ids.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Protocol

import numpy as np


class Feature(IntFlag):
    """What a row needs beyond the largest logit. If no row of a batch needs anything, sampling is a single argmax.

    Stages, in this order: LOGPROBS are taken from the raw logits; BIAS; PENALTY; then the masks MIN_TOKENS, ALLOWED,
    BAD_WORDS and GRAMMAR, in any order, since each only sets logits to -inf; then, for RANDOM rows, temperature, FLOOR,
    FILTER, and TYPICAL over what those leave; then the draw.
    """

    NONE = 0
    RANDOM = 1  # temperature above zero
    FILTER = 2  # top-k or top-p: a cut that depends on the order of the logits
    PENALTY = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    BIAS = 32
    ALLOWED = 64
    BAD_WORDS = 128
    TYPICAL = 256
    GRAMMAR = 512
    FLOOR = 1024  # top-n-sigma or min-p: a cut at a distance from the largest logit


MASKS = Feature.MIN_TOKENS | Feature.ALLOWED | Feature.BAD_WORDS | Feature.GRAMMAR
"""Features that forbid tokens; together they may forbid all."""


class SamplingParams(Protocol):
    """How one output's tokens are chosen (`wire.messages.SamplingParams`): besides these, the numbers named by
    `Column.parameter`. Complete: no defaults of the model are filled in here.

    seed: uint64; the same seed gives the same tokens, whatever else is in the batch.
    stop_token_ids: end tokens included; none of them is sampled before min_tokens.
    num_logprobs: None: none; 0: the chosen token's; n: also the n most likely.
    logit_bias: id -> what is added to its logit.
    allowed_token_ids: the only ids that may be sampled; empty: all.
    bad_words: token sequences that the output never contains; the prompt does not count.
    """

    @property
    def seed(self) -> int: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def num_logprobs(self) -> int | None: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def allowed_token_ids(self) -> tuple[int, ...]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class Column:
    """A parameter as one number per row. off: the value that disables it. feature: what any other value needs. dtype:
    on the host; devices use the 32-bit equivalent."""

    parameter: str
    off: float
    feature: Feature
    dtype: str
    convert: Callable[[float], float] = float


COLUMNS: dict[str, Column] = {
    "temperature": Column("temperature", 0, Feature.RANDOM, "float32"),  # 0: greedy, which turns the filters off
    "top_k": Column("top_k", 0, Feature.FILTER, "int64"),
    "top_p": Column("top_p", 1, Feature.FILTER, "float64"),  # in [0, 1]
    "log_min_p": Column("min_p", -math.inf, Feature.FLOOR, "float32", _log),  # of a value in [0, 1]
    "top_n_sigma": Column("top_n_sigma", 0, Feature.FLOOR, "float32"),  # arXiv:2411.07641
    "typical_p": Column("typical_p", 1, Feature.TYPICAL, "float64"),  # in (0, 1]; arXiv:2202.00666
    "repetition": Column("repetition_penalty", 1, Feature.PENALTY, "float32"),  # prompt and output; arXiv:1909.05858
    "presence": Column("presence_penalty", 0, Feature.PENALTY, "float32"),  # output only, as the next
    "frequency": Column("frequency_penalty", 0, Feature.PENALTY, "float32"),
    "min_tokens": Column("min_tokens", 0, Feature.MIN_TOKENS, "int64"),
}
"""By name of the column."""

OF_RANDOM = Feature.FILTER | Feature.FLOOR | Feature.TYPICAL
"""Features of rows that draw; a greedy row has none of them."""


def column_values(params: SamplingParams, *, vocab_size: int) -> dict[str, float]:
    """Values by name in COLUMNS. A top-k of the whole vocabulary counts as off."""
    values = {name: column.convert(getattr(params, column.parameter)) for name, column in COLUMNS.items()}
    if values["top_k"] >= vocab_size:
        values["top_k"] = 0
    return values


def features_of(params: SamplingParams) -> Feature:
    """What the parameters need beyond the largest logit."""
    wanted = Feature.NONE
    for column in COLUMNS.values():
        if column.convert(getattr(params, column.parameter)) != column.off:
            wanted |= column.feature
    if Feature.RANDOM not in wanted:
        wanted &= ~OF_RANDOM
    if not params.stop_token_ids:
        wanted &= ~Feature.MIN_TOKENS
    if params.num_logprobs is not None:
        wanted |= Feature.LOGPROBS
    if params.logit_bias:
        wanted |= Feature.BIAS
    if params.allowed_token_ids:
        wanted |= Feature.ALLOWED
    if params.bad_words:
        wanted |= Feature.BAD_WORDS
    return wanted


class SamplingRows:
    """SamplingParams of R rows as numpy arrays, so that a step reads them by fancy indexing rather than a loop.

    columns: by name in COLUMNS, [R] each.
    """

    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.features_R = np.zeros(max_rows, np.uint16)
        self.columns = {name: np.full(max_rows, column.off, column.dtype) for name, column in COLUMNS.items()}
        self.seed_R = np.zeros(max_rows, np.uint64)
        self.num_logprobs_R = np.zeros(max_rows, np.int64)
        self.stop_ids_RW = np.full((max_rows, 4), -1, np.int64)  # -1: unused column, never read as an id

    def put(self, row: int, params: SamplingParams) -> None:
        """Replace the row's parameters."""
        self.features_R[row] = features_of(params)
        for name, value in column_values(params, vocab_size=self.vocab_size).items():
            self.columns[name][row] = value
        self.seed_R[row] = np.uint64(params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.num_logprobs_R[row] = params.num_logprobs or 0
        self._put_stop_ids(row, params.stop_token_ids)

    def _put_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Store those ids that can be sampled at all; the table doubles its width for a longer list."""
        ids = [i for i in dict.fromkeys(stop_ids) if 0 <= i < self.vocab_size]
        while len(ids) > self.stop_ids_RW.shape[1]:
            self.stop_ids_RW = np.concatenate([self.stop_ids_RW, np.full_like(self.stop_ids_RW, -1)], axis=1)
        self.stop_ids_RW[row] = -1
        self.stop_ids_RW[row, : len(ids)] = ids
