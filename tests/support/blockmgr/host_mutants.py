"""Planted bugs of the host tier, for walks through the state machine and for the scheduler's traffic alike."""

import numpy as np

from octavo.blockmgr.host_tier import HostTier, SwappedRequest
from octavo.blockmgr.prefix_index import PrefixIndex

_move = PrefixIndex.move


def move_and_leave_the_name(index: PrefixIndex, source: int, target: int) -> None:
    """The index still leads to the block's old place."""
    digest = index.digest_of[source]
    _move(index, source, target)
    if digest is not None:
        index.block_of[digest] = source


def pop_and_keep(host: HostTier, request_id: str) -> SwappedRequest | None:
    """The request stays swapped out."""
    return host.swapped.get(request_id)


def give_up_the_queue_only(host: HostTier, blocks: np.ndarray) -> None:
    """Requests that wait for those blocks keep waiting."""
    awaited = blocks[host.is_awaited_P[blocks]]
    host.is_awaited_P[awaited] = False
    for block in awaited.tolist():
        host.pool.drop(np.array(host.ins.cancel(np.array([block], np.int32)), np.int32))
