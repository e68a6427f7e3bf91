"""Opens requests: resolve, admit, prepare, choose a worker, send. A request is open when a worker has it.

Must not know how answers travel (`gateway.servicers`), nor text (`gateway.requests.input_processor`), nor who else is
in flight (`gateway.requests.tracker`).
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

from octavo.gateway.requests.input_processor import Prepared
from octavo.gateway.requests.tracker import Desk, LiveRequest, current_task, now_ns
from octavo.gateway.rpc.scope import BACKSTOP_S, AtDeadline, Deadline, RpcScope, deadline_of, unsent, until
from octavo.gateway.streams.output_processor import OutputAssembler
from octavo.gateway.streams.stream import Bell, OutputStream
from octavo.gateway.validation.generate import check_capacity, check_outputs
from octavo.gateway.workers.errors import WorkerGone
from octavo.gateway.workers.pool import MAX_CHOICES
from octavo.gateway.workers.views import RunRequest, WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Grammar, ModelCard, Sampling

# A request's sampling and stop fields, completed with the model's defaults, as the worker takes them.


# What an unset field means where generation_config.json says nothing.
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def default_sampling(card: ModelCard) -> dict[str, float]:
    """What unset fields become for this model."""
    known = {name: value for name, value in card.default_sampling.items() if name in _NEUTRAL}
    return _NEUTRAL | known


def complete_sampling(
    request: pb.GenerateRequest,
    card: ModelCard,
    *,
    num_prompt_tokens: int,
    grammar: Grammar | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    """A validated request's parameters. max_tokens is cut at the end of the context. grammar: its constraint.
    bad_words: as tokens."""
    params, stop, output = request.sampling, request.stop, request.output
    values: dict[str, Any] = {
        name: getattr(params, name) if params.HasField(name) else default  # type: ignore[arg-type]
        for name, default in default_sampling(card).items()
    }
    values["top_k"] = int(values["top_k"])
    room = card.max_model_len - num_prompt_tokens
    return Sampling(
        **values,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        max_tokens=min(stop.max_tokens, room) if stop.HasField("max_tokens") else room,
        min_tokens=stop.min_tokens,
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        typical_p=params.typical_p if params.HasField("typical_p") else 1.0,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=bad_words,
        grammar=grammar,
    )


class Opener:
    """Has no state of its own; every method on the gateway's event loop."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def open(
        self, request: pb.GenerateRequest, scope: RpcScope, *, prefix: str, timeout_s: float | None
    ) -> LiveRequest:
        """Start a validated request. prefix: its path in the message. timeout_s: what remains of the caller's time.

        The caller of this has to `Desk.close` what it gets. Raises RequestError, TextError, PoolError; then nothing is
        held.
        """
        desk = self._desk
        desk.check_open()
        deadline = _deadline(request, scope, timeout_s)
        card = desk.card_of(request.model, scope, path=f"{prefix}model")
        scope.request_id = request.request_id or f"req-{uuid.uuid4().hex}"
        with desk.enter(scope, num_outputs=request.num_outputs or 1):
            async with until(deadline.end_s):
                prepared = await desk.preparer.prepare(
                    request, card, prefix=prefix, deadline=deadline, share=desk.share_of(scope)
                )
            return self._send_to_somebody(prepared, scope)

    # No await from here to `Desk.close`: nothing can be lost between the send and the caller's hands.

    def _send_to_somebody(self, prepared: Prepared, scope: RpcScope) -> LiveRequest:
        """To the worker that is best now; to another one where that one is gone before it has the request."""
        salt = self._desk.salt_of(scope, prepared.request.cache_salt)
        for _ in range(MAX_CHOICES - 1):
            try:
                return self._send(prepared, self._choose(prepared, salt), scope, salt)
            except WorkerGone:
                continue
        return self._send(prepared, self._choose(prepared, salt), scope, salt)

    def _choose(self, prepared: Prepared, salt: str) -> WorkerView:
        if prepared.deadline.end_s is not None and prepared.deadline.end_s <= time.monotonic():
            raise unsent()
        worker = self._desk.pool.choose(prepared.card.name, prepared.prompt_ids_T, salt)
        check_capacity(
            num_prompt_tokens=prepared.num_prompt_tokens,
            min_tokens=prepared.request.stop.min_tokens,
            card=worker.card,
            capacity=worker.capacity,
        )
        check_outputs(len(prepared.outputs), worker.capacity)
        return worker

    def _send(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> LiveRequest:
        desk = self._desk
        max_on_worker = worker.capacity.max_num_seqs + worker.capacity.max_waiting
        desk.admission.place(scope.key, worker.worker_id, max_on_worker=max_on_worker)
        run, bell = self._run_request(prepared, worker, scope, salt), Bell()
        streams = [self._stream(index, prepared, scope, bell) for index in range(len(prepared.outputs))]
        num_tokens = prepared.num_prompt_tokens + len(streams) * run.sampling.max_tokens
        desk.quotas.reserve(scope.key, num_tokens, now_ns())
        handles = desk.pool.open_all(worker, run, streams)
        live = _live_request(prepared, worker, scope, run, tuple(zip(handles, streams, strict=True)))
        desk.live.add(live)
        _set_backstop(live, prepared.deadline)
        meters = desk.meters.of_model(worker.card.name)
        meters.started += 1
        meters.prompt_tokens += live.num_prompt_tokens
        meters.request_params_n.observe(len(streams))
        meters.request_params_max_tokens.observe(run.sampling.max_tokens)
        return live

    def _run_request(self, prepared: Prepared, worker: WorkerView, scope: RpcScope, salt: str) -> RunRequest:
        request, deadline_s = prepared.request, prepared.deadline.end_s
        return RunRequest(
            request_id=scope.request_id,
            prompt_ids=prepared.prompt_ids_T,
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
            tenant=self._desk.label_of(scope),
            weight=scope.caller.weight,
        )

    def _stream(self, index: int, prepared: Prepared, scope: RpcScope, bell: Bell) -> OutputStream:
        return OutputStream(
            OutputAssembler(prepared.outputs[index]),
            max_pending_tokens=self._desk.limits.max_pending_tokens,
            pause_pending_tokens=self._desk.limits.pause_pending_tokens,
            on_match=self._matched(scope.key),
            on_started=self._started(scope, index),
            on_moved=lambda worker_id: self._desk.admission.move(scope.key, worker_id, index),
            on_flow=self._flowed(scope.key),
            at_deadline=prepared.deadline.at_end,
            bell=bell,
            coalescer=self._desk.coalescer,
        )

    def _started(self, scope: RpcScope, index: int) -> Callable[[], None] | None:
        """For tenants, whose outputs are no longer queued then."""
        key = scope.key
        return None if scope.caller.tenant is None else lambda: self._desk.quotas.started(key, index)

    def _matched(self, key: str) -> Callable[[OutputStream], None]:
        """When a stop string ends the output the worker is told, and its figures are waited for, not for ever."""

        def cancel(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                self._desk.pool.cancel(handle)
                asyncio.get_running_loop().call_later(self._desk.receipt_timeout_s, stream.stop_waiting_for_figures)

        return cancel

    def _flowed(self, key: str) -> Callable[[OutputStream], None]:
        """When a reader falls behind, or has caught up, the worker is told."""

        def tell(stream: OutputStream) -> None:
            for handle in self._handles_of(stream, key):
                (self._desk.pool.pause if stream.is_paused else self._desk.pool.resume)(handle)

        return tell

    def _handles_of(self, stream: OutputStream, key: str) -> list[int]:
        live = self._desk.live.get(key)
        return [handle for handle, other in live.outputs if other is stream] if live is not None else []


def _deadline(request: pb.GenerateRequest, scope: RpcScope, wire_timeout_s: float | None) -> Deadline:
    return deadline_of(
        arrived_s=scope.started_s,
        wire_timeout_s=wire_timeout_s,
        timeout_s=request.timeout_s if request.HasField("timeout_s") else None,
        at_end=AtDeadline.PARTIAL if request.return_partial_on_deadline else AtDeadline.STATUS,
    )


def _live_request(
    prepared: Prepared,
    worker: WorkerView,
    scope: RpcScope,
    run: RunRequest,
    outputs: tuple[tuple[int, OutputStream], ...],
) -> LiveRequest:
    """outputs: handle and stream of each."""
    (handle, stream), *further = outputs
    tells_prompt = prepared.request.output.return_prompt
    return LiveRequest(
        request_id=scope.request_id,
        key=scope.key,
        card=worker.card,
        worker=worker,
        handle=handle,
        stream=stream,
        further=tuple(further),
        prompt_text=prepared.prompt_text if tells_prompt else "",
        prompt_ids=prepared.prompt_ids_T.tolist() if tells_prompt else (),
        sampling=run.sampling,
        num_prompt_tokens=prepared.num_prompt_tokens,
        arrived_s=scope.started_s,
        sent_s=time.monotonic(),
        task=current_task(),
    )


def _set_backstop(live: LiveRequest, deadline: Deadline) -> None:
    if deadline.end_s is not None and deadline.needs_backstop:
        delay_s = deadline.end_s - time.monotonic() + BACKSTOP_S
        live.backstop = asyncio.get_running_loop().call_later(delay_s, live.end_at_deadline, deadline.figures_s)
