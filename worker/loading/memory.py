"""How many KV blocks fit: arithmetic on byte counts of the system and the model.

Must not know: the block manager, flags' parsing.
"""

import ctypes
import math
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
import torch

from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig
from octavo.model.layers.linear import Linear

GIB = 1 << 30
RESERVE_BYTES = 256 << 20
"""Left free for what is not accounted for: allocator slack, the interpreter, other libraries."""
MOST_BLOCKS = 1 << 24
"""Limit of a pool that takes all spare memory, since each block takes some 200 bytes of host memory. A block of the
smallest models takes 80 KB, so that this is more than a terabyte."""
SMALL_SHARE = 1 / 8
"""Of free memory; a pool on a CPU that takes no more gets its pages as they are written. Of the embedded model's 1.3 GB
most services need little, and a virtual machine may take seconds to provide them. What a larger pool needs is taken at
the start: others that look for memory later, such as the next worker, would count it as free."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 128 << 20
"""Enough for tensors of a step of 2,048 tokens, or logits of 200 rows; larger ones are returned to the system."""
_CGROUP = Path("/sys/fs/cgroup")
_LARGEST_FRACTION = 0.95


class SpareMemory(Enum):
    """What to do with memory beyond what all requests together could ever fill with blocks of their own."""

    LEFT = "left"  # to other programs on this machine
    TAKEN = "taken"  # for cached prefixes: no other program uses the device


class DoesNotFit(Exception):
    """The KV pool cannot be created. The message has three lines: what is wrong, the numbers, what to change."""

    def __init__(self, what: str, numbers: str, change: str) -> None:
        super().__init__(f"{what}\n{numbers}\n{change}")
        self.what, self.numbers, self.change = what, numbers, change


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory of one device and what needs it, over all ranks that share it.

    available_bytes: free after the weights are loaded. weights_bytes: taken by the weights.
    activation_bytes: of the largest step. block_bytes: of one block over all layers.
    memory_fraction: share of what was free before loading, for weights, activations, reserve and blocks together.
    """

    available_bytes: int
    weights_bytes: int
    activation_bytes: int
    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_fraction: float = 0.9
    reserve_bytes: int = RESERVE_BYTES
    spare: SpareMemory = SpareMemory.LEFT

    @property
    def budget_bytes(self) -> int:
        """What this worker may take in total."""
        return int(self.memory_fraction * self.before_loading_bytes)

    @property
    def before_loading_bytes(self) -> int:
        """What was free before the weights were loaded."""
        return self.available_bytes + self.weights_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but the blocks."""
        return self.weights_bytes + self.activation_bytes + self.reserve_bytes

    @property
    def blocks_per_request(self) -> int:
        """Blocks that one request of max_model_len tokens takes."""
        return math.ceil(self.max_model_len / self.block_size)


def size_pool(needs: MemoryNeeds, *, num_blocks: int | None = None) -> int:
    """The number of blocks: as asked for, or as many as the budget holds (with SpareMemory.LEFT, at most as many as all
    requests together could fill). Raises DoesNotFit if a request of max_model_len tokens would not fit in the budget,
    or there is too little memory for what was asked for."""
    if num_blocks is None:
        return _blocks_in_budget(needs)
    _check_asked(needs, num_blocks)
    return num_blocks


def is_small(needs: MemoryNeeds, num_blocks: int) -> bool:
    """Whether so many blocks are a small part of free memory."""
    return num_blocks * needs.block_bytes <= SMALL_SHARE * needs.available_bytes


def _blocks_in_budget(needs: MemoryNeeds) -> int:
    room_bytes = needs.budget_bytes - needs.fixed_bytes
    fitting = max(room_bytes, 0) // needs.block_bytes
    if fitting < needs.blocks_per_request:
        raise _over_budget(needs, room_bytes)
    if needs.spare is SpareMemory.TAKEN:
        return min(fitting, MOST_BLOCKS)
    return min(fitting, needs.max_num_seqs * needs.blocks_per_request)


def _over_budget(needs: MemoryNeeds, room_bytes: int) -> DoesNotFit:
    wanted_bytes = needs.blocks_per_request * needs.block_bytes
    return DoesNotFit(
        f"the KV cache of one request of {needs.max_model_len} tokens ({_gib(wanted_bytes)}) does not fit in memory",
        f"weights {_gib(needs.weights_bytes)} + activations {_gib(needs.activation_bytes)} + reserve "
        f"{_gib(needs.reserve_bytes)} leave {_gib(max(room_bytes, 0))} of the budget {_gib(needs.budget_bytes)} "
        f"({needs.memory_fraction:g} of {_gib(needs.before_loading_bytes)} free); "
        f"need {_gib(wanted_bytes - room_bytes)} more",
        _advice(needs, room_bytes),
    )


def _advice(needs: MemoryNeeds, room_bytes: int) -> str:
    """Flags, with values, that would make it fit."""
    tries = []
    wanted_bytes = needs.fixed_bytes + needs.blocks_per_request * needs.block_bytes
    fraction = math.ceil(100 * wanted_bytes / max(needs.before_loading_bytes, 1)) / 100
    if needs.memory_fraction < fraction <= _LARGEST_FRACTION:
        tries.append(f"--memory-fraction {fraction:.2f}")
    max_model_len = max(room_bytes, 0) // needs.block_bytes * needs.block_size
    if max_model_len >= needs.block_size:
        tries.append(f"--max-model-len {_round_down(max_model_len)}")
    if not tries:
        return "try a smaller model, --dtype bfloat16, a smaller --max-batch-tokens, or free some memory"
    return "try " + " or ".join(tries)


def _check_asked(needs: MemoryNeeds, num_blocks: int) -> None:
    wanted_bytes = num_blocks * needs.block_bytes
    room_bytes = needs.available_bytes - needs.activation_bytes
    if room_bytes < needs.block_bytes:
        raise DoesNotFit(
            f"the largest step ({_gib(needs.activation_bytes)}) does not fit beside the weights",
            f"free {_gib(needs.available_bytes)} after loading",
            "try a smaller --max-batch-tokens or --max-num-seqs, or a smaller model",
        )
    if wanted_bytes > room_bytes:
        raise DoesNotFit(
            f"{num_blocks} KV blocks of {needs.block_size} tokens ({_gib(wanted_bytes)}) do not fit in memory",
            f"free {_gib(needs.available_bytes)} after loading - activations {_gib(needs.activation_bytes)} = "
            f"{_gib(room_bytes)}; need {_gib(wanted_bytes - room_bytes)} more",
            f"try --num-blocks {room_bytes // needs.block_bytes}, or leave it out",
        )
    if num_blocks < 1:
        raise DoesNotFit("a KV cache needs blocks", f"--num-blocks is {num_blocks}", "try 1 or more, or leave it out")


def require_blocks(
    num_blocks: int,
    config: ModelConfig,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
) -> None:
    """Raises DoesNotFit if the device could not hold so many blocks even if nothing else was there: before weights are
    loaded, which may take minutes. Ranks on GPUs have a part of each block."""
    block_bytes = kv_block_bytes(config, block_size=block_size, dtype=kv_dtype)
    if device.type == "cuda":
        block_bytes = max(block_bytes // num_ranks, 1)
    if num_blocks * block_bytes > (total := total_bytes(device)):
        raise DoesNotFit(
            f"{num_blocks} KV blocks of {block_size} tokens ({_gib(num_blocks * block_bytes)}) do not fit in memory",
            f"there are {_gib(total)}, for weights as well",
            f"try fewer than {total // block_bytes} --num-blocks, or leave it out",
        )


def _round_down(tokens: int) -> int:
    """Rounded down to a multiple of 256, for readability; unchanged below 256."""
    return tokens // 256 * 256 or tokens


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / (1 << 20):.2f} MiB"


def available_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Free memory for a process on this host: the smaller of what the kernel reports as available and what the
    container's limit leaves."""
    available = int(psutil.virtual_memory().available)
    folder, names = _counters(cgroup)
    limit, used = (_read_number(folder / name) for name in names[:2])
    if limit is None or used is None:
        return available
    return min(available, max(limit - used + _given_back(folder / "memory.stat", names[2]), 0))


def total_host_bytes(cgroup: Path = _CGROUP) -> int:
    """All memory of this host, or of the container."""
    folder, (limit_file, *_) = _counters(cgroup)
    total, limit = int(psutil.virtual_memory().total), _read_number(folder / limit_file)
    return total if limit is None else min(total, limit)


def _counters(cgroup: Path) -> tuple[Path, tuple[str, str, str]]:
    """Where a container's memory is counted: the folder; the limit's file, the use's, and the name of reclaimable cache
    in memory.stat."""
    if (cgroup / "memory").is_dir():  # the first version of cgroups
        return cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return cgroup, ("memory.max", "memory.current", "inactive_file")


def _read_number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _given_back(path: Path, name: str) -> int:
    """Bytes of page cache that the kernel reclaims before it refuses memory."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def prefer_huge_pages() -> None:
    """Let torch put large CPU tensors into 2 MB pages: reading weights is up to a tenth faster (bench/RESULTS.md). Call
    it before the first large tensor is created. Keeps the variable if it is set already."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next one. By default it returns tensors of some MB to the system
    each time, which zeroes their pages before it hands them out again: 4 % of a step of 32 rows on two cores
    (bench/RESULTS.md). Call it after the weights are loaded, when what loading freed has been returned. Only with
    glibc; elsewhere a no-op."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(parameter, _KEPT_BYTES)


def memory_needs(
    model: CausalLM,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    memory_fraction: float,
    kv_dtype: torch.dtype | None = None,
) -> MemoryNeeds:
    """Call after the weights are loaded and packed, and before the pool is created. Ranks on CPUs share the memory, so
    the needs of all of them are counted, and all must have loaded their weights. kv_dtype None: the model's."""
    num_ranks = model.ranks.size if model.device.type == "cpu" else 1
    step_bytes = activation_bytes(
        model.config, dtype=model.dtype, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs
    )
    return MemoryNeeds(
        available_bytes=available_bytes(model.device),
        weights_bytes=num_ranks * weights_bytes(model),
        activation_bytes=num_ranks * step_bytes,
        block_bytes=num_ranks * kv_block_bytes(model.config, block_size=block_size, dtype=kv_dtype or model.dtype),
        reserve_bytes=num_ranks * RESERVE_BYTES,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        memory_fraction=memory_fraction,
    )


def available_bytes(device: torch.device) -> int:
    """Free memory of the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def total_bytes(device: torch.device) -> int:
    """All memory of the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return total_host_bytes()


def weights_bytes(model: CausalLM) -> int:
    """Bytes of parameters (shared ones once), buffers and packed copies."""
    tensors = (*model.parameters(), *model.buffers())
    packed_bytes = sum(module.packed_bytes for module in model.modules() if isinstance(module, Linear))
    return packed_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def activation_bytes(config: ModelConfig, *, dtype: torch.dtype, max_batch_tokens: int, max_num_seqs: int) -> int:
    """The most that one step holds besides weights and pool, estimated from the tensors that live at the same time: the
    residual stream and its copies, QKV with its rotated copy (and one with normalised heads), gate and up with their
    product, fp32 logits of every row with two temporaries of the sampler."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    copies = 6 if config.family.has_qk_norm else 4
    per_token = 6 * config.hidden_size + copies * heads * config.head_dim + 4 * config.intermediate_size
    logits_bytes = max_num_seqs * config.vocab_size * (dtype.itemsize + 3 * torch.float32.itemsize)
    return max_batch_tokens * per_token * dtype.itemsize + logits_bytes
