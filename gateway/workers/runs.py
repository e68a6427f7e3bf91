"""What a request becomes: the message that a worker gets, and the output that is kept here.

Pure. Must not know sockets, nor who chooses the worker.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from gateway.workers.outputs import Output
from gateway.workers.records import WorkerRecord
from gateway.workers.views import EmbeddingSink, OutputSink, PromptSink, RunRequest
from wire.messages import Run


def run_message(handles: Sequence[int], request: RunRequest) -> Run:
    """For all outputs of the request, by their handles."""
    return Run(
        handle=handles[0],
        fork_handles=tuple(handles[1:]),
        request_id=request.request_id,
        prompt_ids=np.ascontiguousarray(request.prompt_ids, "<i4").tobytes(),
        sampling=request.sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_s=request.timeout_s,
        pooling=request.pooling,
        num_resumed_tokens=request.num_resumed_tokens,
        tenant=request.tenant,
        weight=request.weight,
    )


def new_output(
    handle: int, record: WorkerRecord, request: RunRequest, index: int, sink: OutputSink, now_s: float
) -> Output:
    """Output `index` of a request, at its first worker. now_s: monotonic."""
    own = _alone(request, index)
    is_scored = own.sampling.num_prompt_logprobs is not None
    return Output(
        name=handle,
        handle=handle,
        incarnation=record.incarnation,
        fingerprint=record.card.fingerprint,
        request=own,
        deadline_s=None if request.timeout_s is None else now_s + request.timeout_s,
        vocab_size=record.card.vocab_size,
        max_tokens=request.sampling.max_tokens if request.pooling is None else 0,
        wants_logprobs=request.sampling.num_logprobs is not None,
        embedding_sink=cast(EmbeddingSink, sink) if request.pooling is not None else None,
        prompt_sink=cast(PromptSink, sink) if is_scored else None,
        num_unscored=len(request.prompt_ids) - 1 if is_scored else 0,
        sink=sink,
    )


def _alone(request: RunRequest, index: int) -> RunRequest:
    """What output `index` of a request is when it stands alone."""
    if not index:
        return request
    seed = (request.sampling.seed + index) % (1 << 64)
    return replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed, num_prompt_logprobs=None))


def resumed(output: Output, now_s: float) -> RunRequest:
    """The request that goes on behind what the output has given. now_s: monotonic."""
    request, sampling = output.request, output.request.sampling
    if output.prompt_sink is not None and not output.num_unscored:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    prompt_ids = np.concatenate([np.asarray(request.prompt_ids, np.int32), np.asarray(output.token_ids, np.int32)])
    return replace(
        request,
        prompt_ids=prompt_ids,
        sampling=sampling,
        num_resumed_tokens=len(output.token_ids),
        timeout_s=None if output.deadline_s is None else max(0.001, output.deadline_s - now_s),
    )
