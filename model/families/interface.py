"""What tells one model family from another: the fields of its config, the names of its weights, what its layers
have.

A family is a module of this folder with one `Family` in it, and an entry of model/families/registry.py. Everything else
(loading, CPU and GPU steps, verification) reads what a family says and never asks which one it is.

Must not know: tensors, files, devices.
"""

from dataclasses import dataclass

FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
"""Our matrices that are several of a checkpoint's, one below the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    model_type, architecture: as config.json names them; the architecture is also the class of transformers.
    head_dim: where the config has none; None divides hidden_size among the heads. has_qkv_bias: of the QKV products.
    has_qk_norm: RMSNorm over head_dim of each query and key head, before RoPE. must_be_false: flags of config.json that
    would change the result and are not supported. fused: see FUSED.
    """

    model_type: str
    architecture: str
    head_dim: int | None = None
    has_qkv_bias: bool
    has_qk_norm: bool
    must_be_false: tuple[str, ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = FUSED
