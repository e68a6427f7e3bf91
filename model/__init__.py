"""Language models on tensors, usable alone as a library: config, weights, layers, paged attention, an oracle without
a cache.

    model = load_model(resolve_checkpoint("Qwen/Qwen2.5-0.5B-Instruct"))
    ids = generate(model, prompt_ids, max_new_tokens=32, eos_token_ids=model.config.eos_token_ids)

Must not know: sockets, requests, schedulers, who owns a block.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.model.cpu.isa import hide_instructions

if TYPE_CHECKING:
    from octavo.model.attention.interface import (
        BACKENDS,
        AttentionBackend,
        AttentionInputs,
        BackendName,
        get_backend,
        make_inputs,
    )
    from octavo.model.attention.kv_pool import KvPool, kv_block_bytes, write_kv
    from octavo.model.causal_lm import CausalLM
    from octavo.model.checkpoint.loading import WeightScan, load_model
    from octavo.model.checkpoint.source import resolve_checkpoint
    from octavo.model.config import ModelConfig, load_config
    from octavo.model.dtypes import DTYPES
    from octavo.model.errors import CheckpointError, ConfigError
    from octavo.model.generation import dense_logits, generate
    from octavo.model.layers.rope_scaling import YarnScaling

__all__ = [
    "BACKENDS",
    "DTYPES",
    "AttentionBackend",
    "AttentionInputs",
    "BackendName",
    "CausalLM",
    "CheckpointError",
    "ConfigError",
    "KvPool",
    "ModelConfig",
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
    "AttentionBackend": "octavo.model.attention.interface",
    "AttentionInputs": "octavo.model.attention.interface",
    "BACKENDS": "octavo.model.attention.interface",
    "BackendName": "octavo.model.attention.interface",
    "CheckpointError": "octavo.model.errors",
    "ConfigError": "octavo.model.errors",
    "DTYPES": "octavo.model.dtypes",
    "KvPool": "octavo.model.attention.kv_pool",
    "ModelConfig": "octavo.model.config",
    "CausalLM": "octavo.model.causal_lm",
    "WeightScan": "octavo.model.checkpoint.loading",
    "YarnScaling": "octavo.model.layers.rope_scaling",
    "dense_logits": "octavo.model.generation",
    "generate": "octavo.model.generation",
    "get_backend": "octavo.model.attention.interface",
    "kv_block_bytes": "octavo.model.attention.kv_pool",
    "load_config": "octavo.model.config",
    "load_model": "octavo.model.checkpoint.loading",
    "make_inputs": "octavo.model.attention.interface",
    "resolve_checkpoint": "octavo.model.checkpoint.source",
    "write_kv": "octavo.model.attention.kv_pool",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: a look at a checkpoint's files needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


hide_instructions()  # before torch is imported, by whatever module of ours comes first
