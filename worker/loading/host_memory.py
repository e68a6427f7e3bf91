"""How many KV blocks the host's memory keeps, and the memory itself.

By default a GPU's worker takes a share of what is free on the host; on a CPU both tiers would be the same memory, so
that there is none unless it is asked for. Must not know: the block manager, flags' parsing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import structlog
import torch

from octavo.model.attention.host_blocks import HostBlocks, HostMemoryRefused, OnParts
from octavo.model.parallel import ALONE, Ranks
from octavo.worker.loading.memory import GIB, DoesNotFit, available_host_bytes

log = structlog.get_logger(__name__)

SHARE = 0.25  # of free host memory, for the workers of all GPUs together
MOST_UNASKED_BYTES = 16 * GIB  # pinning takes a third of a second for a GiB, and more
MOST_UNASKED_BLOCKS = 1 << 18  # of tiny models: a gateway that joins is told of each
_DEVICES = Path("/sys/bus/pci/devices")


def host_blocks_wanted(host_kv_gib: float | None, block_bytes: int, *, num_gpus: int) -> int:
    """Blocks to keep. host_kv_gib: as it was asked for; None: the default. num_gpus: of this host; 0: a CPU serves.
    Raises DoesNotFit."""
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
    if host_kv_gib and wanted_bytes < block_bytes:
        least = -(-block_bytes * 10_000 // GIB) / 10_000
        raise DoesNotFit(
            "the host memory for KV blocks is smaller than one block",
            f"--host-kv-gib is {host_kv_gib:g} ({wanted_bytes:,} bytes), a block takes {block_bytes:,} bytes",
            f"try --host-kv-gib {least:g} or more, or 0 for none",
        )
    return wanted_bytes // block_bytes


def allocate_host_blocks(
    host_kv_gib: float | None, block_bytes: int, device: torch.device, on_parts: OnParts, *, ranks: Ranks = ALONE
) -> HostBlocks | None:
    """The memory, pinned for a GPU; None for none. ranks: of a group, which divide what is asked for: block_bytes is
    one rank's part of a block. Raises DoesNotFit, but where nobody asked for it goes on without."""
    num_gpus = max(1, torch.cuda.device_count()) if device.type == "cuda" else 0
    part_gib = None if host_kv_gib is None else host_kv_gib / ranks.size
    num_blocks = ranks.least(host_blocks_wanted(part_gib, block_bytes, num_gpus=num_gpus))  # a block is the same on all
    if not num_blocks:
        return None
    host = None
    try:
        with near(device):
            host = HostBlocks(num_blocks, block_bytes, is_pinned=device.type == "cuda", on_parts=on_parts)
    except HostMemoryRefused as error:
        if host_kv_gib is not None:
            raise DoesNotFit(
                f"the system refuses {num_blocks * block_bytes / GIB:.2f} GiB of host memory for KV blocks",
                str(error),
                "try a smaller --host-kv-gib, or 0 for none; pinned memory may need a higher limit (ulimit -l)",
            ) from error
        log.warning("host_memory_refused", num_bytes=num_blocks * block_bytes, error=str(error))
    if not ranks.least(int(host is not None)) or host is None:  # all ranks, or none
        return None
    log.info("host_memory_taken", num_blocks=num_blocks, num_bytes=host.num_bytes, is_pinned=host.is_pinned)
    return host


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """This thread on the CPUs beside the device, where the system tells them: memory that is touched meanwhile lies on
    their NUMA node."""
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
    """Empty where that is not known."""
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
    """As the kernel writes them: 0-3,8. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
