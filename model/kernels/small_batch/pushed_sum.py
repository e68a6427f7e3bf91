"""A sum over ranks of a few rows by one kernel that writes its numbers into every peer's memory, each together with a
turn number, and adds those that it receives to the residual stream in the same pass.

    this rank  | product | numbers and turn -> the peer's inbox | wait for theirs here | add up | ...
    a peer     |   product  | ... -> ours | wait ...              | add up | ...

The kernel waits for the numbers themselves: 32 bits of numbers and 32 bits of turn are one word of memory, which
arrives as a whole. So there are no signals, and a sum crosses the link once, while `peer_sum` takes a signal and then a
read's round trip. It sends twice the bytes, which is why only few rows gain. Numbers are added in float32 in the order
of the ranks and rounded once, so that all ranks get the same bits.

A program counts its turns in its own memory, and the two parts of an inbox alternate: a rank that has received a peer's
numbers of one turn knows that this peer has read those of the turn before. The numbers to be summed may be anywhere.

It overlaps with its neighbours (model/kernels/overlap.py): the next kernel requests its weights while this one waits
for its peers.

Must not know: how peers' memory is obtained, layers.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

WORDS = 128
"""Words of a program, which is one warp. All sums are cut in the same way, since a word's turn is its program's."""


def num_words(num_elements: int, dtype: torch.dtype) -> int:
    """Words of 32 bits in a sum of this many numbers."""
    return num_elements * dtype.itemsize // 4


def num_turns(words: int) -> int:
    """Programs of a sum of this many words; each counts its turns."""
    return triton.cdiv(words, WORDS)


@triton.jit
def _first_number(word, PAIRS: tl.constexpr):
    """The float32 that the word is, or with PAIRS the first of its two bfloat16, as float32."""
    return (word << 16 if PAIRS else word).to(tl.float32, bitcast=True)


@triton.jit
def _second_number(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _bits(number):
    """The bits of a number as bfloat16, in the low half of an int32."""
    return number.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535


@triton.jit
def _pushed_sum_kernel(
    partial, inboxes, turns, out, num_words, inbox_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, ADDS: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    program = tl.program_id(0)
    k = program * WORDS + tl.arange(0, WORDS)
    mask = k < num_words
    wait_for_previous(PDL)
    mine = tl.load(partial + k, mask=mask, other=0)
    if ADDS:
        before = tl.load(out + k, mask=mask, other=0)
    turn = tl.atomic_add(turns + program, 1, sem="relaxed", scope="gpu") + 1
    marked = (turn.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    part = (turn & 1) * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.store(inboxes[peer] + (part + RANK) * inbox_words + k, marked, mask=mask)
    tl.debug_barrier()  # keeps the stores from being delayed until after the wait below
    first = tl.zeros([WORDS], tl.float32)
    second = tl.zeros([WORDS], tl.float32)
    for peer in tl.static_range(SIZE):
        word = mine
        if peer != RANK:
            inbox = inboxes[RANK] + (part + peer) * inbox_words + k
            found = tl.load(inbox, mask=mask, other=marked, volatile=True)
            while tl.max(((found >> 32).to(tl.int32) != turn).to(tl.int32), axis=0) > 0:
                found = tl.load(inbox, mask=mask, other=marked, volatile=True)
            word = found.to(tl.int32)
        first += _first_number(word, PAIRS)
        if PAIRS:
            second += _second_number(word)
    if ADDS:
        first += _first_number(before, PAIRS)
        if PAIRS:
            second += _second_number(before)
    total = (_bits(first) | (_bits(second) << 16)) if PAIRS else first.to(tl.int32, bitcast=True)
    tl.store(out + k, total, mask=mask)


def pushed_sum(
    partial: torch.Tensor,
    inboxes: tuple[torch.Tensor, ...],
    turns: torch.Tensor,
    out: torch.Tensor,
    *,
    rank: int,
    adds: bool,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """out = the sum of every rank's partial, bfloat16 or float32; adds: plus the previous value of out. inboxes: every
    rank's, in order of the ranks, including this one's: int64 [2, ranks, words], with enough words for the largest sum,
    initially zero. turns: int32, this rank's own, `num_turns` of the largest sum, initially zero. Every rank must
    launch the same sums in the same order.

    Raises ValueError if a tensor does not fit.
    """
    size, words = len(inboxes), num_words(out.numel(), out.dtype)
    if not 0 <= rank < size or any(inbox.dtype != torch.int64 or inbox.shape[:2] != (2, size) for inbox in inboxes):
        raise ValueError(f"rank {rank} has {size} inboxes; each is int64 of 2 parts of {size} ranks")
    if out.dtype not in (torch.bfloat16, torch.float32) or out.numel() * out.dtype.itemsize % 4:
        raise ValueError(f"out has shape {tuple(out.shape)} and is {out.dtype}, which makes no words of 32 bits")
    if (
        partial.shape != out.shape
        or partial.dtype != out.dtype
        or not (partial.is_contiguous() and out.is_contiguous())
    ):
        raise ValueError(f"partial has shape {tuple(partial.shape)} and is {partial.dtype}, unlike out")
    room = min(inbox.shape[2] for inbox in inboxes)
    if words > room or turns.dtype != torch.int32 or turns.numel() < num_turns(words):
        raise ValueError(f"a sum of {words} words has inboxes of {room} and {turns.numel()} turns of {turns.dtype}")
    _pushed_sum_kernel[(num_turns(words),)](
        partial.view(-1).view(torch.int32), inboxes, turns, out.view(-1).view(torch.int32), words, room,
        RANK=rank, SIZE=size, WORDS=WORDS, ADDS=adds, PAIRS=out.dtype == torch.bfloat16, PDL=overlap.value,
        num_warps=1, launch_pdl=overlap.value,
    )  # fmt: skip
