"""The work of a step's attention in deterministic mode: one list for decodes and chunks, computed on the device.

Contexts are split into chunks of one fixed length at absolute positions, whatever the batch. A decode gets an item for
each chunk of its context; a tile of a prompt's tokens gets one item, which goes through the chunks itself. Both have
the same form, so that one kernel does both (model/kernels/attention/invariant.py).

    item    row · first token · position of that token · tokens · first chunk · end chunk · part (NO_PART: none) · 0

Items of tiles come first, at fixed places, including empty ones; those of decodes follow, as many as there are.

Legend: B decodes · W tiles · I items · R rows of the state.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.attention.prefill import QUERY_TILE
from octavo.model.kernels.checks import check_tensor, next_power_of_2

CHUNK_TOKENS = 256
FIELDS = 8
NO_PART = -1


@dataclass(frozen=True, slots=True, eq=False)
class InvariantWork:
    """The list, all int32 on the device. item_I8: as above. count_1: number of items in total.

    first_B: a decode's first part. chunks_B: how many chunks it has (with one it needs no parts).
    tile_tokens: of an item of a prompt. max_chunks: of the longest context.
    """

    item_I8: torch.Tensor
    count_1: torch.Tensor
    first_B: torch.Tensor
    chunks_B: torch.Tensor
    tile_tokens: int
    max_chunks: int

    @classmethod
    def allocate(
        cls, *, max_decodes: int, max_tiles: int, max_context: int, tile_tokens: int, device: torch.device | str
    ) -> "InvariantWork":
        """A list for any lengths of up to max_decodes decodes and for max_tiles tiles of QUERY_TILE tokens."""
        max_chunks = -(-max_context // CHUNK_TOKENS)
        capacity = max_tiles * items_of_tile(tile_tokens) + max_decodes * max_chunks

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            item_I8=zeros(max(capacity, 1), FIELDS),
            count_1=zeros(1),
            first_B=zeros(max(max_decodes, 1)),
            chunks_B=zeros(max(max_decodes, 1)),
            tile_tokens=tile_tokens,
            max_chunks=max_chunks,
        )


def items_of_tile(tile_tokens: int) -> int:
    """Number of items that a tile of QUERY_TILE tokens is split into."""
    return -(-QUERY_TILE // tile_tokens)


def plan_invariant_reference(
    decodes: list[tuple[int, int]], tiles: list[tuple[int, int, int, int]], tile_tokens: int
) -> list[tuple[int, ...]]:
    """The obvious reference: items without the last field, including empty ones of tiles. decodes: (row, position)."""
    items: list[tuple[int, ...]] = []
    for row, first, position, count in tiles:
        for done in range(0, items_of_tile(tile_tokens) * tile_tokens, tile_tokens):
            size = min(max(count - done, 0), tile_tokens)
            chunks = -(-(position + done + size) // CHUNK_TOKENS) if size else 0
            items.append((row, first + done, position + done, size, 0, chunks, NO_PART))
    part = 0
    for b, (row, position) in enumerate(decodes):
        chunks = position // CHUNK_TOKENS + 1
        for chunk in range(chunks):
            items.append((row, b, position, 1, chunk, chunk + 1, part if chunks > 1 else NO_PART))
            part += 1
    return items


@triton.jit
def _put(item, row, token, position, count, first, end, part, mask):
    tl.store(item, row, mask=mask)
    tl.store(item + 1, token, mask=mask)
    tl.store(item + 2, position, mask=mask)
    tl.store(item + 3, count, mask=mask)
    tl.store(item + 4, first, mask=mask)
    tl.store(item + 5, end, mask=mask)
    tl.store(item + 6, part, mask=mask)


@triton.jit
def _plan_tiles_kernel(
    tile_W4, item_I8, TOKENS: tl.constexpr, ITEMS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    w = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    row = tl.load(tile_W4 + w * 4) + i * 0
    token = tl.load(tile_W4 + w * 4 + 1) + i * TOKENS
    position = tl.load(tile_W4 + w * 4 + 2) + i * TOKENS
    count = tl.minimum(tl.maximum(tl.load(tile_W4 + w * 4 + 3) - i * TOKENS, 0), TOKENS)
    end = tl.where(count > 0, tl.cdiv(position + count, CHUNK), 0)
    _put(item_I8 + (w * ITEMS + i) * 8, row, token, position, count, i * 0, end, i * 0 - 1, i < ITEMS)


@triton.jit
def _plan_decodes_kernel(
    rows_B, position_R, item_I8, count_1, first_B, chunks_B, batch_size, num_before,
    CHUNK: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, BATCH)
    is_row = b < batch_size
    row = tl.load(rows_B + b, mask=is_row, other=0)
    position = tl.load(position_R + row, mask=is_row, other=0)
    chunks = tl.where(is_row, position // CHUNK + 1, 0)
    first = tl.cumsum(chunks, 0) - chunks
    tl.store(count_1, num_before + tl.sum(chunks, 0))
    tl.store(first_B + b, first, mask=is_row)
    tl.store(chunks_B + b, chunks, mask=is_row)
    for c in range(tl.max(chunks, 0)):
        part = tl.where(chunks > 1, first + c, -1)
        item = item_I8 + (num_before + first + c) * 8
        _put(item, row, b, position, b * 0 + 1, b * 0 + c, b * 0 + c + 1, part, c < chunks)


def plan_invariant_work(
    rows_B: torch.Tensor, position_R: torch.Tensor, tiles_W4: torch.Tensor, work: InvariantWork
) -> None:
    """Fill the list for the decodes of rows_B, which are the step's first tokens, at position_R[row], and for tiles
    (model/kernels/attention/prefill.py). All int32. Raises ValueError if a tensor does not fit."""
    (B,), W = rows_B.shape, len(tiles_W4)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    check_tensor("tiles_W4", tiles_W4, shape=(W, 4), dtype=torch.int32)
    each = items_of_tile(work.tile_tokens)
    if len(work.first_B) < B or W * each + B * work.max_chunks > len(work.item_I8):
        raise ValueError(f"{B} decodes and {W} tiles are more than the list of {len(work.item_I8)} items is for")
    if W:
        _plan_tiles_kernel[(W,)](
            tiles_W4, work.item_I8,
            TOKENS=work.tile_tokens, ITEMS=each, WIDTH=next_power_of_2(each), CHUNK=CHUNK_TOKENS, num_warps=1,
        )  # fmt: skip
    _plan_decodes_kernel[(1,)](
        rows_B, position_R, work.item_I8, work.count_1, work.first_B, work.chunks_B, B, W * each,
        CHUNK=CHUNK_TOKENS, BATCH=next_power_of_2(max(B, 1)), num_warps=4,
    )  # fmt: skip
