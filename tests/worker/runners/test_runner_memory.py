"""What a model takes, in bytes that can be counted by hand."""

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from octavo.model.parallel import Ranks
from octavo.worker.loading.memory import RESERVE_BYTES, activation_bytes, memory_needs, size_pool, weights_bytes

CONFIG = ModelConfig(
    vocab_size=128,  # whole panels of 32 outputs, as every other matrix here
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
LAYER = 64 * 32 + 64 + 32 * 32 + 2 * 48 * 32 + 32 * 48 + 2 * 32
NUM_WEIGHTS = 128 * 32 + 2 * LAYER + 32


def test_a_tied_head_counts_once_until_it_is_packed() -> None:
    model = CausalLM.random(CONFIG, seed=0, dtype=torch.bfloat16)
    assert weights_bytes(model) == 2 * NUM_WEIGHTS
    model.pack_weights()
    if model.lm_head.packed_bytes:
        assert weights_bytes(model) == 2 * (NUM_WEIGHTS + 128 * 32)


def test_needs_of_a_small_model_give_a_pool() -> None:
    model = CausalLM.random(CONFIG, seed=0)
    needs = memory_needs(
        model, block_size=16, max_model_len=128, max_num_seqs=4, max_batch_tokens=64, memory_fraction=0.9
    )
    assert needs.block_bytes == 2 * 2 * 2 * 8 * 16 * 4
    assert size_pool(needs) == 4 * 8


def test_ranks_on_cpus_are_asked_for_together_what_they_share() -> None:
    """Each by itself would find room for what all of them have none for, and name a fraction that is not the one that
    was given."""
    part = CausalLM(CONFIG, dtype=torch.float32, ranks=Ranks(size=2))
    needs = memory_needs(
        part, block_size=16, max_model_len=128, max_num_seqs=4, max_batch_tokens=64, memory_fraction=0.9
    )
    assert needs.memory_fraction == 0.9
    assert needs.block_bytes == 2 * 2 * 2 * 8 * 16 * 4  # of a whole block, as on one rank
    assert needs.weights_bytes == 2 * weights_bytes(part)
    part_of_step = activation_bytes(part.config, dtype=torch.float32, max_batch_tokens=64, max_num_seqs=4)
    assert (needs.activation_bytes, needs.reserve_bytes) == (2 * part_of_step, 2 * RESERVE_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_grow_with_tokens_and_rows(dtype: torch.dtype) -> None:
    few = activation_bytes(CONFIG, dtype=dtype, max_batch_tokens=64, max_num_seqs=4)
    more_tokens = activation_bytes(CONFIG, dtype=dtype, max_batch_tokens=128, max_num_seqs=4)
    more_rows = activation_bytes(CONFIG, dtype=dtype, max_batch_tokens=64, max_num_seqs=8)
    assert few < more_tokens
    assert few < more_rows
