"""Numbers about the scheduler that others may read: counters that only rise, and a snapshot with the gauges."""

from collections import Counter
from dataclasses import dataclass, field

from octavo.wire.messages import Finished, WireFinishReason


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Since the start. Tokens count once each time they are computed.

    num_ended: by reason, for errors by the name of the error. num_started == num_ended.total() + unfinished.
    """

    num_accepted: int = 0
    num_refused: int = 0
    num_duplicates: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_dropped_tokens: int = 0  # sampled for requests that had ended meanwhile
    num_ended: Counter[str] = field(default_factory=Counter)

    def count(self, finished: Finished) -> None:
        """An accepted request ended."""
        is_error = finished.reason is WireFinishReason.ERROR
        self.num_ended[finished.error if is_error else finished.reason.name] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; safe to read from any thread. Counters as in `SchedulerCounters`."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0
    num_in_flight: int = 0
    is_draining: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_active_blocks: int = 0  # less those that leaked
    num_leaked_blocks: int = 0  # at the last recount
    num_violations: int = 0  # of the last audit
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def has_work(self) -> bool:
        """Whether steps should advance: for paused requests there are none."""
        return bool(self.num_running or self.num_waiting or self.num_in_flight)
