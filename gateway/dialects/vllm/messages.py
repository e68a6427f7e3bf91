"""Output pieces and ends as messages of VllmEngine."""

import time
from collections.abc import Sequence

import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, StreamState
from octavo.gateway.workers.events import BlockBatch, BlockChange, ChangeKind
from octavo.wire.messages import KvTier, TokenLogprobs

Positions = list[tuple[int, TokenLogprobs]]

_TIERS = {KvTier.DEVICE: common.KV_CACHE_TIER_DEVICE, KvTier.HOST: common.KV_CACHE_TIER_HOST}
_MEDIUMS = {KvTier.DEVICE: "GPU", KvTier.HOST: "CPU"}  # vLLM's names, whatever the device is


class KvBatches:
    """Changes of the prefix cache as batches of SubscribeKvEvents, for one subscriber. Events of changes are numbered
    from 1; those of the initial snapshot have number 0, as the dialect requires."""

    def __init__(self) -> None:
        self._next_event = 1

    def of(self, batch: BlockBatch) -> common.KvEventBatch:
        """The batch as a message. A snapshot begins with Cleared, since the subscriber may have an older state."""
        message = common.KvEventBatch(sequence_number=batch.sequence, timestamp=time.time(), dp_rank=0)
        if batch.chunk is not None:
            message.snapshot.index, message.snapshot.count = batch.chunk.index, batch.chunk.count
            message.snapshot.blocks = batch.chunk.num_blocks
            if batch.chunk.index == 0:
                message.events.add().cleared.SetInParent()
        for change in batch.changes:
            self._add(message, change)
        if batch.chunk is None:
            for event in message.events:
                event.event_id, self._next_event = self._next_event, self._next_event + 1
        return message

    def _add(self, message: common.KvEventBatch, change: BlockChange) -> None:
        if change.kind is ChangeKind.STORED:
            _add_stored(message, change)
            return
        last = message.events[-1] if message.events else None
        if last is None or not last.HasField("removed") or last.removed.tier != _TIERS[change.tier]:
            last = message.events.add()
            last.removed.tier, last.removed.medium = _TIERS[change.tier], _MEDIUMS[change.tier]
        last.removed.block_hashes.append(change.block_id)


def _add_stored(message: common.KvEventBatch, change: BlockChange) -> None:
    """Add a stored block. If it continues the last event's blocks, it joins that event, as engines report a prompt."""
    token_ids = np.frombuffer(change.token_ids, "<i4").tolist()
    last = message.events[-1].stored if message.events and message.events[-1].HasField("stored") else None
    tier = _TIERS[change.tier]
    if last is None or last.blocks[-1].block_hash != change.parent_id or last.tier != tier:
        last = message.events.add().stored
        last.tier, last.medium = tier, _MEDIUMS[change.tier]
        if change.parent_id is not None:
            last.parent_block_hash = change.parent_id
    last.blocks.add(block_hash=change.block_id, token_ids=token_ids, block_size=len(token_ids))


class PromptScores:
    """Gathers the prompt's log-probabilities, which arrive in pieces with output 0 and are sent in one message."""

    def __init__(self, tracked: TrackedRequest) -> None:
        self._prompt_ids = tracked.prompt_ids
        self._num_missing = tracked.num_prompt_tokens - 1 if tracked.sampling.num_prompt_logprobs is not None else -1
        self._positions = Positions()

    def take(self, piece: Piece) -> vllm.InputLogProbs | None:
        """All log-probabilities, once, with the piece that completes them; else None. A one-token prompt has only an
        entry without a value."""
        if self._num_missing < 0:
            return None
        self._positions += piece.prompt_logprobs
        self._num_missing -= len(piece.prompt_logprobs)
        if self._num_missing:
            return None
        self._num_missing = -1
        return input_logprobs(self._prompt_ids, self._positions)


def input_logprobs(prompt_ids: Sequence[int], positions: Positions) -> vllm.InputLogProbs:
    """One entry per token of the prompt; the first has no value."""
    message = vllm.InputLogProbs(token_ids=prompt_ids)
    message.token_logprobs.add()
    has_top = any(position.top_ids for _, position in positions)
    if has_top:
        message.top_logprobs.add()
    for _, position in positions:
        message.token_logprobs.add(value=position.logprob)
        if has_top:
            message.top_logprobs.add(values=position.top_logprobs, token_ids=position.top_ids)
    return message


def chunk_of(
    piece: Piece, num_prompt_tokens: int, index: int = 0, scores: vllm.InputLogProbs | None = None
) -> vllm.GenerateResponse:
    """A chunk with the new tokens only. completion_tokens counts just these; clients add them up. index: the output's.
    scores: the prompt's log-probabilities, if they come with this chunk."""
    response = vllm.GenerateResponse()
    chunk = response.chunk
    chunk.token_ids.extend(piece.token_ids)
    chunk.prompt_tokens = num_prompt_tokens
    chunk.completion_tokens = len(piece.token_ids)
    if index:
        chunk.index = index
    if piece.logprobs:
        fill_logprobs(chunk.output_logprobs, piece.logprobs)
    if scores is not None:
        chunk.input_logprobs.CopyFrom(scores)
    return response


def fill_logprobs(target: vllm.OutputLogProbs, positions: Positions) -> None:
    """One entry per token; top_logprobs too if they were asked for."""
    for token_id, position in positions:
        target.token_ids.append(token_id)
        target.token_logprobs.append(position.logprob)
        if position.top_ids:
            target.top_logprobs.add(values=position.top_logprobs, token_ids=position.top_ids)


def complete_of(tracked: TrackedRequest, index: int = 0) -> vllm.GenerateResponse:
    """The end of an output, as aborted if it has not ended by itself. cached_tokens is 0 if the worker's figures are
    missing."""
    stream = tracked.streams[index]
    response = vllm.GenerateResponse(
        complete=vllm.GenerateComplete(
            finish_reason=reason_of(stream),
            prompt_tokens=tracked.num_prompt_tokens,
            completion_tokens=stream.processor.num_tokens,
            cached_tokens=stream.finished.cached_tokens if stream.finished else 0,
            index=index,
        )
    )
    _fill_match(response.complete, stream, tracked)
    return response


def aborted_early(index: int) -> vllm.GenerateResponse:
    """The end of an output whose request was aborted before it reached a worker."""
    return vllm.GenerateResponse(complete=vllm.GenerateComplete(finish_reason="abort", index=index))


def reason_of(stream: OutputStream) -> str:
    """The finish reason: "stop", "length" or "abort"."""
    if stream.state is not StreamState.ENDED:
        return "abort"
    if stream.has_stopped:
        return "stop"
    return "length"


def _fill_match(complete: vllm.GenerateComplete, stream: OutputStream, tracked: TrackedRequest) -> None:
    """Set which of the caller's own stop conditions matched; the model's end tokens do not count."""
    match, finished = stream.processor.match, stream.finished
    if match is not None:
        complete.matched_stop_str = match
    elif finished is not None and finished.stop_token_id in tracked.sampling.stop_token_ids:
        complete.matched_token_id = finished.stop_token_id
