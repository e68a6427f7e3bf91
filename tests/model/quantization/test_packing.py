"""Packed matrices come back exactly, and what contradicts itself is refused by name."""

import numpy as np
import pytest
import torch

from octavo.model.checkpoint.packed import PackingError, packed_shapes, unpack
from octavo.model.quantization.grouped import GroupedWeight, join_outputs, pack_nibbles, unpack_nibbles
from octavo.model.quantization.settings import GroupSettings, Packing
from tests.support.model.packed_checkpoints import RandomMatrix


def settings(
    packing: Packing = Packing.GPTQ, *, bits: int = 4, size: int | None = 32, offset: int = 1
) -> GroupSettings:
    return GroupSettings(packing=packing, bits=bits, group_size=size, zero_offset=offset)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (4, None), (8, 128), (4, 16)])
def test_gptq_comes_back_exactly(bits: int, size: int | None, offset: int, permuted: bool) -> None:
    O, I = 24, 128
    matrix = RandomMatrix(np.random.default_rng(0), O, I, bits=bits, group_size=size or I, permuted=permuted)
    tensors = matrix.gptq(zero_offset=offset)
    wanted = settings(bits=bits, size=size, offset=offset)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == packed_shapes(wanted, O, I)
    weight = unpack(wanted, tensors, dtype=torch.float32)
    assert torch.equal(weight.dequantized(), matrix.weight_OI)
    assert (weight.order_I is not None) == (permuted and size not in (None, I))
    assert weight.codes_OW.shape == (O, I * bits // 8)


@pytest.mark.parametrize("size", [32, None])
def test_awq_comes_back_exactly(size: int | None) -> None:
    O, I = 40, 64
    matrix = RandomMatrix(np.random.default_rng(1), O, I, bits=4, group_size=size or I)
    wanted = settings(Packing.AWQ, size=size, offset=0)
    assert {name: tuple(t.shape) for name, t in matrix.awq().items()} == packed_shapes(wanted, O, I)
    assert torch.equal(unpack(wanted, matrix.awq(), dtype=torch.float32).dequantized(), matrix.weight_OI)


def test_a_zero_point_of_zero_wraps_around_in_the_first_format() -> None:
    matrix = RandomMatrix(np.random.default_rng(2), 8, 32, bits=4, group_size=32)
    tensors = matrix.gptq()
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)  # fifteen everywhere: 0 - 1
    assert unpack(settings(), tensors, dtype=torch.float32).zero_GO.tolist() == [[0] * 8]


def test_groups_of_different_sizes_are_refused() -> None:
    tensors = RandomMatrix(np.random.default_rng(3), 8, 64, bits=4, group_size=32).gptq()
    tensors["g_idx"][0] = 1
    with pytest.raises(PackingError, match=r"g_idx: groups have 31 to 33 inputs, not 32"):
        unpack(settings(), tensors, dtype=torch.float32)
    tensors["g_idx"][0] = 7
    with pytest.raises(PackingError, match="g_idx: names groups 0 to 7, of 2"):
        unpack(settings(), tensors, dtype=torch.float32)


def test_matrices_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(ValueError, match="100 inputs are no multiple of group_size 32"):
        packed_shapes(settings(), 8, 100)
    with pytest.raises(ValueError, match="12 outputs and 32 inputs are no multiples of 8"):
        packed_shapes(settings(), 12, 32)


@pytest.mark.parametrize("block", [2, 16, 128])
def test_nibbles_come_back(block: int) -> None:
    codes = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    packed = pack_nibbles(codes, block)
    assert packed.shape == (3, 128)
    assert torch.equal(unpack_nibbles(packed, block), codes)
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, block // 2]


def unpacked(seed: int, *, O: int = 8, permuted: bool = False) -> tuple[GroupedWeight, torch.Tensor]:
    matrix = RandomMatrix(np.random.default_rng(seed), O, 64, bits=4, group_size=32, permuted=permuted)
    return unpack(settings(), matrix.gptq(), dtype=torch.float32), matrix.weight_OI


def test_outputs_join_where_inputs_stand_alike() -> None:
    (left, left_OI), (right, right_OI) = unpacked(0), unpacked(1, O=16)
    joined = join_outputs([left, right])
    assert joined is not None
    assert torch.equal(joined.dequantized(), torch.cat([left_OI, right_OI]))
    assert join_outputs([left, unpacked(1, permuted=True)[0]]) is None


def test_factors_of_outputs_and_inputs() -> None:
    weight, weight_OI = unpacked(0, permuted=True)
    outputs, inputs, bias = 2.0 ** torch.arange(-4, 4), torch.rand(64), torch.randn(8)
    scaled = weight.with_bias(bias).with_outputs_scaled(outputs).with_inputs_scaled(inputs)
    expected = weight_OI * outputs[:, None]
    torch.testing.assert_close(scaled.dequantized(), expected * inputs)
    x = torch.randn(3, 64)
    torch.testing.assert_close(scaled.multiply(x), x * inputs @ expected.T + bias * outputs, atol=1e-4, rtol=1e-4)
