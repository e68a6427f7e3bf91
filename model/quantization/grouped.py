"""A matrix of small integers with a scale and a zero point per output and group of inputs.

    weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o]        g: the group of input i

Inputs are kept in the order of their groups; where a checkpoint orders them otherwise (GPTQ's desc_act), `order_I`
says which input stands where. Codes of 4 bits lie two to a byte, in blocks of inputs, so that a kernel that reads a
block of bytes has two plain blocks of codes by a mask and a shift:

    block of 2b inputs    | 0 … b-1 | b … 2b-1 |        byte j    code j in the low half, code b + j in the high half

Legend: O outputs · I inputs · G groups · W bytes of a row.
Must not know: how checkpoints pack (model/checkpoint/packed.py).
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch.nn import functional as F

MAX_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupedWeight:
    """A quantised matrix.

    codes_OW: uint8, [O, I * bits / 8]. scale_GO: float16 or float32. zero_GO: uint8.
    order_I: int32, the input at each place; None if inputs are in their own order.
    input_scale_I: factors for the inputs (in their own order) before the product; None: none.
    bias_O: of any float dtype, or None. dtype: what `dequantized` rounds to.
    """

    bits: int
    codes_OW: torch.Tensor
    scale_GO: torch.Tensor
    zero_GO: torch.Tensor
    dtype: torch.dtype
    order_I: torch.Tensor | None = None
    input_scale_I: torch.Tensor | None = None
    bias_O: torch.Tensor | None = None

    @classmethod
    def pack(
        cls,
        code_OI: torch.Tensor,
        scale_GO: torch.Tensor,
        zero_GO: torch.Tensor,
        *,
        bits: int,
        dtype: torch.dtype,
        order_I: torch.Tensor | None = None,
    ) -> "GroupedWeight":
        """From one uint8 code per element, inputs in the order of their groups. Raises ValueError if the number of
        inputs does not fit the groups."""
        (O, I), G = code_OI.shape, len(scale_GO)
        if I % G or scale_GO.shape != (G, O) or zero_GO.shape != (G, O):
            raise ValueError(f"{O} x {I} codes do not fit scales {tuple(scale_GO.shape)}, zeros {tuple(zero_GO.shape)}")
        codes = code_OI if bits == 8 else pack_nibbles(code_OI, block_of(I // G))
        return cls(
            bits=bits, codes_OW=codes.contiguous(), scale_GO=scale_GO.contiguous(), zero_GO=zero_GO.contiguous(),
            dtype=dtype, order_I=order_I,
        )  # fmt: skip

    @property
    def num_outputs(self) -> int:
        """O."""
        return len(self.codes_OW)

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.codes_OW.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Inputs per group."""
        return self.num_inputs // len(self.scale_GO)

    @property
    def block(self) -> int:
        """Inputs per block, all of one group (see above)."""
        return block_of(self.group_size)

    @property
    def num_bytes(self) -> int:
        """Size of everything but the bias."""
        return sum(t.numel() * t.element_size() for name, t in self.named_tensors() if name != "bias")

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All its tensors."""
        named = [
            ("codes", self.codes_OW), ("scale", self.scale_GO), ("zero", self.zero_GO), ("order", self.order_I),
            ("input_scale", self.input_scale_I), ("bias", self.bias_O),
        ]  # fmt: skip
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def codes(self) -> torch.Tensor:
        """uint8 [O, I], one code per element, in the order of the groups."""
        return self.codes_OW if self.bits == 8 else unpack_nibbles(self.codes_OW, self.block)

    def dequantized(self) -> torch.Tensor:
        """The weight [O, I] in `dtype`, with inputs in their own order and scaled; computed in float32 and rounded
        once."""
        step = self.group_size
        scale_OG1, zero_OG1 = self.scale_GO.T.float()[:, :, None], self.zero_GO.T.float()[:, :, None]
        weight_OI = ((self.codes().unflatten(1, (-1, step)).float() - zero_OG1) * scale_OG1).flatten(1)
        if self.order_I is not None:
            weight_OI = torch.empty_like(weight_OI).index_copy_(1, self.order_I.long(), weight_OI)
        if self.input_scale_I is not None:
            weight_OI *= self.input_scale_I.float()
        return weight_OI.to(self.dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias via the dequantised weight: the slow reference of the kernels."""
        return F.linear(x, self.dequantized().to(x.dtype), self.bias_O)

    def with_bias(self, bias_O: torch.Tensor | None) -> "GroupedWeight":
        """The same weight with another bias."""
        return replace(self, bias_O=bias_O)

    def with_outputs_scaled(self, factor_O: torch.Tensor) -> "GroupedWeight":
        """Outputs, bias included, each multiplied by a factor. Exact for powers of two (scales become float32)."""
        bias_O = None if self.bias_O is None else (self.bias_O.float() * factor_O).to(self.bias_O.dtype)
        return replace(self, scale_GO=self.scale_GO.float() * factor_O, bias_O=bias_O)

    def with_inputs_scaled(self, factor_I: torch.Tensor) -> "GroupedWeight":
        """Inputs each multiplied by a factor."""
        before = 1.0 if self.input_scale_I is None else self.input_scale_I.float()
        return replace(self, input_scale_I=factor_I.float() * before)


def join_outputs(parts: list[GroupedWeight]) -> GroupedWeight | None:
    """One matrix with the outputs of all, without biases; None if they order their inputs differently or their groups
    differ in size."""
    first = parts[0]
    for part in parts[1:]:
        if part.bits != first.bits or part.group_size != first.group_size or not _same(part.order_I, first.order_I):
            return None
    return replace(
        first,
        codes_OW=torch.cat([part.codes_OW for part in parts]),
        scale_GO=torch.cat([part.scale_GO for part in parts], 1),
        zero_GO=torch.cat([part.zero_GO for part in parts], 1),
        bias_O=None,
    )


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def block_of(group_size: int) -> int:
    """The largest power of two up to MAX_BLOCK that divides a group. Raises ValueError for groups of odd size."""
    block = gcd(group_size, MAX_BLOCK)
    if block < 2:
        raise ValueError(f"groups of {group_size} inputs cannot be paired")
    return block


def pack_nibbles(code_OI: torch.Tensor, block: int) -> torch.Tensor:
    """4-bit codes, uint8 [O, I], two per byte in blocks of that many inputs."""
    low, high = code_OI.unflatten(1, (-1, 2, block // 2)).unbind(2)
    return (low | (high << 4)).flatten(1)


def unpack_nibbles(codes_OW: torch.Tensor, block: int) -> torch.Tensor:
    """The reverse of `pack_nibbles`."""
    bytes_OBW = codes_OW.unflatten(1, (-1, block // 2))
    return torch.stack([bytes_OBW & 15, bytes_OBW >> 4], dim=2).flatten(1)
