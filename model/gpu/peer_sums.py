"""Sums over ranks of a few rows by one kernel that reads every peer's memory (torch's symmetric memory).

A decode step of few rows sums a few kilobytes twice per layer, and NCCL's time for each is latency: 56 times ten
microseconds are a quarter of the time that reading half of a 7B model takes. Each rank's product is written to memory
that its peers can read; one kernel waits until all have written and adds them in the order of the ranks (so that all
get the same bits): torch's, which then waits until all have read, or ours, which also adds to the residual stream and
takes any size (model/kernels/small_batch/peer_sum.py). Another kernel of ours writes its numbers into its peers' memory
instead (pushed_sum.py there). Which of them is faster than NCCL, for which sizes, is measured before serving; rank 0's
measurement decides. NVLink's multicast is not used.

Each way is tried, compared with NCCL's sums, and not used if either fails.
Must not know: layers, steps.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from functools import partial

import torch

from octavo.model.gpu.autotune import STEPS, time_graph
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.small_batch.peer_sum import num_programs, peer_sum
from octavo.model.kernels.small_batch.pushed_sum import WORDS, num_turns, num_words, pushed_sum
from octavo.model.parallel import PeerSums, Ranks, Sums

VARIABLE = "OCTAVO_SUMS"
"""Environment variable with a Way; unset: as measured."""


class Way(Enum):
    """How ranks sum: as measured, or in one given way without measuring, to compare ways or to avoid one."""

    FASTEST = "fastest"
    BY_LIBRARY = "library"
    ONE_SHOT = "one_shot"  # torch's kernel
    FUSED = "fused"  # ours, which reads its peers' memory
    PUSHED = "pushed"  # ours, which writes into it: for few rows


CANDIDATES = {
    Way.FASTEST: (Way.ONE_SHOT, Way.FUSED, Way.PUSHED),
    Way.BY_LIBRARY: (),
    Way.ONE_SHOT: (Way.ONE_SHOT,),
    Way.FUSED: (Way.FUSED,),
    Way.PUSHED: (Way.PUSHED,),
}
"""Ways to try, in addition to the library's."""
MOST_BYTES = 1 << 20
"""The most that a sum by torch's kernel, or a pushed one, may have."""
GROUP_SIZES = (2, 4, 8)
"""Group sizes for which torch's kernel adds in the order of the ranks."""
DTYPES = (torch.bfloat16, torch.float32)
TIMED_ROWS = (1, 4, 16, 64, 128, 256, 1024)
"""Timed in addition to max_rows. Each stands for smaller numbers, down to the previous one."""
TIMED_PAIRS = 8
MANY_ROWS, STEPS_OF_MANY = 1024, 4
_ALIGNMENT_BYTES = 16


class _Peers:
    """Common to all ways: sums of up to `limit` elements of one dtype, in memory that all ranks read or write. All
    ranks must create theirs at once. Raises RuntimeError if devices or drivers do not support it."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, *, limit: int) -> None:
        self.ranks, self._dtype, self.limit = ranks, dtype, limit

    def takes(self, partial: torch.Tensor) -> bool:
        """See PeerSums."""
        is_aligned = partial.numel() * partial.element_size() % _ALIGNMENT_BYTES == 0
        return partial.dtype == self._dtype and 0 < partial.numel() <= self.limit and is_aligned


class SharedMemory:
    """A tensor of the same shape on every rank, initially zero, which all ranks can read and write."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # not in every build of torch

        self.own = symmetric.empty(*shape, dtype=dtype, device=device)
        self.own.zero_()
        assert ranks.group is not None
        self._ranks, self._handle = ranks, symmetric.rendezvous(self.own, ranks.group)

    def of_all(self) -> list[torch.Tensor]:
        """Every rank's tensor, in order of the ranks."""
        shape, dtype, ranks, handle = self.own.shape, self.own.dtype, self._ranks, self._handle
        remote = getattr(handle, "get_remote_tensor", handle.get_buffer)  # differ only for memory inside a larger block
        others = (remote(rank, shape, dtype) for rank in range(ranks.size))
        return [self.own if rank == ranks.rank else other for rank, other in enumerate(others)]


class OneShotSums(_Peers):
    """Implements `PeerSums` by torch's kernel, after which the room may be reused; to be used in one stream."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device, *, limit: int) -> None:
        super().__init__(ranks, dtype, limit=min(limit, MOST_BYTES // dtype.itemsize))
        assert ranks.group is not None
        self.group_name = ranks.group.group_name
        self.memory = SharedMemory((self.limit,), dtype, device, ranks)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return self.memory.own[: like.numel()].view(like.shape)

    first_room = room

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerSums."""
        torch.ops.symm_mem.one_shot_all_reduce_out(room, "sum", self.group_name, out)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """See PeerSums."""
        out = torch.empty_like(x)
        self.sum(room, out)
        x.add_(out)


class FusedSums(_Peers):
    """Implements `PeerSums` by our kernel, with a room for each of a layer's two sums and one for the embedding's; to
    be used in one stream."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device, *, limit: int) -> None:
        super().__init__(ranks, dtype, limit=limit)
        self.memory = SharedMemory((3, self.limit), dtype, device, ranks)
        self._rooms = list(zip(*(each.unbind() for each in self.memory.of_all()), strict=True))
        self._shared = SharedMemory((num_programs(self.limit), ranks.size), torch.int32, device, ranks)
        self._counts = tuple(self._shared.of_all())
        self._turn = 0
        torch.cuda.synchronize(device)
        ranks.least(0)  # every rank's counts are zero before any rank starts to count

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        self._turn ^= 1
        return self._view(self._turn ^ 1, like)

    def first_room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return self._view(2, like)

    def _view(self, number: int, like: torch.Tensor) -> torch.Tensor:
        return self._rooms[number][self.ranks.rank][: like.numel()].view(like.shape)

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerSums."""
        self._run(room, out, adds=False)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """See PeerSums."""
        self._run(room, x, adds=True)

    def _run(self, room: torch.Tensor, out: torch.Tensor, *, adds: bool) -> None:
        rank, address = self.ranks.rank, room.data_ptr()
        rooms = next(each for each in self._rooms if each[rank].data_ptr() == address)
        peer_sum(rooms, self._counts, out, rank=rank, adds=adds, overlap=Overlap.on(out))


class PushedSums(_Peers):
    """Implements `PeerSums` by our kernel that writes into its peers' inboxes; to be used in one stream."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype, device: torch.device, *, limit: int) -> None:
        super().__init__(ranks, dtype, limit=min(limit, MOST_BYTES // dtype.itemsize))
        words = num_turns(num_words(self.limit, dtype)) * WORDS
        self.memory = SharedMemory((2, ranks.size, words), torch.int64, device, ranks)
        self._inboxes = tuple(self.memory.of_all())
        self._turns = torch.zeros(words // WORDS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        ranks.least(0)  # every rank's inbox is zero before any rank writes

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return torch.empty_like(like)

    first_room = room

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerSums."""
        self._run(room, out, adds=False)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """See PeerSums."""
        self._run(room, x, adds=True)

    def _run(self, room: torch.Tensor, out: torch.Tensor, *, adds: bool) -> None:
        rank = self.ranks.rank
        pushed_sum(room, self._inboxes, self._turns, out, rank=rank, adds=adds, overlap=Overlap.on(out))


class SumsBySize:
    """Implements `PeerSums` by the fastest of several ways. fastest: the way for tensors of up to that many elements,
    None for the library's."""

    def __init__(self, fastest: dict[int, PeerSums | None]) -> None:
        self._sizes, self._ways = sorted(fastest), [fastest[size] for size in sorted(fastest)]

    def _way(self, tensor: torch.Tensor) -> PeerSums | None:
        number = bisect_left(self._sizes, tensor.numel())
        return self._ways[number] if number < len(self._ways) else None

    def takes(self, partial: torch.Tensor) -> bool:
        """See PeerSums."""
        way = self._way(partial)
        return way is not None and way.takes(partial)

    def _taking(self, tensor: torch.Tensor) -> PeerSums:
        way = self._way(tensor)
        assert way is not None
        return way

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return self._taking(like).room(like)

    def first_room(self, like: torch.Tensor) -> torch.Tensor:
        """See PeerSums."""
        return self._taking(like).first_room(like)

    def sum(self, room: torch.Tensor, out: torch.Tensor) -> None:
        """See PeerSums."""
        self._taking(room).sum(room, out)

    def add(self, room: torch.Tensor, x: torch.Tensor) -> None:
        """See PeerSums."""
        self._taking(room).add(room, x)


def with_peer_sums(
    ranks: Ranks,
    *,
    hidden_size: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None],
) -> Ranks:
    """The ranks, with the fastest way for each size among those that are available and give NCCL's sums. Call it on
    every rank at once, with idle devices. max_rows: the most rows that a sum may have. note: called with a sentence on
    the outcome. Raises ValueError for an unknown way in the environment."""
    wanted = ranks.agree(wanted_way())
    found = ways_to_sum(
        ranks, CANDIDATES[wanted], hidden_size=hidden_size, max_rows=max_rows, dtype=dtype, device=device, note=note
    )
    if wanted.value in found or not found:
        return found.get(wanted.value, ranks)
    fastest, told = dict[int, PeerSums | None](), list[str]()
    stream = torch.cuda.Stream(device)
    for rows in [*(rows for rows in TIMED_ROWS if rows < max_rows), max_rows]:
        x_BD = torch.randn(rows, hidden_size, device=device).to(dtype)
        ways = {Way.BY_LIBRARY.value: ranks} | {
            name: each for name, each in found.items() if each.peers is not None and each.peers.takes(x_BD)
        }
        if len(ways) == 1:
            break
        times_ms = {name: _time_pairs(each, x_BD, stream) for name, each in ways.items()}
        name = ranks.agree(min(times_ms, key=lambda name: times_ms[name]))
        fastest[x_BD.numel()] = ways[name].peers
        told.append(f"up to {rows} rows {name} ({', '.join(f'{key} {1e3 * ms:.1f}' for key, ms in times_ms.items())})")
    note(f"sums and what they take, us: {'; '.join(told)}")
    return replace(ranks, peers=SumsBySize(fastest))


def _time_pairs(ranks: Ranks, x_BD: torch.Tensor, stream: torch.cuda.Stream) -> float:
    """Milliseconds of a sum, including a copy before it."""
    work = partial(sum_pairs, ranks, x_BD, TIMED_PAIRS)
    steps = STEPS_OF_MANY if len(x_BD) >= MANY_ROWS else STEPS
    return time_graph(work, stream, steps=steps) / (2 * TIMED_PAIRS)


def wanted_way() -> Way:
    """The Way in the environment. Raises ValueError if it is unknown."""
    name = os.environ.get(VARIABLE) or Way.FASTEST.value
    if name not in [way.value for way in Way]:
        raise ValueError(f"{VARIABLE} is {name!r}; give one of {', '.join(way.value for way in Way)}")
    return Way(name)


def ways_to_sum(
    ranks: Ranks,
    wanted: Iterable[Way],
    *,
    hidden_size: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None],
) -> dict[str, Ranks]:
    """Ranks with each way that is available and gives NCCL's sums, by the Way's value; see `with_peer_sums`."""
    if device.type != "cuda" or ranks.size not in GROUP_SIZES or dtype not in DTYPES or ranks.sums is not Sums.FAST:
        return {}
    found = dict[str, Ranks]()
    for way in wanted:
        make, own = _MAKERS[way], None
        try:
            own = make(ranks, dtype, device, limit=max_rows * hidden_size)
        except (ImportError, AttributeError, RuntimeError) as error:
            note(f"there are no {way.value} sums, since peers' memory cannot be read: {error}")
        if not ranks.least(int(own is not None)) or own is None:
            continue
        with_own = replace(ranks, peers=own)
        largest = own.limit // hidden_size
        if ranks.least(int(_is_right(ranks, with_own, (1, 2, min(8, largest), largest), hidden_size, dtype, device))):
            found[way.value] = with_own
        else:
            note(f"there are no {way.value} sums, since they are not the same as NCCL's")
    return found


_MAKERS: dict[Way, type[OneShotSums] | type[FusedSums] | type[PushedSums]] = {
    Way.ONE_SHOT: OneShotSums,
    Way.FUSED: FusedSums,
    Way.PUSHED: PushedSums,
}


def _is_right(
    library: Ranks, with_own: Ranks, sizes: tuple[int, ...], hidden_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether both give nearly the same sums for each of these numbers of rows."""
    is_right = True
    for rows in sizes:  # always all of them: the other ranks also run them all
        x_BD = torch.randn(rows, hidden_size, device=device).to(dtype)
        wanted, found = (sum_pairs(ranks, x_BD, 1).float() for ranks in (library, with_own))
        is_right &= torch.allclose(found, wanted, rtol=2e-2, atol=6e-2)
    return is_right


def sum_pairs(ranks: Ranks, x_BD: torch.Tensor, count: int) -> torch.Tensor:
    """The total of `count` layers' sums, each after a copy, which takes the place of a layer's product."""
    total_BD = torch.zeros_like(x_BD)
    for _ in range(2 * count):
        partial_BD = ranks.room(x_BD)
        partial_BD.copy_(x_BD)
        ranks.add_sum(partial_BD, total_BD)
    return total_BD
