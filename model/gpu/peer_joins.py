"""Joins the columns of all ranks by one kernel that reads every peer's memory (torch's symmetric memory): each step's
candidates, and its logits if sampling needs them (model/gpu/decode_step.py).

A rank's columns are written to memory that its peers can read. As with sums (model/gpu/peer_sums.py), this is tried,
compared with NCCL, timed against it unless a way is configured, and not used if any of these fails.
Must not know: layers, steps, what the columns are.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from octavo.model.gpu.autotune import time_graph
from octavo.model.gpu.peer_sums import GROUP_SIZES, SharedMemory, Way, wanted_way
from octavo.model.kernels.small_batch.peer_sum import num_programs, peer_join
from octavo.model.parallel import Ranks


class JoinsByPeers:
    """Implements `PeerJoins`, with memory for each dtype; to be used in one stream. widths: columns of a rank, by
    dtype. All ranks must create theirs at once. Raises RuntimeError if devices or drivers do not support it."""

    def __init__(self, ranks: Ranks, widths: dict[torch.dtype, int], device: torch.device, *, max_rows: int) -> None:
        self._rank, self._widths, self._max_rows = ranks.rank, widths, max_rows
        self._memory = {dtype: SharedMemory((max_rows, width), dtype, device, ranks) for dtype, width in widths.items()}
        self._rooms = {dtype: tuple(memory.of_all()) for dtype, memory in self._memory.items()}
        most = max(max_rows * width for width in widths.values())
        self._shared = SharedMemory((num_programs(most), ranks.size), torch.int32, device, ranks)
        self._counts = tuple(self._shared.of_all())
        self.is_taken = dict.fromkeys(widths, True)
        torch.cuda.synchronize(device)
        ranks.least(0)  # every rank's counts are zero before any rank starts to count

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See PeerJoins."""
        if shape != (self._max_rows, self._widths.get(dtype)):
            return None
        return self._rooms[dtype][self._rank]

    def takes(self, part: torch.Tensor) -> bool:
        """See PeerJoins."""
        is_there = part.dtype in self._rooms and part.data_ptr() == self._rooms[part.dtype][self._rank].data_ptr()
        return is_there and self.is_taken[part.dtype]

    def concatenate(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerJoins."""
        peer_join(self._rooms[room.dtype], self._counts, out, rank=self._rank)


def with_peer_joins(
    ranks: Ranks,
    widths: dict[torch.dtype, int],
    *,
    max_rows: int,
    device: torch.device,
    note: Callable[[str], None],
) -> Ranks:
    """The ranks, joining columns through peers' memory for each dtype for which that is correct and faster than NCCL.
    Call it on every rank at once, with idle devices. widths: columns of a rank, by dtype. note: called with a sentence
    on the outcome. Raises ValueError for an unknown way in the environment."""
    wanted = ranks.agree(wanted_way())
    if device.type != "cuda" or ranks.size not in GROUP_SIZES or wanted is Way.BY_LIBRARY:
        return ranks
    joins = None
    try:
        joins = JoinsByPeers(ranks, widths, device, max_rows=max_rows)
    except (ImportError, AttributeError, RuntimeError) as error:
        note(f"columns are joined by NCCL, since peers' memory cannot be read: {error}")
    if not ranks.least(int(joins is not None)) or joins is None:
        return ranks
    with_own, told = replace(ranks, joins=joins), list[str]()
    for dtype, width in widths.items():
        if not ranks.least(int(_is_right(ranks, with_own, dtype, (max_rows, width), device))):
            joins.is_taken[dtype] = False
            told.append(f"{dtype} by NCCL, since ours are not the same")
        elif wanted is Way.FASTEST:
            library_ms, own_ms = (_time(each, with_own, dtype, (max_rows, width), device) for each in (ranks, with_own))
            joins.is_taken[dtype] = ranks.agree(own_ms < library_ms)
            told.append(f"{dtype} {max_rows} x {width} library {1e3 * library_ms:.1f}, ours {1e3 * own_ms:.1f}")
    note(f"joined columns and what they take, us: {'; '.join(told)}")
    return with_own


def _room(with_own: Ranks, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    room_BW = with_own.room_of_columns(shape, dtype, device)
    bytes_ = torch.randint(0, 100, (room_BW.numel() * dtype.itemsize,), dtype=torch.uint8, device=device)
    return room_BW.copy_(bytes_.view(dtype).view(shape))


def _is_right(
    library: Ranks, with_own: Ranks, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> bool:
    """Whether both give the same result for one row, two, and all."""
    is_right = True
    for rows in (1, 2, shape[0]):  # always all three: the other ranks also run them all
        part_BW = _room(with_own, dtype, shape, device)[:rows]
        out_BV = torch.zeros(rows, shape[1] * library.size, dtype=dtype, device=device)
        # NCCL's comes second: once it is done, every peer has read what the next iteration overwrites.
        found, wanted = (ranks.concatenate(part_BW, out=torch.zeros_like(out_BV)) for ranks in (with_own, library))
        is_right &= torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    return is_right


def _time(ranks: Ranks, with_own: Ranks, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> float:
    """Milliseconds of a join of all rows."""
    part_BW = _room(with_own, dtype, shape, device)
    out_BV = torch.zeros(shape[0], shape[1] * ranks.size, dtype=dtype, device=device)
    return time_graph(partial(ranks.concatenate, part_BW, out=out_BV))
