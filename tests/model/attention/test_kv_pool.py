"""The pool: writes go where the slot mapping says and nowhere else."""

import psutil
import pytest
import torch

from octavo.model import KvPool, ModelConfig, kv_block_bytes, write_kv
from tests.support.model.checkpoints import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())


@pytest.mark.parametrize("slots", [[5, 0, 31, 16], [5, -1, 31, -1], [-1, -1, -1, -1]])
def test_tokens_land_in_their_slots_and_a_negative_slot_is_skipped(slots: list[int]) -> None:
    pools = [torch.full((2, 3, 16, 4), -1.0) for _ in "kv"]
    new = [torch.arange(4 * 3 * 4.0).reshape(4, 3, 4), 100 + torch.arange(4 * 3 * 4.0).reshape(4, 3, 4)]
    expected = [pool.clone() for pool in pools]
    for rows, pool in zip(new, expected, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                pool[slot // 16, :, slot % 16] = rows[token]
    write_kv(new[0], new[1], pools[0], pools[1], torch.tensor(slots))
    torch.testing.assert_close(pools, expected, rtol=0, atol=0)


def test_blocks_are_copied_on_every_layer_from_what_they_held_before() -> None:
    kv = KvPool(CONFIG, 4, 2, torch.float32)
    for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH):
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    k_before, v_before = kv.k_pool_LPKBH.clone(), kv.v_pool_LPKBH.clone()
    kv.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 3]))  # block 1 is read and written
    torch.testing.assert_close(kv.k_pool_LPKBH, k_before[:, [0, 0, 2, 1]], rtol=0, atol=0)
    torch.testing.assert_close(kv.v_pool_LPKBH, v_before[:, [0, 0, 2, 1]], rtol=0, atol=0)


def test_the_size_is_that_of_the_memory() -> None:
    kv = KvPool(CONFIG, 5, 16, torch.bfloat16)
    held = kv.k_pool_LPKBH.numel() * 2 + kv.v_pool_LPKBH.numel() * 2
    assert kv.num_bytes == held == 5 * kv_block_bytes(CONFIG, block_size=16, dtype=torch.bfloat16)


def test_a_block_of_the_published_half_billion_takes_what_the_design_says() -> None:
    config = ModelConfig.from_dict(
        tiny_config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=24)
    )
    assert kv_block_bytes(config, block_size=1, dtype=torch.bfloat16) == 12_288


def test_layers_are_views_of_one_pool() -> None:
    kv = KvPool(CONFIG, 3, 16, torch.float32)
    kv.k_pools[1][2] = 7.0
    assert bool((kv.k_pool_LPKBH[1, 2] == 7).all())
    assert kv.k_pools[0].shape == (3, CONFIG.num_key_value_heads, 16, CONFIG.head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_memory_is_taken_when_blocks_are_written_or_by_touch(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        return int(psutil.Process().memory_info().rss)

    before = resident_bytes()
    kv = KvPool(CONFIG, (96 << 20) // kv_block_bytes(CONFIG, block_size=16, dtype=dtype), 16, dtype)
    assert resident_bytes() - before < 16 << 20
    assert not bool(kv.k_pools[-1][-1].float().any())
    kv.touch()
    assert resident_bytes() - before > 80 << 20
    assert not bool(kv.v_pools[0][0].float().any())
