"""The requests that are in flight: each with its stream, its worker's handle and the task that answers it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.errors import RequestError, SlowConsumer
from gateway.stream import OutputStream
from gateway.workers.views import WorkerView
from wire.messages import ModelCard, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """One request that a worker has. Times are monotonic seconds.

    key: its id as no other tenant can have it. worker: its first, as it was chosen. sent_s: when it was sent there.
    task: the one that answers the RPC. handle, stream, sampling: of output 0; further: of the outputs after it, which
    draw with the seeds after its. prompt_text, prompt_ids: where the caller asked for them.
    """

    request_id: str
    key: str
    card: ModelCard
    worker: WorkerView
    handle: int
    stream: OutputStream
    sampling: Sampling
    num_prompt_tokens: int
    arrived_s: float
    sent_s: float
    task: "asyncio.Task[object]"
    last_message_s: float = field(default=0.0)
    num_complete: int = 0  # outputs that are complete and were sent
    further: tuple[tuple[int, OutputStream], ...] = ()
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    backstop: asyncio.TimerHandle | None = None  # ends the output where the worker is late at the deadline

    @property
    def outputs(self) -> tuple[tuple[int, OutputStream], ...]:
        """Handle and stream of each output."""
        return ((self.handle, self.stream), *self.further)

    @property
    def streams(self) -> list[OutputStream]:
        """Of each output."""
        return [stream for _, stream in self.outputs]

    def worker_id(self, index: int = 0) -> str:
        """Who has the output, or had it last."""
        return self.streams[index].worker_id or self.worker.worker_id

    @property
    def num_tokens(self) -> int:
        """Generated, in all outputs."""
        return sum(stream.assembler.num_tokens for stream in self.streams)

    def end_at_deadline(self, figures_s: float) -> None:
        """The time is over and the worker has not said so: for so long its figures are waited for, where there is
        something to tell them with."""
        for stream in self.streams:
            stream.end_at_deadline()
        self.backstop = asyncio.get_running_loop().call_later(figures_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        for stream in self.streams:
            stream.stop_waiting_for_figures()

    def fail(self, error: RequestError) -> None:
        """End it from here. Where its task is in a write, the task is cancelled and finds the error in the stream: a
        caller that does not read would keep even a complete output open."""
        for stream in self.streams:
            stream.fail(error)
        if self.stream.write_since_s:
            self.interrupt(error)

    def interrupt(self, error: RequestError) -> None:
        """End it though its output may be complete: nobody reads it."""
        self.stream.error = self.stream.error or error
        self.task.cancel()


class LiveRequests:
    """By key. Owns nothing but the index."""

    def __init__(self) -> None:
        self._by_key: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._by_key.values()))

    def add(self, live: LiveRequest) -> None:
        """Keys are unique: admission has seen to that."""
        self._by_key[live.key] = live

    def remove(self, key: str) -> None:
        """Idempotent."""
        self._by_key.pop(key, None)

    def get(self, key: str) -> LiveRequest | None:
        """None where it is not in flight."""
        return self._by_key.get(key)

    def fail_stalled_writes(self, *, max_wait_s: float) -> int:
        """End streams whose reader has not taken a message for so long; how many."""
        limit_s = time.monotonic() - max_wait_s
        stalled = [live for live in self if 0.0 < live.stream.write_since_s < limit_s]
        for live in stalled:
            live.interrupt(SlowConsumer(f"a message waited for more than {max_wait_s:g} s to be read"))
        return len(stalled)

    def num_scheduled(self) -> int:
        """Requests that a worker has begun."""
        return sum(1 for live in self._by_key.values() if live.stream.scheduled_s or live.stream.first_token_s)
