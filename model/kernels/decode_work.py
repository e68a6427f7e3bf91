"""How decode attention is divided among thread blocks: the work list of a step, made on the device.

Sequences differ in length; a thread block per sequence would leave most of the device waiting for the longest. So a
context is cut into chunks of one length for the whole batch, chosen so that there are about `target_items` of them, and
each chunk is one item. The list is made once per step and used by every layer.

    positions   [ 70, 300, 10 ], chunk 128   ->   items (0,0) (1,0) (1,1) (1,2) (2,0);  first 0 1 4;  chunks 1 3 1

Legend: B sequences of the batch · R rows of the state · W capacity of the list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2

TARGET_PROGRAMS = 396  # three per multiprocessor of an H100
MIN_CHUNK_TOKENS = 128
CHUNK_MULTIPLE = 64  # a chunk is whole tiles of the attention kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """How finely work is cut: into about target_items items, none shorter than min_chunk_tokens unless it is all."""

    target_items: int
    min_chunk_tokens: int = MIN_CHUNK_TOKENS

    @classmethod
    def of(cls, num_kv_heads: int) -> "WorkLimits":
        """An item is a program for each KV head."""
        return cls(target_items=max(1, TARGET_PROGRAMS // num_kv_heads))

    def capacity(self, batch_size: int) -> int:
        """Items that a batch can have at most."""
        return batch_size + self.target_items

    def chunk_tokens(self, total_tokens: int) -> int:
        """Tokens of a chunk for a batch whose contexts have so many tokens together."""
        even = -(-total_tokens // self.target_items)
        return max(self.min_chunk_tokens, -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """The list, all int32 on the device. head_4: (number of items, tokens of a chunk, unused, unused).

    item_W2: (index in the batch, index of the chunk). first_B: a sequence's first item. chunks_B: how many it has.
    arrived_BK: how many chunks of a sequence and KV head are done; zero between launches.
    """

    limits: WorkLimits
    head_4: torch.Tensor
    item_W2: torch.Tensor
    first_B: torch.Tensor
    chunks_B: torch.Tensor
    arrived_BK: torch.Tensor

    @classmethod
    def allocate(
        cls, max_batch: int, num_kv_heads: int, device: torch.device | str, limits: WorkLimits | None = None
    ) -> "DecodeWork":
        """Room for any lengths of up to max_batch sequences."""
        limits = limits or WorkLimits.of(num_kv_heads)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            limits=limits,
            head_4=zeros(4),
            item_W2=zeros(limits.capacity(max_batch), 2),
            first_B=zeros(max_batch),
            chunks_B=zeros(max_batch),
            arrived_BK=zeros(max_batch, num_kv_heads),
        )


def plan_work_reference(
    lengths_B: list[int], limits: WorkLimits
) -> tuple[int, list[tuple[int, int]], list[int], list[int]]:
    """The obvious twin of `plan_work`: tokens of a chunk, items, first_B, chunks_B."""
    chunk = limits.chunk_tokens(sum(lengths_B))
    chunks_B = [max(1, -(-length // chunk)) for length in lengths_B]
    items = [(b, c) for b, count in enumerate(chunks_B) for c in range(count)]
    return chunk, items, [sum(chunks_B[:b]) for b in range(len(chunks_B))], chunks_B


@triton.jit
def _plan_work_kernel(
    rows_B, position_R, head_4, item_W2, first_B, chunks_B, batch_size,
    TARGET: tl.constexpr, LEAST: tl.constexpr, MULTIPLE: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BATCH)
    is_row = b < batch_size
    length = tl.load(position_R + tl.load(rows_B + b, mask=is_row, other=0), mask=is_row, other=0)
    even = tl.cdiv(tl.sum(length, 0), TARGET)
    chunk = tl.maximum(tl.cdiv(even, MULTIPLE) * MULTIPLE, LEAST)
    count = tl.where(is_row, tl.maximum(tl.cdiv(length, chunk), 1), 0)
    first = tl.cumsum(count, 0) - count
    tl.store(head_4, tl.sum(count, 0))
    tl.store(head_4 + 1, chunk)
    tl.store(first_B + b, first, mask=is_row)
    tl.store(chunks_B + b, count, mask=is_row)
    for c in range(tl.max(count, 0)):
        has = c < count
        tl.store(item_W2 + (first + c) * 2, b, mask=has)
        tl.store(item_W2 + (first + c) * 2 + 1, tl.zeros_like(b) + c, mask=has)


def plan_work(rows_B: torch.Tensor, position_R: torch.Tensor, work: DecodeWork) -> None:
    """Fill the list for the rows of this step (int32): a sequence has position_R[row] tokens in the cache.

    Raises ValueError where a tensor does not fit.
    """
    (batch_size,) = rows_B.shape
    check_tensor("rows_B", rows_B, shape=(batch_size,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    if batch_size > len(work.first_B):
        raise ValueError(f"rows_B has {batch_size} rows, but the work list is for {len(work.first_B)}")
    _plan_work_kernel[(1,)](
        rows_B, position_R, work.head_4, work.item_W2, work.first_B, work.chunks_B, batch_size,
        TARGET=work.limits.target_items, LEAST=work.limits.min_chunk_tokens, MULTIPLE=CHUNK_MULTIPLE,
        BATCH=next_power_of_2(batch_size), num_warps=4,
    )  # fmt: skip
