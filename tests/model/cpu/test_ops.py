"""The kernels in C against their references in torch, at the edges of blocks and vectors, with poison where nothing
may be read or written."""

import pytest
import torch
from torch.nn import functional as F

from octavo.model.attention.kv_pool import write_kv
from octavo.model.cpu import ops
from octavo.model.cpu.native import kernels_arithmetic, native_library
from octavo.model.layers.decoder import RopeAngles, plain_rms_norm, rotate

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C compiler here")

NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def units_apart(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Largest distance in representable bf16 numbers; values near zero count as if they were 2**-6."""
    wide, reference = found.float(), expected.float()
    step = 2.0 ** (reference.abs().clamp(min=2.0**-6).log2().floor() - 7)
    return int(((wide - reference).abs() / step).max().ceil())


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 896), (3, 16), (130, 896), (2, 3584)])
def test_the_norm_is_the_plain_norm(num_rows: int, dim: int) -> None:
    x_TD, weight_D = normal(num_rows, dim), 1 + normal(dim, seed=1)
    assert units_apart(ops.rms_norm(x_TD, weight_D, 1e-6), plain_rms_norm(x_TD, weight_D, 1e-6)) <= 1


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 4864), (3, 16), (40, 4864)])
def test_silu_times_up_is_the_expression_of_the_layer(num_rows: int, dim: int) -> None:
    gate_up_TE = 6 * normal(num_rows, 2 * dim)
    gate_up_TE[0, :4] = torch.tensor([-300.0, -88.0, 88.0, 1e30])
    gate_TI, up_TI = gate_up_TE.chunk(2, dim=-1)
    assert units_apart(ops.silu_mul(gate_up_TE), F.silu(gate_TI) * up_TI) <= 1


def test_not_a_number_stays_in_its_row() -> None:
    x_TD = normal(3, 64)
    x_TD[1, 5] = NAN
    for out in (ops.rms_norm(x_TD, torch.ones(64).bfloat16(), 1e-6), ops.silu_mul(x_TD)):
        assert out.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 32), (12, 2, 128)])
def test_queries_turn_and_keys_and_values_find_their_slots(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    qkv_TC = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    angle_TH = 6 * torch.rand(num_tokens, head_dim, generator=torch.Generator().manual_seed(2))
    angles = RopeAngles(angle_TH.cos().bfloat16(), angle_TH.sin().bfloat16())
    slots_T = torch.randperm(16 * 6, generator=torch.Generator().manual_seed(3))[:num_tokens]
    slots_T[num_tokens // 2] = -1
    pools = torch.full((4, 6, num_kv_heads, 16, head_dim), NAN).bfloat16()
    heads_TNH = qkv_TC.unflatten(1, (-1, head_dim))
    turned_TNH = rotate(heads_TNH[:, : num_heads + num_kv_heads], angles)
    write_kv(turned_TNH[:, num_heads:], heads_TNH[:, -num_kv_heads:], pools[0], pools[1], slots_T)
    q_TNH = ops.rope_write(qkv_TC, angles.cos_TH, angles.sin_TH, slots_T, pools[2], pools[3])
    assert torch.equal(q_TNH, turned_TNH[:, :num_heads])
    assert torch.equal(pools[2:].nan_to_num(7.0), pools[:2].nan_to_num(7.0))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 32), (24, 2, 128), (9, 1, 96)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_decodes_read_their_own_blocks_and_nothing_else(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    contexts = [1, 2, 15, 16, 17, 33, 100]
    width = -(-max(contexts) // block_size)
    table_SM = torch.randperm(len(contexts) * width, generator=torch.Generator().manual_seed(4)).int().view(-1, width)
    k_pool, v_pool = torch.full((2, table_SM.numel(), num_kv_heads, block_size, head_dim), NAN).bfloat16()
    q_SNH, expected_SNH, allowed_SNH = 3 * normal(len(contexts), num_heads, head_dim), [], []
    weight_error = 2**-9 if kernels_arithmetic() in ("AVX512-BF16", "AMX") else 0.0  # there they are bf16
    for s, context in enumerate(contexts):
        keys_CKH, values_CKH = normal(context, num_kv_heads, head_dim, seed=s), normal(context, num_kv_heads, head_dim)
        position_C = torch.arange(context)
        slots_C = table_SM[s].long()[position_C // block_size] * block_size + position_C % block_size
        write_kv(keys_CKH, values_CKH, k_pool, v_pool, slots_C)
        group = num_heads // num_kv_heads
        keys_NCH = keys_CKH.double().repeat_interleave(group, 1).transpose(0, 1)
        scores_NC = (keys_NCH @ q_SNH[s].double()[:, :, None])[..., 0] * head_dim**-0.5
        values_NCH = values_CKH.double().repeat_interleave(group, 1).transpose(0, 1)
        weights_N1C = scores_NC.softmax(-1)[:, None]
        expected_SNH.append((weights_N1C @ values_NCH)[:, 0])
        rounding_NH = weight_error * (weights_N1C @ values_NCH.abs())[:, 0]
        allowed_SNH.append(rounding_NH + 2**-8 * expected_SNH[-1].abs() + 1e-4)
        table_SM[s, -(-context // block_size) :] = -1
    context_S = torch.tensor(contexts, dtype=torch.int32)
    arguments = (k_pool, v_pool, table_SM, context_S, head_dim**-0.5)
    found_SNH = ops.decode_attention(q_SNH, *arguments, max_context_len=max(contexts))
    assert (found_SNH.double() - torch.stack(expected_SNH)).abs().le(torch.stack(allowed_SNH)).all()


def test_a_sequence_gets_the_same_bits_alone_and_among_others() -> None:
    table_SM = torch.arange(32, dtype=torch.int32).view(4, 8)
    k_pool, v_pool, q_SNH = normal(32, 2, 16, 64), normal(32, 2, 16, 64, seed=1), normal(4, 14, 64, seed=2)
    context_S = torch.tensor([128, 3, 40, 77], dtype=torch.int32)
    among = ops.decode_attention(q_SNH, k_pool, v_pool, table_SM, context_S, 0.125, max_context_len=128)
    for s in range(4):
        one = slice(s, s + 1)
        alone = ops.decode_attention(
            q_SNH[one], k_pool, v_pool, table_SM[one], context_S[one], 0.125, max_context_len=int(context_S[s])
        )
        assert torch.equal(alone, among[one])


def test_what_a_kernel_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="weight_D"):
        ops.rms_norm(normal(2, 32), normal(48), 1e-6)
    with pytest.raises(ValueError, match="dtype"):
        ops.rms_norm(normal(2, 32).half(), normal(32).half(), 1e-6)
    with pytest.raises(ValueError, match="dtype"):
        ops.rms_norm(normal(2, 32).float(), normal(32), 1e-6)
    angles = normal(2, 32)
    with pytest.raises(ValueError, match="slot_mapping_T"):
        ops.rope_write(normal(2, 96), angles, angles, torch.zeros(2), normal(1, 1, 16, 32), normal(1, 1, 16, 32))


def test_only_bf16_rows_of_whole_vectors_are_taken() -> None:
    assert ops.takes(normal(1, 64), width=64)
    assert not ops.takes(normal(1, 64), width=48)
    assert not ops.takes(normal(1, 64).float(), width=64)
