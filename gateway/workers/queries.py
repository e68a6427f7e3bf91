"""Admin queries under way: which worker was asked, and the future of its answer. Must not know sockets."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from octavo.gateway.workers.registry import WorkerRecord
from octavo.wire.messages import AdminQuery, AdminReply, HostBlocks, Message, OutputPhase

Answer = asyncio.Future[AdminReply]


_NUM_BLOCK_STATES = 4  # of each tier
_MOST_BLOCKS = 2**31 - 1
_PHASES = {int(phase): phase for phase in OutputPhase}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDetails:
    """What a worker reported of its blocks and of this gateway's outputs, as far as it can be true.

    cells_C: uint8, states of octavo.v1.BlockState in order of block ids, each for blocks_per_cell blocks; empty if not
    reported. held: by handle, what an output does and how many blocks it holds. host: its second tier; None if it has
    none or did not report it.
    """

    worker_id: str
    epoch: str
    cells_C: np.ndarray
    blocks_per_cell: int
    num_shared_blocks: int
    held: dict[int, tuple[OutputPhase, int]] = field(default_factory=dict)
    host: HostBlocks | None = None


def details_of(record: WorkerRecord, reply: AdminReply, *, max_cells: int, max_outputs: int) -> WorkerDetails:
    """The report, without what is out of range or more than was asked for."""
    num_blocks = record.capacity.num_blocks
    cells_C = np.frombuffer(reply.cells, np.uint8)
    if not _is_map(cells_C, num_blocks, reply.blocks_per_cell, max_cells):
        cells_C = cells_C[:0]
    handles = np.frombuffer(reply.handles, "<i8").tolist()
    rows = zip(handles, reply.phases, np.frombuffer(reply.held_blocks, "<i4").tolist(), strict=True)
    believable = [row for row in rows if row[1] in _PHASES and 0 <= row[2] <= num_blocks][:max_outputs]
    return WorkerDetails(
        worker_id=record.worker_id,
        epoch=record.epoch,
        cells_C=cells_C,
        blocks_per_cell=max(1, reply.blocks_per_cell),
        num_shared_blocks=min(max(0, reply.num_shared_blocks), num_blocks),
        held={handle: (_PHASES[phase], held) for handle, phase, held in believable},
        host=reply.host if reply.host is not None and _is_tier(reply.host, max_cells) else None,
    )


def _is_tier(host: HostBlocks, max_cells: int) -> bool:
    counts = (host.num_free, host.num_cached, host.num_swapped)
    if not 0 < host.num_blocks <= _MOST_BLOCKS or min(counts) < 0 or sum(counts) > host.num_blocks:
        return False
    return _is_map(np.frombuffer(host.cells, np.uint8), host.num_blocks, host.blocks_per_cell, max_cells)


def _is_map(cells_C: np.ndarray, num_blocks: int, blocks_per_cell: int, max_cells: int) -> bool:
    """Whether these can be the states of this many blocks."""
    if not 0 < len(cells_C) <= max_cells or len(cells_C) != -(-num_blocks // max(1, blocks_per_cell)):
        return False
    return bool(cells_C.min() >= 1 and cells_C.max() <= _NUM_BLOCK_STATES)


class Queries:
    """Draws query ids. The future of an answer is cancelled when its time is over, or when its worker is lost."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Answer]] = {}
        self._next_id = 1

    async def ask(
        self,
        records: Iterable[WorkerRecord],
        try_send: Callable[[WorkerRecord, Message], bool],
        question: AdminQuery,
        *,
        timeout_s: float,
    ) -> list[tuple[WorkerRecord, AdminReply]]:
        """The answers that come in time, in order of worker ids. question: gets its number here."""
        asked: dict[Answer, WorkerRecord] = {}
        try:
            for record in records:
                query_id, future = self._new(record.incarnation)
                if try_send(record, msgspec.structs.replace(question, query_id=query_id)):
                    asked[future] = record
                else:
                    future.cancel()
            if asked:
                await asyncio.wait(asked, timeout=timeout_s)
            answered = [
                (record, future.result())
                for future, record in asked.items()
                if future.done() and not future.cancelled()
            ]
        finally:
            for future in asked:
                future.cancel()
        return sorted(answered, key=lambda row: row[0].worker_id)

    def _new(self, incarnation: int) -> tuple[int, Answer]:
        query_id, self._next_id = self._next_id, self._next_id + 1
        future: Answer = asyncio.get_running_loop().create_future()
        self._open[query_id] = (incarnation, future)
        future.add_done_callback(lambda _: self._open.pop(query_id, None))
        return query_id, future

    def take(self, incarnation: int, reply: AdminReply) -> bool:
        """Take an answer. Returns whether this worker was asked that query."""
        asked, future = self._open.get(reply.query_id, (None, None))
        if future is None or asked != incarnation:
            return False
        if not future.done():
            future.set_result(reply)
        return True

    def lose(self, incarnation: int) -> None:
        """The worker is gone: cancel what waits for it."""
        for asked, future in tuple(self._open.values()):
            if asked == incarnation:
                future.cancel()
