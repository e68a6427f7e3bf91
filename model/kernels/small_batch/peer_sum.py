"""A sum over ranks by one kernel that reads every peer's memory, and adds it to the residual stream in the same pass.

    this rank  | product -> its room | signal peers | wait for theirs | read all rooms, add up | ...
    a peer     |   product -> its room     | signal | wait ...        | read all rooms, add up | ...

Between two ranks that is also the least that can go over the link, whatever the size: of each rank's numbers, each is
read once. Each program signals for its part alone, by counting up in every peer's memory, and waits until each peer's
count is its own: nothing is reset, and nobody waits for an answer over the link. Numbers are added in float32 in the
order of the ranks and rounded once, so that all ranks get the same bits. A room may be written again after the next sum
that begins: then every peer has ended this one. So sums that follow one another need rooms of their own, and two are
enough.

Another kernel meets its peers in the same way and puts all ranks' columns side by side where this one adds.

It does not overlap with its neighbours (model/kernels/overlap.py): some steps stood still where it did.

Must not know: how peers' memory is had, layers, what the columns are.

Legend, of columns: B rows · V columns of all ranks.
"""

import torch
import triton
import triton.language as tl

BLOCK, LARGE_BLOCK = 2048, 4096
WARPS = 8
MAX_PROGRAMS = 512
"""All of them are on the device at once; of large sums, each goes from block to block."""


def num_programs(num_elements: int) -> int:
    """Of a sum of so many numbers, and so the counts of each rank that it needs."""
    return min(MAX_PROGRAMS, triton.cdiv(num_elements, BLOCK))


@triton.jit
def meet(counts, program, RANK: tl.constexpr, SIZE: tl.constexpr, SEM: tl.constexpr):
    """Tell this program's peers that what was written before this kernel is there, and wait until they have. SEM:
    "relaxed", or "release" where some of that is in their memory."""
    own = counts[RANK] + program * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            # Relaxed is enough where the kernel that wrote this rank's memory has ended: then it is there.
            tl.atomic_add(counts[peer] + program * SIZE + RANK, 1, sem=SEM, scope="sys")
    # By one thread, which tells the others: those that load it for themselves could see what the first has stored.
    turn = tl.atomic_add(own + RANK, 1, sem="relaxed", scope="gpu") + 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            found = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
            while found - turn < 0:  # which also holds where counts wrap
                found = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")


@triton.jit
def _peer_sum_kernel(
    rooms, counts, out, num_elements,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
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
) -> None:
    """out, the sum of what lies in the same room of every rank; adds: with what out had. rooms, counts: of every rank,
    in their order, this one's among them. counts: int32, zero at first, a column for each rank and a row for each of
    `num_programs`. Every rank launches the same sums in the same order.

    Raises ValueError if a tensor does not fit.
    """
    num_elements = out.numel()
    _check(rooms, counts, out, num_elements, rank)
    _peer_sum_kernel[(num_programs(num_elements),)](
        rooms, counts, out, num_elements,
        RANK=rank, SIZE=len(rooms), BLOCK=_block_of(num_elements), ADDS=adds, num_warps=WARPS,
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
    """out_BV: the columns that lie in the same room of every rank, [B, W] in its first elements. rooms, counts: as of
    `peer_sum`; counts are of these joins alone. Every rank launches the same joins in the same order.

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
    """Raises ValueError if so many programs could not meet their peers by the ranks' counts."""
    least = programs * len(counts)
    if any(each.dtype != torch.int32 or each.numel() < least for each in counts):
        raise ValueError(f"{programs} programs need {least} counts of int32 on each rank")


def _block_of(num_elements: int) -> int:
    """Numbers that a program takes at once."""
    return BLOCK if num_elements <= MAX_PROGRAMS * BLOCK else LARGE_BLOCK
