"""A small model for tests of deterministic mode on a CPU: its sizes are multiples of what the kernels need."""

import torch

from octavo.model import CausalLM, ModelConfig

CONFIG = ModelConfig(
    vocab_size=330,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def random_model(dtype: torch.dtype) -> CausalLM:
    """A random model whose logits differ clearly."""
    model = CausalLM.random(CONFIG, seed=1, dtype=dtype)
    for parameter in model.parameters():
        parameter.data *= 3
    return model
