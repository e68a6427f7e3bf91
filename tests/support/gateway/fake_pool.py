"""A worker pool without workers: tests say what comes back, and read what was asked for."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from octavo.gateway.workers.errors import NoWorker, WorkerBusy, WorkerGone
from octavo.gateway.workers.events import BlockSubscription
from octavo.gateway.workers.prefix_index import PrefixIndexes
from octavo.gateway.workers.queries import WorkerDetails
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import EmbeddingSink, OutputSink, WorkerState, WorkerView
from octavo.wire.messages import AdminReply, Capacity, Finished, ModelCard, Run, TokenLogprobs, WireFinishReason


def model_card(name: str = "tiny", **changes: object) -> ModelCard:
    """A card with plausible figures."""
    fields: dict[str, object] = {
        "name": name,
        "fingerprint": f"fingerprint-of-{name}",
        "architecture": "Qwen2ForCausalLM",
        "dtype": "float32",
        "max_model_len": 256,
        "vocab_size": 600,
        "eos_token_ids": (0,),
        "default_sampling": {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.125},
        "tokenizer_digest": "d" * 64,
    }
    return ModelCard(**fields | changes)  # type: ignore[arg-type]


def worker_view(worker_id: str = "w0", **changes: object) -> WorkerView:
    """A ready worker of the card above with 64 blocks of 16."""
    fields: dict[str, object] = {
        "worker_id": worker_id,
        "epoch": "e1",
        "state": WorkerState.READY,
        "card": model_card(),
        "capacity": Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_waiting=4, max_batch_tokens=64),
        "in_flight": 0,
        "num_steps": 7,
        "num_running": 0,
        "num_waiting": 0,
        "num_free_blocks": 60,
        "num_cached_blocks": 4,
        "heartbeat_age_s": 0.25,
        "pid": 4242,
    }
    return WorkerView(**fields | changes)  # type: ignore[arg-type]


@dataclass(eq=False)
class FakeRun:
    """One output that was asked for."""

    handle: int
    worker: WorkerView
    request: Run
    sink: OutputSink
    is_cancelled: bool = False
    is_over: bool = False
    num_tokens: int = 0

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32, as sent."""
        return np.frombuffer(self.request.prompt_ids, "<i4")

    def tokens(self, ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """Deliver tokens as one step message would; none after a cancel, as the real pool guarantees."""
        if self.is_cancelled or self.is_over:
            return
        self.num_tokens += len(ids)
        self.sink.on_tokens(ids, logprobs)

    def embed(self, values: list[float], **figures: object) -> None:
        """Deliver a vector and the end."""
        if not self.is_cancelled and not self.is_over:
            cast(EmbeddingSink, self.sink).on_embedding(np.asarray(values, np.float32))
        self.finish(WireFinishReason.LENGTH, **figures)

    def finish(self, reason: WireFinishReason = WireFinishReason.LENGTH, **figures: object) -> None:
        """The terminal call; ignored if there was one already."""
        if self.is_over:
            return
        self.is_over = True
        fields = {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": self.num_tokens,
            "cached_tokens": 3,
            "computed_tokens": 5,
            "preemptions": 1,
            "queue_s": 0.25,
            "prefill_s": 0.5,
            "decode_s": 0.75,
        } | figures
        self.sink.on_finished(Finished(handle=self.handle, reason=reason, **fields))  # type: ignore[arg-type]

    def lose(self, reason: str = "WORKER_LOST", detail: str = "") -> None:
        """The other terminal call."""
        if not self.is_over:
            self.is_over = True
            self.sink.on_lost(reason, detail)


@dataclass(eq=False)
class FakePool:
    """Shaped like gateway.workers.pool.WorkerPool. on_run: called with each new run, to script its output.
    answers_cancels: whether a cancel is followed by Finished(CANCELLED) at once."""

    views: list[WorkerView] = field(default_factory=lambda: [worker_view()])
    on_run: Callable[[FakeRun], None] | None = None
    answers_cancels: bool = True
    runs: list[FakeRun] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    paces: list[tuple[str, int]] = field(default_factory=list)  # pauses and resumes, by handle
    queries: list[dict[str, object]] = field(default_factory=list)
    replies: list[tuple[str, AdminReply]] = field(default_factory=list)
    details: list[WorkerDetails] = field(default_factory=list)
    refuse: list[Exception] = field(default_factory=list)  # raised by the next opens
    stats: PoolStats = field(default_factory=PoolStats)
    has_taken_leave: bool = False
    is_closed: bool = False
    index_bytes: int = 0
    prefixes: PrefixIndexes = field(
        default_factory=lambda: PrefixIndexes(max_nodes=1000, stats=PoolStats(), now_us=lambda: 1000)
    )
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _handles: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def start(self) -> None:
        """Nothing to bind."""

    def take_leave(self) -> None:
        """Nobody to tell."""
        self.has_taken_leave = True

    async def close(self) -> None:
        """End what is open, like the real pool."""
        self.is_closed = True
        for run in self.runs:
            run.lose("DRAINING")

    def on_change(self, callback: Callable[[], None]) -> None:
        """Like the real pool."""
        self._callbacks.append(callback)

    def set_views(self, *views: WorkerView) -> None:
        """Workers came or went."""
        self.views = list(views)
        for callback in self._callbacks:
            callback()

    def cards(self) -> dict[str, ModelCard]:
        """Cards of ready workers."""
        return {view.card.name: view.card for view in self.views if view.state is WorkerState.READY}

    def workers(self) -> tuple[WorkerView, ...]:
        """All workers."""
        return tuple(self.views)

    def choose(self, model: str, prompt_ids: np.ndarray, salt: str) -> WorkerView:
        """The first ready worker of the model."""
        for view in self.views:
            if view.card.name == model and view.state is WorkerState.READY:
                return view
        raise NoWorker(model)

    def draw_handles(self, num_outputs: int) -> list[int]:
        """Like the real pool."""
        return [next(self._handles) for _ in range(num_outputs)]

    def submit(self, worker: WorkerView, run: Run, sinks: Sequence[OutputSink]) -> None:
        """Remember a run for each sink, and start the script."""
        if self.refuse:
            raise self.refuse.pop(0)
        handles = (run.handle, *run.fork_handles)
        runs = [FakeRun(handle, worker, run, sink) for handle, sink in zip(handles, sinks, strict=True)]
        self.runs += runs
        for each in runs:
            if self.on_run is not None:
                self.on_run(each)

    def cancel(self, handle: int) -> None:
        """Counted, and answered if answers_cancels."""
        self.cancelled.append(handle)
        for run in self.runs:
            if run.handle == handle and not run.is_cancelled:
                run.is_cancelled = True
                if self.answers_cancels:
                    run.finish(WireFinishReason.CANCELLED)

    def pause(self, handle: int) -> None:
        """Recorded."""
        self.paces.append(("pause", handle))

    def resume(self, handle: int) -> None:
        """Recorded."""
        self.paces.append(("resume", handle))

    def follow_blocks(self, model: str, salt: str) -> BlockSubscription:
        """Like the real pool, from `prefixes`."""
        return self.prefixes.follow(model, salt)

    def end_feeds(self) -> None:
        """Like the real pool."""
        self.prefixes.end_feeds()

    async def query_details(self, *, max_cells: int, max_outputs: int, timeout_s: float) -> list[WorkerDetails]:
        """The prepared details."""
        self.queries.append({"max_cells": max_cells, "max_outputs": max_outputs})
        return self.details

    async def query(
        self, *, audit: bool, flush: bool, timeout_s: float, model: str | None = None
    ) -> list[tuple[str, AdminReply]]:
        """The prepared replies."""
        self.queries.append({"audit": audit, "flush": flush, "model": model})
        return self.replies


def busy(worker_id: str = "w0") -> WorkerBusy:
    """What submit raises if a worker is full."""
    return WorkerBusy(worker_id, "queue full")


def gone(worker_id: str = "w0") -> WorkerGone:
    """What submit raises if a worker has just left."""
    return WorkerGone(worker_id)


__all__ = ["FakePool", "FakeRun", "busy", "gone", "model_card", "worker_view"]


def speaking(*ids: int, end: tuple[WireFinishReason, int | None] = (WireFinishReason.LENGTH, None)) -> FakePool:
    """A pool whose outputs give these tokens one by one and then end. end: the reason, and the token that stopped
    it."""

    def speak(run: FakeRun) -> None:
        for token_id in ids:
            run.tokens([token_id])
        run.finish(end[0], stop_token_id=end[1])

    return FakePool(on_run=speak)
