"""Between the wire's messages and the scheduler's and block manager's own values. Pure; knows no sockets."""

from collections.abc import Iterator

import numpy as np

from blockmgr.events import BlockEvent, EventKind
from wire.messages import Finished, KvEvent, KvEventKind, KvEvents, Run, Sampling, StepOutput, WireFinishReason
from worker.outputs import GatewayOutput
from worker.ports import GatewayIndex
from worker.request import AddRequest, RequestKey
from worker.shares import MAX_WEIGHT

MAX_EVENTS_PER_MESSAGE = 512  # some milliseconds of the gateway's loop, and far from what a frame may hold
_RARE_KINDS = {EventKind.REMOVED: KvEventKind.REMOVED, EventKind.CLEARED: KvEventKind.CLEARED}


def asked_by(gateway: GatewayIndex, run: Run) -> AddRequest:
    """What a Run asks for. Raises ValueError where its token ids are no int32, or fewer than it resumes."""
    token_ids_T = np.frombuffer(run.prompt_ids, np.dtype("<i4"))
    num_prompt_tokens = len(token_ids_T) - run.num_resumed_tokens
    if not 0 <= num_prompt_tokens <= len(token_ids_T):
        raise ValueError(f"num_resumed_tokens: {run.num_resumed_tokens} of {len(token_ids_T)} tokens")
    if run.fork_handles and (run.num_resumed_tokens or run.pooling is not None):
        raise ValueError("fork_handles: with resumed output or pooling")
    if len({run.handle, *run.fork_handles}) <= len(run.fork_handles):
        raise ValueError("fork_handles: not distinct")
    if not 1 <= run.weight <= MAX_WEIGHT:
        raise ValueError(f"weight: {run.weight} is not in [1, {MAX_WEIGHT}]")
    return AddRequest(
        key=RequestKey(gateway, run.handle),
        request_id=run.request_id,
        prompt_ids_T=token_ids_T[:num_prompt_tokens],
        resumed_ids_T=token_ids_T[num_prompt_tokens:],
        sampling=run.sampling if run.pooling is None else Sampling(temperature=0.0, ignore_eos=True, max_tokens=1),
        priority=run.priority,
        cache_salt=run.cache_salt,
        timeout_s=run.timeout_s,
        pooling=run.pooling,
        fork_handles=run.fork_handles,
        tenant=run.tenant,
        weight=run.weight,
    )


def refused_run(run: Run, detail: str) -> GatewayOutput:
    """The answer to a Run that cannot even be read."""
    return GatewayOutput(
        finished=tuple(
            Finished(handle=handle, reason=WireFinishReason.ERROR, error="INVALID_FIELD", detail=detail)
            for handle in dict.fromkeys((run.handle, *run.fork_handles))
        )
    )


def step_output(output: GatewayOutput, *, epoch: str, seq: int, step: int) -> StepOutput:
    """One gateway's news as it travels."""
    return StepOutput(
        epoch=epoch,
        seq=seq,
        step=step,
        handles=output.handles_N.astype("<i8", copy=False).tobytes(),
        tokens=output.tokens_N.astype("<i4", copy=False).tobytes(),
        logprobs=output.logprobs,
        started=output.started,
        finished=output.finished,
        prompt_logprobs=output.prompt_logprobs,
        embeddings={
            handle: embedding_D.astype("<f4", copy=False).tobytes() for handle, embedding_D in output.embeddings.items()
        },
    )


def kv_events(events: list[BlockEvent], *, epoch: str) -> Iterator[KvEvents]:
    """Changes of the prefix cache as they travel, in messages of a bounded size."""
    for begin in range(0, len(events), MAX_EVENTS_PER_MESSAGE):
        some = events[begin : begin + MAX_EVENTS_PER_MESSAGE]
        yield KvEvents(epoch=epoch, events=tuple(_kv_event(event) for event in some))


def _kv_event(event: BlockEvent) -> KvEvent:
    return KvEvent(
        kind=KvEventKind.STORED if event.kind is EventKind.STORED else _RARE_KINDS[event.kind],
        block_hash=event.block_hash,
        parent_hash=event.parent_hash,
        token_ids=event.token_ids,
        salt=event.salt,
    )
