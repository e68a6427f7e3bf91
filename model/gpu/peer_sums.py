"""Sums over ranks of a few rows by one kernel that reads every peer's memory (torch's symmetric memory, one shot).

A decode step of few rows sums some kilobytes twice a layer, and what NCCL takes for each is latency: 56 times ten
microseconds are a quarter of what half of a 7B model takes to read. Each rank's product is written where its peers can
read it; one kernel waits until all have written, adds them up in the order of the ranks (so that all get the same bits)
and waits until all have read. Whether, and up to which size, that is faster than NCCL is measured before serving, and
rank 0's measurement holds. Without NVLink's multicast.

What it needs is asked for, compared with NCCL's sums, and left alone where either fails.
Must not know: layers, steps.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial

import torch

from octavo.model.gpu.autotune import time_graph
from octavo.model.parallel import Ranks, Sums

VARIABLE = "OCTAVO_SUMS"
"""Of the environment: a Way; unset: the fastest."""


class Way(Enum):
    """How few rows are summed: as measured, or without a measurement in one way, to compare them or to do without
    one."""

    FASTEST = "fastest"
    LIBRARY = "library"
    ONE_SHOT = "one_shot"


MOST_BYTES = 1 << 20
"""Of a sum. Beyond, each rank would read much more than NCCL moves."""
GROUP_SIZES = (2, 4, 8)
"""Those for which torch's kernel adds in the order of the ranks."""
DTYPES = (torch.bfloat16, torch.float32)
TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SUMS_AT_ONCE = 16
_ALIGNMENT_BYTES = 16


class SymmetricSums:
    """Implements `PeerSums` for tensors of up to `limit` elements of one dtype; one at a time, in one stream. All ranks
    make theirs at once. Raises RuntimeError where devices or drivers cannot do it."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # which not every build of torch has

        assert ranks.group is not None
        self._group_name = ranks.group.group_name
        self._room = symmetric.empty(MOST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric.rendezvous(self._room, self._group_name)
        self.limit = self._room.numel()

    def takes(self, partial: torch.Tensor) -> bool:
        """See PeerSums."""
        is_aligned = partial.numel() * partial.element_size() % _ALIGNMENT_BYTES == 0
        return partial.dtype == self._room.dtype and 0 < partial.numel() <= self.limit and is_aligned

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return self._room[: like.numel()].view(like.shape)

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerSums."""
        torch.ops.symm_mem.one_shot_all_reduce_out(room, "sum", self._group_name, out)


def with_peer_sums(
    ranks: Ranks, *, hidden_size: int, dtype: torch.dtype, device: torch.device, note: Callable[[str], None]
) -> Ranks:
    """The ranks, with sums of few rows by this way where it is there, gives NCCL's sums and is faster. On every rank at
    once, on idle devices. note: is given a sentence on what came of it. Raises ValueError for an unknown way in the
    environment."""
    wanted = ranks.agree(_wanted_way())
    if wanted is Way.LIBRARY:
        return ranks
    found = ways_to_sum(ranks, hidden_size=hidden_size, dtype=dtype, device=device, note=note)
    chosen = found.get(Way.ONE_SHOT.value, ranks)
    if wanted is not Way.FASTEST or not isinstance(chosen.peers, SymmetricSums):
        return chosen
    chosen.peers.limit = _faster_up_to(ranks, chosen, hidden_size, dtype, device)
    note(f"sums of up to {chosen.peers.limit // hidden_size} rows go by peers' memory, others through NCCL")
    return chosen if chosen.peers.limit else ranks


def _wanted_way() -> Way:
    name = os.environ.get(VARIABLE) or Way.FASTEST.value
    if name not in [way.value for way in Way]:
        raise ValueError(f"{VARIABLE} is {name!r}; give one of {', '.join(way.value for way in Way)}")
    return Way(name)


def ways_to_sum(
    ranks: Ranks, *, hidden_size: int, dtype: torch.dtype, device: torch.device, note: Callable[[str], None]
) -> dict[str, Ranks]:
    """Ranks with each way beside NCCL's that is there and gives right sums, by a Way's value; see `with_peer_sums`."""
    if device.type != "cuda" or ranks.size not in GROUP_SIZES or dtype not in DTYPES or ranks.sums is not Sums.FAST:
        return {}
    own: SymmetricSums | None = None
    try:
        own = SymmetricSums(ranks, dtype, device)
    except (ImportError, AttributeError, RuntimeError) as error:
        note(f"sums go through NCCL alone, since peers' memory cannot be read: {error}")
    if not ranks.least(int(own is not None)) or own is None:
        return {}
    with_own = replace(ranks, peers=own)
    if not ranks.least(int(_is_right(ranks, with_own, hidden_size, dtype, device))):
        note("sums go through NCCL alone, since those by peers' memory are not the same")
        return {}
    return {Way.ONE_SHOT.value: with_own}


def _is_right(library: Ranks, with_own: Ranks, hidden_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether both give the same, of one row and of many."""
    is_right = True
    for rows in (1, 8, MOST_BYTES // (hidden_size * dtype.itemsize)):  # all of them, as the other ranks do
        x_BD = torch.randn(rows, hidden_size, device=device).to(dtype)
        wanted, found = (_sum_copy(ranks, x_BD).float() for ranks in (library, with_own))
        is_right &= torch.allclose(found, wanted, rtol=2e-2, atol=2e-2)
    return is_right


def _faster_up_to(library: Ranks, with_own: Ranks, hidden_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Elements; 0 where it is never faster."""
    limit, stream = 0, torch.cuda.Stream(device)
    for rows in TIMED_ROWS:
        if rows * hidden_size * dtype.itemsize > MOST_BYTES:
            break
        x_BD = torch.randn(rows, hidden_size, device=device).to(dtype)
        library_ms, own_ms = (time_graph(partial(_sum_often, ranks, x_BD), stream) for ranks in (library, with_own))
        if not library.agree(own_ms < library_ms):
            break
        limit = rows * hidden_size
    return limit


def _sum_copy(ranks: Ranks, x_BD: torch.Tensor) -> torch.Tensor:
    partial_BD = ranks.room(x_BD)
    partial_BD.copy_(x_BD)
    return ranks.sum(partial_BD)


def _sum_often(ranks: Ranks, x_BD: torch.Tensor) -> None:
    for _ in range(SUMS_AT_ONCE):
        _sum_copy(ranks, x_BD)
