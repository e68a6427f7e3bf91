"""Sums over ranks by shares, for steps with prompts (model/kernels/small_batch/divided_sum.py). Copies run in parallel
with products: a product's rows are copied to the rank that sums them while the next rows are multiplied, and the rows
that a rank has summed are copied to the others while it multiplies them.

As with the other sums (model/gpu/peer_sums.py), this is tried, compared, and not used if either fails. From how many
rows on it is faster than the ranks' other sums is measured before serving, with a product before and after, since the
copies run beside those. Must not know: layers, steps.

Legend: T rows of the stream · D model dim · A columns of what a product starts from.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from octavo.model.gpu.autotune import time_graph
from octavo.model.gpu.peer_sums import GROUP_SIZES, STEPS_OF_MANY, SharedMemory, Way, wanted_way
from octavo.model.kernels.small_batch.divided_sum import (
    divided_sum,
    meet_peers,
    num_programs,
    room_shape,
    share_of,
)
from octavo.model.parallel import Ranks, Sums

TIMED_ROWS = (4096, 2048, 1024)
"""Timed after max_rows, from the largest down to the first for which shares are slower."""
CHECKED_ROWS = (1023, 64)
"""Checked in addition to max_rows: unequal shares, and small ones."""
_NEVER = 1 << 30


class SumsByShares:
    """Implements `DividedSums`, with a stream of its own for copies; to be used in one stream. least_rows: fewer rows
    are summed in another way. All ranks must create theirs at once. Raises RuntimeError if devices or drivers do not
    support it."""

    def __init__(self, ranks: Ranks, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        (max_rows, width), self._rank, self._size = shape, ranks.rank, ranks.size
        self.least_rows = 1
        self._memory = [
            SharedMemory(shape, dtype, device, ranks),
            SharedMemory(room_shape(max_rows, width, ranks.size), dtype, device, ranks),
            SharedMemory((num_programs(max_rows, width, ranks.size), ranks.size), torch.int32, device, ranks),
        ]
        streams, rooms, counts = (tuple(each.of_all()) for each in self._memory)
        self._streams, self._rooms, self._counts = streams, rooms, counts
        self._products = torch.empty(shape, dtype=dtype, device=device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_arriving = False
        torch.cuda.synchronize(device)
        ranks.least(0)  # every rank's counts are zero before any rank starts to count

    def stream(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See DividedSums."""
        own = self._streams[self._rank]
        return own if shape == own.shape and dtype == own.dtype else None

    def takes(self, x: torch.Tensor) -> bool:
        """See DividedSums."""
        return x.data_ptr() == self._streams[self._rank].data_ptr() and len(x) >= self.least_rows

    def parts(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """See DividedSums."""
        for step in range(1, self._size):  # peers' shares first: they are copied while the others are computed
            peer = (self._rank + step) % self._size
            rows = share_of(len(x), peer, self._size)
            yield rows, self._products[rows]
            with self._copying():
                self._rooms[peer][self._rank, : rows.stop - rows.start].copy_(self._products[rows])
        rows = share_of(len(x), self._rank, self._size)
        yield rows, self._rooms[self._rank][self._rank, : rows.stop - rows.start]

    def add(self, x: torch.Tensor) -> None:
        """See DividedSums."""
        self._await_copies()
        divided_sum(self._rooms[self._rank], x, self._counts, rank=self._rank)
        rows = share_of(len(x), self._rank, self._size)
        with self._copying():
            for step in range(1, self._size):
                self._streams[(self._rank + step) % self._size][rows].copy_(x[rows])
        self._is_arriving = True

    def arrivals(self, x: torch.Tensor) -> Iterator[slice]:
        """See DividedSums."""
        rows = share_of(len(x), self._rank, self._size) if self._is_arriving else slice(0, len(x))
        if rows.start < rows.stop:
            yield rows
        if self._is_arriving:
            self._is_arriving = False
            self._await_copies()
            meet_peers(self._counts, rank=self._rank)
            yield from (rest for rest in (slice(0, rows.start), slice(rows.stop, len(x))) if rest.start < rest.stop)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Copies inside start after what was launched before and run beside what is launched next. On CPUs they are
        done at once."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        with torch.cuda.stream(self._beside):
            yield

    def _await_copies(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)


def with_divided_sums(
    ranks: Ranks,
    *,
    hidden_size: int,
    num_inputs: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None],
) -> Ranks:
    """The ranks, summing by shares from the number of rows on from which that is faster than their other sums, if it is
    correct. Call it on every rank at once, with idle devices. num_inputs: of the products before sums. max_rows: the
    most rows that a sum may have. note: called with a sentence on the outcome. Raises ValueError for an unknown way in
    the environment."""
    wanted = ranks.agree(wanted_way())
    is_asked = device.type == "cuda" and ranks.size in GROUP_SIZES and ranks.sums is Sums.FAST
    if not is_asked or wanted is not Way.FASTEST or max_rows < TIMED_ROWS[-1]:
        return ranks
    sums = None
    try:
        sums = SumsByShares(ranks, (max_rows, hidden_size), dtype, device)
    except (ImportError, AttributeError, RuntimeError) as error:
        note(f"rows are not summed by shares, since peers' memory cannot be reached: {error}")
    if not ranks.least(int(sums is not None)) or sums is None:
        return ranks
    x_TD = sums.stream((max_rows, hidden_size), dtype)
    assert x_TD is not None
    y_TA = torch.randn(max_rows, num_inputs, device=device).to(dtype)
    weight_DA = torch.randn(hidden_size, num_inputs, device=device).to(dtype).mul_(num_inputs**-0.5)
    for rows in (max_rows, *CHECKED_ROWS):  # in the same order on all ranks
        found, expected = (_summed(way, x_TD[:rows], y_TA[:rows], weight_DA).float() for way in (sums, ranks))
        if not ranks.least(int(torch.allclose(found, expected, rtol=2e-2, atol=6e-2))):
            note("rows are not summed by shares, since that is not the same as NCCL's sums")
            return ranks
    sums.least_rows, told, out_TA = _NEVER, list[str](), torch.empty_like(y_TA)
    for rows in (max_rows, *(rows for rows in TIMED_ROWS if rows < max_rows)):
        ours_ms, others_ms = (
            time_graph(partial(_multiply, way, x_TD[:rows], y_TA[:rows], weight_DA, out_TA[:rows]), steps=STEPS_OF_MANY)
            for way in (sums, ranks)
        )
        told.append(f"{rows} rows {1e3 * ours_ms:.0f}, else {1e3 * others_ms:.0f}")
        if not ranks.agree(ours_ms < others_ms):
            break
        sums.least_rows = rows
    note(f"sums by shares, with products of {num_inputs} inputs before and behind, us: {'; '.join(told)}")
    x_TD.zero_()
    return replace(ranks, divided=sums) if sums.least_rows < _NEVER else ranks


def _summed(way: SumsByShares | Ranks, x_TD: torch.Tensor, y_TA: torch.Tensor, weight_DA: torch.Tensor) -> torch.Tensor:
    """Ones plus the sum of all ranks' products, in new memory."""
    x_TD.fill_(1.0)
    _multiply(way, x_TD, y_TA, weight_DA, torch.empty_like(y_TA))
    return x_TD.clone()


def _multiply(
    way: SumsByShares | Ranks, x_TD: torch.Tensor, y_TA: torch.Tensor, weight_DA: torch.Tensor, out_TA: torch.Tensor
) -> None:
    """Add the sum of all ranks' products to x_TD, and multiply the result."""
    if isinstance(way, Ranks):
        way.add_sum(torch.mm(y_TA, weight_DA.T, out=way.room(x_TD)), x_TD)
        torch.mm(x_TD, weight_DA, out=out_TA)
        return
    for rows, out in way.parts(x_TD):
        torch.mm(y_TA[rows], weight_DA.T, out=out)
    way.add(x_TD)
    for rows in way.arrivals(x_TD):
        torch.mm(x_TD[rows], weight_DA, out=out_TA[rows])
