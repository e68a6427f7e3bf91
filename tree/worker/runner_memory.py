"""What a loaded model needs of its device's memory: the bytes that `worker.memory` decides with.

Must not know: how many blocks there will be.
"""

import os

import torch

from model.config import Qwen2Config
from model.kv_pool import kv_block_bytes
from model.linear import Linear
from model.qwen2 import Qwen2ForCausalLM
from worker.memory import MemoryNeeds, available_host_bytes


def prefer_huge_pages() -> None:
    """Let torch put large CPU tensors into 2 MB pages: reading weights is up to a tenth faster (bench/RESULTS.md). Call
    it before the first large tensor is made; a value that is set already is kept."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def memory_needs(
    model: Qwen2ForCausalLM,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    memory_fraction: float,
    kv_dtype: torch.dtype | None = None,
) -> MemoryNeeds:
    """Ask once, after the weights are loaded and packed and before the pool is made. kv_dtype None: the model's."""
    return MemoryNeeds(
        available_bytes=available_bytes(model.device),
        weights_bytes=weights_bytes(model),
        activation_bytes=activation_bytes(
            model.config, dtype=model.dtype, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
        ),
        block_bytes=kv_block_bytes(model.config, block_size=block_size, dtype=kv_dtype or model.dtype),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        memory_fraction=memory_fraction,
    )


def available_bytes(device: torch.device) -> int:
    """Free memory of the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def weights_bytes(model: Qwen2ForCausalLM) -> int:
    """Parameters (shared ones once), buffers and packed copies."""
    tensors = (*model.parameters(), *model.buffers())
    packed_bytes = sum(module.packed_bytes for module in model.modules() if isinstance(module, Linear))
    return packed_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def activation_bytes(config: Qwen2Config, *, dtype: torch.dtype, max_batch_tokens: int, max_num_seqs: int) -> int:
    """The most that one step holds besides weights and pool, estimated from the shapes that live at the same time:
    the stream and its copies, QKV with its rotated twin, gate and up with their product, fp32 logits of every row with
    two temporaries of the sampler."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    per_token = 6 * config.hidden_size + 4 * heads * config.head_dim + 4 * config.intermediate_size
    logits_bytes = max_num_seqs * config.vocab_size * (dtype.itemsize + 3 * torch.float32.itemsize)
    return max_batch_tokens * per_token * dtype.itemsize + logits_bytes
