"""Blocks of the KV cache in host memory: where they lie, and how they get there from a pool.

One block is one row of bytes over all layers, keys before values, so that the copy of a block is one piece of memory:

    a row    | keys of layer 0 | keys of layer 1 | … | values of layer 0 | values of layer 1 | … |

The scales of an e4m3 cache are folded into the weights (model/quantization/cache_scales.py): a row is all that there
is.

Legend: N blocks of a copy · W bytes of a row · L layers · P blocks of the pool · K kv heads · B block size · H head
dim. Must not know who owns a block.
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch

from octavo.model.attention.kv_pool import KvPool, untouched_zeros

PART_BYTES = 1 << 30
"""Of one allocation: pinning goes on in parts that can be told of, and torch rounds pinned memory to powers of two."""
SLICE_BYTES = 1 << 26
"""That one thread touches at a time."""
MOST_THREADS = 8
"""That touch pages: a memory's bandwidth is used up by some."""

OnParts = Callable[[int, int], None]
"""Called with (parts allocated, parts in all)."""


class HostMemoryRefused(Exception):
    """The system does not provide this much memory, or does not pin it."""


class HostBlocks:
    """Rows [W] of bytes, in parts, backed by physical memory from the start. is_pinned: for copies that overlap a CUDA
    device's steps. Raises HostMemoryRefused."""

    def __init__(
        self,
        num_blocks: int,
        row_bytes: int,
        *,
        is_pinned: bool,
        part_bytes: int = PART_BYTES,
        on_parts: OnParts = lambda done, total: None,
    ) -> None:
        self.num_blocks = num_blocks
        self.row_bytes = row_bytes
        self.is_pinned = False
        self._rows_a_part = max(1, part_bytes // row_bytes)
        self._parts: list[torch.Tensor] = []
        num_parts = -(-num_blocks // self._rows_a_part)
        on_parts(0, num_parts)
        for part in range(num_parts):
            num_rows = min(self._rows_a_part, num_blocks - part * self._rows_a_part)
            self._parts.append(self._allocate(num_rows))
            on_parts(part + 1, num_parts)
        if is_pinned:
            self.pin()

    def pin(self, on_parts: OnParts = lambda done, total: None) -> None:
        """Pin the rows, for copies that overlap a CUDA device's steps. Call it in the thread whose device it is:
        meanwhile the driver blocks other callers, only briefly if the pages are there already. Idempotent. Raises
        HostMemoryRefused."""
        if self.is_pinned:
            return
        registered = list[int]()
        weakref.finalize(self, _unregister, registered).atexit = False
        on_parts(0, len(self._parts))
        for part, memory in enumerate(self._parts):
            try:
                if _register(memory):
                    registered.append(memory.data_ptr())
                else:  # a system where a process brings no memory of its own
                    self._parts[part] = torch.empty_like(memory, pin_memory=True)
            except (RuntimeError, MemoryError, AssertionError) as error:  # indistinguishable from other errors
                raise HostMemoryRefused((str(error) or type(error).__name__).splitlines()[0]) from error
            on_parts(part + 1, len(self._parts))
        self.is_pinned = True

    @property
    def num_bytes(self) -> int:
        """Size of all rows."""
        return self.num_blocks * self.row_bytes

    def runs(self, blocks_N: np.ndarray) -> Iterator[tuple[slice, torch.Tensor]]:
        """Runs of consecutive ids among rising block ids: (where the run lies in blocks_N, its rows as uint8 [run,
        W])."""
        if not len(blocks_N):
            return
        is_end = (np.diff(blocks_N) != 1) | (blocks_N[1:] % self._rows_a_part == 0)
        ends = [*(np.flatnonzero(is_end) + 1).tolist(), len(blocks_N)]
        start = 0
        for end in ends:
            part, row = divmod(int(blocks_N[start]), self._rows_a_part)
            yield slice(start, end), self._parts[part][row : row + end - start]
            start = end

    def put(self, blocks_N: np.ndarray, rows_NW: torch.Tensor) -> None:
        """Write rows, uint8, for blocks in any order; done when this returns."""
        order_N = np.argsort(blocks_N)
        ordered_NW = rows_NW.cpu()[torch.from_numpy(order_N)]
        for where, target in self.runs(blocks_N[order_N]):
            target.copy_(ordered_NW[where])

    def get(self, blocks_N: np.ndarray) -> torch.Tensor:
        """The rows of these blocks, in any order: uint8 [N, W] on the CPU."""
        order_N = np.argsort(blocks_N)
        rows_NW = torch.empty((len(blocks_N), self.row_bytes), dtype=torch.uint8)
        for where, source in self.runs(blocks_N[order_N]):
            rows_NW[torch.from_numpy(order_N[where])] = source
        return rows_NW

    def _allocate(self, num_rows: int) -> torch.Tensor:
        return touched(num_rows * self.row_bytes).view(num_rows, self.row_bytes)


def touched(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], in huge pages if the system has them. Several threads touch the pages, on the caller's
    CPUs: left to the driver, pinning takes half a second for a GiB, mostly for missing pages. Raises
    HostMemoryRefused."""
    try:
        # A fork's copy would leave the device with pages of the child's.
        memory = untouched_zeros(num_bytes, "MADV_HUGEPAGE", "MADV_DONTFORK")
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryRefused(str(error)) from error
    starts = range(0, num_bytes, SLICE_BYTES)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(MOST_THREADS, cpus, len(starts)), "touch") as pool:
        address = memory.data_ptr()
        list(pool.map(lambda at: ctypes.memset(address + at, 0, min(SLICE_BYTES, num_bytes - at)), starts))
    return memory


def _register(memory: torch.Tensor) -> bool:
    """Whether the driver could register the memory. Raises RuntimeError, AssertionError if there is no driver."""
    runtime = torch.cuda.cudart()
    if runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == runtime.cudaError.success:
        return True
    with suppress(RuntimeError):  # clears the error, which the next launch would report again
        torch.zeros(1, device="cuda")
    return False


def _unregister(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def gather_rows(kv: KvPool, blocks_N: torch.Tensor) -> torch.Tensor:
    """These blocks (int64) of the pool as rows, uint8 [N, W]. The simple reference of model/kernels/block_rows.py."""
    return torch.cat([_rows(pool_LPKBH)[:, blocks_N].transpose(0, 1).flatten(1) for pool_LPKBH in _pools(kv)], dim=1)


def scatter_rows(kv: KvPool, blocks_N: torch.Tensor, rows_NW: torch.Tensor) -> None:
    """Write rows into these blocks of the pool: the reverse of `gather_rows`."""
    halves = rows_NW.to(blocks_N.device).chunk(2, dim=1)
    for pool_LPKBH, half_NW in zip(_pools(kv), halves, strict=True):
        rows_LPW = _rows(pool_LPKBH)
        rows_LPW[:, blocks_N] = half_NW.reshape(len(blocks_N), rows_LPW.shape[0], -1).transpose(0, 1)


def _pools(kv: KvPool) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_pool_LPKBH, kv.v_pool_LPKBH


def _rows(pool_LPKBH: torch.Tensor) -> torch.Tensor:
    """uint8 [L, P, bytes of a block in one layer], a view."""
    return pool_LPKBH.view(torch.uint8).flatten(2)
