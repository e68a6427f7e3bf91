"""Random Qwen3 checkpoints made by transformers itself."""

from pathlib import Path
from typing import Any

import torch

from tests.support.model.checkpoints import write_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384, "max_position_embeddings": 512, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
"""All heads together are wider than the hidden size, as in Qwen3-0.6B."""


def make_qwen3(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """transformers' model with random weights; norm weights differ from 1, so that a missing norm shows."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM(Qwen3Config(**(SHAPE | {"attn_implementation": "sdpa"} | changes)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in theirs.named_parameters():
        is_norm = name.endswith("norm.weight")
        deviation = 0.3 if is_norm else parameter.shape[1] ** -0.5
        parameter.data.normal_(1.0 if is_norm else 0.0, deviation, generator=generator)
    return theirs.to(dtype).eval()


def write_qwen3(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a complete checkpoint as `save_pretrained` does, with a tokenizer. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_qwen3(seed=seed, dtype=dtype, **changes).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
