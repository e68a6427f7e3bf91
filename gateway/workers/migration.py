"""Outputs of a lost worker continue at another one, or at the same one after its restart; their callers see a pause.

An output is sent again as its prompt followed by the tokens it has given, which the new worker counts as output:
sampling, penalties and limits continue where they were.

    lost ──► waiting ──a ready worker of the same model──► sent, on probation ──a token──► running as before
               └── no such worker in time, or moved too often ──► lost for good

An output may be what crashes its workers. Any output that a crashed worker had is suspected of it, so each of them
goes on probation: a worker has at most one of them at a time, until it has given a token for it. The others wait
and lose only time. So do those that had only been queued, since a worker that crashes does not say which these were;
what one turned away, or left in order, needs no probation.

A worker that crashes meanwhile was crashed by its suspect, or by chance: two crashes are therefore an accusation. An
accused output that had given tokens before has a harmless prompt, and gets a second probation; one that never gave any
ends with an error that its caller may retry, and its prompt is remembered, so that the same request starts on
probation. An output that loses a worker in its second probation too is guilty: three crashes, two of them with nothing
else on trial, the last at another time.
"""

import asyncio
import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from enum import Enum

import structlog

from octavo.gateway.workers.errors import WorkerBusy, WorkerGone
from octavo.gateway.workers.outputs import Output, Outputs, resumed
from octavo.gateway.workers.registry import Registry, WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason, WorkerState
from octavo.wire.messages import Finished, Run

log = structlog.get_logger(__name__)

_NOT_THE_WORKERS_END = frozenset({LostReason.INTERNAL, LostReason.POISONED})
_MAX_ACCUSED = 1024  # prompts that are remembered

_IT_MAY_BE_CHANCE = "two workers in turn were lost with this request, by chance or by it: it may be tried once more"

Send = Callable[[WorkerRecord, Run, Output], None]
"""Sends an output again under its new handle. Raises WorkerBusy, WorkerGone."""


class Verdict(Enum):
    """What becomes of an output whose worker was lost."""

    FREE = "free"  # may go to any worker at once
    SUSPECT = "suspect"  # waits until `next_for` names it
    ACCUSED = "accused"  # ends; the same request, tried again, has to be held (`hold`)
    GUILTY = "guilty"  # must not go to a worker again


class Quarantine:
    """Decides which outputs of lost workers may go to another one now. One per model.

    Pure: no clock, no sockets. Outputs and workers are any hashable names; each process of a worker has a new one.
    """

    def __init__(self, on_probation: dict[Hashable, Hashable] | None = None) -> None:
        """on_probation: worker -> output, if several share it; None: its own."""
        self._waiting: deque[Hashable] = deque()
        self._on_probation = {} if on_probation is None else on_probation
        self._worker_of: dict[Hashable, Hashable] = {}  # output -> worker, the same turned round
        self._accused: set[Hashable] = set()  # a worker crashed during an earlier probation of theirs

    def __len__(self) -> int:
        return len(self._waiting) + len(self._worker_of)

    @property
    def num_waiting(self) -> int:
        """Suspects without a worker."""
        return len(self._waiting)

    def hold(self, output: Hashable) -> None:
        """An output whose prompt was accused before, and which has no worker yet: it starts on probation."""
        self._accused.add(output)
        self._waiting.append(output)

    def lost(self, output: Hashable, worker: Hashable, *, was_begun: bool, has_given: bool) -> Verdict:
        """The output's worker is gone. was_begun: a step may have had it, and the worker did not shut down cleanly.
        has_given: it has given tokens, at any worker."""
        is_on_probation = self._worker_of.get(output) == worker
        was_accused = output in self._accused
        self.forget(output)
        if not was_begun and is_on_probation:
            if was_accused:
                self._accused.add(output)
            self._waiting.appendleft(output)  # its probation is not over
            return Verdict.SUSPECT
        if not was_begun:
            return Verdict.FREE
        if is_on_probation and was_accused:
            return Verdict.GUILTY
        if is_on_probation and not has_given:
            return Verdict.ACCUSED
        if is_on_probation:
            self._accused.add(output)
        self._waiting.append(output)
        return Verdict.SUSPECT

    def next_for(self, worker: Hashable) -> Hashable | None:
        """The suspect that this worker may have now, first come first served; its probation begins."""
        if not self._waiting or worker in self._on_probation:
            return None
        output = self._waiting.popleft()
        self._on_probation[worker] = output
        self._worker_of[output] = worker
        return output

    def send_back(self, output: Hashable) -> None:
        """The worker could not take it after all: it goes to the front of the queue."""
        del self._on_probation[self._worker_of.pop(output)]
        self._waiting.appendleft(output)

    def passed(self, output: Hashable) -> bool:
        """A token or an end came, so it is no longer a suspect. Returns whether it was one; then its worker may have
        another."""
        worker = self._worker_of.pop(output, None)
        if worker is None:
            return False
        self._accused.discard(output)
        del self._on_probation[worker]
        return True

    def forget(self, output: Hashable) -> None:
        """It ended some other way (cancelled, deadline). Idempotent."""
        self._accused.discard(output)
        if not self.passed(output) and output in self._waiting:
            self._waiting.remove(output)


class Migration:
    """One per pool. on_probation: outputs, by their worker's incarnation. accused: prompts with which two workers were
    lost. max_moves 0: nothing ever moves. timeout_s: how long an output waits for a worker."""

    def __init__(
        self,
        registry: Registry,
        outputs: Outputs,
        stats: PoolStats,
        *,
        send: Send,
        check: Callable[[int], None],
        drains: Callable[[WorkerRecord], None],
        max_moves: int,
        timeout_s: float,
    ) -> None:
        """check(incarnation): reports an exit of that worker that was not noticed yet. drains(record): a worker refused
        an output in a way that shows that it drains; its heartbeat says so later."""
        self._registry = registry
        self._outputs = outputs
        self._stats = stats
        self._send = send
        self._check = check
        self._drains = drains
        self.on_probation: dict[Hashable, Hashable] = {}
        self.accused: dict[bytes, None] = {}  # the latest last
        self._max_moves = max_moves
        self._timeout_s = timeout_s
        self._quarantines = defaultdict[str, Quarantine](lambda: Quarantine(self.on_probation))  # by fingerprint
        self._free: list[Output] = []
        self._lost: dict[Output, tuple[LostReason, str, float]] = {}  # those that wait: why, and since when
        self._is_due = False
        self._is_closed = False

    def is_waiting(self, output: Output) -> bool:
        """Whether no worker has it."""
        return output in self._lost

    def is_accused(self, output: Output) -> bool:
        """Whether two workers were lost with a request of this prompt."""
        return _content(output) in self.accused

    def close(self) -> None:
        """From now on, outputs of lost workers end."""
        self._is_closed = True
        for output in tuple(self._lost):
            self._give_up(output, LostReason.DRAINING, "the gateway is shutting down")

    # ------------------------------------------------------------ events

    def hold(self, output: Output) -> None:
        """A new output with an accused prompt: it waits for its probation, as suspects do."""
        self._outputs.detach(output)
        self._lost[output] = (LostReason.WORKER_LOST, _IT_MAY_BE_CHANCE, time.monotonic())
        self._quarantine(output).hold(output)
        self.soon()

    def lost(self, output: Output, reason: LostReason, detail: str) -> None:
        """The output's worker is gone, or ended it early: continue it elsewhere, or end it."""
        verdict = self._quarantine(output).lost(
            output,
            output.incarnation,
            was_begun=reason is not LostReason.DRAINING,
            has_given=output.num_tokens > 0,
        )
        output.is_on_probation = False
        if verdict in (Verdict.GUILTY, Verdict.ACCUSED):
            self._condemn(output, verdict, reason, detail)
            return
        if not self._may_move(output, reason):
            self.forget(output)
            self._outputs.lose(output, reason, detail)
            return
        self._outputs.detach(output)
        self._lost[output] = (reason, detail, time.monotonic())
        if verdict is Verdict.FREE:
            self._free.append(output)
        self.soon()

    def turned_away(self, output: Output, finished: Finished) -> bool:
        """A worker ended an output because it drains or is full. Returns whether the output continues elsewhere."""
        # For a request that is new, the caller gets the refusal.
        drains, is_full = finished.error == "DRAINING", finished.error == "QUEUE_FULL" and output.num_moves > 0
        if (record := self._registry.get(output.incarnation)) is not None:
            record.is_full = record.is_full or is_full
            if drains:
                self._drains(record)
        if not (drains or is_full) or not self._may_move(output, LostReason.DRAINING):
            return False
        self.lost(output, LostReason.DRAINING, finished.detail)
        return True

    def passed(self, output: Output) -> None:
        """An output on probation gave a token or ended."""
        output.is_on_probation = False
        if self.accused:
            self.accused.pop(_content(output), None)
        if self._quarantine(output).passed(output):
            self.soon()

    def forget(self, output: Output) -> None:
        """The output needs no worker any more."""
        self._lost.pop(output, None)
        self._quarantine(output).forget(output)
        if output in self._free:
            self._free.remove(output)

    def soon(self) -> None:
        """Look for places in the next turn of the loop."""
        if not self._is_due and self._lost:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.place)

    def place(self) -> None:
        """Send waiting outputs to workers; end those that have waited too long."""
        self._is_due = False
        for output in tuple(self._free):
            for record in self._ready(output.fingerprint):
                if self._move(output, record):
                    self._free.remove(output)
                    break
        for fingerprint, quarantine in tuple(self._quarantines.items()):  # a loss may add one
            self._place_suspects(fingerprint, quarantine)
        self._expire(time.monotonic())

    # ------------------------------------------------------------ parts

    def _condemn(self, output: Output, verdict: Verdict, reason: LostReason, detail: str) -> None:
        content = _content(output)
        self.accused.pop(content, None)
        self.accused[content] = None
        if len(self.accused) > _MAX_ACCUSED:
            del self.accused[next(iter(self.accused))]
        log.warning("output_condemned", **output.log_fields, verdict=verdict.value, detail=detail)
        if verdict is Verdict.GUILTY:
            self._outputs.lose(output, LostReason.POISONED, f"three workers were lost with it; the last: {detail}")
        else:
            self._outputs.lose(output, reason, f"{_IT_MAY_BE_CHANCE}; the last: {detail}")

    def _quarantine(self, output: Output) -> Quarantine:
        return self._quarantines[output.fingerprint]

    def _may_move(self, output: Output, reason: LostReason) -> bool:
        return not (
            self._is_closed
            or reason in _NOT_THE_WORKERS_END
            or output.is_cancelled
            or output.num_moves >= self._max_moves
            or output.is_half_scored
            or (output.run.pooling is not None and output.embedding_sink is None)
        )

    def _ready(self, fingerprint: str) -> list[WorkerRecord]:
        """Ready workers, least loaded first."""
        ready = [
            record
            for record in self._registry
            if record.state is WorkerState.READY
            and record.card.fingerprint == fingerprint
            and record.in_flight < record.max_requests
            and not record.is_full
        ]
        return sorted(ready, key=lambda record: record.num_requests / record.max_requests)

    def _place_suspects(self, fingerprint: str, quarantine: Quarantine) -> None:
        for record in self._ready(fingerprint) if quarantine.num_waiting else ():
            # If several workers crash together, those noticed only now were not crashed by a suspect.
            self._check(record.incarnation)
            if self._registry.get(record.incarnation) is None:
                continue
            output = quarantine.next_for(record.incarnation)
            if not isinstance(output, Output):
                continue
            output.is_on_probation = True
            if not self._move(output, record):
                output.is_on_probation = False
                if output in self._lost:
                    quarantine.send_back(output)

    def _move(self, output: Output, record: WorkerRecord) -> bool:
        # Detached until it is sent: if the connection turns out to be gone, this output is not lost with it.
        self._outputs.rename(output)
        moved_s = time.monotonic()
        try:
            self._send(record, resumed(output, moved_s), output)
        except (WorkerBusy, WorkerGone):
            return False
        _, _, lost_s = self._lost.pop(output)
        self._outputs.attach(output, record.incarnation)
        output.num_moves += 1
        self._stats.moved_outputs += 1
        self._registry.opened(record, time.monotonic())
        log.info("output_moved", **output.log_fields, worker_id=record.worker_id, tokens=output.num_tokens)
        output.sink.on_moved(record.worker_id, lost_s, moved_s)
        return True

    def _expire(self, now_s: float) -> None:
        for output, (reason, detail, since_s) in tuple(self._lost.items()):
            if now_s - since_s > self._timeout_s:
                self._give_up(output, reason, f"{detail}; no other worker took it within {self._timeout_s:g} s")

    def _give_up(self, output: Output, reason: LostReason, detail: str) -> None:
        self.forget(output)
        self._outputs.lose(output, reason, detail)


def _content(output: Output) -> bytes:
    """What identifies a request's content: the model, the prompt, and its caller's salt."""
    digest = hashlib.blake2b(output.fingerprint.encode(), digest_size=16)
    digest.update(b"\0" + output.run.cache_salt.encode() + b"\0")
    digest.update(output.run.prompt_ids)
    return digest.digest()
