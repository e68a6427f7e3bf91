"""The second tier: blocks in host memory, and the copies between them and the device's.

    a plan            copies out, in order ── copy on write ── tokens ── copies in (before the next plan's tokens)
    a device block    may be reused by the very plan that copies it out
    a host block      may be copied in by a plan as soon as the copy out that fills it is queued

A device block is *awaited* while the copy into it is queued: no plan has this copy yet, so no step may read the block.
Blocks of preempted requests are kept under the requests' ids. It must not know rows, nor what a request is.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import Chain, PrefixIndex
from octavo.blockmgr.tables import NO_COPIES, CopyQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedRequest:
    """The blocks of a preempted request. blocks: host blocks, int32, head first; this owns one reference to each.
    num_tokens: how many tokens they hold."""

    blocks: np.ndarray
    chain: Chain
    num_tokens: int


class HostTier:
    """Host blocks, copies and swapped requests. num_copied_out, num_copied_in: blocks in copies taken so far.

    swapped: by request id. outs: copies for the next plan, from host block to the device block that is copied to it.
    ins: copies from host to device blocks; the queue owns a reference to each source.
    """

    def __init__(self, device: BlockPool, pool: BlockPool, index: PrefixIndex, *, max_copies_in: int) -> None:
        self.pool = pool
        self.outs: dict[int, int] = {}
        self.ins = CopyQueue()
        self.is_awaited_P = np.zeros(device.num_blocks, np.bool_)
        self.swapped: dict[str, SwappedRequest] = {}
        self.num_copied_out = self.num_copied_in = 0
        self._taken_C2 = NO_COPIES  # copies in, (host, device), of the plan that begins next
        self._under_way: deque[np.ndarray] = deque()  # the same for each plan in flight
        self._device = device
        self._index = index
        self._max_copies_in = max_copies_in

    # ------------------------------------------------------------ out

    def offload(self, victims: np.ndarray) -> None:
        """Move cached device blocks, int32, to the host before they are handed out. If there is room for only some of
        them, these are the ones used last."""
        num = min(len(victims), self.pool.num_available)
        if not num:
            return
        latest = victims[len(victims) - num :]
        blocks = self._take(num)
        for source, target in zip(latest.tolist(), blocks.tolist(), strict=True):
            self._index.move(source, target)
            self._queue_out(source, target)
        self.pool.drop(blocks)  # least recently used first, as in the device's pool

    def swap_out(self, request_id: str, blocks: np.ndarray, origins: list[int], chain: Chain, num_tokens: int) -> None:
        """Copy a row's device blocks, int32, to the host. The caller releases them afterwards. Raises OutOfBlocks.

        origins: the block that has the content of each one now. The index entry of a block that no other slot holds
        moves with it.
        """
        is_awaited = self.is_awaited_P[blocks]
        sources = np.array([self.ins.origin(block) for block in blocks[is_awaited].tolist()], np.int32)
        num_new = int(np.count_nonzero(~is_awaited))
        if num_new > self.pool.num_available:
            raise OutOfBlocks(wanted=num_new, free=self.pool.num_available)
        self.share(sources)
        targets = np.empty(len(blocks), np.int32)
        targets[is_awaited], targets[~is_awaited] = sources, self._take(num_new)
        for i in np.flatnonzero(~is_awaited).tolist():
            block, target = int(blocks[i]), int(targets[i])
            self._queue_out(origins[i], target)
            if self._index.is_tainted_P[block]:
                self._index.taint(targets[i : i + 1])
            elif self._device.ref_P[block] == 1 and self._index.digest_of[block] is not None:
                self._index.move(block, target)
        self.swapped[request_id] = SwappedRequest(blocks=targets, chain=chain, num_tokens=num_tokens)

    # ------------------------------------------------------------ in

    def share(self, blocks: np.ndarray) -> None:
        """Add a reference to each of these host blocks, so that they are not reused meanwhile."""
        if len(blocks):
            self.pool.share(blocks)

    def copy_in(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Queue copies into device blocks that the caller has just allocated. The queue takes over the caller's
        references to the sources. Index entries move to the device blocks."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.ins.append(source=source, destination=target)
            if self._index.digest_of[source] is not None:
                self._index.move(source, target)
            if self._index.is_tainted_P[source]:
                self._index.taint(np.array([target], np.int32))
        self.is_awaited_P[targets] = True

    def cancel_copies_in(self, blocks: np.ndarray) -> None:
        """Cancel the copies into device blocks whose last owner releases them; blocks that are not awaited are ignored.
        The content stays on the host."""
        awaited = blocks[self.is_awaited_P[blocks]]
        self.is_awaited_P[awaited] = False
        for block in awaited.tolist():
            (source,) = self.ins.cancel(np.array([block], np.int32))
            if self._index.digest_of[block] is not None:
                self._index.move(block, source)
            self.pool.drop(np.array([source], np.int32))

    def pop_swapped(self, request_id: str) -> SwappedRequest | None:
        """Take what was swapped out for a request, including the references to its blocks; None if nothing was."""
        return self.swapped.pop(request_id, None)

    def drop_swapped(self, request_id: str) -> None:
        """Drop what was swapped out for a request. Idempotent."""
        swapped = self.pop_swapped(request_id)
        if swapped is not None:
            self.pool.drop(swapped.blocks[::-1])

    # ------------------------------------------------------------ plans

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Take copies for the next plan, two int32 [C, 2]: all copies out, (device, host); and as many copies in,
        (host, device), as a plan may have. Host blocks are numbered from 0 here."""
        if not (self.outs or self.ins):
            return NO_COPIES, NO_COPIES
        first = self.pool.first
        outs_C2 = np.array([(device, host - first) for host, device in self.outs.items()], np.int32).reshape(-1, 2)
        self.outs.clear()
        ins_C2 = self._taken_C2 = self.ins.take(self._max_copies_in)
        self.is_awaited_P[ins_C2[:, 1]] = False
        self.num_copied_out += len(outs_C2)
        self.num_copied_in += len(ins_C2)
        return outs_C2, ins_C2 - np.array([first, 0], np.int32)

    def begin_step(self, step: int) -> None:
        """A plan is launched: from now on its fence protects the blocks in its copies."""
        self.pool.fence.begin(step)
        self._under_way.append(self._taken_C2)
        self._taken_C2 = NO_COPIES
        taken = self.ins.pop_taken()
        if not taken:
            return
        sources = np.array(taken, np.int32)
        if len(np.unique(sources)) == len(sources):
            self.pool.drop(sources)
        else:  # one host block is copied to two device blocks
            for source in sources.tolist():
                self.pool.drop(np.array([source], np.int32))

    def end_step(self, step: int) -> None:
        """The oldest plan in flight has run."""
        self.pool.end_step(step)
        self._under_way.popleft()

    def invalidate(self, host_blocks: np.ndarray) -> np.ndarray:
        """Copies into these host blocks, numbered from 0, have failed: the blocks leave the index, and swapped requests
        that have one of them are dropped. Returns device blocks, int32, into which one of them is to be copied, by a
        queued copy or by a plan in flight."""
        blocks = (host_blocks + self.pool.first).astype(np.int32)
        self.pool.forget(blocks)
        lost = [name for name, request in self.swapped.items() if np.isin(request.blocks, blocks).any()]
        for name in lost:
            self.drop_swapped(name)
        copies_C2 = np.concatenate([np.array(self.ins.pending, np.int32).reshape(-1, 2), *self._under_way])
        return copies_C2[np.isin(copies_C2[:, 0], blocks), 1]

    # ------------------------------------------------------------ inside

    def _take(self, num: int) -> np.ndarray:
        """Allocate host blocks, in ascending order: a run of adjacent ones is copied in one transfer."""
        return np.sort(self.pool.allocate(num)) if num else np.empty(0, np.int32)

    def _queue_out(self, source: int, target: int) -> None:
        self.outs.pop(target, None)  # an earlier copy into it is not needed any more
        self.outs[target] = source
