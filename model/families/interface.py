"""What tells one model family from another: the fields of its config, the names of its weights, its decoder layer.

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
    """What a rank of a tensor-parallel group has of a weight [outputs, inputs] and of its bias (Megatron-LM, arXiv
    1909.08053). VOCABULARY is rows, one for each id. KV_HEADS is OUTPUTS by whole heads, of which several ranks have
    the same one where there are fewer heads than ranks."""

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
    """The operations that follow attention in a layer, on one kind of device.

    layer: what this execution tells its layers apart by. x: the residual stream of some tokens, which an operation may
    change in place; one that returns it returns the new one.
    """

    def add_output(self, layer: Any, x: Any, attended: Any) -> Any:
        """x + o_proj(attended)."""

    def activate(self, layer: Any, x: Any) -> Any:
        """silu(gate) * up of the normalised x."""

    def add_down(self, layer: Any, x: Any, activated: Any) -> Any:
        """x + down_proj(activated)."""

    def begin_sum(self, x: Any) -> Any:
        """What a rank of a tensor-parallel group adds its product to, before `reduce`: zeros, or room that the product
        overwrites. Of one rank, x."""

    def reduce(self, x: Any, partial: Any) -> Any:
        """x + the sum of all ranks' partial. Of one rank, partial: x is in it."""


class LayerOps(FinishOps, Protocol):
    """All operations of a layer. An implementation that does several of them at once does so in the last of them, and
    passes on in the others what it was given."""

    def multiply_qkv(self, layer: Any, x: Any) -> Any:
        """The product of the normalised x with the matrices of queries, keys and values, without what `write_qkv`
        adds."""

    def write_qkv(self, layer: Any, x: Any, qkv: Any) -> Any:
        """Bias, norm of each query and key head, RoPE, as the family has them; keys and values go into the cache.
        Returns the queries."""

    def attend(self, layer: Any, x: Any, queries: Any) -> Any:
        """Attention over the cache: the heads of every token."""


def attend_dense(ops: LayerOps, layer: Any, x: Any) -> Any:
    """The heads of a layer whose norm stands before attention."""
    return ops.attend(layer, x, ops.write_qkv(layer, x, ops.multiply_qkv(layer, x)))


def finish_dense(ops: FinishOps, layer: Any, x: Any, attended: Any) -> Any:
    """x after a dense layer whose norms stand before attention and before the MLP."""
    x = ops.reduce(x, ops.add_output(layer, ops.begin_sum(x), attended))
    return ops.reduce(x, ops.add_down(layer, ops.begin_sum(x), ops.activate(layer, x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    model_type, architecture: as config.json names them; the architecture is also the class of transformers.
    head_dim: where the config has none; None divides hidden_size among the heads. has_qkv_bias: of the QKV products.
    has_qk_norm: RMSNorm over head_dim of each query and key head, before RoPE. must_be_false: flags of config.json that
    would change the result and are not supported. fused: see FUSED. cuts: see DENSE_CUTS. attend, finish: the layer as
    a program over operations; between the two a step may drop tokens that nothing reads later.
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
