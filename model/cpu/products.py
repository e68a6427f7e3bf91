"""Products with packed weights, and what follows attention in a decoder layer as one call.

Weights are laid out for `matmul.c`, as bf16 or as 8-bit integers with a scale per output, or for `matmul_int8.c`, which
also rounds inputs to such integers. The reference of a product is ``F.linear`` with the weight that `unpacked` returns,
applied to model.quantization.rounding.round_inputs if it rounds them; every row has the same bits whatever the other
rows are. The reference of `LayerRest` (`layer.c`) is model.layers.decoder.DecoderLayer, whose stages give the same bits
one by one.

Legend: N outputs · K inputs · P panels · T tokens in this step · D model dim · I intermediate · C columns of all query
heads. Must not know: attention, how many layers there are.
"""

import ctypes
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch.nn import functional as F

from octavo.model.cpu.native import integer_arithmetic, native_library
from octavo.model.cpu.ops import LANES, loaded_library, require, threads_for, threads_for_product

PANEL = 32
"""Outputs of a panel, as in matmul.c."""

GROUP = 32
"""Inputs that are rounded in units of their own, as in dots_x86.h and dots_neon.h and by `round_inputs`."""


class Layout(IntEnum):
    """The layout of panels. Must match layer.c."""

    PAIRS = 0
    INTEGER_PAIRS = 1
    INTEGER_FOURS = 2  # whose products round their inputs


@dataclass(frozen=True, slots=True, eq=False)
class PanelWeight:
    """panels: [P, K / 2, PANEL, 2], bf16 or int8, or int8 [P, K' / 4, PANEL, 4] with whole groups of inputs. scale_N,
    bias_N: fp32, padded to whole panels. num_inputs: K."""

    panels: torch.Tensor
    scale_N: torch.Tensor
    bias_N: torch.Tensor
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return self.panels.numel() * self.panels.element_size()

    @property
    def layout(self) -> Layout:
        """The layout of the panels."""
        if self.panels.dtype == torch.bfloat16:
            return Layout.PAIRS
        return Layout.INTEGER_PAIRS if self.panels.shape[-1] == 2 else Layout.INTEGER_FOURS

    def multiply(self, x: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """x: bf16 [..., K]. Returns [..., N], in bf16 or the same values in fp32. Raises ValueError, MemoryError."""
        num_inputs = self.num_inputs
        if x.dtype != torch.bfloat16 or x.shape[-1] != num_inputs or not x.is_cpu:
            raise ValueError(f"x: bf16 rows of {num_inputs} on the CPU are wanted, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.num_outputs, dtype=out_dtype)
        num_rows = x.numel() // num_inputs
        failed = loaded_library().octavo_multiply(
            ctypes.byref(_weight(self)),
            x.data_ptr(),
            out.data_ptr(),
            int(out_dtype == torch.float32),
            num_rows,
            threads_for_product(num_rows, self.num_bytes),
        )
        if failed:
            raise MemoryError("no memory for a panel of weights")
        return out

    def unpacked(self) -> torch.Tensor:
        """The weight as multiplied: fp32 [N, K]."""
        rows_NK = self.panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1).float()
        return (rows_NK * self.scale_N[:, None])[: self.num_outputs, : self.num_inputs]


def can_panel(weight_NK: torch.Tensor) -> bool:
    """Whether the compiled products support this weight: bf16, an even number of inputs, on a CPU with a C compiler."""
    if not weight_NK.is_cpu or weight_NK.dtype != torch.bfloat16 or weight_NK.shape[1] % 2:
        return False
    return native_library() is not None


def pack_bf16(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    """The same values, reordered."""
    return _pack(weight_NK, torch.ones(len(weight_NK)), bias_N, together=2)


def pack_int8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    """Each row divided by 1/127 of its largest magnitude and rounded to the nearest integer; inputs stay bf16."""
    return _pack(*_rounded_rows(weight_NK), bias_N, together=2)


def pack_int8_rounding(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    """`pack_int8` for products that round their inputs too: several times as fast for many rows. For CPUs that
    `multiplies_integers`."""
    rounded_NK, scale_N = _rounded_rows(weight_NK)
    behind = -weight_NK.shape[1] % GROUP
    panels = _pack(F.pad(rounded_NK, (0, behind)), scale_N, bias_N, together=4)
    return replace(panels, num_inputs=weight_NK.shape[1])


def multiplies_integers() -> bool:
    """Whether this CPU has (and does not hide) instructions that multiply and sum 8-bit integers."""
    return bool(integer_arithmetic())


def _rounded_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K], and fp32 scales [N]."""
    scale_N = weight_NK.abs().amax(1).float() / 127
    scale_N = torch.where(scale_N == 0, torch.ones_like(scale_N), scale_N)  # NaN stays, and makes products NaN
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    for rows in range(0, len(weight_NK), 4096):  # the fp32 copy of a head would be large
        part = slice(rows, rows + 4096)
        rounded_NK[part] = (weight_NK[part].float() / scale_N[part, None]).round_().to(torch.int8)
    return rounded_NK, scale_N


def _pack(weight_NK: torch.Tensor, scale_N: torch.Tensor, bias_N: torch.Tensor | None, *, together: int) -> PanelWeight:
    """together: inputs of an output that are stored side by side."""
    num_outputs, num_inputs = weight_NK.shape
    behind = -num_outputs % PANEL
    whole_NK = F.pad(weight_NK, (0, 0, 0, behind)) if behind else weight_NK
    panels = whole_NK.view(-1, PANEL, num_inputs // together, together).permute(0, 2, 1, 3)
    bias = torch.zeros(num_outputs) if bias_N is None else bias_N.float()
    scale, bias = F.pad(scale_N, (0, behind)), F.pad(bias, (0, behind))
    return PanelWeight(panels.contiguous(), scale, bias, num_outputs, num_inputs)


class _Weight(ctypes.Structure):
    """`weight` in layer.c."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("layout", ctypes.c_int),
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
        """Raises ValueError for shapes that do not match."""
        dim, inner = o.num_outputs, down.num_inputs
        require(gate_up.num_inputs == down.num_outputs == dim and norm_D.shape == (dim,), "model dim")
        require(gate_up.num_outputs == 2 * inner, "intermediate")
        require(dim % LANES == inner % LANES == 0 and norm_D.dtype == torch.bfloat16, "norm_D")
        packed = _LayerRest(_weight(o), _weight(gate_up), _weight(down), norm_D.data_ptr(), epsilon)
        return cls(o, norm_D, epsilon, gate_up, down, packed)

    def run(self, attended_TC: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """attended_TC: the result of attention. hidden_TD: the layer's input; bf16. Returns a new [T, D]. Raises
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
        of.layout,
    )
