"""Embed: every input is its own request to the workers, a bounded number of them at a time.

Must not know how answers travel.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.gateway.errors import ExceedsCapacity, InvalidRequest, RequestError, error_of, from_reason
from octavo.gateway.models import check_same
from octavo.gateway.requests.input_processor import BACKSTOP_S, share_of, until
from octavo.gateway.requests.spans import Timeline, trace_embeddings
from octavo.gateway.requests.submit import Collaborators
from octavo.gateway.requests.tracker import PreparingRequest
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.streams.stream import Move
from octavo.gateway.text.errors import TooManyTokens
from octavo.gateway.text.model_text import Bounds
from octavo.gateway.text.service import Share
from octavo.gateway.validation.generate import check_capacity, check_context, check_ids
from octavo.gateway.workers.errors import WorkerBusy, WorkerGone
from octavo.gateway.workers.router import MAX_CHOICES
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Finished, ModelCard, Pooling, Run, SamplingParams, TokenLogprobs

WINDOW = 64  # inputs of one call that workers have at a time
_NO_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
_POOLINGS = {
    pb.POOLING_UNSPECIFIED: Pooling.LAST_TOKEN,
    pb.POOLING_LAST_TOKEN: Pooling.LAST_TOKEN,
    pb.POOLING_MEAN: Pooling.MEAN,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedded:
    """One vector, float32 [D]. worker_id: the worker that computed it, after any moves. sent_s, ended_s: monotonic."""

    vector_D: np.ndarray
    num_prompt_tokens: int
    worker_id: str
    first_worker_id: str
    moves: tuple[Move, ...]
    figures: Finished
    sent_s: float
    ended_s: float

    @property
    def timeline(self) -> Timeline:
        """What a trace records of it."""
        return Timeline(
            worker_id=self.first_worker_id, sent_s=self.sent_s, ended_s=self.ended_s, moves=self.moves,
            figures=self.figures,
        )  # fmt: skip


class VectorSink:
    """An EmbeddingSink. worker_id: the worker that has the input. outcome: the vector, the figures, and when they
    came."""

    def __init__(self, worker_id: str, *, on_started: Callable[[], None]) -> None:
        self.worker_id = self.first_worker_id = worker_id
        self.moves: list[Move] = []
        self.on_started = on_started
        self.outcome: asyncio.Future[tuple[np.ndarray, Finished, float]] = asyncio.get_running_loop().create_future()
        self._vector_D: np.ndarray | None = None

    def on_tokens(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Never called: the pool refuses tokens for an embedding."""

    def on_embedding(self, embedding_D: np.ndarray) -> None:
        """The vector, before the end."""
        self._vector_D = embedding_D

    def on_finished(self, finished: Finished) -> None:
        """The worker is done: the outcome is the vector or an error."""
        error = error_of(finished)
        if error is not None or self._vector_D is None:
            self._fail(error or from_reason("INTERNAL", ""))
        elif not self.outcome.done():
            self.outcome.set_result((self._vector_D, finished, time.monotonic()))

    def on_lost(self, reason: str, detail: str) -> None:
        """The worker is gone."""
        self._fail(from_reason(reason, detail))

    def on_moved(self, worker_id: str, lost_s: float, moved_s: float) -> None:
        """Another worker computes it, or its own after a restart."""
        self.worker_id = worker_id
        self.moves.append(Move(worker_id, lost_s, moved_s))

    def _fail(self, error: RequestError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentInput:
    """An input that was sent to a worker. sent_s: monotonic."""

    handle: int
    sent_s: float
    num_prompt_tokens: int
    sink: VectorSink

    @property
    def is_running(self) -> bool:
        """Whether neither the vector nor an error has come."""
        return not self.sink.outcome.done()

    async def result(self) -> Embedded:
        """The vector. Raises the RequestError that ended it."""
        vector_D, figures, ended_s = await asyncio.shield(self.sink.outcome)
        return Embedded(
            vector_D=vector_D,
            num_prompt_tokens=self.num_prompt_tokens,
            worker_id=self.sink.worker_id,
            first_worker_id=self.sink.first_worker_id,
            moves=tuple(self.sink.moves),
            figures=figures,
            sent_s=self.sent_s,
            ended_s=ended_s,
        )


class Embedder:
    """One per gateway; every method on its event loop."""

    def __init__(self, collaborators: Collaborators) -> None:
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._input_processor = collaborators.input_processor
        self._prefix_salt = collaborators.prefix_salt
        self._limits = collaborators.limits
        self._meters = collaborators.meters

    async def embed(
        self, request: pb.EmbedRequest, scope: RpcScope, *, timeout_s: float | None
    ) -> tuple[ModelCard, list[Embedded]]:
        """The vectors of a validated request, in the order of its inputs. timeout_s: the caller's, from the call's
        start. Raises RequestError, TextError, PoolError; by then nothing is running."""
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        self._tracker.check_open()
        card = self._models.card_of(request.model or scope.model, self._pool)
        end_s = _end_s(request, scope, timeout_s)
        with self._tracker.hold(scope) as preparing:
            async with until(end_s):
                prompts = await self._prompts(request, card, share_of(scope))
            self._tracker.reserve(scope, sum(map(len, prompts)))
            async with until(None if end_s is None else end_s + BACKSTOP_S):
                embedded = await self._run(request, card, prompts, scope, end_s, preparing)
            trace_embeddings(scope, card, [each.timeline for each in embedded], num_tokens=sum(map(len, prompts)))
            return card, embedded

    async def _prompts(self, request: pb.EmbedRequest, card: ModelCard, share: Share) -> list[np.ndarray]:
        prompts = []
        for index, each in enumerate(request.inputs):
            path = f"inputs[{index}]."
            try:
                ids_T = await self._prompt_ids(each, card, path, request.truncate_prompt_tokens, share)
                check_context(len(ids_T), 1, card)
            except (ExceedsCapacity, TooManyTokens) as error:
                raise ExceedsCapacity(str(error), field=f"inputs[{index}]") from None
            if not len(ids_T):
                raise InvalidRequest.of(f"{path}input", "gives no tokens")
            prompts.append(ids_T)
        return prompts

    async def _prompt_ids(self, each: pb.EmbedInput, card: ModelCard, path: str, keep: int, share: Share) -> np.ndarray:
        """int32 [T]. keep: only this many last tokens; 0: all."""
        if each.WhichOneof("input") == "token_ids":
            given = each.token_ids.ids
            ids = given[-keep:] if keep else given
            return check_ids(ids, card.vocab_size, f"{path}token_ids.ids", first=len(given) - len(ids))
        max_bytes = self._limits.max_prompt_bytes
        bounds = Bounds(max_bytes=max_bytes, max_tokens=card.max_model_len - 1, keep=keep)
        encoded = await self._input_processor.encode(each, self._models.text_of(card), bounds, share)
        return encoded.ids_T[-keep:] if keep else encoded.ids_T

    async def _run(
        self,
        request: pb.EmbedRequest,
        card: ModelCard,
        prompts: Sequence[np.ndarray],
        scope: RpcScope,
        end_s: float | None,
        preparing: PreparingRequest,
    ) -> list[Embedded]:
        salt = self._prefix_salt.of(scope.caller, request.cache_salt)
        sent: list[SentInput] = []
        try:
            for index, ids_T in enumerate(prompts):
                await self._wait_for_room(sent)
                (handle,) = self._pool.draw_handles(1)
                run = Run(
                    handle=handle,
                    request_id=f"{scope.request_id}/{index}",
                    prompt_ids=np.ascontiguousarray(ids_T, "<i4").tobytes(),
                    sampling=_NO_SAMPLING,
                    priority=request.priority,
                    cache_salt=salt,
                    timeout_s=None if end_s is None else max(0.001, end_s - time.monotonic()),
                    pooling=_POOLINGS[request.pooling],
                    tenant=self._prefix_salt.label_of(scope.caller),
                    weight=scope.caller.weight,
                    traceparent=scope.traceparent,
                )
                try:
                    sent.append(await self._send(run, ids_T, card, preparing, sent))
                except ExceedsCapacity as error:
                    raise ExceedsCapacity(str(error), field=f"inputs[{index}]") from None
            return [await each.result() for each in sent]
        finally:
            preparing.num_used_tokens = sum(each.num_prompt_tokens for each in sent)  # even if not all have ended
            for each in sent:
                if each.is_running:
                    self._pool.cancel(each.handle)
                    each.sink.outcome.cancel()
                elif not each.sink.outcome.cancelled():
                    each.sink.outcome.exception()  # retrieved, so that asyncio does not report it

    async def _wait_for_room(self, sent: Sequence[SentInput]) -> None:
        while len(running := _running(sent)) >= WINDOW:
            await _first_of(running)

    async def _send(
        self, run: Run, ids_T: np.ndarray, card: ModelCard, preparing: PreparingRequest, sent: Sequence[SentInput]
    ) -> SentInput:
        """Send to a worker, waiting for room. Raises WorkerBusy only if none of this call's own inputs is going to
        end."""
        num_gone = 0
        while True:
            try:
                return self._try_send(run, ids_T, card, preparing)
            except WorkerGone:
                num_gone += 1
                if num_gone == MAX_CHOICES:
                    raise
            except WorkerBusy:
                if not (running := _running(sent)):
                    raise
                await _first_of(running)

    def _try_send(self, run: Run, ids_T: np.ndarray, card: ModelCard, preparing: PreparingRequest) -> SentInput:
        num_tokens, scope = len(ids_T), preparing.scope

        def started() -> None:
            preparing.is_begun = True
            self._tracker.quotas.started(scope.key)

        worker = self._pool.choose(card.name, ids_T, run.cache_salt)
        check_same(card, worker)
        check_capacity(num_prompt_tokens=num_tokens, min_tokens=0, card=worker.card, capacity=worker.capacity)
        sink = VectorSink(worker.worker_id, on_started=started)
        sent_s = time.monotonic()
        self._pool.submit(worker, run, [sink])
        preparing.model = card.name
        meters = self._meters.of_model(card.name)
        meters.started += 1
        meters.prompt_tokens += num_tokens
        if (tenant := scope.caller.tenant) is not None:
            self._meters.of_tenant(tenant).prompt_tokens += num_tokens
        return SentInput(handle=run.handle, sent_s=sent_s, num_prompt_tokens=num_tokens, sink=sink)


def normalized(vector_D: np.ndarray) -> np.ndarray:
    """The vector scaled to length 1, float32; a zero vector is returned as it is."""
    length = float(np.linalg.norm(vector_D.astype(np.float64)))
    return vector_D if length == 0.0 else (vector_D / length).astype(np.float32)


def _end_s(request: pb.EmbedRequest, scope: RpcScope, wire_timeout_s: float | None) -> float | None:
    timeouts = [] if wire_timeout_s is None else [wire_timeout_s]
    if request.HasField("timeout_s"):
        timeouts.append(request.timeout_s)
    return scope.started_s + min(timeouts) if timeouts else None


def _running(sent: Sequence[SentInput]) -> list[SentInput]:
    return [each for each in sent if each.is_running]


async def _first_of(running: Sequence[SentInput]) -> None:
    """Wait until one of them is done. Raises its error, if it failed."""
    done, _ = await asyncio.wait([each.sink.outcome for each in running], return_when=asyncio.FIRST_COMPLETED)
    for outcome in done:
        outcome.result()
