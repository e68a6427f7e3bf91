"""How decode attention is divided among programs: the work list of a step, computed on the device.

Sequences differ in length; one program per sequence would leave most of the device waiting for the longest. So contexts
are cut into chunks of one length for the whole batch, chosen so that there are about `target_items` of them, and each
chunk is one item. The list is made once per step and used by every layer; an item has everything its program needs to
know, so that nothing else is looked up before the first keys. Whole chunks come first, then the rest of each sequence,
those longer than half a chunk before the others: programs start in this order, and the launch should end with short
ones.

    positions [ 70, 300, 10 ], chunk 128   ->   whole chunks (1,0) (1,1), then ends (0,0) (1,2) (2,0); first parts 0 1 4

In deterministic mode chunks have the same length whatever the batch (`FixedChunks`), an item is one or more of them,
and the new token is in its chunk already, as it will be for later tokens.

Legend: B sequences of the batch · R rows of the state · W capacity of the list · K kv heads.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2

TARGET_PROGRAMS = 396  # three per multiprocessor of an H100
MIN_CHUNK_TOKENS = 128
CHUNK_MULTIPLE = 64  # a chunk is whole rounds of the attention kernel
ITEM_WORDS = 8
WIDTHS = (16, 64, 256)
"""Batch sizes that planning kernels are compiled for; beyond them, powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """How finely work is divided: into about target_items items, with chunks of at least min_chunk_tokens tokens."""

    target_items: int
    min_chunk_tokens: int = MIN_CHUNK_TOKENS

    @classmethod
    def of(cls, num_kv_heads: int) -> "WorkLimits":
        """Limits for this many KV heads, since an item is one program per KV head."""
        return cls(target_items=max(1, TARGET_PROGRAMS // num_kv_heads))

    def capacity(self, batch_size: int) -> int:
        """The most items that a batch can have."""
        return batch_size + self.target_items

    def chunk_tokens(self, total_tokens: int) -> int:
        """Tokens of a chunk for a batch whose contexts have this many tokens in total."""
        even = -(-total_tokens // self.target_items)
        return max(self.min_chunk_tokens, -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedChunks:
    """Chunks of `tokens` tokens at absolute positions, for contexts of up to max_context tokens. An item has as many
    chunks as give about target_items items."""

    tokens: int
    max_context: int
    target_items: int

    def capacity(self, batch_size: int) -> int:
        """The most items, and the most parts, that a batch can have."""
        return batch_size * -(-self.max_context // self.tokens)

    def chunk_tokens(self, total_tokens: int) -> int:
        """Tokens of an item for a batch whose contexts have this many tokens in total, including the new ones."""
        return max(1, -(-total_tokens // (self.target_items * self.tokens))) * self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The list, all int32 on the device. count_1: number of items.

    item_W8: (index in the batch, row, position, first token, end, index of the item, items of the sequence, where the
    sequence's parts begin among all parts). An item has one part; in deterministic mode one per chunk, except that a
    sequence's last item merges its own. arrived_BK: number of finished items of a sequence and KV head; zero between
    launches.
    """

    limits: WorkLimits | FixedChunks
    count_1: torch.Tensor
    item_W8: torch.Tensor
    arrived_BK: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_batch: int,
        num_kv_heads: int,
        device: torch.device | str,
        limits: WorkLimits | FixedChunks | None = None,
    ) -> "DecodeWork":
        """A list for any lengths of up to max_batch sequences."""
        limits = limits or WorkLimits.of(num_kv_heads)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            limits=limits,
            count_1=zeros(1),
            item_W8=zeros(limits.capacity(max_batch), ITEM_WORDS),
            arrived_BK=zeros(max_batch, num_kv_heads),
        )


def plan_work_reference(
    rows_B: list[int], positions_B: list[int], limits: WorkLimits | FixedChunks
) -> list[tuple[int, ...]]:
    """The obvious reference of `plan_work`: the items."""
    is_fixed = isinstance(limits, FixedChunks)
    chunk = limits.chunk_tokens(sum(positions_B) + is_fixed * len(positions_B))
    whole, large_ends, small_ends, first = [], [], [], 0
    for b, (row, position) in enumerate(zip(rows_B, positions_B, strict=True)):
        length = position + is_fixed
        count = max(1, -(-length // chunk))
        for c in range(count):
            end = min((c + 1) * chunk, length)
            ends = large_ends if 2 * (end - c * chunk) > chunk else small_ends
            (whole if c + 1 < count else ends).append((b, row, position, c * chunk, end, c, count, first))
        first += (count - 1) * (chunk // limits.tokens) + 1 if isinstance(limits, FixedChunks) else count
    whole.sort(key=lambda item: (item[0], item[5]))
    return whole + large_ends + small_ends


@triton.jit
def _put_item(item_W8, at, mask, b, row, position, length, chunk, c, count, first):
    item = item_W8 + at * 8
    begin = c * chunk
    tl.store(item, b, mask=mask)
    tl.store(item + 1, row, mask=mask)
    tl.store(item + 2, position, mask=mask)
    tl.store(item + 3, begin, mask=mask)
    tl.store(item + 4, tl.minimum(begin + chunk, length), mask=mask)
    tl.store(item + 5, c, mask=mask)
    tl.store(item + 6, count, mask=mask)
    tl.store(item + 7, first, mask=mask)


@triton.jit(do_not_specialize=["batch_size"])
def _plan_work_kernel(
    rows_B, position_R, count_1, item_W8, batch_size,
    TARGET: tl.constexpr, LEAST: tl.constexpr, MULTIPLE: tl.constexpr, FIXED: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BATCH)
    is_row = b < batch_size
    row = tl.load(rows_B + b, mask=is_row, other=0)
    position = tl.load(position_R + row, mask=is_row, other=0)
    length = position
    if FIXED:
        length = tl.where(is_row, position + 1, 0)
    even = tl.cdiv(tl.sum(length, 0), TARGET)
    chunk = tl.maximum(tl.cdiv(even, MULTIPLE) * MULTIPLE, LEAST)
    count = tl.where(is_row, tl.maximum(tl.cdiv(length, chunk), 1), 0)
    parts = count
    if FIXED:
        parts = tl.where(is_row, (count - 1) * (chunk // MULTIPLE) + 1, 0)
    first = tl.cumsum(parts, 0) - parts
    whole = tl.where(is_row, count - 1, 0)
    at = tl.cumsum(whole, 0) - whole
    for c in range(tl.max(whole, 0)):
        _put_item(item_W8, at + c, c < whole, b, row, position, length, chunk, tl.zeros_like(b) + c, count, first)
    is_large = is_row & (2 * (length - whole * chunk) > chunk)
    is_small = is_row & (is_large == 0)
    large, small = is_large.to(tl.int32), is_small.to(tl.int32)
    num_whole, num_large = tl.sum(whole, 0), tl.sum(large, 0)
    at = num_whole + tl.where(is_large, tl.cumsum(large, 0) - 1, num_large + tl.cumsum(small, 0) - 1)
    _put_item(item_W8, at, is_row, b, row, position, length, chunk, whole, count, first)
    tl.store(count_1, tl.sum(count, 0))


def _width(batch_size: int) -> int:
    """Rows of the kernel for this batch size: one of few widths, since each is compiled."""
    return next((width for width in WIDTHS if batch_size <= width), next_power_of_2(batch_size))


def plan_work(rows_B: torch.Tensor, position_R: torch.Tensor, work: DecodeWork) -> None:
    """Fill the list for the rows of this step (int32): a sequence has position_R[row] tokens in the cache.

    Raises ValueError if a tensor does not fit.
    """
    (batch_size,) = rows_B.shape
    check_tensor("rows_B", rows_B, shape=(batch_size,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    if batch_size > len(work.arrived_BK):
        raise ValueError(f"rows_B has {batch_size} rows, but the work list is for {len(work.arrived_BK)}")
    limits = work.limits
    is_fixed = isinstance(limits, FixedChunks)
    least, multiple = (
        (limits.tokens,) * 2 if isinstance(limits, FixedChunks) else (limits.min_chunk_tokens, CHUNK_MULTIPLE)
    )
    _plan_work_kernel[(1,)](
        rows_B, position_R, work.count_1, work.item_W8, batch_size,
        TARGET=limits.target_items, LEAST=least, MULTIPLE=multiple, FIXED=is_fixed,
        BATCH=_width(batch_size), num_warps=4,
    )  # fmt: skip
