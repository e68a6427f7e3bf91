"""Scheduler, block manager and engine around a runner, in this thread: what a worker is without its network.

Must not know: what is asked, what is measured, devices.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.mailbox import Mailbox
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import Run, Sampling
from octavo.worker.config import SchedulerConfig
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.loading.warmup import WarmConfig
from octavo.worker.runners.interface import Runner
from octavo.worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts, made for one another."""

    blocks: BlockManager
    scheduler: Scheduler
    engine: Engine


def assemble(
    runner: Runner,
    sizes: WarmConfig,
    mail: Mailbox,
    *,
    max_batch_tokens: int,
    prefix_cache: PrefixCache,
    eos_token_ids: tuple[int, ...] = (),
    max_waiting: int = 1024,
) -> Assembly:
    """sizes: the runner's room. Raises ValueError where they do not fit one another."""
    blocks = BlockManager(
        BlockManagerConfig(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_slots=sizes.max_slots,
            max_blocks_per_slot=blocks_of(sizes.max_model_len, sizes.block_size),
            fingerprint=b"bench",
            prefix_cache=prefix_cache,
        )
    )
    config = SchedulerConfig(
        max_model_len=sizes.max_model_len,
        vocab_size=sizes.vocab_size,
        eos_token_ids=eos_token_ids,
        max_num_seqs=sizes.max_slots,
        max_waiting=max_waiting,
        max_batch_tokens=max_batch_tokens,
        max_in_flight=runner.max_in_flight,
    )
    scheduler = Scheduler(config, blocks)
    engine = Engine(
        config=EngineConfig(epoch="bench", audit_every_steps=0),
        scheduler=scheduler,
        blocks=blocks,
        runner=runner,
        inbox=mail,
        outbox=mail,
        clock=time.perf_counter,
    )
    return Assembly(blocks=blocks, scheduler=scheduler, engine=engine)


def blocks_of(max_model_len: int, block_size: int) -> int:
    """Of the longest request, with one token more: a step that runs ahead samples one for nobody."""
    return -(-(max_model_len + 1) // block_size)


def run_of(handle: int, prompt_ids_T: np.ndarray, **sampling: Any) -> Run:
    """A request as a gateway asks for it."""
    return Run(
        handle=handle,
        request_id=f"bench-{handle}",
        prompt_ids=prompt_ids_T.astype(np.int32).tobytes(),
        sampling=Sampling(**sampling),
    )
