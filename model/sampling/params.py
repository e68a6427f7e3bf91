"""What a caller may ask of the sampler, and those parameters for many requests side by side.

Must not know: requests, slots' lifetimes, text, logits.

Legend: R rows (stable, one per running request) · W widest list of stop ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np

from octavo.model.sampling.filters import TOP_K_OFF


class Feature(IntFlag):
    """What a row needs beyond the largest logit. A batch in which no row needs anything takes the short way.

    Stages, in this order: LOGPROBS are taken of the raw logits; BIAS is added; PENALTY; then the masks MIN_TOKENS,
    ALLOWED, BAD_WORDS and GRAMMAR, whose order among themselves says nothing, as each only sets logits to -inf; then,
    for RANDOM rows, temperature, min-p, top-k and top-p (FILTER), and TYPICAL over what those leave; then the draw.
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


MASKS = Feature.MIN_TOKENS | Feature.ALLOWED | Feature.BAD_WORDS | Feature.GRAMMAR
"""Features that forbid tokens; together they may forbid all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one output's tokens are chosen. Complete: nothing is filled in from a model's defaults here.

    temperature: 0 is greedy (and turns top-k, top-p and min-p off).
    top_k: 0 keeps all. top_p, min_p: in [0, 1]; 1 and 0 keep all.
    seed: uint64; one seed gives the same tokens whatever else is in the batch.
    repetition_penalty: over prompt and output (CTRL, arXiv:1909.05858); presence and frequency over the output only.
    min_tokens, stop_ids: while fewer than min_tokens are out, none of stop_ids (end tokens included) is sampled.
    num_logprobs: None: none; 0: the chosen token's; n: the n most likely besides.
    typical_p: locally typical sampling (arXiv:2202.00666), in (0, 1]; 1 keeps all.
    logit_bias: id -> what is added to its logit. allowed_token_ids: the only ones that are sampled; empty: all.
    bad_words: token sequences, none of which the output ever holds; the prompt does not count.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    typical_p: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def features(self) -> Feature:
        """What this asks for beyond greedy."""
        wanted = Feature.NONE
        if self.temperature > 0:
            wanted |= Feature.RANDOM
            if self.top_k > 0 or self.top_p < 1:
                wanted |= Feature.FILTER
            if self.typical_p < 1:
                wanted |= Feature.TYPICAL
        if self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0:
            wanted |= Feature.PENALTY
        if self.min_tokens > 0 and self.stop_ids:
            wanted |= Feature.MIN_TOKENS
        if self.num_logprobs is not None:
            wanted |= Feature.LOGPROBS
        if self.logit_bias:
            wanted |= Feature.BIAS
        if self.allowed_token_ids:
            wanted |= Feature.ALLOWED
        if self.bad_words:
            wanted |= Feature.BAD_WORDS
        return wanted


class SamplingRows:
    """SamplingParams of R rows as numpy columns, so that a step reads them by fancy indexing and not by a loop."""

    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.features_R = np.zeros(max_rows, np.uint16)
        self.temperature_R = np.zeros(max_rows, np.float32)
        self.top_k_R = np.zeros(max_rows, np.int64)
        self.top_p_R = np.ones(max_rows, np.float64)
        self.min_p_R = np.zeros(max_rows, np.float64)
        self.typical_p_R = np.ones(max_rows, np.float64)
        self.seed_R = np.zeros(max_rows, np.uint64)
        self.repetition_R = np.ones(max_rows, np.float32)
        self.presence_R = np.zeros(max_rows, np.float32)
        self.frequency_R = np.zeros(max_rows, np.float32)
        self.min_tokens_R = np.zeros(max_rows, np.int64)
        self.num_logprobs_R = np.zeros(max_rows, np.int64)
        self.stop_ids_RW = np.full((max_rows, 4), -1, np.int64)  # -1: unused column, never read as an id

    def put(self, row: int, params: SamplingParams) -> None:
        """Give the row new parameters; whatever it had is forgotten."""
        self.features_R[row] = params.features
        self.temperature_R[row] = params.temperature
        self.top_k_R[row] = params.top_k if 0 < params.top_k < self.vocab_size else TOP_K_OFF
        self.top_p_R[row] = params.top_p
        self.min_p_R[row] = params.min_p
        self.typical_p_R[row] = params.typical_p
        self.seed_R[row] = np.uint64(params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.repetition_R[row] = params.repetition_penalty
        self.presence_R[row] = params.presence_penalty
        self.frequency_R[row] = params.frequency_penalty
        self.min_tokens_R[row] = params.min_tokens
        self.num_logprobs_R[row] = params.num_logprobs or 0
        self._put_stop_ids(row, params.stop_ids)

    def _put_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Store the ids that can be sampled at all; the table widens by doubling when a longer list comes."""
        ids = [i for i in dict.fromkeys(stop_ids) if 0 <= i < self.vocab_size]
        while len(ids) > self.stop_ids_RW.shape[1]:
            self.stop_ids_RW = np.concatenate([self.stop_ids_RW, np.full_like(self.stop_ids_RW, -1)], axis=1)
        self.stop_ids_RW[row] = -1
        self.stop_ids_RW[row, : len(ids)] = ids
