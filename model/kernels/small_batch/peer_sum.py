"""A sum over ranks by one kernel that reads every peer's memory and adds the sum to the residual stream in one pass.

    this rank  | product -> its room | signal peers | wait for theirs | read all rooms, add up | ...
    a peer     |   product -> its room     | signal | wait ...        | read all rooms, add up | ...

With two ranks this is also the least traffic over the link, whatever the size: each number of each rank is read once.
Each program signals for its own part only, by incrementing a count in every peer's memory, and waits until each peer's
count has reached its own: nothing is reset, and nobody waits for a reply over the link. Numbers are added in float32 in
the order of the ranks and rounded once, so that all ranks get the same bits. A room may be written again once the next
sum has met its peers: by then every peer has ended this sum. So consecutive sums need different rooms, and two are
enough.

It overlaps with its neighbours (model/kernels/overlap.py): the next kernel requests its weights while this one waits
for its peers, when memory has little else to do.

Another kernel meets its peers in the same way and puts all ranks' columns side by side instead of adding them.

Must not know: how peers' memory is obtained, layers, what the columns are.

Legend, of columns: B rows · V columns of all ranks.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

BLOCK, LARGE_BLOCK = 2048, 4096
WARPS = 8
MAX_PROGRAMS = 512
"""So few that all of them are resident on the device at once; in large sums, each goes from block to block."""


def num_programs(num_elements: int) -> int:
    """Programs of a sum of this many numbers; it needs as many rows of counts on each rank."""
    return min(MAX_PROGRAMS, triton.cdiv(num_elements, BLOCK))


@triton.jit
def meet(counts, program, RANK: tl.constexpr, SIZE: tl.constexpr, SEM: tl.constexpr):
    """Signal to this program's peers that everything written before this kernel is visible, and wait for their signals.
    SEM: "relaxed", or "release" if some of it is in the peers' memory."""
    own = counts[RANK] + program * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            # Relaxed is enough if the kernel that wrote to this rank's memory has ended: its writes are then visible.
            tl.atomic_add(counts[peer] + program * SIZE + RANK, 1, sem=SEM, scope="sys")
    # By one thread, which broadcasts it: threads that loaded it themselves could see what the first one has stored.
    turn = tl.atomic_add(own + RANK, 1, sem="relaxed", scope="gpu") + 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            found = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
            while found - turn < 0:  # also correct when counts wrap around
                found = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")


@triton.jit
def _peer_sum_kernel(
    rooms, counts, out, num_elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    program = tl.program_id(0)
    wait_for_previous(PDL)
    meet(counts, program, RANK, SIZE, SEM="relaxed")
    for start in tl.range(program * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = k < num_elements
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            total += tl.load(rooms[peer] + k, mask=mask, other=0.0, volatile=True).to(tl.float32)
        if ADDS:
            total += tl.load(out + k, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + k, total.to(out.dtype.element_ty), mask=mask)


def peer_sum(
    rooms: tuple[torch.Tensor, ...],
    counts: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    *,
    rank: int,
    adds: bool,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """out = the sum of every rank's tensor in the same room; adds: plus the previous value of out. rooms, counts: every
    rank's, in order of the ranks, including this one's. counts: int32, initially zero, a column for each rank and a row
    for each of `num_programs`. Every rank must launch the same sums in the same order.

    Raises ValueError if a tensor does not fit.
    """
    num_elements = out.numel()
    _check(rooms, counts, out, num_elements, rank)
    _peer_sum_kernel[(num_programs(num_elements),)](
        rooms, counts, out, num_elements,
        RANK=rank, SIZE=len(rooms), BLOCK=_block_of(num_elements), ADDS=adds, PDL=overlap.value,
        num_warps=WARPS, launch_pdl=overlap.value,
    )  # fmt: skip


@triton.jit
def _peer_join_kernel(
    rooms, counts, out_BV, num_elements, width,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    meet(counts, program, RANK, SIZE, SEM="relaxed")
    for start in tl.range(program * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = k < num_elements
        place = (k // width).to(tl.int64) * (width * SIZE) + k % width
        for peer in tl.static_range(SIZE):
            x = tl.load(rooms[peer] + k, mask=mask, volatile=True)
            tl.store(out_BV + place + peer * width, x, mask=mask)


def peer_join(
    rooms: tuple[torch.Tensor, ...], counts: tuple[torch.Tensor, ...], out_BV: torch.Tensor, *, rank: int
) -> None:
    """out_BV = the columns in the same room of every rank, side by side; each room has them as [B, W] in its first
    elements. rooms, counts: as in `peer_sum`, but the counts are used by these joins alone. Every rank must launch the
    same joins in the same order.

    Raises ValueError if a tensor does not fit.
    """
    size, V = len(rooms), out_BV.shape[1]
    num_elements = out_BV.numel() // max(size, 1)
    if size and V % size:
        raise ValueError(f"out has shape {tuple(out_BV.shape)}: {size} ranks do not have equal columns of it")
    _check(rooms, counts, out_BV, num_elements, rank)
    _peer_join_kernel[(num_programs(num_elements),)](
        rooms, counts, out_BV, num_elements, V // size,
        RANK=rank, SIZE=size, BLOCK=_block_of(num_elements), num_warps=WARPS,
    )  # fmt: skip


def _check(
    rooms: tuple[torch.Tensor, ...],
    counts: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    num_elements: int,
    rank: int,
) -> None:
    """Raises ValueError if a tensor does not fit. num_elements: of each room."""
    if len(rooms) != len(counts) or not 0 <= rank < len(rooms):
        raise ValueError(f"rank {rank} has {len(rooms)} rooms and {len(counts)} counts")
    if not out.is_contiguous() or any(room.dtype != out.dtype or room.numel() < num_elements for room in rooms):
        raise ValueError(f"out has shape {tuple(out.shape)} and is {out.dtype}, which its rooms do not fit")
    check_counts(counts, num_programs(num_elements))


def check_counts(counts: tuple[torch.Tensor, ...], programs: int) -> None:
    """Raises ValueError if the ranks' counts are too few for this many programs."""
    least = programs * len(counts)
    if any(each.dtype != torch.int32 or each.numel() < least for each in counts):
        raise ValueError(f"{programs} programs need {least} counts of int32 on each rank")


def _block_of(num_elements: int) -> int:
    """Numbers that a program processes at once."""
    return BLOCK if num_elements <= MAX_PROGRAMS * BLOCK else LARGE_BLOCK
