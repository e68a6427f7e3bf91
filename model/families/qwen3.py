"""Qwen3 dense, every size: as Qwen2, but each head of queries and keys is normalised before RoPE, products have no
bias, and heads are of 128 whatever the hidden size is."""

from octavo.model.families.interface import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    head_dim=128,
    has_qkv_bias=False,
    has_qk_norm=True,
    must_be_false=("attention_bias",),
)
