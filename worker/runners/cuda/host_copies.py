"""Copies between the device's blocks and the host's, beside the steps.

    steps' stream   | arrive: scatter │ gather │ step N ……………………… | arrive: scatter │ gather │ step N + 1
    stream out               staging ──────► host (N)
    stream in       host ──────► staging (N) ─────────────────────────►┘

What goes out is gathered into a staging buffer on the device in the steps' own stream, in microseconds, so that the
step behind may overwrite the blocks; the link carries the buffer while that step runs. What comes in is fetched into
another buffer meanwhile, and scattered before the next step. Buffers are used in turn. Streams wait for each other by
events alone, never the host. Without a CUDA device all of it happens at once, in the same order. Must not know who owns
a block.

Legend: C copies · N blocks · W bytes of a row.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from octavo.model.attention.host_blocks import HostBlocks
from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.sampling_state import to_device
from octavo.model.kernels.block_rows import gather_block_rows, scatter_block_rows

NUM_BUFFERS = 2  # each way
STAGING_BYTES = 128 << 20  # of one buffer, at most
MAX_ROWS = 256
_LEAST_SHARE = 128  # a buffer takes no more than this part of what is free


def staging_rows(row_bytes: int, free_bytes: int) -> int:
    """Blocks per buffer, and so the most that one plan may copy in."""
    return max(1, min(MAX_ROWS, min(STAGING_BYTES, free_bytes // _LEAST_SHARE) // row_bytes))


def staging_bytes(rows: int, row_bytes: int) -> int:
    """Device memory that copies take."""
    return 2 * NUM_BUFFERS * rows * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Transfer:
    """Copies under way over the link. host_blocks_N: read or written. began, ended: events; None on a CPU."""

    host_blocks_N: np.ndarray
    began: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.ended is None or bool(self.ended.query())


def copy_one_block(kv: KvPool) -> None:
    """Enqueue the gather and scatter kernels once, without effect, to compile them."""
    pools = kv.k_pool_LPKBH, kv.v_pool_LPKBH
    block_bytes = sum(pool[:, 0].numel() * pool.element_size() for pool in pools)
    row_1W = torch.empty(1, block_bytes, dtype=torch.uint8, device=pools[0].device)
    block_1 = torch.zeros(1, dtype=torch.int32, device=pools[0].device)
    gather_block_rows(pools, block_1, row_1W)
    scatter_block_rows(pools, block_1, row_1W)


class _Lane:
    """One direction: its stream, and its buffers with the event after which each may be overwritten."""

    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self.buffers_NW = [torch.empty((rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_cuda else None
        self.reusable = [torch.cuda.Event() if is_cuda else None for _ in range(NUM_BUFFERS)]
        self.under_way: deque[_Transfer] = deque()
        self._turn = 0

    def next_turn(self) -> int:
        """The buffer that has waited longest."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        return turn

    def touches(self, host_blocks_N: np.ndarray) -> list[_Transfer]:
        """Unfinished transfers that use one of these blocks."""
        return [
            each for each in self.under_way if not each.is_done and np.isin(each.host_blocks_N, host_blocks_N).any()
        ]


class HostCopies:
    """Copies blocks between the tiers. rows: blocks per staging buffer."""

    def __init__(self, kv: KvPool, host: HostBlocks, *, rows: int) -> None:
        self.rows = rows
        self.host = host
        self._pools = kv.k_pool_LPKBH, kv.v_pool_LPKBH
        self._device = kv.k_pool_LPKBH.device
        self._out = _Lane(rows, host.row_bytes, self._device)
        self._in = _Lane(rows, host.row_bytes, self._device)
        self._arriving: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None  # turn, device blocks, when
        self._num_copied, self._copied_s = 0, 0.0

    def begin(self, copies_out_C2: np.ndarray, copies_in_C2: np.ndarray) -> None:
        """Enqueue a plan's copies, before anything else of the plan: first what the previous plan fetched arrives, then
        outgoing blocks are gathered, then incoming ones are fetched. Raises ValueError if more come in than a buffer
        holds."""
        if len(copies_in_C2) > self.rows:
            raise ValueError(f"{len(copies_in_C2)} blocks to bring back at once, there is room for {self.rows}")
        self._arrive()
        if len(copies_out_C2):
            copies_out_C2 = copies_out_C2[np.argsort(copies_out_C2[:, 1])]
            for start in range(0, len(copies_out_C2), self.rows):
                self._send(copies_out_C2[start : start + self.rows])
        if len(copies_in_C2):
            self._fetch(copies_in_C2[np.argsort(copies_in_C2[:, 0])])

    def take_times(self) -> tuple[int, float]:
        """(blocks whose transfers have finished since the last call, seconds that the link took for them)."""
        for lane in (self._out, self._in):
            while lane.under_way and lane.under_way[0].is_done:
                transfer = lane.under_way.popleft()
                self._num_copied += len(transfer.host_blocks_N)
                if transfer.began is not None and transfer.ended is not None:
                    self._copied_s += transfer.began.elapsed_time(transfer.ended) / 1000
        num_copied, self._num_copied = self._num_copied, 0
        copied_s, self._copied_s = self._copied_s, 0.0
        return num_copied, copied_s

    def measure(self, num_blocks: int) -> float:
        """Seconds per block, one way; measured there and back on the first blocks of both tiers, which must be idle."""
        num = min(self.rows, num_blocks, self.host.num_blocks)
        pairs_C2 = np.repeat(np.arange(num, dtype=np.int32)[:, None], 2, axis=1)
        for _ in range(2):  # the first time compiles the kernels
            self.take_times()
            self.begin(pairs_C2, pairs_C2[:0])
            self.wait()
            self.begin(pairs_C2[:0], pairs_C2)
            self._arrive()
            self.wait()
        num_copied, seconds = self.take_times()
        return seconds / max(num_copied, 1)

    def wait(self) -> None:
        """Wait until no transfer is under way."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------------------ both ways

    def _send(self, copies_C2: np.ndarray) -> None:
        """Pairs of (device, host), in order of host blocks."""
        lane, turn = self._out, self._out.next_turn()
        buffer_NW, host_blocks_N = lane.buffers_NW[turn], copies_C2[:, 1]
        self._let_steps_wait(lane.reusable[turn])
        gather_block_rows(
            self._pools, to_device(np.ascontiguousarray(copies_C2[:, 0], np.int32), self._device), buffer_NW
        )
        self._let_lane_wait(lane, self._in.touches(host_blocks_N))
        runs = [(rows_NW, buffer_NW[where]) for where, rows_NW in self.host.runs(host_blocks_N)]
        lane.reusable[turn] = self._transfer(lane, host_blocks_N, runs)

    def _fetch(self, copies_C2: np.ndarray) -> None:
        """Pairs of (host, device), in order of host blocks."""
        lane, turn = self._in, self._in.next_turn()
        buffer_NW, host_blocks_N = lane.buffers_NW[turn], copies_C2[:, 0]
        targets_N = to_device(np.ascontiguousarray(copies_C2[:, 1], np.int32), self._device)
        if lane.stream is not None and (reusable := lane.reusable[turn]) is not None:
            lane.stream.wait_event(reusable)
        if lane.stream is not None:
            for transfer in self._out.touches(host_blocks_N):
                if transfer.ended is not None:
                    lane.stream.wait_event(transfer.ended)
        runs = [(buffer_NW[where], rows_NW) for where, rows_NW in self.host.runs(host_blocks_N)]
        self._arriving = turn, targets_N, self._transfer(lane, host_blocks_N, runs)

    def _arrive(self) -> None:
        """Scatter what was fetched for the previous plan, in the steps' stream."""
        if self._arriving is None:
            return
        turn, targets_N, fetched = self._arriving
        self._arriving = None
        self._let_steps_wait(fetched)
        scatter_block_rows(self._pools, targets_N, self._in.buffers_NW[turn])
        reusable = self._in.reusable[turn]
        if reusable is not None:
            reusable.record(torch.cuda.current_stream(self._device))

    def _transfer(
        self, lane: _Lane, host_blocks_N: np.ndarray, runs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event | None:
        """Copy each (target, source) in the lane's stream. Returns the event after them."""
        if lane.stream is None:
            start_s = time.perf_counter()
            for target, source in runs:
                target.copy_(source)
            self._copied_s += time.perf_counter() - start_s
            lane.under_way.append(_Transfer(host_blocks_N=host_blocks_N))
            return None
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(lane.stream):
            began.record(lane.stream)
            for target, source in runs:
                target.copy_(source, non_blocking=True)
            ended.record(lane.stream)
        lane.under_way.append(_Transfer(host_blocks_N=host_blocks_N, began=began, ended=ended))
        return ended

    def _let_steps_wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _let_lane_wait(self, lane: _Lane, transfers: list[_Transfer]) -> None:
        """Let the lane wait for the work enqueued so far in the steps' stream, and for these transfers."""
        if lane.stream is None:
            return
        lane.stream.wait_stream(torch.cuda.current_stream(self._device))
        for transfer in transfers:
            if transfer.ended is not None:
                lane.stream.wait_event(transfer.ended)
