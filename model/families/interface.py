"""What tells one model family from another: the fields of its config, the names of its weights, its decoder layer.

A family is a module of this folder with one `Family` in it, and an entry of model/families/registry.py. Everything else
(loading, CPU and GPU steps, verification) reads what a family says and never asks which one it is.

Must not know: tensors, files, devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
"""Our matrices that are several of a checkpoint's, one below the other."""


class FinishOps(Protocol):
    """The operations that follow attention in a layer, on one kind of device.

    layer: whatever this execution tells its layers apart by. x: the residual stream of some tokens, which an operation
    may change in place; it returns the new one.
    """

    def add_output(self, layer: Any, x: Any, attended: Any) -> Any:
        """x + o_proj(attended). Under tensor parallelism the product is summed over devices before it is added."""

    def activate(self, layer: Any, x: Any) -> Any:
        """silu(gate) * up of the normalised x."""

    def add_down(self, layer: Any, x: Any, activated: Any) -> Any:
        """x + down_proj(activated). Under tensor parallelism as `add_output`."""


class LayerOps(FinishOps, Protocol):
    """All operations of a layer."""

    def attend(self, layer: Any, x: Any) -> Any:
        """Of the normalised x: the product with QKV and its bias, norm of each query and key head, RoPE, the write into
        the cache, attention. Bias and norm as the family has them. Returns the heads of every token."""


def finish_dense(ops: FinishOps, layer: Any, x: Any, attended: Any) -> Any:
    """x after a dense layer whose norms stand before attention and before the MLP."""
    x = ops.add_output(layer, x, attended)
    return ops.add_down(layer, x, ops.activate(layer, x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    model_type, architecture: as config.json names them; the architecture is also the class of transformers.
    head_dim: where the config has none; None divides hidden_size among the heads. has_qkv_bias: of the QKV products.
    has_qk_norm: RMSNorm over head_dim of each query and key head, before RoPE. must_be_false: flags of config.json that
    would change the result and are not supported. fused: see FUSED. finish: what follows `LayerOps.attend` in a layer;
    between the two a step may drop tokens that nobody reads.
    """

    model_type: str
    architecture: str
    head_dim: int | None = None
    has_qkv_bias: bool
    has_qk_norm: bool
    must_be_false: tuple[str, ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = FUSED
    finish: Callable[[FinishOps, Any, Any, Any], Any] = finish_dense
