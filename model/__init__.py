"""Qwen2.5 on tensors, usable alone as a library: config, weights, layers, paged attention, an oracle without a cache.

    model = load_model(resolve_checkpoint("Qwen/Qwen2.5-0.5B-Instruct"))
    ids = generate(model, prompt_ids, max_new_tokens=32, eos_token_ids=model.config.eos_token_ids)

Must not know: sockets, requests, schedulers, who owns a block.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from model.cpu.isa import hide_instructions

if TYPE_CHECKING:
    from model.attention import BACKENDS, AttentionBackend, AttentionInputs, BackendName, get_backend, make_inputs
    from model.checkpoint import resolve_checkpoint
    from model.config import Qwen2Config, load_config
    from model.dtypes import DTYPES
    from model.errors import CheckpointError, ConfigError
    from model.generation import dense_logits, generate
    from model.kv_pool import KvPool, kv_block_bytes, write_kv
    from model.loading import WeightScan, load_model
    from model.qwen2 import Qwen2ForCausalLM
    from model.rope_scaling import YarnScaling

__all__ = [
    "BACKENDS",
    "DTYPES",
    "AttentionBackend",
    "AttentionInputs",
    "BackendName",
    "CheckpointError",
    "ConfigError",
    "KvPool",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "WeightScan",
    "YarnScaling",
    "dense_logits",
    "generate",
    "get_backend",
    "kv_block_bytes",
    "load_config",
    "load_model",
    "make_inputs",
    "resolve_checkpoint",
    "write_kv",
]

_MODULES = {
    "AttentionBackend": "model.attention",
    "AttentionInputs": "model.attention",
    "BACKENDS": "model.attention",
    "BackendName": "model.attention",
    "CheckpointError": "model.errors",
    "ConfigError": "model.errors",
    "DTYPES": "model.dtypes",
    "KvPool": "model.kv_pool",
    "Qwen2Config": "model.config",
    "Qwen2ForCausalLM": "model.qwen2",
    "WeightScan": "model.loading",
    "YarnScaling": "model.rope_scaling",
    "dense_logits": "model.generation",
    "generate": "model.generation",
    "get_backend": "model.attention",
    "kv_block_bytes": "model.kv_pool",
    "load_config": "model.config",
    "load_model": "model.loading",
    "make_inputs": "model.attention",
    "resolve_checkpoint": "model.checkpoint",
    "write_kv": "model.kv_pool",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: to look at a checkpoint's files nobody needs torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


hide_instructions()  # before torch is imported, by whatever module of ours comes first
