"""Attention of prompts' chunks in C against its reference in torch, with poison wherever nothing may be read."""

import pytest
import torch

from octavo.model.attention.interface import AttentionInputs, make_inputs
from octavo.model.attention.kv_pool import write_kv
from octavo.model.attention.reference import ReferenceAttention
from octavo.model.attention.sdpa import attend_chunk, make_plan
from octavo.model.cpu.ops import chunk_attention, takes_chunks

NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


pytestmark = pytest.mark.skipif(not takes_chunks(normal(1, 1, 1, 32)), reason="no C compiler here")


def make_cache(
    context: int, num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pools of NaN with one context in scattered blocks, and its table; entries behind the context are of no block."""
    width = -(-context // block_size)
    table_M = torch.full((width + 3,), -1, dtype=torch.int32)
    table_M[:width] = torch.randperm(2 * width, generator=torch.Generator().manual_seed(1))[:width]
    k_pool, v_pool = torch.full((2, 2 * width, num_kv_heads, block_size, head_dim), NAN).bfloat16()
    position_C = torch.arange(context)
    slots_C = table_M.long()[position_C // block_size] * block_size + position_C % block_size
    keys_CKH, values_CKH = (normal(context, num_kv_heads, head_dim, seed=seed) for seed in (2, 3))
    write_kv(keys_CKH, values_CKH, k_pool, v_pool, slots_C)
    return k_pool, v_pool, table_M


def reference(
    q_QNH: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table_M: torch.Tensor, scale: float, context: int
) -> torch.Tensor:
    """In double precision."""
    inputs = AttentionInputs(
        slot_mapping_T=torch.zeros(len(q_QNH), dtype=torch.int64),
        table_SM=table_M[None],
        cu_query_lens_S1=torch.tensor([0, len(q_QNH)], dtype=torch.int32),
        context_lens_S=torch.tensor([context], dtype=torch.int32),
        max_query_len=len(q_QNH),
        max_context_len=context,
    )
    return ReferenceAttention().attend(q_QNH.double(), k_pool.double(), v_pool.double(), inputs, scale)


@pytest.mark.parametrize(
    ("num_tokens", "context"),
    [(1, 1), (2, 2), (12, 12), (13, 13), (5, 31), (7, 32), (33, 33), (100, 256), (20, 257), (256, 300), (3, 1000)],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(14, 2, 64, 16), (4, 4, 32, 1), (3, 1, 96, 5), (12, 2, 128, 16)],
)
def test_a_chunk_reads_its_own_blocks_up_to_each_token(
    num_tokens: int, context: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    k_pool, v_pool, table_M = make_cache(context, num_kv_heads, head_dim, block_size)
    q_QNH, scale = 3 * normal(num_tokens, num_heads, head_dim), head_dim**-0.5
    found_QNH = chunk_attention(q_QNH, k_pool, v_pool, table_M, scale, context_len=context)
    expected_QNH = reference(q_QNH, k_pool, v_pool, table_M, scale, context)
    torch.testing.assert_close(found_QNH.double(), expected_QNH, rtol=2**-7, atol=4e-3)
    assert (found_QNH.double() - expected_QNH).norm() <= 4e-3 * expected_QNH.norm()


def test_a_token_has_the_same_bits_however_its_prompt_is_cut() -> None:
    check_cuts(600, num_heads=14, num_kv_heads=2)


def check_cuts(context: int, *, num_heads: int, num_kv_heads: int) -> None:
    """Of a prompt longer than 270: within its first span of 256 positions, and around the end of that."""
    k_pool, v_pool, table_M = make_cache(context, num_kv_heads, 64, 16)
    q_QNH = normal(context, num_heads, 64)
    whole_QNH = chunk_attention(q_QNH, k_pool, v_pool, table_M, 0.125, context_len=context)
    for first, end in ((0, 5), (5, 250), (250, 270), (270, context)):
        part_QNH = chunk_attention(q_QNH[first:end], k_pool, v_pool, table_M, 0.125, context_len=end)
        assert torch.equal(part_QNH, whole_QNH[first:end])


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    k_pool, v_pool, table_M = make_cache(300, 1, 64, 16)
    q_QNH = 200 * normal(300, 1, 64)
    found_QNH = chunk_attention(q_QNH, k_pool, v_pool, table_M, 1.0, context_len=300)
    expected_QNH = reference(q_QNH, k_pool, v_pool, table_M, 1.0, 300)
    assert (found_QNH.double() - expected_QNH).norm() <= 4e-3 * expected_QNH.norm()


def test_not_a_number_stays_in_its_head() -> None:
    k_pool, v_pool, table_M = make_cache(40, 2, 64, 16)
    q_QNH = normal(40, 14, 64)
    q_QNH[7, 3, 5] = NAN
    found_QNH = chunk_attention(q_QNH, k_pool, v_pool, table_M, 0.125, context_len=40)
    assert found_QNH.isnan().any(2).nonzero().tolist() == [[7, 3]]


def test_what_the_kernel_does_not_take_is_refused_by_name() -> None:
    k_pool, v_pool, table_M = make_cache(40, 2, 64, 16)
    q_QNH = normal(8, 14, 64)
    with pytest.raises(ValueError, match="table_M"):
        chunk_attention(q_QNH, k_pool, v_pool, table_M.long(), 0.125, context_len=40)
    with pytest.raises(ValueError, match="table_M"):
        chunk_attention(q_QNH, k_pool, v_pool, table_M, 0.125, context_len=200)
    with pytest.raises(ValueError, match="context_len"):
        chunk_attention(q_QNH, k_pool, v_pool, table_M, 0.125, context_len=7)
    with pytest.raises(ValueError, match="dtype"):
        chunk_attention(q_QNH.float(), k_pool, v_pool, table_M, 0.125, context_len=40)
    with pytest.raises(ValueError, match="v_pool_PKBH"):
        chunk_attention(normal(8, 13, 64), k_pool, v_pool, table_M, 0.125, context_len=40)
    assert not takes_chunks(k_pool.float())
    assert not takes_chunks(normal(1, 1, 16, 288))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_chunks_are_read_in_place_where_there_are_kernels(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        monkeypatch.setattr("octavo.model.attention.sdpa.takes_chunks", lambda pool_PKBH: False)
    k_pool, v_pool, table_M = make_cache(40, 2, 64, 16)
    q_QNH = normal(8, 14, 64)
    _, inputs = make_inputs([table_M.tolist()[:3]], [32], [8], block_size=16)
    (chunk,) = make_plan(inputs, k_pool).chunks
    assert (chunk.gathered is None) is has_kernels
    found_QNH = attend_chunk(q_QNH, k_pool, v_pool, chunk, 0.125)
    expected_QNH = reference(q_QNH, k_pool, v_pool, table_M, 0.125, 40)
    torch.testing.assert_close(found_QNH.double(), expected_QNH, rtol=2**-7, atol=4e-3)
