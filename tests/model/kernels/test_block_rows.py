"""Blocks as rows: every byte of every layer against the obvious reference, both ways, and nothing else moves."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import ModelConfig
from octavo.model.attention.host_blocks import gather_rows, scatter_rows
from octavo.model.attention.kv_pool import KvPool, kv_block_bytes
from octavo.model.kernels.block_rows import gather_block_rows, scatter_block_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


def pools(kv: KvPool) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_pool_LPKBH, kv.v_pool_LPKBH


def noise(kv: KvPool) -> KvPool:
    for seed, pool in enumerate(pools(kv)):
        plain = pool.view(torch.uint8)
        plain.copy_(
            torch.randint(0, 255, plain.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        )
    return kv


@pytest.mark.sanitize(only=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 1), (16, 16), (128, 16)])
def test_blocks_are_gathered_and_scattered_byte_by_byte(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    kv = noise(KvPool(config(head_dim), 7, block_size, dtype, DEVICE))
    row_bytes = kv_block_bytes(config(head_dim), block_size=block_size, dtype=dtype)
    blocks = torch.tensor([6, 0, 3], dtype=torch.int32, device=DEVICE)
    rows = torch.full((5, row_bytes), 7, dtype=torch.uint8, device=DEVICE)
    gather_block_rows(pools(kv), blocks, rows)
    assert torch.equal(rows[:3], gather_rows(kv, blocks.long()))
    assert (rows[3:] == 7).all()
    other, expected = (noise(KvPool(config(head_dim), 7, block_size, dtype, DEVICE)) for _ in range(2))
    targets = torch.tensor([1, 5, 2], dtype=torch.int32, device=DEVICE)
    scatter_block_rows(pools(other), targets, rows)
    scatter_rows(expected, targets.long(), rows[:3])
    for got, wanted in ((other.k_pool_LPKBH, expected.k_pool_LPKBH), (other.v_pool_LPKBH, expected.v_pool_LPKBH)):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_rows_that_do_not_fit_are_refused() -> None:
    kv = KvPool(config(16), 7, 4, torch.float32, DEVICE)
    blocks = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="rows_NR"):
        gather_block_rows(pools(kv), blocks, torch.zeros((2, 8), dtype=torch.uint8, device=DEVICE))
    with pytest.raises(ValueError, match="blocks_N"):
        gather_block_rows(pools(kv), blocks.long(), torch.zeros((2, 8), dtype=torch.uint8, device=DEVICE))
