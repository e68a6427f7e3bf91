"""Qwen2 and Qwen2.5 dense, every size: grouped-query attention with a bias on QKV, SwiGLU."""

from octavo.model.families.interface import Family

QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", has_qkv_bias=True, has_qk_norm=False)
