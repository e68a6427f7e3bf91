"""What it costs to tell a large prefix cache: to a gateway that joins, and to a subscriber; and to forget it.

    python -m bench.worker.kv_events [BLOCKS]

A cache of so many blocks (100,000), nearly all full, told and applied in one process. Prints seconds, bytes and the
longest part of each, writes nothing.
"""

import argparse
import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.gateway.dialects.vllm.messages import KvBatches
from octavo.gateway.workers.prefix_index import PrefixIndexes
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.codec import decode_to_gateway, encode
from octavo.worker.engine.interfaces import OutboxMessage
from octavo.worker.engine.kv_events import KvEventPublisher
from octavo.worker.scheduler.plan import GatewayIndex

BLOCK_SIZE = 16
PROMPT_BLOCKS = 1_600


def filled(num_blocks: int) -> BlockManager:
    """A manager whose blocks are nearly all cached, in long prompts."""
    manager = BlockManager(
        BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_slots=4,
            max_blocks_per_slot=PROMPT_BLOCKS,
            fingerprint=b"bench",
            prefix_cache=PrefixCache.ON,
        )
    )
    random, number = np.random.default_rng(0), 0
    while manager.num_free >= PROMPT_BLOCKS:
        number += 1
        ids_T = random.integers(0, 150_000, BLOCK_SIZE * PROMPT_BLOCKS, dtype=np.int32)
        slot = manager.admit(f"r{number}", ids_T, reserve_tokens=len(ids_T)).slot
        manager.commit(slot, ids_T, len(ids_T))
        manager.release(slot, f"r{number}")
    return manager


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Do the work, and print how long it took."""
    begin_s = time.perf_counter()
    result = work()
    print(f"{what:<44} {time.perf_counter() - begin_s:8.3f} s")
    return result


class Frames:
    """The gateway's end: keeps the frames that would be sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """Encode the message, as the link does."""
        self.frames.append(encode(message))

    def put_all(self, message: OutboxMessage) -> None:
        """Never called: nothing changes here."""


def tell(manager: BlockManager, sent: Frames) -> list[float]:
    """Report the whole cache, as an engine does between its steps; the thread's CPU seconds of each part."""
    telling, took_s = KvEventPublisher(manager, sent, epoch="e"), []
    telling.begin(GatewayIndex(0))
    while telling.is_due:
        begin_s = time.thread_time()
        telling.publish()
        took_s.append(time.thread_time() - begin_s)
    return took_s


def apply_all(prefixes: PrefixIndexes, frames: list[bytes]) -> float:
    """Apply all frames, as a gateway does; seconds of the slowest message."""
    model, size = SimpleNamespace(name="m"), SimpleNamespace(block_size=BLOCK_SIZE)
    record: Any = SimpleNamespace(card=model, capacity=size, incarnation=1)
    longest_s = 0.0
    for frame in frames:
        begin_s = time.perf_counter()
        prefixes.apply(record, decode_to_gateway(frame))  # type: ignore[arg-type]
        longest_s = max(longest_s, time.perf_counter() - begin_s)
    return longest_s


def leave(prefixes: PrefixIndexes, turns: deque[Callable[[], None]]) -> float:
    """Forget everything of a lost worker; the thread's CPU seconds of the longest turn."""
    longest_s = 0.0
    work: Callable[[], None] = partial(prefixes.forget, 1)
    while True:
        begin_s = time.thread_time()
        work()
        longest_s = max(longest_s, time.thread_time() - begin_s)
        if not turns:
            return longest_s
        work = turns.popleft()


async def subscribe(prefixes: PrefixIndexes) -> tuple[int, float]:
    """Send the state as batches; their total bytes, and the seconds of the slowest."""
    subscription, batches, num_bytes, longest_s = prefixes.follow("m", ""), KvBatches(), 0, 0.0
    while True:
        begin_s = time.perf_counter()
        batch = await subscription.next()
        num_bytes += batches.of(batch).ByteSize()
        longest_s = max(longest_s, time.perf_counter() - begin_s)
        if batch.chunk is not None and batch.chunk.index + 1 == batch.chunk.count:
            return num_bytes, longest_s


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", type=int, nargs="?", default=100_000)
    manager = filled(parser.parse_args().blocks)
    gc.collect()
    gc.freeze()  # as a worker does once it has started
    sent = Frames()
    took_s = timed("worker: tell the blocks", lambda: tell(manager, sent))
    frames = sent.frames
    print(f"{manager.num_indexed} blocks, {sum(map(len, frames)) / 1e6:.1f} MB in {len(frames)} messages")
    print(f"{len(took_s)} parts, mean {1e3 * np.mean(took_s):.2f} ms, longest {1e3 * max(took_s):.2f} ms")
    turns: deque[Callable[[], None]] = deque()
    prefixes = PrefixIndexes(max_nodes=1 << 20, stats=PoolStats(), soon=lambda work: work(), later=turns.append)
    longest_s = timed("gateway: apply", lambda: apply_all(prefixes, frames))
    print(f"longest message {longest_s * 1e3:.1f} ms")
    num_bytes, longest_s = timed("subscriber: the state", lambda: asyncio.run(subscribe(prefixes)))
    print(f"{num_bytes / 1e6:.1f} MB, longest chunk {longest_s * 1e3:.1f} ms")
    longest_s = timed("gateway: the worker leaves", lambda: leave(prefixes, turns))
    print(f"longest turn {longest_s * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
