"""Where each tensor of a HF checkpoint goes: name -> part of one of our (partly fused) parameters.

    q_proj, k_proj, v_proj  ->  rows of qkv_proj          gate_proj, up_proj  ->  rows of gate_up_proj

Must not know: files.
"""

import torch

from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def destinations(model: CausalLM) -> dict[str, torch.Tensor]:
    """For every tensor name that the config asks for, a view of the model's memory with the required shape."""
    views = {EMBEDDING: model.embed_tokens.weight.data, "model.norm.weight": model.norm.weight.data}
    if not model.config.tie_word_embeddings:
        views[HEAD] = model.lm_head.weight.data
    parameters = dict(model.named_parameters())
    for index in range(model.config.num_hidden_layers):
        ours = f"layers.{index}."
        for name, parameter in parameters.items():
            if name.startswith(ours):
                views |= {f"model.{ours}{part}": view for part, view in split(name, ours, parameter.data, model.config)}
    return views


def split(name: str, layer: str, tensor: torch.Tensor, config: ModelConfig) -> list[tuple[str, torch.Tensor]]:
    """(name within the layer, view) of the parts of one parameter; just itself if it is not fused."""
    name = name.removeprefix(layer)
    q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"qkv_proj": [q_size, kv_size, kv_size], "gate_up_proj": [config.intermediate_size] * 2}
    for fused, parts in config.family.fused:
        if f".{fused}." in name:
            views = tensor.split(sizes[fused])
            return [(name.replace(fused, part), view) for part, view in zip(parts, views, strict=True)]
    return [(name, tensor)]
