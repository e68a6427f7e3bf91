"""What rounding weights or the cache costs: a model against the same model as it was before, on the same tokens.

The rounded model is the slow reference: weights are rounded as the kernels have them and multiplied as floats.

Legend: T tokens of a text · V vocabulary.
Must not know: files, how figures are printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

import torch
from torch.nn import functional as F

from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_generate, paged_logits
from octavo.model.causal_lm import CausalLM
from octavo.model.layers.decoder import DecoderLayer
from octavo.model.layers.linear import Linear
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import FP8, Fp8Weight, round_inputs, round_to_groups


class Rounding(Enum):
    """What is rounded. TOKENS: weights and, for each product, its inputs, as products of many tokens on a GPU do."""

    NONE = "none"
    FP8_WEIGHTS = "fp8 weights"
    FP8_WEIGHTS_AND_TOKENS = "fp8 weights and tokens"
    INT8_WEIGHTS = "int8 weights, a scale per output"
    INT8_WEIGHTS_AND_INPUTS = "int8 weights, a scale per output, and their inputs, 32 at a time"
    INT8_GROUPS = "int8 weights, groups of 128"
    INT4_GROUPS = "int4 weights, groups of 128"
    INT4_SMALL_GROUPS = "int4 weights, groups of 32"
    FP8_CACHE = "fp8 cache"
    FP8_ALL = "fp8 weights and cache"
    FP8_ALL_AND_TOKENS = "fp8 weights, tokens and cache"

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of the cache; None for the model's."""
        return FP8 if self in (Rounding.FP8_CACHE, Rounding.FP8_ALL, Rounding.FP8_ALL_AND_TOKENS) else None

    @property
    def has_rounded_tokens(self) -> bool:
        """Whether what an e4m3 weight is multiplied with is rounded, too."""
        return self in (Rounding.FP8_WEIGHTS_AND_TOKENS, Rounding.FP8_ALL_AND_TOKENS)


GROUPED = {
    Rounding.INT8_WEIGHTS: (8, None),
    Rounding.INT8_WEIGHTS_AND_INPUTS: (8, None),
    Rounding.INT8_GROUPS: (8, 128),
    Rounding.INT4_GROUPS: (4, 128),
    Rounding.INT4_SMALL_GROUPS: (4, 32),
}
"""Bits and group size."""


class RoundingTokens(Fp8Weight):
    """An e4m3 weight that rounds what it is multiplied with."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `Fp8Weight.multiply_rounded`."""
        return self.multiply_rounded(x)


class RoundingInputs(GroupedWeight):
    """Integers that round what they are multiplied with."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """As a CPU does for int8 weights."""
        bias_O = None if self.bias_O is None else self.bias_O.float()
        return F.linear(round_inputs(x), self.dequantized(), bias_O).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingError:
    """perplexity: of the texts, by the rounded model; before: by the other. relative_error: norm of the difference of
    logits over their norm. divergence: Kullback-Leibler, nats a token. same_choice: share of tokens whose most likely
    successor is the same. same_outputs, num_outputs: greedy continuations that are equal token by token.
    mean_prefix: tokens of a continuation before the first other one, on average.
    """

    perplexity: float
    before: float
    relative_error: float
    divergence: float
    same_choice: float
    same_outputs: int
    num_outputs: int
    mean_prefix: float


def round_model(model: CausalLM, rounding: Rounding) -> None:
    """Round the layers' matrices; the head and the embedding stay."""
    if rounding.kv_dtype is not None:
        fold_cache_scales(model)
    for layer in model.decoder_layers:
        for linear, norm_D in matrices_of(layer):
            round_linear(linear, norm_D, rounding)


def matrices_of(layer: DecoderLayer) -> list[tuple[Linear, torch.Tensor | None]]:
    """Each with the weight of the norm before it."""
    return [
        (layer.self_attn.qkv_proj, layer.input_layernorm.weight.data),
        (layer.self_attn.o_proj, None),
        (layer.mlp.gate_up_proj, layer.post_attention_layernorm.weight.data),
        (layer.mlp.down_proj, None),
    ]


def round_linear(linear: Linear, norm_D: torch.Tensor | None, rounding: Rounding) -> None:
    """One matrix, in place. Groups are of the checkpoint's own matrix, as in GPTQ; others have the norm folded in."""
    if rounding in GROUPED:
        bits, group_size = GROUPED[rounding]
        fitting = group_size if group_size and linear.weight.shape[1] % group_size == 0 else None
        grouped = round_to_groups(linear.weight.data, bits=bits, group_size=fitting)
        if rounding is Rounding.INT8_WEIGHTS_AND_INPUTS:
            parts = {field.name: getattr(grouped, field.name) for field in fields(grouped)}
            linear.hold(RoundingInputs(**parts | {"dtype": torch.float32}))
            return
        linear.weight.data = replace(grouped, dtype=linear.weight.dtype).dequantized()
        return
    if rounding in (Rounding.NONE, Rounding.FP8_CACHE):
        return
    if norm_D is not None:
        linear.weight.data.copy_(linear.weight.data.float() * norm_D.float())
        norm_D.fill_(1.0)
    weight = Fp8Weight.quantize(linear.weight.data)
    if rounding.has_rounded_tokens:
        linear.hold(RoundingTokens(code_OI=weight.code_OI, scale_O=weight.scale_O))
    else:
        linear.weight.data.copy_(weight.dequantized())


def measure(
    rounded: CausalLM,
    before: CausalLM,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    kv_dtype: torch.dtype | None = None,
    max_new_tokens: int = 48,
) -> RoundingError:
    """Compare on texts of at least 2 tokens each and on the continuations of prompts. kv_dtype: of the rounded model's
    cache."""
    backend, sums, outputs = get_backend("sdpa"), LogitSums(), []
    with torch.inference_mode():
        for ids in texts:
            found_TV = paged_logits(rounded, backend, ids, [len(ids)], kv_dtype=kv_dtype)
            sums.add(found_TV, paged_logits(before, backend, ids, [len(ids)]), torch.tensor(ids))
        for model, dtype in ((rounded, kv_dtype), (before, None)) if prompts else ():
            outputs.append(paged_generate(model, backend, prompts, max_new_tokens=max_new_tokens, kv_dtype=dtype))
    pairs = [(found, until_end(expected, before)) for found, expected in zip(*outputs, strict=True)]
    prefixes = [common_prefix(found[: len(expected)], expected) for found, expected in pairs]
    return replace(
        sums.error(),
        same_outputs=sum(prefix == len(expected) for prefix, (_, expected) in zip(prefixes, pairs, strict=True)),
        num_outputs=len(prefixes),
        mean_prefix=sum(prefixes) / max(len(prefixes), 1),
    )


def until_end(ids: Sequence[int], model: CausalLM) -> Sequence[int]:
    """The tokens up to the first that ends an output, that one included."""
    ends = (index for index, token in enumerate(ids) if token in model.config.eos_token_ids)
    return ids[: next(ends, len(ids)) + 1]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens before the first different one."""
    pairs = enumerate(zip(left, right, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(left))


@dataclass(slots=True)
class LogitSums:
    """Two models' logits compared over the tokens that have a successor."""

    count: int = 0
    loss: float = 0.0
    loss_before: float = 0.0
    difference: float = 0.0
    square: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def error(self) -> RoundingError:
        """Of all that was added; no continuations."""
        return RoundingError(
            perplexity=float(torch.tensor(self.loss / self.count).exp()),
            before=float(torch.tensor(self.loss_before / self.count).exp()),
            relative_error=(self.difference / self.square) ** 0.5,
            divergence=self.divergence / self.count,
            same_choice=self.same / self.count,
            same_outputs=0,
            num_outputs=0,
            mean_prefix=0.0,
        )

    def add(self, found_TV: torch.Tensor, before_TV: torch.Tensor, ids_T: torch.Tensor) -> None:
        """Logits of a whole text, by the rounded model and by the one before."""
        found_TV, before_TV, next_T1 = found_TV[:-1].double(), before_TV[:-1].double(), ids_T[1:, None]
        found, before = found_TV.log_softmax(-1), before_TV.log_softmax(-1)
        self.count += len(next_T1)
        self.loss -= float(found.gather(1, next_T1).sum())
        self.loss_before -= float(before.gather(1, next_T1).sum())
        self.difference += float((found_TV - before_TV).square().sum())
        self.square += float(before_TV.square().sum())
        self.divergence += float((before.exp() * (before - found)).sum())
        self.same += int((found.argmax(-1) == before.argmax(-1)).sum())
