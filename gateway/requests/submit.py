"""From a request to a worker that has it: resolve the model, admit, prepare, choose a worker, send.

Must not know how answers travel (`gateway.servicers`), nor text (`gateway.requests.input_processor`).
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.gateway.auth.authenticator import PrefixSalt
from octavo.gateway.config import RequestLimits
from octavo.gateway.models import ServedModels, check_same
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.requests.input_processor import (
    BACKSTOP_S,
    Deadline,
    InputProcessor,
    Prepared,
    deadline_before_sending,
    deadline_of,
    share_of,
    until,
)
from octavo.gateway.requests.tracker import RequestTracker, TrackedRequest, current_task
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.streams.output_processor import OutputProcessor
from octavo.gateway.streams.stream import AtDeadline, Coalescer, Notifier, OutputStream
from octavo.gateway.text.service import TextService
from octavo.gateway.validation.generate import check_capacity, check_outputs
from octavo.gateway.workers.errors import WorkerGone
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.router import MAX_CHOICES
from octavo.gateway.workers.views import WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Grammar, ModelCard, Run, SamplingParams

# What generation_config.json may set, and the defaults where it does not.
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def default_sampling(card: ModelCard) -> dict[str, Any]:
    """The model's values for unset fields."""
    known = {name: value for name, value in card.default_sampling.items() if name in _NEUTRAL}
    return _NEUTRAL | known


def complete_sampling(
    request: pb.GenerateRequest,
    card: ModelCard,
    *,
    num_prompt_tokens: int,
    grammar: Grammar | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """A validated request's parameters, complete. max_tokens is cut at the end of the context. grammar: its constraint.
    bad_words: as token sequences."""
    stop, output = request.stop, request.output
    values = default_sampling(card) | _given(request.sampling)
    values |= {"top_k": int(values["top_k"]), "bad_words": bad_words}
    values.setdefault("seed", secrets.randbits(64))
    room = card.max_model_len - num_prompt_tokens
    return SamplingParams(
        **values,
        max_tokens=min(stop.max_tokens, room) if stop.HasField("max_tokens") else room,
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        grammar=grammar,
    )


def _given(params: pb.SamplingParams) -> dict[str, Any]:
    """The fields that are set, by name; the contract and the wire use the same names for sampling parameters."""
    values: dict[str, Any] = {}
    for field, value in params.ListFields():
        values[field.name] = value if not field.is_repeated else dict(value) if field.message_type else tuple(value)
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collaborators:
    """The parts of a gateway that requests of every RPC and dialect need on their way to a worker."""

    tracker: RequestTracker
    pool: WorkerPool
    models: ServedModels
    text: TextService
    input_processor: InputProcessor
    prefix_salt: PrefixSalt
    limits: RequestLimits
    meters: GatewayMeters


class Submitter:
    """One per gateway; every method on its event loop. coalescer: shared by all streams."""

    def __init__(self, collaborators: Collaborators, *, receipt_timeout_s: float) -> None:
        """receipt_timeout_s: how long to wait for the worker's figures after a stop string."""
        self.coalescer = Coalescer()
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._input_processor = collaborators.input_processor
        self._prefix_salt = collaborators.prefix_salt
        self._limits = collaborators.limits
        self._meters = collaborators.meters
        self._receipt_timeout_s = receipt_timeout_s

    async def submit(
        self, request: pb.GenerateRequest, scope: RpcScope, *, prefix: str, timeout_s: float | None
    ) -> TrackedRequest:
        """Start a validated request. prefix: its path in the message. timeout_s: the caller's, from the call's start.

        The caller must answer it within `RequestTracker.closing`. Raises RequestError, TextError, PoolError; then
        nothing is held.
        """
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        self._tracker.check_open()
        deadline = deadline_of(
            arrived_s=scope.started_s,
            wire_timeout_s=timeout_s,
            timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
            at_end=AtDeadline.PARTIAL if request.return_partial_on_deadline else AtDeadline.STATUS,
        )
        card = self._models.card_of(request.model or scope.model, self._pool, path=f"{prefix}model")
        with self._tracker.enter(scope, num_outputs=request.num_outputs or 1):
            async with until(deadline.end_s):
                prepared = await self._input_processor.process(
                    request, card, prefix=prefix, deadline=deadline, share=share_of(scope)
                )
            return self._send_to_best(prepared, scope)

    # No await from here to `RequestTracker.closing`: a request that was sent is always closed.

    def _send_to_best(self, prepared: Prepared, scope: RpcScope) -> TrackedRequest:
        """Send to the worker that is best now, or to another if that one leaves before it has the request."""
        salt = self._prefix_salt.of(scope.caller, prepared.request.cache_salt)
        for _ in range(MAX_CHOICES - 1):
            try:
                return self._send(prepared, self._choose(prepared, salt), scope, salt)
            except WorkerGone:
                continue
        return self._send(prepared, self._choose(prepared, salt), scope, salt)

    def _choose(self, prepared: Prepared, salt: str) -> WorkerView:
        if prepared.deadline.end_s is not None and prepared.deadline.end_s <= time.monotonic():
            raise deadline_before_sending()
        worker = self._pool.choose(prepared.card.name, prepared.prompt_ids_T, salt)
        check_same(prepared.card, worker)
        check_capacity(
            num_prompt_tokens=prepared.num_prompt_tokens,
            min_tokens=prepared.request.stop.min_tokens,
            card=worker.card,
            capacity=worker.capacity,
        )
        check_outputs(len(prepared.outputs), worker.capacity)
        return worker

    def _send(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> TrackedRequest:
        self._tracker.place(scope, worker)
        run, notifier = self._run(prepared, worker, scope, salt), Notifier()
        streams = [self._stream(index, prepared, scope, notifier) for index in range(len(prepared.outputs))]
        self._tracker.reserve(scope, prepared.num_prompt_tokens + len(streams) * run.sampling.max_tokens)
        sent_s = time.monotonic()  # before: the worker may have begun by the time that this task goes on
        self._pool.submit(worker, run, streams)
        meters, tells_prompt = self._meters.of_model(worker.card.name), prepared.request.output.return_prompt
        tenant = scope.caller.tenant
        tracked = TrackedRequest(
            scope=scope,
            worker=worker,
            outputs=tuple(zip((run.handle, *run.fork_handles), streams, strict=True)),
            sampling=run.sampling,
            num_prompt_tokens=prepared.num_prompt_tokens,
            sent_s=sent_s,
            task=current_task(),
            meters=meters,
            tenant_meters=None if tenant is None else self._meters.of_tenant(tenant),
            prompt_text=prepared.prompt_text if tells_prompt else "",
            prompt_ids=prepared.prompt_ids_T.tolist() if tells_prompt else (),
        )
        if scope.trace is not None and prepared.request.WhichOneof("input") == "chat":
            scope.trace.operation = "chat"
        self._tracker.add(tracked)
        _set_backstop(tracked, prepared.deadline)
        meters.started += 1
        meters.prompt_tokens += tracked.num_prompt_tokens
        if tracked.tenant_meters is not None:
            tracked.tenant_meters.prompt_tokens += tracked.num_prompt_tokens
        meters.request_params_n.observe(len(streams))
        meters.request_params_max_tokens.observe(run.sampling.max_tokens)
        return tracked

    def _run(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> Run:
        request, deadline_s = prepared.request, prepared.deadline.end_s
        handle, *fork_handles = self._pool.draw_handles(len(prepared.outputs))
        return Run(
            handle=handle,
            fork_handles=tuple(fork_handles),
            request_id=scope.request_id,
            prompt_ids=np.ascontiguousarray(prepared.prompt_ids_T, "<i4").tobytes(),
            sampling=complete_sampling(
                request,
                worker.card,
                num_prompt_tokens=prepared.num_prompt_tokens,
                grammar=prepared.grammar,
                bad_words=prepared.bad_words,
            ),
            priority=request.priority,
            cache_salt=salt,
            timeout_s=None if deadline_s is None else max(0.001, deadline_s - time.monotonic()),
            tenant=self._prefix_salt.label_of(scope.caller),
            weight=scope.caller.weight,
            traceparent=scope.traceparent,
        )

    def _stream(self, index: int, prepared: Prepared, scope: RpcScope, notifier: Notifier) -> OutputStream:
        key, tracker = scope.key, self._tracker
        return OutputStream(
            OutputProcessor(prepared.outputs[index]),
            max_pending_tokens=self._limits.max_pending_tokens,
            pause_pending_tokens=self._limits.pause_pending_tokens,
            on_match=self._cancel_at_match(key),
            # Of a tenant: the output no longer counts as queued.
            on_started=None if scope.caller.tenant is None else lambda: tracker.quotas.started(key, index),
            on_moved=lambda worker_id: tracker.admission.move(key, worker_id, index),
            on_flow=self._pause_or_resume(key),
            at_deadline=prepared.deadline.at_end,
            notifier=notifier,
            coalescer=self.coalescer,
        )

    def _cancel_at_match(self, key: str) -> Callable[[OutputStream], None]:
        """A callback for when a stop string ends the output: cancels it at the worker, and waits a bounded time for its
        figures."""

        def cancel(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                self._pool.cancel(handle)
                asyncio.get_running_loop().call_later(self._receipt_timeout_s, stream.stop_waiting_for_figures)

        return cancel

    def _pause_or_resume(self, key: str) -> Callable[[OutputStream], None]:
        """A callback for when a reader falls behind or has caught up: pauses or resumes its output at the worker."""

        def send(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                (self._pool.pause if stream.is_paused else self._pool.resume)(handle)

        return send

    def _handles_of(self, stream: OutputStream, key: str) -> list[int]:
        tracked = self._tracker.get(key)
        return [handle for handle, other in tracked.outputs if other is stream] if tracked is not None else []


def _set_backstop(tracked: TrackedRequest, deadline: Deadline) -> None:
    if deadline.end_s is not None and deadline.needs_backstop:
        delay_s = deadline.end_s - time.monotonic() + BACKSTOP_S
        tracked.backstop = asyncio.get_running_loop().call_later(delay_s, tracked.end_at_deadline, deadline.figures_s)
