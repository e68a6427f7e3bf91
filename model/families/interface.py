"""What distinguishes one model family from another: its config's fields, the names of its weights, its decoder layer.

A family is a module of this folder with one `Family` in it, and an entry of model/families/registry.py. Everything else
(loading, CPU and GPU steps, verification) reads what a family says and never asks which one it is.

Must not know: tensors, files, devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
"""Our matrices that are several of a checkpoint's, one below the other."""


class Cut(Enum):
    """How a weight [outputs, inputs] and its bias are divided among the ranks of a tensor-parallel group (Megatron-LM,
    arXiv 1909.08053). VOCABULARY: by rows, one per id. KV_HEADS: by outputs in whole heads; with fewer heads than
    ranks, several ranks have the same one."""

    WHOLE = "whole"
    OUTPUTS = "column-parallel"
    INPUTS = "row-parallel"
    KV_HEADS = "column-parallel by KV heads"
    VOCABULARY = "vocabulary-parallel"


DENSE_CUTS = {
    "embed_tokens": Cut.VOCABULARY,
    "lm_head": Cut.VOCABULARY,
    "norm": Cut.WHOLE,
    "input_layernorm": Cut.WHOLE,
    "q_proj": Cut.OUTPUTS,
    "k_proj": Cut.KV_HEADS,
    "v_proj": Cut.KV_HEADS,
    "q_norm": Cut.WHOLE,
    "k_norm": Cut.WHOLE,
    "o_proj": Cut.INPUTS,
    "post_attention_layernorm": Cut.WHOLE,
    "gate_proj": Cut.OUTPUTS,
    "up_proj": Cut.OUTPUTS,
    "down_proj": Cut.INPUTS,
}
"""By the last part of a weight's name in the checkpoint. A name that is not here cannot be cut."""


class FinishOps(Protocol):
    """The operations after attention in a layer, on one kind of device.

    layer: how this implementation identifies its layers. x: the residual stream of some tokens. An operation may change
    x in place; if it returns x, callers use what it returned.
    """

    def add_output(self, layer: Any, x: Any, attended: Any) -> Any:
        """x + o_proj(attended)."""

    def activate(self, layer: Any, x: Any) -> Any:
        """silu(gate) * up of the normalised x."""

    def add_down(self, layer: Any, x: Any, activated: Any) -> Any:
        """x + down_proj(activated)."""

    def begin_sum(self, x: Any) -> Any:
        """What a tensor-parallel rank adds its product to before `reduce`: zeros, or memory that the product
        overwrites. With one rank, x."""

    def reduce(self, x: Any, partial: Any) -> Any:
        """x + the sum of all ranks' partial. With one rank, partial, which includes x already."""


class LayerOps(FinishOps, Protocol):
    """All operations of a layer. An implementation that fuses several of them does the work in the last one, and passes
    its arguments through in the others."""

    def multiply_qkv(self, layer: Any, x: Any) -> Any:
        """The product of the normalised x with the query, key and value matrices, without what `write_qkv` adds."""

    def write_qkv(self, layer: Any, x: Any, qkv: Any) -> Any:
        """Bias, norm of each query and key head, and RoPE, as far as the family has them; writes keys and values to the
        cache. Returns the queries."""

    def attend(self, layer: Any, x: Any, queries: Any) -> Any:
        """Attention over the cache: the heads of every token."""


def attend_dense(ops: LayerOps, layer: Any, x: Any) -> Any:
    """The attended heads of a layer whose norm precedes attention."""
    return ops.attend(layer, x, ops.write_qkv(layer, x, ops.multiply_qkv(layer, x)))


def finish_dense(ops: FinishOps, layer: Any, x: Any, attended: Any) -> Any:
    """x after a dense layer whose norms precede attention and the MLP."""
    x = ops.reduce(x, ops.add_output(layer, ops.begin_sum(x), attended))
    return ops.reduce(x, ops.add_down(layer, ops.begin_sum(x), ops.activate(layer, x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    model_type, architecture: as in config.json; the architecture is also transformers' class name.
    head_dim: if the config has none; None: hidden_size divided by the number of heads.
    has_qkv_bias: whether the QKV products have one.
    has_qk_norm: RMSNorm over head_dim of each query and key head, before RoPE.
    must_be_false: flags of config.json that would change the result and are not supported.
    fused: see FUSED. cuts: see DENSE_CUTS.
    attend, finish: the layer as a program over operations; between them a step may drop tokens that nothing reads.
    """

    model_type: str
    architecture: str
    head_dim: int | None = None
    has_qkv_bias: bool
    has_qk_norm: bool
    must_be_false: tuple[str, ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = FUSED
    cuts: Mapping[str, Cut] = field(default_factory=lambda: DENSE_CUTS, hash=False)
    attend: Callable[[LayerOps, Any, Any], Any] = attend_dense
    finish: Callable[[FinishOps, Any, Any, Any], Any] = finish_dense
