"""The live outputs of one gateway: handles to sinks, and the check of everything that a worker claims about them.

A worker that lies costs the outputs that it lied about, never the gateway. Must not know sockets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import structlog

from gateway.workers.stats import PoolStats
from gateway.workers.views import EmbeddingSink, LostReason, OutputSink, PromptSink
from wire.messages import Finished, StepOutput, TokenLogprobs, WireFinishReason

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Output:
    """One live output. embedding_sink: the sink, where it waits for a vector; None once that has come. prompt_sink: the
    sink, where it wants the prompt's log-probabilities, of which num_unscored are still to come."""

    handle: int
    incarnation: int
    request_id: str
    vocab_size: int
    max_tokens: int
    wants_logprobs: bool
    sink: OutputSink
    embedding_sink: EmbeddingSink | None = None
    prompt_sink: PromptSink | None = None
    num_unscored: int = 0
    num_tokens: int = 0
    is_cancelled: bool = False
    is_faulted: bool = False  # ended by us; the worker must be told to stop it


class Outputs:
    """Handles are drawn here, upwards from 1, never again."""

    def __init__(self, stats: PoolStats) -> None:
        self._stats = stats
        self._live: dict[int, Output] = {}
        self._next_handle = 1

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Output]:
        return iter(tuple(self._live.values()))

    def draw_handle(self) -> int:
        """A handle never used before."""
        handle = self._next_handle
        self._next_handle += 1
        return handle

    def add(self, output: Output) -> None:
        """An output begins."""
        self._live[output.handle] = output

    def get(self, handle: int) -> Output | None:
        """The output, while it lives."""
        return self._live.get(handle)

    def of(self, incarnation: int) -> list[Output]:
        """All live outputs of one worker."""
        return [output for output in self._live.values() if output.incarnation == incarnation]

    def take(self, incarnation: int, message: StepOutput) -> list[Output]:
        """Hand a step's tokens and ends to their sinks. Returns the outputs that ended with it (also by a fault)."""
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
        """End an output without the worker's word."""
        if self._live.pop(output.handle, None) is None:
            return
        try:
            output.sink.on_lost(reason.value, detail)
        except Exception:
            self._stats.sink_errors += 1
            log.exception("sink_failed", request_id=output.request_id)

    # ------------------------------------------------------------ parts

    def _take_tokens(self, incarnation: int, message: StepOutput, ended: list[Output]) -> None:
        handles = np.frombuffer(message.handles, "<i8").tolist()
        tokens = np.frombuffer(message.tokens, "<i4").tolist()
        self._stats.received_tokens += len(tokens)
        positions: dict[int, int] = {}  # of the next logprobs, by handle
        for handle, token in zip(handles, tokens, strict=True):
            output = self._live.get(handle)
            if output is None or output.incarnation != incarnation:
                self._claim(handle, incarnation, ended)
                continue
            output.num_tokens += 1
            if not 0 <= token < output.vocab_size or output.num_tokens > output.max_tokens:
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
        """The live output that a worker may speak of. None: counted as late, or as a lie."""
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
        is_whole = finished.reason in (WireFinishReason.STOP, WireFinishReason.LENGTH)
        if is_whole and output.embedding_sink is not None:
            self._fault(output, "missing_embedding", ended)
            return
        if is_whole and finished.completion_tokens != output.num_tokens:
            self._fault(output, "wrong_count", ended)
            return
        del self._live[output.handle]
        ended.append(output)
        try:
            output.sink.on_finished(finished)
        except Exception:
            self._stats.sink_errors += 1
            log.exception("sink_failed", request_id=output.request_id)

    def _fault(self, output: Output, kind: str, ended: list[Output]) -> None:
        self._stats.protocol_errors[kind] += 1
        log.error("worker_broke_protocol", kind=kind, request_id=output.request_id)
        output.is_faulted = True
        self.lose(output, LostReason.INTERNAL, "the worker broke the protocol")
        ended.append(output)

    def _start(self, output: Output, ended: list[Output]) -> None:
        try:
            output.sink.on_started()
        except Exception:
            self._sink_failed(output, ended)

    def _sink_failed(self, output: Output, ended: list[Output]) -> None:
        """A defect of ours: this output ends, the others go on."""
        self._stats.sink_errors += 1
        log.exception("sink_failed", request_id=output.request_id)
        output.is_faulted = True
        self.lose(output, LostReason.INTERNAL, "a defect of the gateway")
        ended.append(output)
