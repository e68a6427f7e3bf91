"""Weights laid out for the products in `matmul.c`, as bf16 or as 8-bit integers with a scale per output.

The slow reference of a product is ``F.linear`` with the weight that `unpacked` gives back. Every row of a product has
the same bits whatever the other rows are.

Legend: N outputs · K inputs · P panels. Must not know: what the matrices mean.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.model.cpu.native import loaded_library, native_library
from octavo.model.cpu.ops import threads_for_product

PANEL = 32
"""Outputs of a panel, as in matmul.c."""


@dataclass(frozen=True, slots=True, eq=False)
class PanelWeight:
    """panels: [P, K / 2, PANEL, 2], bf16 or int8. scale_N, bias_N: fp32, filled up to whole panels."""

    panels: torch.Tensor
    scale_N: torch.Tensor
    bias_N: torch.Tensor
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        """K."""
        return 2 * self.panels.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self.panels.numel() * self.panels.element_size()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x: bf16 [..., K]. Returns bf16 [..., N]. Raises ValueError, MemoryError."""
        return self._multiply(x, torch.bfloat16)

    def multiply_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`multiply` as fp32, in one pass: the same values."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        num_inputs = self.num_inputs
        if x.dtype != torch.bfloat16 or x.shape[-1] != num_inputs or not x.is_cpu:
            raise ValueError(f"x: bf16 rows of {num_inputs} on the CPU are wanted, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.num_outputs, dtype=out_dtype)
        num_rows = x.numel() // num_inputs
        failed = loaded_library().octavo_matmul(
            x.data_ptr(),
            self.panels.data_ptr(),
            int(self.panels.dtype == torch.int8),
            self.scale_N.data_ptr(),
            self.bias_N.data_ptr(),
            out.data_ptr(),
            int(out_dtype == torch.float32),
            num_rows,
            self.num_outputs,
            num_inputs,
            threads_for_product(num_rows, self.num_bytes),
        )
        if failed:
            raise MemoryError("no memory for a panel of weights")
        return out

    def unpacked(self) -> torch.Tensor:
        """The weight that is multiplied with: fp32 [N, K]."""
        rows_NK = self.panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1).float()
        return (rows_NK * self.scale_N[:, None])[: self.num_outputs]


def can_panel(weight_NK: torch.Tensor) -> bool:
    """Whether the compiled products take this weight: bf16, an even number of inputs, on a CPU with a C compiler."""
    if not weight_NK.is_cpu or weight_NK.dtype != torch.bfloat16 or weight_NK.shape[1] % 2:
        return False
    return native_library() is not None


def pack_bf16(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    """The same values in another order."""
    return _pack(weight_NK, torch.ones(len(weight_NK)), bias_N)


def pack_int8(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    """Each row divided by a 127th of its largest magnitude and rounded to the nearest integer."""
    scale_N = weight_NK.abs().amax(1).float() / 127
    scale_N = torch.where(scale_N > 0, scale_N, torch.ones_like(scale_N))
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    for rows in range(0, len(weight_NK), 4096):  # the fp32 copy of a head would be large
        part = slice(rows, rows + 4096)
        rounded_NK[part] = (weight_NK[part].float() / scale_N[part, None]).round_().to(torch.int8)
    return _pack(rounded_NK, scale_N, bias_N)


def _pack(weight_NK: torch.Tensor, scale_N: torch.Tensor, bias_N: torch.Tensor | None) -> PanelWeight:
    num_outputs, num_inputs = weight_NK.shape
    behind = -num_outputs % PANEL
    whole_NK = F.pad(weight_NK, (0, 0, 0, behind)) if behind else weight_NK
    pairs = whole_NK.view(-1, PANEL, num_inputs // 2, 2).permute(0, 2, 1, 3)
    bias = torch.zeros(num_outputs) if bias_N is None else bias_N.float()
    return PanelWeight(pairs.contiguous(), F.pad(scale_N, (0, behind)), F.pad(bias, (0, behind)), num_outputs)
