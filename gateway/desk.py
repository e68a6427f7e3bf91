"""From a request to a running output: check, resolve, tokenize, admit, choose a worker, send. And back out again.

Knows requests and the pool; must not know how answers travel (`gateway.servicers`).
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from octavo.v1 import inference_pb2 as pb

from gateway.admission import Admission
from gateway.config import RequestLimits
from gateway.errors import DeadlinePassed, Draining, InvalidRequest, RequestError, Violation
from gateway.live import LiveRequest, LiveRequests
from gateway.meters import GatewayMeters
from gateway.models import ServedModels
from gateway.output import OutputAssembler, OutputFormat
from gateway.rpc.scope import RpcScope
from gateway.sampling import complete_sampling
from gateway.stream import OutputStream
from gateway.text.model_text import ModelText
from gateway.text.service import TextService
from gateway.text.stop_matcher import StopStrings
from gateway.validation.chat import chat_input
from gateway.validation.generate import check_capacity, check_context, check_ids
from gateway.workers.errors import WorkerGone
from gateway.workers.pool import WorkerPool
from gateway.workers.views import RunRequest, WorkerView
from wire.messages import ModelCard

_MAX_CHOICES = 3  # a worker may leave between the choice and the send


@dataclass(slots=True, eq=False)
class _Preparing:
    """A request between its admission and its worker. error: why its task was cancelled, where we did it."""

    task: "asyncio.Task[object]"
    error: RequestError | None = None


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    assert task is not None, "requests are opened by tasks"
    return task


class Desk:
    """One per gateway process; every method on its event loop."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        models: ServedModels,
        text: TextService,
        limits: RequestLimits,
        meters: GatewayMeters,
        receipt_timeout_s: float,
    ) -> None:
        self.pool = pool
        self.models = models
        self.text = text
        self.limits = limits
        self.meters = meters
        self.admission = Admission(max_requests=limits.max_requests)
        self.live = LiveRequests()
        self.is_draining = False
        self._preparing: dict[str, _Preparing] = {}
        self._receipt_timeout_s = receipt_timeout_s

    def check_open(self) -> None:
        """Raises Draining once shutting down has begun."""
        if self.is_draining:
            raise Draining("this gateway is shutting down")

    async def open(
        self, request: pb.GenerateRequest, scope: RpcScope, *, prefix: str, timeout_s: float | None
    ) -> LiveRequest:
        """Start a validated request. prefix: its path in the message. timeout_s: what remains of the caller's time.

        The caller of this has to `close` what it gets. Raises RequestError, TextError, PoolError; then nothing is held.
        """
        self.check_open()
        deadline_s = None if timeout_s is None else scope.started_s + timeout_s
        _check_deadline(deadline_s)
        card = self.models.resolve(request.model, self.pool.cards(), path=f"{prefix}model")
        scope.model = card.name
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        self.admission.enter(scope.request_id)
        preparing = self._preparing[scope.request_id] = _Preparing(_current_task())
        try:
            return await self._open_admitted(request, card, scope, prefix, deadline_s)
        except BaseException as error:
            self.admission.leave(scope.request_id)
            if isinstance(error, asyncio.CancelledError) and preparing.error is not None:
                preparing.task.uncancel()
                raise preparing.error from None
            raise
        finally:
            del self._preparing[scope.request_id]

    async def _open_admitted(
        self, request: pb.GenerateRequest, card: ModelCard, scope: RpcScope, prefix: str, deadline_s: float | None
    ) -> LiveRequest:
        prompt_ids = await self._prompt_ids(request, card, prefix)
        stop_ids = check_ids(request.stop.token_ids, card.vocab_size, f"{prefix}stop.token_ids")
        if len(prompt_ids) == 0:
            raise InvalidRequest((Violation(field=f"{prefix}input", description="gives no tokens"),))
        stops = await self._stop_strings(request)
        output = self._output_format(request, card, frozenset(stop_ids.tolist()), stops)
        _check_deadline(deadline_s)
        for attempt in range(_MAX_CHOICES):
            worker = self.pool.choose(card.name, prompt_ids, request.cache_salt)
            check_capacity(
                num_prompt_tokens=len(prompt_ids),
                min_tokens=request.stop.min_tokens,
                card=card,
                capacity=worker.capacity,
            )
            try:
                return self._send(request, worker, prompt_ids, output, scope, deadline_s)
            except WorkerGone:
                if attempt == _MAX_CHOICES - 1:
                    raise
        raise AssertionError("unreachable")

    async def _prompt_ids(self, request: pb.GenerateRequest, card: ModelCard, prefix: str) -> np.ndarray:
        """int32 [T]."""
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            ids = request.token_ids.ids
            check_context(len(ids), 1, card)  # before looking at millions of them
            return check_ids(ids, card.vocab_size, f"{prefix}token_ids.ids")
        text, max_bytes = self.models.text_of(card), self.limits.max_prompt_bytes
        if kind == "text":
            encoded = await self.text.run(lambda: text.encode(request.text, max_bytes=max_bytes))
        else:
            encoded = await self.text.run(lambda: text.encode_chat(chat_input(request.chat), max_bytes=max_bytes))
        return encoded.ids_T

    async def _stop_strings(self, request: pb.GenerateRequest) -> StopStrings | None:
        strings = list(request.stop.strings)
        if not strings:
            return None
        if sum(map(len, strings)) > 512:  # the largest automaton takes milliseconds to build
            return await self.text.run(lambda: StopStrings(strings))
        return StopStrings(strings)

    def _output_format(
        self, request: pb.GenerateRequest, card: ModelCard, stop_ids: frozenset[int], stops: StopStrings | None
    ) -> OutputFormat:
        wants_text = request.output.format != pb.OUTPUT_FORMAT_TOKEN_IDS
        return OutputFormat(
            bytes_by_id=_bytes_by_id(request.output, self.models.text_of(card)) if wants_text else None,
            wants_ids=request.output.format in (pb.OUTPUT_FORMAT_TOKEN_IDS, pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS),
            stop_strings=stops,
            stop_ids=stop_ids if request.stop.ignore_eos else stop_ids | frozenset(card.eos_token_ids),
            min_tokens=request.stop.min_tokens,
        )

    def _send(
        self,
        request: pb.GenerateRequest,
        worker: WorkerView,
        prompt_ids: np.ndarray,
        output: OutputFormat,
        scope: RpcScope,
        deadline_s: float | None,
    ) -> LiveRequest:
        """No await in here: nothing can be lost between the send and the caller's `close`."""
        max_on_worker = worker.capacity.max_num_seqs + worker.capacity.max_waiting
        self.admission.place(scope.request_id, worker.worker_id, max_on_worker=max_on_worker)
        sampling = complete_sampling(request, worker.card, num_prompt_tokens=len(prompt_ids))
        stream = OutputStream(
            OutputAssembler(output), max_pending_tokens=self.limits.max_pending_tokens, on_match=self._matched(scope)
        )
        now_s = time.monotonic()
        run = RunRequest(
            request_id=scope.request_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=None if deadline_s is None else max(0.001, deadline_s - now_s),
        )
        handle = self.pool.open(worker, run, stream)
        live = LiveRequest(
            request_id=scope.request_id,
            card=worker.card,
            worker=worker,
            handle=handle,
            stream=stream,
            sampling=sampling,
            num_prompt_tokens=len(prompt_ids),
            arrived_s=scope.started_s,
            sent_s=now_s,
            task=_current_task(),
        )
        self.live.add(live)
        scope.worker_id = worker.worker_id
        meters = self.meters.of_model(worker.card.name)
        meters.started += 1
        meters.prompt_tokens += len(prompt_ids)
        return live

    def _matched(self, scope: RpcScope) -> Callable[[OutputStream], None]:
        """When a stop string ends the output the worker is told, and its figures are waited for, not for ever."""

        def cancel(stream: OutputStream) -> None:
            live = self.live.get(scope.request_id)
            if live is not None and live.stream is stream:
                self.pool.cancel(live.handle)
                asyncio.get_running_loop().call_later(self._receipt_timeout_s, stream.stop_waiting_for_figures)

        return cancel

    def fail(self, request_id: str, error: RequestError) -> bool:
        """End a request from here, whatever it is doing; False where it is not in flight."""
        live, preparing = self.live.get(request_id), self._preparing.get(request_id)
        if live is not None:
            live.fail(error)
        elif preparing is not None:
            preparing.error = error
            preparing.task.cancel()
        return live is not None or preparing is not None

    def fail_all(self, error: RequestError) -> int:
        """End every request; how many."""
        return sum(self.fail(request_id, error) for request_id in self.admission.request_ids())

    def close(self, live: LiveRequest) -> None:
        """The RPC is over, however: free the worker at once where it still runs, forget the request. Idempotent."""
        if live.stream.finished is None:
            self.pool.cancel(live.handle)
        live.stream.fail(Draining("closed"))  # a no-op on a stream that has ended
        self.live.remove(live.request_id)
        self.admission.leave(live.request_id)


def _bytes_by_id(output: pb.OutputOptions, text: ModelText) -> tuple[bytes, ...]:
    skips = output.skip_special_tokens if output.HasField("skip_special_tokens") else True
    return text.table.visible_bytes if skips else text.table.all_bytes


def _check_deadline(deadline_s: float | None) -> None:
    if deadline_s is not None and deadline_s <= time.monotonic():
        raise DeadlinePassed("the deadline passed before the request was sent to a worker")
