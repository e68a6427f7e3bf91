"""The live outputs of one gateway: handles to sinks, and the check of everything that a worker sends about them.

A worker that breaks the protocol costs the outputs concerned, never the gateway. Must not know sockets.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import msgspec
import numpy as np
import structlog

from octavo.gateway.workers.registry import WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import EmbeddingSink, LostReason, OutputSink, PromptSink
from octavo.wire.codec import TOKEN_BYTES
from octavo.wire.messages import Finished, Run, StepOutput, TokenLogprobs, WireFinishReason, sampling_of_output

log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Output:
    """One live output.

    name: its number at this gateway; never changes. handle: its number at its current worker; new at each worker.
    run: as sent to its first worker, for this output alone.
    token_ids: int32, generated so far. deadline_s: monotonic.
    embedding_sink: the sink while it waits for a vector, else None.
    prompt_sink: the sink if it wants the prompt's log-probabilities; num_unscored are still to come.
    """

    name: int
    handle: int
    incarnation: int
    fingerprint: str
    run: Run
    vocab_size: int
    max_tokens: int
    wants_logprobs: bool
    sink: OutputSink
    deadline_s: float | None = None
    embedding_sink: EmbeddingSink | None = None
    prompt_sink: PromptSink | None = None
    num_unscored: int = 0
    num_awaited: int = 0  # prompt tokens that its worker has to compute before the first token
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_moves: int = 0  # to another worker, or to a restarted one
    is_started: bool = False
    is_on_probation: bool = False  # the migration waits for its next token
    is_cancelled: bool = False
    is_paused: bool = False  # its reader is behind: its worker gives it no more steps
    is_faulted: bool = False  # ended by us; the worker must be told to stop it

    @property
    def request_id(self) -> str:
        """The caller's request id."""
        return self.run.request_id

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of every log line about it."""
        trace_id = self.run.traceparent[3:35]
        return {"request_id": self.request_id} | ({"trace_id": trace_id} if trace_id else {})

    @property
    def num_tokens(self) -> int:
        """Tokens given so far."""
        return len(self.token_ids)

    @property
    def is_half_scored(self) -> bool:
        """Whether some, but not all, of the prompt's log-probabilities were delivered."""
        return self.prompt_sink is not None and 0 < self.num_unscored < num_prompt_tokens(self.run) - 1


class Outputs:
    """Draws handles, upwards from 1 and never reused. The callbacks are the migration's: on_turned_away returns whether
    an output that a worker ended early continues elsewhere; on_passed is called for outputs on probation that have
    given a token or ended."""

    def __init__(self, stats: PoolStats) -> None:
        self._stats = stats
        self._by_name: dict[int, Output] = {}
        self._live: dict[int, Output] = {}  # by handle: those that a worker has
        self.waiting_tokens: Counter[int] = Counter()  # what outputs await, by incarnation
        self._next_handle = 1
        self.on_turned_away: Callable[[Output, Finished], bool] = lambda output, finished: False
        self.on_passed: Callable[[Output], None] = lambda output: None

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Output]:
        return iter(tuple(self._by_name.values()))

    def draw_handles(self, num_handles: int) -> list[int]:
        """Handles never used before."""
        first = self._next_handle
        self._next_handle += num_handles
        return list(range(first, self._next_handle))

    def add(self, output: Output) -> None:
        """A new output."""
        self._by_name[output.name] = self._live[output.handle] = output

    def get(self, name: int) -> Output | None:
        """The live output of this name, or None."""
        return self._by_name.get(name)

    def await_first_token(self, output: Output, num_tokens: int) -> None:
        """Its worker must compute this many tokens of its prompt before it gives one."""
        output.num_awaited = num_tokens
        self.waiting_tokens[output.incarnation] += num_tokens

    def detach(self, output: Output) -> None:
        """No worker has it for now; messages about it are stale."""
        self._settle(output)
        self._live.pop(output.handle, None)

    def rename(self, output: Output) -> None:
        """Draw a new handle, under which no worker has it yet."""
        (output.handle,) = self.draw_handles(1)

    def attach(self, output: Output, incarnation: int) -> None:
        """Another worker has it, under its current handle."""
        output.incarnation = incarnation
        self._live[output.handle] = output

    def of(self, incarnation: int) -> list[Output]:
        """All live outputs of one worker."""
        return [output for output in self._live.values() if output.incarnation == incarnation]

    def by_name(self, incarnation: int, said: Mapping[int, T]) -> dict[int, T]:
        """What a worker reported by handle, keyed by output name instead; only outputs that it has."""
        rows = ((self._live.get(handle), what) for handle, what in said.items())
        return {output.name: what for output, what in rows if output is not None and output.incarnation == incarnation}

    def take(self, incarnation: int, message: StepOutput) -> list[Output]:
        """Hand a step's tokens and ends to their sinks. Returns the outputs that ended with it, by a fault included."""
        ended: list[Output] = []
        for handle in message.started:
            output = self._claim(handle, incarnation, ended)
            if output is not None and not output.is_cancelled:
                self._start(output, ended)
        for handle, scores in message.prompt_logprobs.items():
            output = self._claim(handle, incarnation, ended)
            if output is not None:
                self._take_scores(output, scores, ended)
        self._take_tokens(incarnation, message, ended)
        for handle, embedding in message.embeddings.items():
            output = self._claim(handle, incarnation, ended)
            if output is not None:
                self._take_embedding(output, embedding, ended)
        for finished in message.finished:
            output = self._claim(finished.handle, incarnation, ended)
            if output is not None:
                self._finish(output, finished, ended)
        return ended

    def lose(self, output: Output, reason: LostReason, detail: str) -> None:
        """End an output for a reason other than a message from its worker."""
        if self._by_name.pop(output.name, None) is None:
            return
        if output.is_on_probation:  # its worker broke the protocol, or we have a defect: others wait for its end
            self.on_passed(output)
        self._settle(output)
        self._live.pop(output.handle, None)
        try:
            output.sink.on_lost(reason.value, detail)
        except Exception:
            self._stats.sink_errors += 1
            log.exception("sink_failed", **output.log_fields)

    # ------------------------------------------------------------ parts

    def _settle(self, output: Output) -> None:
        """It no longer waits for its first token."""
        if output.num_awaited:
            self.waiting_tokens[output.incarnation] -= output.num_awaited
            output.num_awaited = 0
            if not self.waiting_tokens[output.incarnation]:
                del self.waiting_tokens[output.incarnation]

    def _take_tokens(self, incarnation: int, message: StepOutput, ended: list[Output]) -> None:
        handles = np.frombuffer(message.handles, "<i8").tolist()
        tokens = np.frombuffer(message.tokens, "<i4").tolist()
        positions: dict[int, int] = {}  # of the next logprobs, by handle
        for handle, token in zip(handles, tokens, strict=True):
            output = self._live.get(handle)
            if output is None or output.incarnation != incarnation:
                self._claim(handle, incarnation, ended)
                continue
            if not 0 <= token < output.vocab_size or len(output.token_ids) >= output.max_tokens:
                kind = "too_many_tokens" if 0 <= token < output.vocab_size else "token_out_of_range"
                self._fault(output, kind, ended)
                continue
            if output.num_unscored:
                self._fault(output, "missing_prompt_logprobs", ended)
                continue
            logprobs: list[TokenLogprobs] | None = None
            if output.wants_logprobs:
                position = positions.get(handle, 0)
                positions[handle] = position + 1
                logprobs = message.logprobs.get(handle, [])[position : position + 1]
                if not logprobs:
                    self._fault(output, "missing_logprobs", ended)
                    continue
            output.token_ids.append(token)
            if output.num_awaited:
                self._settle(output)
            if output.is_on_probation:
                self.on_passed(output)
            if output.is_cancelled:
                continue
            try:
                output.sink.on_tokens([token], logprobs)
            except Exception:
                self._sink_failed(output, ended)

    def _take_scores(self, output: Output, scores: list[TokenLogprobs], ended: list[Output]) -> None:
        output.num_unscored -= len(scores)
        if output.prompt_sink is None or output.num_unscored < 0:
            self._fault(output, "bad_prompt_logprobs", ended)
        elif not output.is_cancelled:
            try:
                output.prompt_sink.on_prompt_logprobs(scores)
            except Exception:
                self._sink_failed(output, ended)

    def _take_embedding(self, output: Output, embedding: bytes, ended: list[Output]) -> None:
        sink, output.embedding_sink = output.embedding_sink, None
        is_whole = len(embedding) > 0 and len(embedding) % 4 == 0
        embedding_D = np.frombuffer(embedding, "<f4") if is_whole else np.full(1, np.nan, np.float32)
        if sink is None or not np.isfinite(embedding_D).all():
            self._fault(output, "bad_embedding", ended)
        elif not output.is_cancelled:
            try:
                sink.on_embedding(embedding_D)
            except Exception:
                self._sink_failed(output, ended)

    def _claim(self, handle: int, incarnation: int, ended: list[Output]) -> Output | None:
        """The live output of a handle, if this worker has it. None: counted as late, or as a protocol error."""
        output = self._live.get(handle)
        if output is None:
            if 0 < handle < self._next_handle and all(handle != other.handle for other in ended):
                self._stats.late_outputs += 1
            elif 0 < handle < self._next_handle:
                self._stats.protocol_errors["after_end"] += 1
            else:
                self._stats.protocol_errors["unknown_handle"] += 1
            return None
        if output.incarnation != incarnation:
            self._stats.protocol_errors["foreign_handle"] += 1
            return None
        return output

    def _finish(self, output: Output, finished: Finished, ended: list[Output]) -> None:
        if finished.reason is WireFinishReason.ERROR and self.on_turned_away(output, finished):
            ended.append(output)
            return
        if output.is_on_probation:
            self.on_passed(output)
        is_whole = finished.reason in (WireFinishReason.STOP, WireFinishReason.LENGTH)
        if is_whole and output.embedding_sink is not None:
            self._fault(output, "missing_embedding", ended)
            return
        if is_whole and finished.completion_tokens != output.num_tokens:
            self._fault(output, "wrong_count", ended)
            return
        self._settle(output)
        del self._live[output.handle], self._by_name[output.name]
        ended.append(output)
        try:
            output.sink.on_finished(finished)
        except Exception:
            self._stats.sink_errors += 1
            log.exception("sink_failed", **output.log_fields)

    def _fault(self, output: Output, kind: str, ended: list[Output]) -> None:
        self._stats.protocol_errors[kind] += 1
        log.error("worker_broke_protocol", kind=kind, **output.log_fields)
        output.is_faulted = True
        self.lose(output, LostReason.INTERNAL, "the worker broke the protocol")
        ended.append(output)

    def _start(self, output: Output, ended: list[Output]) -> None:
        if output.is_started:
            return
        output.is_started = True
        try:
            output.sink.on_started()
        except Exception:
            self._sink_failed(output, ended)

    def _sink_failed(self, output: Output, ended: list[Output]) -> None:
        """The sink raised, which is our defect: end this output, keep the others."""
        self._stats.sink_errors += 1
        log.exception("sink_failed", **output.log_fields)
        output.is_faulted = True
        self.lose(output, LostReason.INTERNAL, "a defect of the gateway")
        ended.append(output)


def new_output(run: Run, index: int, record: WorkerRecord, sink: OutputSink, now_s: float) -> Output:
    """Output `index` of a request, at its first worker. now_s: monotonic."""
    own = _alone(run, index)
    is_scored = own.sampling.num_prompt_logprobs is not None
    return Output(
        name=own.handle,
        handle=own.handle,
        incarnation=record.incarnation,
        fingerprint=record.card.fingerprint,
        run=own,
        deadline_s=None if run.timeout_s is None else now_s + run.timeout_s,
        vocab_size=record.card.vocab_size,
        max_tokens=run.sampling.max_tokens if run.pooling is None else 0,
        wants_logprobs=run.sampling.num_logprobs is not None,
        embedding_sink=cast(EmbeddingSink, sink) if run.pooling is not None else None,
        prompt_sink=cast(PromptSink, sink) if is_scored else None,
        num_unscored=num_prompt_tokens(run) - 1 if is_scored else 0,
        sink=sink,
    )


def num_prompt_tokens(run: Run) -> int:
    """Tokens of the prompt as it was sent."""
    return len(run.prompt_ids) // TOKEN_BYTES


def _alone(run: Run, index: int) -> Run:
    """The Run for output `index` alone, for when another worker must take it over."""
    if not index:
        return run
    sampling = sampling_of_output(run.sampling, index)
    return msgspec.structs.replace(run, handle=run.fork_handles[index - 1], fork_handles=(), sampling=sampling)


def resumed(output: Output, now_s: float) -> Run:
    """The Run for another worker, under the output's new handle: it continues after the tokens given so far. now_s:
    monotonic."""
    run, sampling = output.run, output.run.sampling
    if output.prompt_sink is not None and not output.num_unscored:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    return msgspec.structs.replace(
        run,
        handle=output.handle,
        fork_handles=(),
        prompt_ids=run.prompt_ids + np.asarray(output.token_ids, "<i4").tobytes(),
        sampling=sampling,
        num_resumed_tokens=len(output.token_ids),
        timeout_s=None if output.deadline_s is None else max(0.001, output.deadline_s - now_s),
    )
