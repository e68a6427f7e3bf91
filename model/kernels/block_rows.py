"""Gathers whole blocks of the KV cache, of all layers, into rows of a buffer, and scatters them back, so that copies to
and from host memory have one piece per block.

    a row    | keys of layer 0 | … | keys of layer L-1 | values of layer 0 | … |      W words of 4 bytes each

Legend: N blocks · L layers · P blocks of the pool · W words of a block in one layer. The reference is
`model.attention.host_blocks.gather_rows`, `scatter_rows`.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

LANES = 2048

Pools = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of all layers, each [L, P, kv heads, tokens of a block, head dim], of any dtype."""


@triton.jit(do_not_specialize=["num_layers", "num_pool_blocks"])
def _block_rows_kernel(
    pool_LPW,
    rows_NR,
    blocks_N,
    first,
    num_layers,
    num_pool_blocks,
    words,
    GATHER: tl.constexpr,
    LANES: tl.constexpr,
):
    # One program copies one block of one layer. first: where this pool's words begin in a row.
    n = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks_N + n).to(tl.int64)
    in_pool = pool_LPW + (layer * num_pool_blocks + block) * words
    in_row = rows_NR + (n * 2 * num_layers + layer) * words + first
    lane = tl.arange(0, LANES)
    for start in range(0, words, LANES):
        at = start + lane
        has = at < words
        if GATHER:
            tl.store(in_row + at, tl.load(in_pool + at, mask=has, other=0), mask=has)
        else:
            tl.store(in_pool + at, tl.load(in_row + at, mask=has, other=0), mask=has)


def gather_block_rows(pools: Pools, blocks_N: torch.Tensor, rows_NR: torch.Tensor) -> None:
    """Copy these blocks (int32) to rows_NR, uint8 [at least N, bytes of a block]. Raises ValueError if a tensor does
    not fit."""
    _launch(pools, blocks_N, rows_NR, gather=True)


def scatter_block_rows(pools: Pools, blocks_N: torch.Tensor, rows_NR: torch.Tensor) -> None:
    """The reverse: copy the rows to these blocks."""
    _launch(pools, blocks_N, rows_NR, gather=False)


def _launch(pools_LPKBH: Pools, blocks_N: torch.Tensor, rows_NR: torch.Tensor, *, gather: bool) -> None:
    check_tensor("blocks_N", blocks_N, shape=(None,), dtype=torch.int32)
    check_tensor("rows_NR", rows_NR, shape=(None, None), dtype=torch.uint8)
    pools = [pool.view(torch.int32).flatten(2) for pool in pools_LPKBH]
    num_layers, num_pool_blocks, words = pools[0].shape
    if rows_NR.shape[0] < len(blocks_N) or rows_NR.shape[1] != 8 * num_layers * words:
        raise ValueError(f"rows_NR has shape {tuple(rows_NR.shape)}, not {(len(blocks_N), 8 * num_layers * words)}")
    for half, pool_LPW in enumerate(pools):
        _block_rows_kernel[(len(blocks_N), num_layers)](
            pool_LPW, rows_NR.view(torch.int32), blocks_N, half * num_layers * words,
            num_layers, num_pool_blocks, words, GATHER=gather, LANES=LANES, num_warps=4,
        )  # fmt: skip
