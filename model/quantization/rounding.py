"""Weights quantised from floats: to e4m3 with a scale per output, and to integers by rounding to the nearest.

Legend: O outputs · I inputs · G groups · T tokens.
Must not know: checkpoints, layers.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from octavo.model.quantization.grouped import GroupedWeight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite e4m3 (arXiv:2209.05433); torch's cast makes NaN of what lies above."""

INPUT_GROUP = 32
"""Inputs that are rounded together (GROUP in model/cpu/dots_x86.h and dots_neon.h); llama.cpp's q8_0 takes as many."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fp8Weight:
    """code_OI: e4m3. scale_O: float32, per output. bias_O: in the model's dtype, or None."""

    code_OI: torch.Tensor
    scale_O: torch.Tensor
    bias_O: torch.Tensor | None = None

    @classmethod
    def quantize(cls, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> "Fp8Weight":
        """Each output divided by 1/448 of its largest magnitude and rounded to the nearest e4m3."""
        code_OI = torch.empty(weight_OI.shape, dtype=FP8, device=weight_OI.device)
        scale_O = torch.empty(len(weight_OI), dtype=torch.float32, device=weight_OI.device)
        for rows in range(0, len(weight_OI), 4096):  # the float32 copy of a large matrix would be twice as large
            part = slice(rows, rows + 4096)
            code_OI[part], scale_O[part] = quantize_rows(weight_OI[part])
        return cls(code_OI=code_OI, scale_O=scale_O, bias_O=bias_O)

    @property
    def num_outputs(self) -> int:
        """O."""
        return len(self.code_OI)

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.code_OI.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of codes and scales."""
        return self.code_OI.numel() + 4 * self.scale_O.numel()

    def with_bias(self, bias_O: torch.Tensor | None) -> "Fp8Weight":
        """The same with another bias."""
        return replace(self, bias_O=bias_O)

    def dequantized(self) -> torch.Tensor:
        """float32 [O, I]."""
        return self.code_OI.float() * self.scale_O[:, None]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias with x as it is: the slow reference of the kernel for few tokens."""
        return F.linear(x, self.dequantized().to(x.dtype), self.bias_O)

    def multiply_rounded(self, x_TI: torch.Tensor) -> torch.Tensor:
        """`multiply` with x rounded to e4m3, with a scale per token: the slow reference of the product for many
        tokens."""
        code_TI, scale_T = quantize_rows(x_TI)
        rounded_TI = code_TI.float() * scale_T[:, None]
        out_TO = rounded_TI @ self.dequantized().T
        return (out_TO if self.bias_O is None else out_TO + self.bias_O.float()).to(x_TI.dtype)


def quantize_rows(x_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [R, I] and float32 scales [R], each row scaled by its largest magnitude. A row of zeros has scale
    1."""
    scale_R = x_RI.abs().amax(1).float() / FP8_MAX
    scale_R = torch.where(scale_R > 0, scale_R, torch.ones_like(scale_R))
    return to_fp8(x_RI.float() / scale_R[:, None]), scale_R


def round_inputs(x: torch.Tensor) -> torch.Tensor:
    """The inputs that a CPU multiplies int8 weights with, as fp32 [..., I]: each INPUT_GROUP in units of 1/127 of its
    largest magnitude, rounded to the nearest. If one of a group is infinite or NaN, the whole group is NaN."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % INPUT_GROUP)).unflatten(-1, (-1, INPUT_GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    steps = torch.where(most == 0, 0, groups.double() * (torch.full_like(most, 127) / most)).round()
    return (steps.float() * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3, saturating (as the GPU's conversion does); NaN stays."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def round_to_groups(
    weight_OI: torch.Tensor, *, bits: int, group_size: int | None = None, bias_O: torch.Tensor | None = None
) -> GroupedWeight:
    """Symmetric rounding to the nearest integers with a scale per output and group (None: per output): the baseline
    that GPTQ improves on. Raises ValueError if the inputs do not divide into groups."""
    O, I = weight_OI.shape
    if I % (group_size or I):
        raise ValueError(f"{I} inputs are no multiple of group_size {group_size}")
    middle, most = 2 ** (bits - 1), 2 ** (bits - 1) - 1
    groups_OGI = weight_OI.float().unflatten(1, (-1, group_size or I))
    scale_OG = groups_OGI.abs().amax(2) / most
    scale_OG = torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG)  # NaN stays, and makes weights NaN
    code_OI = ((groups_OGI / scale_OG[:, :, None]).round_() + middle).to(torch.uint8).flatten(1)
    zero_GO = torch.full((scale_OG.shape[1], O), middle, dtype=torch.uint8, device=weight_OI.device)
    packed = GroupedWeight.pack(code_OI, scale_OG.T, zero_GO, bits=bits, dtype=weight_OI.dtype)
    return packed.with_bias(bias_O)
