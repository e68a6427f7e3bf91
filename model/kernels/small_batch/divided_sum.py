"""A sum over ranks of many rows, of which each rank sums its share, and a meeting of ranks for the copies between them.

    this rank | product of peers' rows | of its own | meet, add up | next product of its own | meet | of peers'
    copies                             | to their rooms ... |      | to all streams ...        |

What `peer_sum` reads over the link after a product is here sent during products, by the device's copy engines, which
use no multiprocessor. Numbers are added in float32 in the order of the ranks, the stream last, and rounded once, by one
rank for all, so that all have the same bits. A room may be written again after the second meeting: by then all peers
have read theirs.

Must not know: how peers' memory is obtained, who copies, layers.

Legend: T rows of the stream · R rows of a share · D columns · G ranks.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.small_batch.peer_sum import check_counts, meet

BLOCK, WARPS = 4096, 8
MAX_PROGRAMS = 512
"""So few that all of them are resident on the device at once."""
GRAIN = 128
"""Rows of a share are a multiple of this, so that no tile of a product is cut in two."""


def share_of(num_rows: int, rank: int, size: int) -> slice:
    """The rows that a rank sums."""
    most = _most(num_rows, size)
    return slice(min(most * rank, num_rows), min(most * (rank + 1), num_rows))


def room_shape(num_rows: int, width: int, size: int) -> tuple[int, int, int]:
    """[G, R, D], G ranks: shape of the room for sums of up to this many rows."""
    return size, _most(num_rows, size), width


def _most(num_rows: int, size: int) -> int:
    """Rows of the largest share."""
    return triton.cdiv(triton.cdiv(num_rows, GRAIN), size) * GRAIN


def num_programs(num_rows: int, width: int, size: int) -> int:
    """Programs of a sum, the same on every rank; a sum needs as many rows of counts."""
    return min(MAX_PROGRAMS, triton.cdiv(_most(num_rows, size) * width, BLOCK))


@triton.jit
def _divided_sum_kernel(
    rooms_GRD, share_RD, counts, num_elements, room_elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    meet(counts, program, RANK, SIZE, SEM="release")  # releases what was copied into their memory
    for start in tl.range(program * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = k < num_elements
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            part = tl.load(rooms_GRD + peer * room_elements + k, mask=mask, other=0.0, volatile=True)
            total += part.to(tl.float32)
        total += tl.load(share_RD + k, mask=mask, other=0.0).to(tl.float32)
        tl.store(share_RD + k, total.to(share_RD.dtype.element_ty), mask=mask)


def divided_sum(rooms_GRD: torch.Tensor, x_TD: torch.Tensor, counts: tuple[torch.Tensor, ...], *, rank: int) -> None:
    """Add to this rank's share of x_TD the sum of all ranks' products, which have been copied into rooms_GRD: for each
    rank, its rows of the share. counts: every rank's, in order of the ranks, int32, initially zero, a column for each
    rank and a row for each of `num_programs`. Every rank must launch the same sums and meetings in the same order, on
    streams that wait for its copies.

    Raises ValueError if a tensor does not fit.
    """
    size, (num_rows, D) = len(counts), x_TD.shape
    if len(rooms_GRD) != size or not 0 <= rank < size:
        raise ValueError(f"rank {rank} has {len(rooms_GRD)} parts of a room and {size} counts")
    share = share_of(num_rows, rank, size)
    fits = x_TD.dtype == rooms_GRD.dtype and rooms_GRD.shape[2:] == (D,) and rooms_GRD.shape[1] >= _most(num_rows, size)
    if not fits or not x_TD.is_contiguous() or not rooms_GRD.is_contiguous():
        raise ValueError(
            f"a stream of {tuple(x_TD.shape)} and {x_TD.dtype} does not fit rooms of {tuple(rooms_GRD.shape)} "
            f"and {rooms_GRD.dtype}"
        )
    programs = num_programs(num_rows, D, size)
    check_counts(counts, programs)
    _divided_sum_kernel[(programs,)](
        rooms_GRD, x_TD[share], counts, (share.stop - share.start) * D, rooms_GRD.shape[1] * D,
        RANK=rank, SIZE=size, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _meet_kernel(counts, RANK: tl.constexpr, SIZE: tl.constexpr):
    meet(counts, 0, RANK, SIZE, SEM="release")


def meet_peers(counts: tuple[torch.Tensor, ...], *, rank: int) -> None:
    """After this, everything that every rank copied before it is visible. counts: those of the sums. Raises ValueError
    if they do not fit."""
    check_counts(counts, 1)
    _meet_kernel[(1,)](counts, RANK=rank, SIZE=len(counts), num_warps=1)
