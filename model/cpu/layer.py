"""What follows attention in a decoder layer, as one call of `layer.c`; its slow reference:
model.layers.decoder.DecoderLayer, whose stages give the same bits one by one.

Legend: T tokens in this step · D model dim · I intermediate · C columns of all query heads.
Must not know: attention, how many layers there are.
"""

import ctypes
from dataclasses import dataclass

import torch

from octavo.model.cpu.native import loaded_library
from octavo.model.cpu.ops import LANES, require, threads_for, threads_for_product
from octavo.model.cpu.panels import PanelWeight


class _Weight(ctypes.Structure):
    """`weight` in layer.c."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("is_int8", ctypes.c_int),
    )


class _LayerRest(ctypes.Structure):
    """`layer_rest` in layer.c."""

    _fields_ = (
        ("o", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("norm", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
    )


class _StageThreads(ctypes.Structure):
    """`stage_threads` in layer.c."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("o", "gate_up", "down", "stream", "silu"))


@dataclass(frozen=True, slots=True, eq=False)
class LayerRest:
    """The weights of one layer after its attention. norm_D: bf16, of the norm before the MLP."""

    o: PanelWeight
    norm_D: torch.Tensor
    epsilon: float
    gate_up: PanelWeight
    down: PanelWeight
    _packed: _LayerRest

    @classmethod
    def of(
        cls, *, o: PanelWeight, norm_D: torch.Tensor, epsilon: float, gate_up: PanelWeight, down: PanelWeight
    ) -> "LayerRest":
        """Raises ValueError for shapes that do not belong together."""
        dim, inner = o.num_outputs, down.num_inputs
        require(gate_up.num_inputs == down.num_outputs == dim and norm_D.shape == (dim,), "model dim")
        require(gate_up.num_outputs == 2 * inner, "intermediate")
        require(dim % LANES == inner % LANES == 0 and norm_D.dtype == torch.bfloat16, "norm_D")
        packed = _LayerRest(_weight(o), _weight(gate_up), _weight(down), norm_D.data_ptr(), epsilon)
        return cls(o, norm_D, epsilon, gate_up, down, packed)

    def run(self, attended_TC: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """attended_TC: what attention gave, hidden_TD: what the layer was given; bf16. Returns a new [T, D]. Raises
        ValueError, MemoryError."""
        attended_TC, hidden_TD = attended_TC.contiguous(), hidden_TD.contiguous()
        num_tokens, dim = hidden_TD.shape
        require(dim == self.o.num_outputs and hidden_TD.dtype == torch.bfloat16, "hidden_TD")
        require(attended_TC.shape == (num_tokens, self.o.num_inputs), "attended_TC")
        require(attended_TC.dtype == torch.bfloat16 and attended_TC.is_cpu and hidden_TD.is_cpu, "attended_TC")
        out_TD = torch.empty_like(hidden_TD)
        scratch = hidden_TD.new_empty(num_tokens * (dim + 3 * self.down.num_inputs))
        failed = loaded_library().octavo_layer_rest(
            ctypes.byref(self._packed),
            attended_TC.data_ptr(),
            hidden_TD.data_ptr(),
            out_TD.data_ptr(),
            scratch.data_ptr(),
            num_tokens,
            ctypes.byref(self._threads(num_tokens)),
        )
        if failed:
            raise MemoryError("no memory for a panel of weights")
        return out_TD

    def _threads(self, num_tokens: int) -> _StageThreads:
        return _StageThreads(
            threads_for_product(num_tokens, self.o.num_bytes),
            threads_for_product(num_tokens, self.gate_up.num_bytes),
            threads_for_product(num_tokens, self.down.num_bytes),
            threads_for(2 * num_tokens * self.o.num_outputs),
            threads_for(4 * num_tokens * self.down.num_inputs),
        )


def _weight(of: PanelWeight) -> _Weight:
    return _Weight(
        of.panels.data_ptr(),
        of.scale_N.data_ptr(),
        of.bias_N.data_ptr(),
        of.num_outputs,
        of.num_inputs,
        of.panels.dtype == torch.int8,
    )
