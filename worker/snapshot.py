"""The engine's numbers at one moment, as a value that any thread may keep."""

from blockmgr.manager import BlockManager
from worker.scheduler import Scheduler
from worker.stats import EngineStats


def snapshot(
    scheduler: Scheduler, blocks: BlockManager, *, num_steps: int, num_leaked_blocks: int, num_violations: int
) -> EngineStats:
    """Gauges and counters as they are now; to be called by the thread that owns the scheduler. num_leaked_blocks,
    num_violations: as they were found last."""
    counters = scheduler.counters
    return EngineStats(
        num_steps=num_steps,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_paused=scheduler.num_paused,
        num_in_flight=scheduler.num_in_flight,
        is_draining=scheduler.is_draining,
        num_blocks=blocks.config.num_blocks,
        num_free_blocks=blocks.num_free,
        num_cached_blocks=blocks.num_cached,
        num_active_blocks=max(0, blocks.num_active - num_leaked_blocks),
        num_leaked_blocks=num_leaked_blocks,
        num_violations=num_violations,
        num_queried_tokens=blocks.num_queried_tokens,
        num_hit_tokens=blocks.num_hit_tokens,
        num_preemptions=counters.num_preemptions,
        num_pauses=counters.num_pauses,
        num_prefill_tokens=counters.num_prefill_tokens,
        num_decode_tokens=counters.num_decode_tokens,
        num_generated_tokens=counters.num_generated_tokens,
    )
