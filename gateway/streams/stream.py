"""One output between the pool and the RPC that waits for it.

The pool puts in tokens and the end; the RPC's own task takes pieces out as fast as its caller reads: one token a piece
when idle, several when writing is slow, tokens come in bursts, or the gateway is busy. Knows no gRPC; must not block.

    RUNNING --stop string, deadline--> MATCHED --worker's end, or nothing for a while--> ENDED
    RUNNING --worker's end--> ENDED
    RUNNING --lost, failed, aborted--> FAILED

**Slow readers.** A reader that is still writing a message while many tokens gather is behind: its output is paused at
the worker, and resumed once most of them are taken. A reader that is waiting is not behind, however much has gathered:
it takes everything in its next turn, or nothing can be sent yet.

**Coalescing.** A message costs 30 to 60 µs whatever it carries, and gRPC needs several turns of the event loop to take
a request: a gateway busy with single tokens makes new requests wait while workers have free slots
(bench/gateway/arrivals.py). So once the loop's thread is busy half of the time, each output gets one message per round,
rounds move further apart, and they wait while calls arrive; with time to spare, tokens go out at once again. First
tokens and ends never wait.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

from octavo.gateway.errors import DeadlinePassed, InternalDefect, RequestError, SlowConsumer, error_of, from_reason
from octavo.gateway.streams.output_processor import OutputProcessor, Piece
from octavo.wire.messages import Finished, TokenLogprobs, WireFinishReason

BUSY_SHARE = 0.5  # of the thread's time; above it, rounds move apart
CALM_SHARE = 0.3  # below it, they move closer
STEP = 1.5
LEAST_INTERVAL_S = 0.001  # below it, tokens go out as they come
MOST_INTERVAL_S = 0.008
ROUND_PART = 16  # readers woken in one turn of the loop
YIELD_S = 0.001  # how long a round waits for another call after one
MOST_YIELD_S = 0.004  # … and for all of them together
WINDOW_S = 0.02  # time over which the busy share is measured
STALE_S = 0.2  # an older share is not used


class Move(NamedTuple):
    """An output moved from a worker that was lost to worker_id. Times are monotonic seconds."""

    worker_id: str
    lost_s: float
    moved_s: float


class Notifier:
    """Wakes the one task that reads an output, or the outputs of one request."""

    __slots__ = ("_loop", "_waiter", "was_missed")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.was_missed = False  # a round came while no task was waiting

    async def wait(self) -> None:
        """Wait for the next `notify`; earlier ones do not count."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def is_awaited(self) -> bool:
        """Whether a task is waiting, or was woken and has not run yet."""
        return self._waiter is not None

    def notify(self) -> None:
        """Wake the task, if one waits."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Coalescer:
    """Decides when readers are woken for new tokens, and take them. One per gateway, on its event loop."""

    def __init__(self, *, cpu_s: Callable[[], float] | None = None, now_s: Callable[[], float] | None = None) -> None:
        """cpu_s: CPU time of this thread; now_s: monotonic. None: the system's."""
        self._cpu_s = cpu_s or time.thread_time
        self._now_s = now_s or time.monotonic
        self._window = (self._now_s(), self._cpu_s())
        self._waiting: dict[Notifier, None] = {}  # for the next round
        self._left: dict[Notifier, None] = {}  # what is left of this one
        self._round: asyncio.Handle | None = None  # the next round, or the next part of this one
        self._due_s = 0.0  # of the next round, or of the last one
        self._interval_s = 0.0
        self._call_s = 0.0  # when the last call came in

    @property
    def interval_s(self) -> float:
        """Time between rounds; 0.0: tokens go out as they come."""
        return 0.0 if self._now_s() - self._window[0] > STALE_S else self._interval_s

    def holds(self, notifier: Notifier) -> bool:
        """Whether this reader, back from writing a message, must wait for the next round. If a round passed while it
        was writing, it need not."""
        was_missed, notifier.was_missed = notifier.was_missed, False
        return not was_missed and (notifier in self._waiting or notifier in self._left)

    def yield_to_call(self) -> None:
        """A call has arrived: pending and unfinished rounds wait until no other call follows."""
        self._call_s = self._now_s()

    def notify(self, notifier: Notifier) -> None:
        """An output has new tokens."""
        if self._round is None:
            now_s = self._now_s()
            if now_s - self._window[0] >= WINDOW_S:
                self._adjust(now_s)
            if not self._interval_s and now_s - self._call_s >= YIELD_S:
                notifier.notify()
                return
            self._schedule(now_s)
        if notifier not in self._left:
            self._waiting[notifier] = None

    def _schedule(self, now_s: float) -> None:
        self._due_s = max(now_s, self._due_s + self._interval_s)
        self._round = asyncio.get_running_loop().call_later(self._due_s - now_s, self._notify_some)

    def _notify_some(self) -> None:
        """Wake a part of the readers that are due, then let arriving calls in. A round that is late is completed at
        once."""
        loop, now_s = asyncio.get_running_loop(), self._now_s()
        is_late = now_s - self._due_s >= MOST_YIELD_S
        if now_s - self._call_s < YIELD_S and not is_late:
            self._round = loop.call_later(YIELD_S, self._notify_some)
            return
        if now_s - self._window[0] >= WINDOW_S:
            self._adjust(now_s)
        if not self._left:
            self._left, self._waiting = self._waiting, {}
        for notifier in list(islice(self._left, None if is_late else ROUND_PART)):
            del self._left[notifier]
            notifier.was_missed = not notifier.is_awaited
            notifier.notify()
        self._round = loop.call_soon(self._notify_some) if self._left else None
        if self._waiting and not self._left:
            self._schedule(now_s)

    def _adjust(self, now_s: float) -> None:
        (since_s, since_cpu_s), cpu_s = self._window, self._cpu_s()
        self._window = (now_s, cpu_s)
        share = (cpu_s - since_cpu_s) / (now_s - since_s)
        if share > BUSY_SHARE:
            self._interval_s = min(max(self._interval_s * STEP, LEAST_INTERVAL_S), MOST_INTERVAL_S)
        elif share < CALM_SHARE:
            self._interval_s /= STEP
        if now_s - since_s > STALE_S or self._interval_s < LEAST_INTERVAL_S:
            self._interval_s = 0.0


class AtDeadline(Enum):
    """What the caller gets at the deadline."""

    STATUS = "status"  # DEADLINE_EXCEEDED
    PARTIAL = "partial"  # what there is, as a complete answer with reason DEADLINE


class StreamState(Enum):
    """The state of an output."""

    RUNNING = "running"
    MATCHED = "matched"  # a stop string or the deadline ended it; the worker's figures are on their way
    ENDED = "ended"
    FAILED = "failed"


_RESUME_SHARE = 4  # resumed at this fraction of the mark at which it pauses


class OutputStream:
    """An OutputSink and PromptSink (see gateway.workers.views). Times are monotonic seconds, 0.0 for "not yet"."""

    __slots__ = (
        "_coalescer", "_loop", "_max_pending", "_on_flow", "_on_match", "_on_moved_to", "_on_started", "_pause_mark",
        "at_deadline", "error", "finished", "first_token_s", "is_partial", "is_paused", "moves", "notifier",
        "processor", "scheduled_s", "state", "worker_id", "write_since_s",
    )  # fmt: skip

    def __init__(
        self,
        processor: OutputProcessor,
        *,
        max_pending_tokens: int,
        pause_pending_tokens: int = 512,
        on_match: Callable[["OutputStream"], None],
        on_started: Callable[[], None] | None = None,
        on_moved: Callable[[str], None] | None = None,
        on_flow: Callable[["OutputStream"], None] | None = None,
        at_deadline: AtDeadline = AtDeadline.STATUS,
        notifier: Notifier | None = None,
        coalescer: Coalescer | None = None,
    ) -> None:
        """on_match: called once, soon after a stop string ended the output. on_started: the worker has begun.
        on_moved: another worker, by id, continues the output. on_flow: `is_paused` has changed.
        notifier: shared by the streams of one request; None: its own.
        pause_pending_tokens: unread tokens at which it pauses, at most half of max_pending_tokens, which end it.
        coalescer: decides when tokens after the first are read; None: at once.
        """
        self.processor = processor
        self.state = StreamState.RUNNING
        self.error: RequestError | None = None
        self.finished: Finished | None = None  # the worker's figures, where they came
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.write_since_s = 0.0  # while a message waits for the reader
        self.at_deadline = at_deadline
        self.is_partial = False  # the deadline ended the output, and the caller takes what there is
        self.worker_id = ""  # the worker that it has moved to
        self.moves: list[Move] = []
        self.is_paused = False  # the worker was asked to wait for the reader
        self._max_pending = max_pending_tokens
        # Steps that are in flight when the pause is sent need room below the end.
        self._pause_mark = min(max_pending_tokens if on_flow is None else pause_pending_tokens, max_pending_tokens // 2)
        self._on_flow = on_flow
        self._on_match = on_match
        self._on_started = on_started
        self._on_moved_to = on_moved
        self._loop = asyncio.get_running_loop()
        self._coalescer = coalescer
        self.notifier = notifier or Notifier()

    @property
    def has_stopped(self) -> bool:
        """Whether a finished output ended with a stop string or token rather than at its length limit."""
        finished = self.finished
        return self.processor.match is not None or (finished is not None and finished.reason is WireFinishReason.STOP)

    # ------------------------------------------------------------ the pool's side

    def on_started(self) -> None:
        """The worker scheduled the request for the first time."""
        self.scheduled_s = time.monotonic()
        if self._on_started is not None:
            self._on_started()

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """New tokens."""
        if self.state is not StreamState.RUNNING:
            return
        is_first = not self.first_token_s
        if is_first:
            self.first_token_s = time.monotonic()
        processor = self.processor
        processor.feed(token_ids, logprobs)
        if processor.match is not None:
            self.state = StreamState.MATCHED
            self._loop.call_soon(self._on_match, self)  # soon: the pool is in the middle of a message
        elif processor.num_pending > self._pause_mark:
            self._fall_behind()
        if is_first or self._coalescer is None or self.state is not StreamState.RUNNING:
            self.notifier.notify()
        else:
            self._coalescer.notify(self.notifier)

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """More of the prompt's log-probabilities."""
        if self.state is StreamState.RUNNING:
            self.processor.feed_prompt(logprobs)

    def on_finished(self, finished: Finished) -> None:
        """The worker ended the output."""
        if self.state is StreamState.MATCHED:
            self.finished = finished
            self.state = StreamState.ENDED
        elif self.state is StreamState.RUNNING:
            self.finished = finished
            if finished.reason is WireFinishReason.DEADLINE and self.at_deadline is AtDeadline.PARTIAL:
                self._end_partial(StreamState.ENDED)
                return
            self.error = error_of(finished)
            if self.error is None:  # cut short otherwise: half a character is left out
                self.processor.finish(finished.stop_token_id)
            self.state = StreamState.ENDED if self.error is None else StreamState.FAILED
        self.notifier.notify()

    def on_lost(self, reason: str, detail: str) -> None:
        """The worker is gone."""
        if self.state is StreamState.MATCHED:
            self.state = StreamState.ENDED  # the output is complete, only the figures are lost
        elif self.state is StreamState.RUNNING:
            self.error, self.state = from_reason(str(reason), detail), StreamState.FAILED
        self.notifier.notify()

    def on_moved(self, worker_id: str, lost_s: float, moved_s: float) -> None:
        """Another worker continues it, or its own after a restart."""
        self.worker_id = worker_id
        self.moves.append(Move(worker_id, lost_s, moved_s))
        if self._on_moved_to is not None:
            self._on_moved_to(worker_id)

    # ------------------------------------------------------------ the gateway's side

    def fail(self, error: RequestError) -> None:
        """End the output from the gateway's side (abort, drain, slow reader). Only the first end counts."""
        if self.state in (StreamState.RUNNING, StreamState.MATCHED):
            self.error, self.state = error, StreamState.FAILED
            self.notifier.notify()

    def end_at_deadline(self) -> None:
        """The deadline passed before the worker ended it. A partial output still waits for the worker's figures."""
        if self.state is not StreamState.RUNNING:
            return
        if self.at_deadline is AtDeadline.PARTIAL:
            self._end_partial(StreamState.MATCHED)
        else:
            self.fail(DeadlinePassed("the deadline passed"))

    def _end_partial(self, state: StreamState) -> None:
        self.processor.cut_short()
        self.is_partial, self.state = True, state
        self.notifier.notify()

    def _fall_behind(self) -> None:
        num_pending = self.processor.num_pending
        if num_pending > self._max_pending:
            self.fail(SlowConsumer(f"{num_pending} tokens wait to be read"))
        elif not self.is_paused and not self.notifier.is_awaited and self._on_flow is not None:
            self.is_paused = True
            self._on_flow(self)

    def _catch_up(self, piece: Piece | None) -> None:
        """Resume a paused output once its reader has caught up. piece: what was taken last; None: nothing is left."""
        if piece is None or self.processor.num_pending * _RESUME_SHARE <= self._pause_mark:
            self.is_paused = False
            if self._on_flow is not None:
                self._on_flow(self)

    def stop_waiting_for_figures(self) -> None:
        """The worker's figures did not come in time after a stop string or the deadline."""
        if self.state is StreamState.MATCHED:
            self.state = StreamState.ENDED
            self.notifier.notify()

    def take(self) -> Piece | None:
        """What can be sent now; None if nothing, or if it must wait for the next round. Resumes a paused output once
        little is left."""
        if self._waits_for_round():
            return None
        piece = self.processor.take()
        if self.is_paused:
            self._catch_up(piece)
        return piece

    def _waits_for_round(self) -> bool:
        if self._coalescer is None or self.state is not StreamState.RUNNING:
            return False
        has_given = self.processor.num_undelivered < self.processor.num_tokens
        return has_given and self._coalescer.holds(self.notifier)

    async def next(self) -> Piece | None:
        """The next piece, as soon as there is one; None after the last. Raises the RequestError that ended the output,
        after what came before it. One caller at a time."""
        while True:
            piece = self.take()
            if piece is not None:
                return piece
            if self.state is StreamState.ENDED:
                return None
            if self.state is StreamState.FAILED:
                raise self.error or InternalDefect("a stream failed without an error")
            await self.notifier.wait()


class OutputStreams:
    """Several outputs of one request as one source of pieces. They share a notifier."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._open = dict(enumerate(streams))
        self._notifier = streams[0].notifier

    async def next(self) -> tuple[int, Piece | None] | None:
        """(output index, its next piece), or (index, None) once when that output ends; None after all have ended.
        Outputs take turns, except that prompt log-probabilities, which output 0 carries, come first. Raises the
        RequestError that ended one of them. One caller at a time."""
        while self._open:
            first = self._open.get(0)
            turns = ((0, first),) if first and first.processor.has_undelivered_prompt else tuple(self._open.items())
            for index, stream in turns:
                piece = stream.take()
                if piece is not None:
                    self._open[index] = self._open.pop(index)  # behind the others
                    return index, piece
                if stream.state is StreamState.ENDED:
                    del self._open[index]
                    return index, None
                if stream.state is StreamState.FAILED:
                    raise stream.error or InternalDefect("a stream failed without an error")
            await self._notifier.wait()
        return None
