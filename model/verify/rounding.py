"""The error of a rounded model against the one before: a plain checkpoint rounded as a worker would round it, or a
packed checkpoint (GPTQ, AWQ) against the plain one that it was made from.

Must not know: how the figures are printed.
"""

from pathlib import Path

import torch

from octavo.model.checkpoint.loading import load_model
from octavo.model.config import load_config
from octavo.model.errors import CheckpointError
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from octavo.model.verify.prompts import make_prompts
from octavo.model.verify.rounding_error import Rounding, RoundingError, measure, round_model

ROUNDINGS = {
    "int8": Rounding.INT8_WEIGHTS_AND_INPUTS,
    "fp8": Rounding.FP8_WEIGHTS_AND_TOKENS,
    "int8-weights": Rounding.INT8_WEIGHTS,
}
"""By the name that `--quantization` has for it, as a CPU rounds; fp8 as a GPU does for prompts and larger batches."""
CACHES = {"fp8": FP8}
"""By the name that `--kv-cache-dtype` has for it."""


def verify_rounding(
    folder: Path,
    *,
    against: Path | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    dtype: torch.dtype | None = None,
    num_prompts: int = 8,
    max_new_tokens: int = 32,
) -> RoundingError:
    """Load both on the CPU and compare on the prompts of `octavo verify` and their continuations.

    against: the plain checkpoint; None: the folder itself, before it is rounded. dtype: of the rounded model, None for
    what a worker takes; the other is computed in float32. Raises CheckpointError where the folder is packed and there
    is nothing to compare with, where the two are models of different shapes; ValueError for an unknown rounding.
    """
    if quantization is not None and quantization not in ROUNDINGS:
        raise ValueError(f"quantization {quantization!r} is none of {', '.join(ROUNDINGS)}")
    if kv_cache_dtype is not None and kv_cache_dtype not in CACHES:
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is none of {', '.join(CACHES)}")
    check_pair(folder, against)
    before = load_model(against or folder, dtype=torch.float32)
    rounded = load_model(folder, dtype=dtype)
    if quantization is not None:
        round_model(rounded, ROUNDINGS[quantization])
    if kv_cache_dtype is not None:
        fold_cache_scales(rounded)
    prompts = make_prompts(folder, before.config, num_prompts)
    texts = [prompt for prompt in prompts if len(prompt) > 1]
    kv_dtype = CACHES[kv_cache_dtype] if kv_cache_dtype else None
    return measure(rounded, before, texts, prompts, kv_dtype=kv_dtype, max_new_tokens=max_new_tokens)


def check_pair(folder: Path, against: Path | None) -> None:
    """Raises CheckpointError where there is nothing to compare with."""
    config = load_config(folder)
    if against is None:
        if config.quantization is not None:
            raise CheckpointError(f"{folder}: is packed; name the plain checkpoint that it was made from: --against")
        return
    other = load_config(against)
    if other.quantization is not None:
        raise CheckpointError(f"{against}: is packed itself, so it is nothing to compare with")
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim")  # fmt: skip
    different = [name for name in names if getattr(config, name) != getattr(other, name)]
    if different:
        raise CheckpointError(f"{folder} and {against} are different models: {', '.join(different)}")
