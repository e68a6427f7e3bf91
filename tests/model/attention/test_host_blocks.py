"""Rows of host memory: every byte of a block goes out and comes back, in any order, across parts, in any type."""

import gc

import numpy as np
import pytest
import torch

from octavo.model import ModelConfig
from octavo.model.attention import host_blocks
from octavo.model.attention.host_blocks import HostBlocks, HostMemoryRefused, gather_rows, scatter_rows
from octavo.model.attention.kv_pool import KvPool, kv_block_bytes

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


def filled(dtype: torch.dtype) -> KvPool:
    kv = KvPool(CONFIG, 9, 4, dtype)
    for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH):
        plain = pool.view(torch.uint8)
        plain.copy_(torch.randint(0, 255, plain.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows_a_part", [1, 2, 100])
def test_blocks_go_out_and_come_back_byte_by_byte(dtype: torch.dtype, rows_a_part: int) -> None:
    kv, row_bytes = filled(dtype), kv_block_bytes(CONFIG, block_size=4, dtype=dtype)
    before = [pool.view(torch.uint8).clone() for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH)]
    host = HostBlocks(7, row_bytes, is_pinned=False, part_bytes=rows_a_part * row_bytes)
    blocks, places = np.array([4, 0, 8, 5]), np.array([6, 2, 3, 0])
    host.put(places, gather_rows(kv, torch.from_numpy(blocks)))
    for pool in (kv.k_pool_LPKBH, kv.v_pool_LPKBH):
        pool.view(torch.uint8)[:, blocks] = 0
    moved = np.array([1, 0, 8, 4])  # block 4's bytes to block 1, and so on
    scatter_rows(kv, torch.from_numpy(moved), host.get(places))
    for pool, was in zip((kv.k_pool_LPKBH, kv.v_pool_LPKBH), before, strict=True):
        now = pool.view(torch.uint8)
        assert torch.equal(now[:, [1, 0, 8, 4]], was[:, [4, 0, 8, 5]])
        assert torch.equal(now[:, [2, 3, 6, 7]], was[:, [2, 3, 6, 7]])


def test_neighbours_are_one_run_within_a_part() -> None:
    host = HostBlocks(10, 8, is_pinned=False, part_bytes=4 * 8)
    runs = [(where.start, where.stop, len(rows)) for where, rows in host.runs(np.array([0, 1, 3, 4, 5, 9]))]
    assert runs == [(0, 2, 2), (2, 3, 1), (3, 5, 2), (5, 6, 1)]
    assert list(host.runs(np.array([], np.int64))) == []


def test_progress_is_told_by_parts() -> None:
    told: list[tuple[int, int]] = []
    HostBlocks(10, 8, is_pinned=False, part_bytes=4 * 8, on_parts=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


class Driver:
    """Of a CUDA device, as torch shows it."""

    class cudaError:
        success = 0

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.known: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.known.append(address)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.known.remove(address)
        return 0


def test_pinned_memory_is_made_known_to_the_driver_part_by_part_and_forgotten_with_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, told = Driver(), list[tuple[int, int]]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    host = HostBlocks(10, 8, is_pinned=False, part_bytes=4 * 8)
    host.pin(lambda done, total: told.append((done, total)))
    host.pin()
    assert host.is_pinned
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert len(driver.known) == 3
    del host
    gc.collect()
    assert driver.known == []


def test_memory_that_the_driver_does_not_take_is_replaced_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()

    def empty_like(memory: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        asked.append(pin_memory)
        return torch.ones(memory.shape, dtype=memory.dtype)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(answer=801))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    monkeypatch.setattr(torch, "empty_like", empty_like)
    host = HostBlocks(10, 8, is_pinned=True, part_bytes=4 * 8)
    assert asked == [True] * 3
    assert host.get(np.arange(10)).eq(1).all()


def test_memory_that_is_refused_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(answer=2))
    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch, "empty_like", refuse)
    with pytest.raises(HostMemoryRefused, match=r"^CUDA error: out of memory$"):
        HostBlocks(10, 8, is_pinned=True)


def test_more_than_the_system_has_is_refused_by_name() -> None:
    with pytest.raises(HostMemoryRefused):
        HostBlocks(1, 1 << 62, is_pinned=False)


def test_touched_memory_is_all_zeros_in_sizes_that_no_slice_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "SLICE_BYTES", 4096)
    memory = host_blocks.touched(5 * 4096 + 17)
    assert memory.shape == (5 * 4096 + 17,)
    assert not memory.any()
    memory.fill_(3)
    assert memory.sum() == 3 * memory.numel()
