"""The memory of the KV cache: blocks of keys and values, per KV head, never repeated per query head.

Legend: T tokens in this step · L layers · P blocks · K kv heads · B block size · H head dim · C copies.
Must not know: which request owns a block, or which blocks are free.
"""

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch

from octavo.model.attention.interface import AttentionInputs
from octavo.model.config import ModelConfig
from octavo.model.quantization.rounding import FP8, to_fp8


def kv_block_bytes(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


class KvPool:
    """Keys and values of every layer: `k_pools[l]` and `v_pools[l]` are [P, K, B, H].

    Slot s of the cache is block s // B, offset s % B. Blocks start as zeros; nothing reads what was not written. On a
    CPU the system provides their memory when they are first written, or all of it at `touch`.
    dtype: the model's, or e4m3, for models with the scales of model/quantization/cache_scales.py; readers convert.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.num_hidden_layers, num_blocks, config.num_key_value_heads, block_size, config.head_dim)
        self.k_pool_LPKBH = _zeros(shape, dtype, torch.device(device))
        self.v_pool_LPKBH = _zeros(shape, dtype, torch.device(device))
        self.k_pools = tuple(self.k_pool_LPKBH.unbind(0))
        self.v_pools = tuple(self.v_pool_LPKBH.unbind(0))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = num_blocks * kv_block_bytes(config, block_size=block_size, dtype=dtype)

    def touch(self) -> None:
        """Take all of the memory now. Only for an empty pool: it is overwritten with zeros."""
        for pool_LPKBH in (self.k_pool_LPKBH, self.v_pool_LPKBH):
            pool_LPKBH.zero_()

    def copy_blocks(self, source_C: torch.Tensor, destination_C: torch.Tensor) -> None:
        """Copy whole blocks on every layer (int64 ids). All sources are read before any destination is written."""
        for pool_LPKBH in (self.k_pool_LPKBH, self.v_pool_LPKBH):
            plain = indexable(pool_LPKBH)
            plain[:, destination_C] = plain[:, source_C]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return untouched_zeros(math.prod(shape) * dtype.itemsize, "MADV_HUGEPAGE").view(dtype).view(shape)


def untouched_zeros(num_bytes: int, *advice: str) -> torch.Tensor:
    """Zeros, uint8 [num_bytes] on the CPU, in pages that the system provides when they are first written. advice: names
    of `mmap`, ignored where the system has none of them. Raises OSError, ValueError and OverflowError if the system
    does not provide so much."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for each in advice:
        with suppress(OSError, AttributeError):
            pages.madvise(getattr(mmap, each))
    return torch.frombuffer(pages, dtype=torch.uint8)


def indexable(pool: torch.Tensor) -> torch.Tensor:
    """The pool, or its bytes if it is e4m3, which torch cannot index on a CPU."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


@dataclass(frozen=True, slots=True, eq=False)
class WriteRows:
    """Where this step's tokens go; computed once and used by every layer.

    token_R: rows of k_TKH and v_TKH to write, None for all. block_R, offset_R: int64.
    """

    token_R: torch.Tensor | None
    block_R: torch.Tensor
    offset_R: torch.Tensor

    @classmethod
    def from_slots(cls, slot_mapping_T: torch.Tensor, block_size: int) -> "WriteRows":
        """slot_mapping_T: int64, slot = block * B + offset; tokens with a negative slot are left out."""
        token_R = None
        if bool((slot_mapping_T < 0).any()):
            token_R = torch.nonzero(slot_mapping_T >= 0).squeeze(1)
            slot_mapping_T = slot_mapping_T[token_R]
        return cls(token_R, slot_mapping_T // block_size, slot_mapping_T % block_size)

    def write(self, new_TKH: torch.Tensor, pool_PKBH: torch.Tensor) -> None:
        """Write the rows into the pool."""
        new_RKH = new_TKH if self.token_R is None else new_TKH[self.token_R]
        if pool_PKBH.dtype == FP8:
            new_RKH = to_fp8(new_RKH.float()).view(torch.uint8)
        indexable(pool_PKBH)[self.block_R, :, self.offset_R] = new_RKH


def write_rows_of(inputs: AttentionInputs, block_size: int) -> WriteRows:
    """The rows of this step, computed in its first layer."""
    rows = inputs.derived.get("write_rows")
    if rows is None:
        rows = inputs.derived["write_rows"] = WriteRows.from_slots(inputs.slot_mapping_T, block_size)
    return rows


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    slot_mapping_T: torch.Tensor,
) -> None:
    """Write this step's keys and values into their slots; -1 is skipped. Two tokens must not share a slot."""
    rows = WriteRows.from_slots(slot_mapping_T, k_pool_PKBH.shape[2])
    rows.write(k_TKH, k_pool_PKBH)
    rows.write(v_TKH, v_pool_PKBH)
