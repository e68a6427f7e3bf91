"""How many KV blocks to keep in host memory, and allocating that memory.

By default a worker on a GPU takes a share of free host memory. On a CPU both tiers would be in the same memory, so
there is no second tier unless it is asked for. Must not know: the block manager, flags' parsing.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import psutil
import structlog
import torch

from octavo.model.attention.host_blocks import PART_BYTES, HostBlocks, HostMemoryRefused, OnParts
from octavo.model.parallel import ALONE, Ranks
from octavo.worker.loading.memory import GIB, DoesNotFit, available_host_bytes

log = structlog.get_logger(__name__)

SHARE = 0.25  # of free host memory, for the workers of all GPUs together
MOST_UNASKED_BYTES = 16 * GIB  # by default; pinning takes at least a third of a second for each GiB
MOST_UNASKED_BLOCKS = 1 << 18  # by default, for tiny models: a gateway that joins is told of each block
TOLD_EVERY_S = 0.2
_DEVICES = Path("/sys/bus/pci/devices")


def host_blocks_wanted(host_kv_gib: float | None, block_bytes: int, *, num_gpus: int, num_ranks: int = 1) -> int:
    """The number of blocks to keep. host_kv_gib: as asked for, over all ranks; None: the default. num_gpus: on this
    host; 0 if the model runs on a CPU. block_bytes: of one rank's part. Raises DoesNotFit."""
    free_bytes = available_host_bytes()
    if host_kv_gib is None:
        unasked_bytes = min(int(SHARE * free_bytes) // num_gpus, MOST_UNASKED_BYTES) if num_gpus else 0
        return min(unasked_bytes // block_bytes, MOST_UNASKED_BLOCKS)
    wanted_bytes = int(host_kv_gib * GIB)
    if wanted_bytes > free_bytes:
        total = psutil.virtual_memory().total
        raise DoesNotFit(
            f"{host_kv_gib:g} GiB of host memory for KV blocks are more than this machine has free",
            f"--host-kv-gib is {host_kv_gib:g}, free are {free_bytes / GIB:.2f} GiB of {total / GIB:.2f} GiB",
            f"try --host-kv-gib {int(free_bytes / GIB * SHARE * 10) / 10:g}, or 0 for none",
        )
    whole_bytes = block_bytes * num_ranks
    if host_kv_gib and wanted_bytes < whole_bytes:
        least = -(-whole_bytes * 10_000 // GIB) / 10_000
        raise DoesNotFit(
            "the host memory for KV blocks is smaller than one block",
            f"--host-kv-gib is {host_kv_gib:g} ({wanted_bytes:,} bytes), a block takes {whole_bytes:,} bytes",
            f"try --host-kv-gib {least:g} or more, or 0 for none",
        )
    return wanted_bytes // whole_bytes


def allocate_host_blocks(
    host_kv_gib: float | None, block_bytes: int, device: torch.device, on_parts: OnParts, *, ranks: Ranks = ALONE
) -> HostBlocks | None:
    """`begin_host_blocks`, and wait for the result."""
    return begin_host_blocks(host_kv_gib, block_bytes, device, ranks=ranks).take(on_parts)


def begin_host_blocks(
    host_kv_gib: float | None, block_bytes: int, device: torch.device, *, ranks: Ranks = ALONE
) -> "PendingHostBlocks":
    """Start allocating the memory. host_kv_gib: over all ranks. block_bytes: of one rank's part of a block. Raises
    DoesNotFit."""
    num_gpus = max(1, torch.cuda.device_count()) if device.type == "cuda" else 0
    wanted = host_blocks_wanted(host_kv_gib, block_bytes, num_gpus=num_gpus, num_ranks=ranks.size)
    num_blocks = ranks.least(wanted)  # all ranks must have the same number of blocks
    return PendingHostBlocks(num_blocks, block_bytes, device, is_asked=host_kv_gib is not None, ranks=ranks)


class PendingHostBlocks:
    """Blocks in host memory whose pages a separate thread touches, and pins for a GPU, while the calling thread
    compiles kernels; this saves seconds. is_asked: whether the size was asked for rather than the default."""

    def __init__(
        self, num_blocks: int, block_bytes: int, device: torch.device, *, is_asked: bool, ranks: Ranks
    ) -> None:
        self._num_blocks, self._block_bytes, self._device = num_blocks, block_bytes, device
        self._is_asked, self._ranks = is_asked, ranks
        self._coming: Future[HostBlocks] = Future()
        self._parts = (0, -(-num_blocks * block_bytes // PART_BYTES))
        if num_blocks:
            Thread(target=self._touch, name="host-memory", daemon=True).start()  # daemon: never delays an exit

    def take(self, on_parts: OnParts) -> HostBlocks | None:
        """The memory, pinned for a GPU; None if there is none. If the system refuses it, raises DoesNotFit if it was
        asked for, else returns None."""
        if not self._num_blocks:
            return None
        host, num_bytes = None, self._num_blocks * self._block_bytes
        try:
            host = self._touched(on_parts)
        except HostMemoryRefused as error:
            if self._is_asked:
                raise DoesNotFit(
                    f"the system refuses {num_bytes / GIB:.2f} GiB of host memory for KV blocks",
                    str(error),
                    "try a smaller --host-kv-gib, or 0 for none; pinned memory may need a higher limit (ulimit -l)",
                ) from error
            log.warning("host_memory_refused", num_bytes=num_bytes, error=str(error))
            host = None
        if not self._ranks.least(int(host is not None)) or host is None:  # all ranks or none
            return None
        log.info("host_memory_taken", num_blocks=host.num_blocks, num_bytes=host.num_bytes, is_pinned=host.is_pinned)
        return host

    def _touched(self, on_parts: OnParts) -> HostBlocks:
        on_parts(0, self._parts[1])
        while not wait([self._coming], TOLD_EVERY_S).done:
            on_parts(*self._parts)
        host = self._coming.result()
        on_parts(*self._parts)
        return host

    def _touch(self) -> None:
        try:
            with near(self._device):
                host = HostBlocks(self._num_blocks, self._block_bytes, is_pinned=False, on_parts=self._at)
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    host.pin(self._at)
            self._coming.set_result(host)
        except BaseException as error:
            self._coming.set_exception(error)

    def _at(self, done: int, total: int) -> None:
        self._parts = done, total


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """Run this thread on the CPUs close to the device, if known, so that memory touched meanwhile is on their NUMA
    node."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    beside = mine & cpus_beside(device) if mine else set()
    if not beside or beside == mine:
        yield
        return
    os.sched_setaffinity(0, beside)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def cpus_beside(device: torch.device, devices: Path = _DEVICES) -> set[int]:
    """The CPUs close to the device; empty if unknown."""
    if device.type != "cuda":
        return set()
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return set()
    domain, bus, slot = (int(number or 0) for number in numbers)
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        return parse_cpus((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parse_cpus(text: str) -> set[int]:
    """Parses a CPU list as the Linux kernel writes it, such as "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
