"""The contexts of prompt chunks, converted from e4m3 once per layer: otherwise every tile of queries of every head
would convert them again, and the fast kernels are those for wider numbers.

A step's plan gives each chunk's context, from position 0 on, adjacent blocks of a wide pool that all layers share, as
long as there are any. Chunks for which there is no room use the small pool, where each tile converts.

    tiles (row, ...)       [ 7, 7, 7, 3 ]                  contexts: row 7 has 5 blocks, row 3 has 2
    wide pool              | 7 7 7 7 7 | 3 3 | - - |       tiles of it (first block, ...)  [ 0, 0, 0, 5 ]

All of this happens on the device, so that a recorded step can be replayed with other chunks.

Legend: W tiles · R rows of the state · M table width · P blocks of the pool · X blocks of the wide pool · K kv heads ·
S block size · H head dim. Must not know: layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2

COMPARED = 16384  # pairs of tiles that are compared at once: more do not fit into registers
PROGRAMS = 1024
MOST_TILES = 1024
"""The most tiles of a step, since one program compares them all."""


@dataclass(frozen=True, slots=True, eq=False)
class WideContext:
    """Memory for the contexts of a step's chunks. k_XKSH, v_XKSH: in the queries' dtype. source_X, count_1: which
    blocks of the small pool they hold, and how many. table_X1: the block tables of wide tiles. wide_W4, left_W4: the
    tiles of chunks with room, and without; tiles of the other kind are empty there. base_W, blocks_W: for the tile that
    represents its row, where the row's context begins and how many blocks it has."""

    k_XKSH: torch.Tensor
    v_XKSH: torch.Tensor
    source_X: torch.Tensor
    count_1: torch.Tensor
    table_X1: torch.Tensor
    wide_W4: torch.Tensor
    left_W4: torch.Tensor
    base_W: torch.Tensor
    blocks_W: torch.Tensor

    @classmethod
    def allocate(cls, pool_PKSH: torch.Tensor, *, num_tokens: int, dtype: torch.dtype) -> "WideContext":
        """For contexts of num_tokens tokens in total."""
        K, S, H = pool_PKSH.shape[1:]
        X, device = -(-num_tokens // S), pool_PKSH.device

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            k_XKSH=empty(X, K, S, H, dtype=dtype),
            v_XKSH=empty(X, K, S, H, dtype=dtype),
            source_X=empty(X),
            count_1=empty(1),
            table_X1=torch.arange(X, dtype=torch.int32, device=device)[:, None],
            wide_W4=empty(MOST_TILES, 4),
            left_W4=empty(MOST_TILES, 4),
            base_W=empty(MOST_TILES),
            blocks_W=empty(MOST_TILES),
        )

    def tiles(self, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tiles of chunks with room, and without, for a step of num_tiles tiles."""
        return self.wide_W4[:num_tiles], self.left_W4[:num_tiles]


def plan_wide_reference(
    tiles: list[tuple[int, int, int, int]], num_blocks: int, block_size: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    """The obvious reference of `plan_wide`: (tiles with room, tiles without)."""
    ends: dict[int, int] = {}
    for row, _, position, count in tiles:
        if count:
            ends[row] = max(ends.get(row, 0), position + count)
    first, begin = dict[int, int](), 0
    for row, end in ends.items():
        first[row] = begin
        begin += -(-end // block_size)
    last = {row: first[row] - (-end // block_size) for row, end in ends.items()}
    wide, left = [], []
    for row, token, position, count in tiles:
        has_room = count > 0 and last[row] <= num_blocks
        wide.append((first[row], token, position, count) if has_room else (0, 0, 0, 0))
        left.append((row, token, position, count) if count and not has_room else (0, 0, 0, 0))
    return wide, left


@triton.jit
def _put_tile(tiles, w, mask, has, row, first, position, count):
    tl.store(tiles + w * 4, tl.where(has, row, 0), mask=mask)
    tl.store(tiles + w * 4 + 1, tl.where(has, first, 0), mask=mask)
    tl.store(tiles + w * 4 + 2, tl.where(has, position, 0), mask=mask)
    tl.store(tiles + w * 4 + 3, tl.where(has, count, 0), mask=mask)


@triton.jit(do_not_specialize=["num_tiles"])
def _plan_wide_kernel(
    tiles_W4, wide_W4, left_W4, base_W, blocks_W, count_1, num_tiles, num_blocks,
    S: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    w = tl.arange(0, WIDTH)
    is_tile = w < num_tiles
    row = tl.load(tiles_W4 + w * 4, mask=is_tile, other=0)
    first = tl.load(tiles_W4 + w * 4 + 1, mask=is_tile, other=0)
    position = tl.load(tiles_W4 + w * 4 + 2, mask=is_tile, other=0)
    count = tl.load(tiles_W4 + w * 4 + 3, mask=is_tile, other=0)
    is_used = count > 0
    end = tl.zeros([WIDTH], tl.int32)
    owner = tl.full([WIDTH], WIDTH, tl.int32)
    for start in range(0, num_tiles, STEP):
        j = start + tl.arange(0, STEP)
        other_row = tl.load(tiles_W4 + j * 4, mask=j < num_tiles, other=0)
        other_position = tl.load(tiles_W4 + j * 4 + 2, mask=j < num_tiles, other=0)
        other_count = tl.load(tiles_W4 + j * 4 + 3, mask=j < num_tiles, other=0)
        is_same = (row[:, None] == other_row[None, :]) & (other_count > 0)[None, :]
        end = tl.maximum(end, tl.max(tl.where(is_same, (other_position + other_count)[None, :], 0), 1))
        owner = tl.minimum(owner, tl.min(tl.where(is_same, j[None, :], WIDTH), 1))
    blocks = tl.where(is_used, tl.cdiv(end, S), 0)
    is_owner = is_used & (owner == w)
    wanted = tl.where(is_owner, blocks, 0)
    base = tl.cumsum(wanted, 0) - wanted
    tl.store(base_W + w, base, mask=is_tile)
    # The barrier orders every thread's stores before the loads of what others stored.
    tl.debug_barrier()
    begin = tl.load(base_W + owner, mask=is_used, other=0)
    has_room = is_used & (begin + blocks <= num_blocks)
    taken = tl.where(is_owner & has_room, blocks, 0)
    tl.store(blocks_W + w, taken, mask=is_tile)
    tl.store(count_1, tl.max(tl.where(is_owner & has_room, begin + blocks, 0), 0))
    _put_tile(wide_W4, w, is_tile, has_room, begin, first, position, count)
    _put_tile(left_W4, w, is_tile, is_used & (has_room == 0), row, first, position, count)


@triton.jit(do_not_specialize=["num_tiles"])
def _list_sources_kernel(
    tiles_W4, base_W, blocks_W, table_RM, source_X, count_1, num_tiles, table_width,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    total = tl.load(count_1)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK >= total:
        return
    row = tl.full([BLOCK], -1, tl.int32)
    at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tiles, STEP):
        j = start + tl.arange(0, STEP)
        base = tl.load(base_W + j, mask=j < num_tiles, other=0)
        blocks = tl.load(blocks_W + j, mask=j < num_tiles, other=0)
        tile_row = tl.load(tiles_W4 + j * 4, mask=j < num_tiles, other=0)
        inside = x[:, None] - base[None, :]
        is_here = (inside >= 0) & (inside < blocks[None, :])
        row = tl.maximum(row, tl.max(tl.where(is_here, tile_row[None, :], -1), 1))
        at = tl.maximum(at, tl.max(tl.where(is_here, inside, 0), 1))
    source = tl.load(table_RM + row.to(tl.int64) * table_width + at, mask=row >= 0, other=-1)
    tl.store(source_X + x, source, mask=x < total)


@triton.jit
def _widen_kernel(k_pool, v_pool, k_wide, v_wide, source_X, count_1, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    total = tl.load(count_1)
    for x in range(tl.program_id(0), total, tl.num_programs(0)):
        source = tl.load(source_X + x).to(tl.int64)
        if source >= 0:
            from_at = source * SIZE
            to_at = x * SIZE
            for start in range(0, SIZE, WIDTH):
                is_in = start + i < SIZE
                k = tl.load(k_pool + from_at + start + i, mask=is_in, other=0.0)
                v = tl.load(v_pool + from_at + start + i, mask=is_in, other=0.0)
                tl.store(k_wide + to_at + start + i, k.to(k_wide.dtype.element_ty), mask=is_in)
                tl.store(v_wide + to_at + start + i, v.to(v_wide.dtype.element_ty), mask=is_in)


def plan_wide(tiles_W4: torch.Tensor, table_RM: torch.Tensor, wide: WideContext) -> None:
    """Assign blocks to the chunks' contexts, for all layers of a step. tiles_W4, table_RM: int32 (`list_tiles`).

    Raises ValueError if a tensor does not fit.
    """
    W, X = len(tiles_W4), len(wide.source_X)
    check_tensor("tiles_W4", tiles_W4, shape=(W, 4), dtype=torch.int32)
    check_tensor("table_RM", table_RM, shape=(None, None), dtype=torch.int32)
    if W > MOST_TILES:
        raise ValueError(f"tiles_W4 has {W} tiles, more than {MOST_TILES}")
    if not W:
        return
    width = next_power_of_2(W)
    _plan_wide_kernel[(1,)](
        tiles_W4, wide.wide_W4, wide.left_W4, wide.base_W, wide.blocks_W, wide.count_1, W, X,
        S=wide.k_XKSH.shape[2], WIDTH=width, STEP=min(64, COMPARED // width), num_warps=8,
    )  # fmt: skip
    _list_sources_kernel[(triton.cdiv(X, 128),)](
        tiles_W4, wide.base_W, wide.blocks_W, table_RM, wide.source_X, wide.count_1, W, table_RM.shape[1],
        BLOCK=128, STEP=32, num_warps=4,
    )  # fmt: skip


def widen(k_pool_PKSH: torch.Tensor, v_pool_PKSH: torch.Tensor, wide: WideContext) -> None:
    """Convert a layer's keys and values of the planned contexts. Raises ValueError if a tensor does not fit."""
    shape = (None, *wide.k_XKSH.shape[1:])
    check_tensor("k_pool_PKSH", k_pool_PKSH, shape=shape, dtype=k_pool_PKSH.dtype)
    check_tensor("v_pool_PKSH", v_pool_PKSH, shape=shape, dtype=k_pool_PKSH.dtype)
    size = wide.k_XKSH[0].numel()
    _widen_kernel[(min(PROGRAMS, len(wide.source_X)),)](
        k_pool_PKSH, v_pool_PKSH, wide.k_XKSH, wide.v_XKSH, wide.source_X, wide.count_1,
        SIZE=size, WIDTH=min(2048, next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
