"""Host time of the block manager: `python -m bench.worker.blockmgr [--num-blocks N] [--json FILE]`.

Microseconds of one thread, the best of several repeats. "steady" is a decode step in which no row crosses a border;
"mean" is over 160 consecutive steps: a sixteenth of the rows cross a border in each, evict a block and commit one.
Prints tables; --json writes them, too.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.figures import write_json
from octavo.blockmgr import BlockManager, BlockManagerConfig, PrefixCache
from octavo.blockmgr.pool import LruQueue

BLOCK_SIZE, PROMPT, NUM_STEPS = 16, 4000, 160
SIZES = (1, 64, 256, 1024)


def best_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of the shortest of several runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds) * 1e6


def make(num_blocks: int) -> BlockManager:
    """A manager for 1,024 requests of at most 8,192 tokens."""
    config = BlockManagerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_slots=1024,
        max_blocks_per_slot=512,
        fingerprint=b"bench",
        prefix_cache=PrefixCache.ON,
    )
    return BlockManager(config)


def prompt_figures(num_blocks: int) -> dict[str, float]:
    """The costs of one long prompt."""
    manager, prompt = make(num_blocks), np.arange(PROMPT, dtype=np.int32)
    figures = {
        "construct": best_us(lambda: make(num_blocks), 3),
        "match, miss": best_us(lambda: manager.match(prompt), 20),
    }

    def admit(salt: str) -> None:
        manager.admit("r", prompt, salt=salt, reserve_tokens=PROMPT + 1)

    def admit_and_release(salt: str) -> None:
        admit(salt)
        manager.release(0, "r")

    def first_time(salt: str) -> tuple[float, float, float]:
        """Times of admit, commit and release for a prompt that is new."""
        spent = (
            best_us(lambda: admit(salt), 1),
            best_us(lambda: manager.commit(0, prompt, PROMPT), 1),
            best_us(lambda: manager.release(0, "r"), 1),
        )
        manager.take_updates()
        manager.take_events()
        return spent

    rounds = [first_time(str(salt)) for salt in range(5)]
    for verb, times in zip(("admit", "commit", "release"), zip(*rounds, strict=True), strict=True):
        figures[f"{verb}, first time"] = min(times)
    figures["match, full hit, asked again"] = best_us(lambda: manager.match(prompt, salt="0"), 20)
    figures["match, full hit, hashed anew"] = min(match_anew(manager, prompt) for _ in range(20))
    figures["admit and release, asked again"] = best_us(lambda: admit_and_release("0"), 20)
    figures["audit"] = best_us(manager.audit, 3)
    return figures


def match_anew(manager: BlockManager, prompt: np.ndarray) -> float:
    """Time of a look-up whose hashes are not remembered from an earlier one."""
    manager.match(prompt[:20])
    return best_us(lambda: manager.match(prompt, salt="0"), 1)


def step_figures(num_blocks: int, num_requests: int) -> dict[str, float]:
    """The costs of one decode step with this many requests running and the rest of the pool full of cached blocks."""
    manager = make(num_blocks)
    fill_with_cached(manager)
    prompts = np.arange(num_requests * 1000, dtype=np.int32).reshape(num_requests, 1000) + 10_000_000
    slots_S = np.array(
        [manager.admit(f"r{i}", prompt[:100], reserve_tokens=101).slot for i, prompt in enumerate(prompts)], np.int32
    )
    lens_S = np.full(num_requests, 101) + np.arange(num_requests) % BLOCK_SIZE
    manager.grow_many(slots_S, lens_S)
    for slot, tokens_T, num_tokens in zip(slots_S.tolist(), prompts, lens_S.tolist(), strict=True):
        manager.commit(slot, tokens_T, num_tokens - 1)
    manager.take_events()
    figures = {
        "grow_many, steady": best_us(lambda: manager.grow_many(slots_S, lens_S), 200),
        "prepare_write_many, steady": best_us(lambda: manager.prepare_write_many(slots_S, lens_S - 1), 200),
    }
    start = time.process_time()
    for step in range(NUM_STEPS):
        decode_step(manager, step, slots_S, lens_S, prompts)
        lens_S += 1
    figures["whole step, mean CPU time"] = (time.process_time() - start) / NUM_STEPS * 1e6
    if manager.audit().violations:
        raise SystemExit(f"audit: {manager.audit().violations}")
    return figures


def decode_step(
    manager: BlockManager, step: int, slots_S: np.ndarray, lens_S: np.ndarray, tokens_ST: np.ndarray
) -> None:
    """Everything that a scheduler asks of the manager in one decode step."""
    if len(manager.grow_many(slots_S, lens_S)) or len(manager.prepare_write_many(slots_S, lens_S - 1)):
        raise SystemExit("the pool is too small for this benchmark")
    manager.take_updates()
    manager.begin_step(step)
    for row in np.flatnonzero(lens_S % BLOCK_SIZE == 0).tolist():
        manager.commit(int(slots_S[row]), tokens_ST[row], int(lens_S[row]))
    manager.end_step(step)
    manager.take_events()


def fill_with_cached(manager: BlockManager) -> None:
    """Leave no blank block, so that every new block evicts one."""
    width = manager.config.max_blocks_per_slot * BLOCK_SIZE
    salt = 0
    while manager.num_free >= manager.config.max_blocks_per_slot:
        prompt = np.full(width, salt, np.int32)
        slot = manager.admit("filler", prompt, salt=str(salt), reserve_tokens=width).slot
        manager.commit(slot, prompt, width)
        manager.release(slot, "filler")
        salt += 1
    manager.take_updates()
    manager.take_events()


def queue_figures() -> dict[str, float]:
    """The LRU queue compared with an intrusive doubly linked list of two Python lists: 250 blocks, and one, in and
    out."""
    size = 100_000
    queue, after, before = LruQueue(size), [size] * (size + 1), [size] * (size + 1)

    def linked(blocks: np.ndarray) -> None:
        last = before[size]
        for block in blocks.tolist():
            after[last], before[block] = block, last
            last = block
        after[last], before[size] = size, last
        for block in blocks.tolist():
            left, right = before[block], after[block]
            after[left], before[right] = right, left

    def queued(blocks: np.ndarray) -> None:
        queue.push(blocks)
        queue.discard(blocks)

    many, one = np.arange(1000, 1250, dtype=np.int32), np.array([7], np.int32)
    return {
        f"{name}, {len(blocks)} in and out": best_us(partial(call, blocks), 200)
        for name, call in (("queue", queued), ("linked list", linked))
        for blocks in (many, one)
    }


def show(title: str, figures: dict[str, float]) -> None:
    """Print one small table."""
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:<34}{value:>12,.1f}")


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=100_000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    figures = {
        f"one prompt of {PROMPT:,} tokens, {arguments.num_blocks:,} blocks, us": prompt_figures(arguments.num_blocks)
    }
    for num_requests in SIZES:
        title = f"decode step of {num_requests:,} requests, every new block evicts one, us"
        figures[title] = step_figures(arguments.num_blocks, num_requests)
    figures["order of cached free blocks, us"] = queue_figures()
    for title, table in figures.items():
        show(title, table)
    write_json(arguments.json, {"unit": "us", "block_size": BLOCK_SIZE, "figures": figures})


if __name__ == "__main__":
    main()
