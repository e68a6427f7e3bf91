"""Output pieces, ends and errors, and changes of the prefix cache, as messages of openengine.v1. Pure, but for the
time that a batch of changes carries."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from octavo.gateway.errors import Retry, row_of
from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.rpc.status import public_message
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, StreamState
from octavo.gateway.workers.events import BlockBatch, BlockChange, ChangeKind
from octavo.openengine import openengine_pb2 as oe
from octavo.wire.messages import KvTier, TokenLogprobs, WireFinishReason

BytesById = Sequence[bytes]
_CODES = {
    "INVALID_FIELD": oe.ERROR_CODE_INVALID_ARGUMENT,
    "EXCEEDS_CAPACITY": oe.ERROR_CODE_INVALID_ARGUMENT,
    "CONSTRAINT": oe.ERROR_CODE_INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": oe.ERROR_CODE_MODEL_NOT_FOUND,
    "DUPLICATE_REQUEST": oe.ERROR_CODE_DUPLICATE_REQUEST,
    "QUEUE_FULL": oe.ERROR_CODE_OVERLOADED,
    "TENANT_LIMIT": oe.ERROR_CODE_OVERLOADED,
    "OUT_OF_MEMORY": oe.ERROR_CODE_OVERLOADED,
    "SLOW_CONSUMER": oe.ERROR_CODE_OVERLOADED,
    "NO_WORKER": oe.ERROR_CODE_OVERLOADED,
    "ABORTED": oe.ERROR_CODE_CANCELLED,
    "DEADLINE": oe.ERROR_CODE_CANCELLED,
    "DRAINING": oe.ERROR_CODE_DRAINING,
}


def engine_error(error: Exception, request_id: str = "") -> oe.EngineError:
    """The error that ended an accepted request or subscription."""
    row = row_of(error)
    return oe.EngineError(
        code=_CODES.get(row.reason, oe.ERROR_CODE_INTERNAL),
        message=public_message(error, row, request_id),
        retryable=row.retry is Retry.LATER,
    )


class Events:
    """Makes the events of one request. bytes_by_id: each token's bytes. includes_stop: whether to include the request's
    own stop tokens; each is the last of its output."""

    def __init__(self, tracked: TrackedRequest, bytes_by_id: BytesById, *, includes_stop: bool) -> None:
        self._tracked = tracked
        self._bytes_by_id = bytes_by_id
        self._left_out = frozenset() if includes_stop else frozenset(tracked.sampling.stop_token_ids)
        self._scores: list[tuple[int, TokenLogprobs]] = []
        wants_scores = tracked.sampling.num_prompt_logprobs is not None
        self._num_missing = tracked.num_prompt_tokens - 1 if wants_scores else -1
        self._num_open = len(tracked.outputs)

    def of(self, piece: Piece, index: int) -> list[oe.GenerateResponse]:
        """The messages for a piece: new tokens and the text that has become final. If prompt scores are wanted, the
        whole prompt comes in one message, with the piece of output 0 that completes its scores."""
        messages = []
        if index == 0 and self._num_missing >= 0:
            self._scores += piece.prompt_logprobs
            self._num_missing -= len(piece.prompt_logprobs)
            if self._num_missing == 0:
                self._num_missing = -1
                messages.append(self._response(prompt=self._prompt()))
        if piece.logprobs:
            tokens = [self._token(*each) for each in piece.logprobs if each[0] not in self._left_out]
        else:
            ids = [each for each in piece.token_ids if each not in self._left_out]
            tokens = [oe.TokenInfo(token_id=each, token=self._text(each)) for each in ids]
        if tokens or piece.text:
            output = oe.TokenOutput(output_index=index, tokens=tokens, text=piece.text)
            messages.append(self._response(token=output))
        return messages

    def _prompt(self) -> oe.PromptOutput:
        first = self._tracked.prompt_ids[0]
        tokens = [oe.TokenInfo(token_id=first, token=self._text(first))]
        return oe.PromptOutput(tokens=tokens + [self._token(*each) for each in self._scores])

    def end(self, index: int) -> oe.GenerateResponse:
        """The end of an output, as cancelled if it has not ended by itself. The last output's end has the usage."""
        stream = self._tracked.streams[index]
        response = self._response(
            finished=oe.GenerationFinished(
                output_index=index, reason=reason_of(stream), stop_match=_match(stream, self._tracked)
            )
        )
        self._num_open -= 1
        if self._num_open == 0:
            response.usage.CopyFrom(self.usage())
        return response

    def error(self, error: Exception) -> oe.GenerateResponse:
        """Ends all outputs that are still open with an error."""
        response = self._response(error=engine_error(error, self._tracked.request_id))
        response.usage.CopyFrom(self.usage())
        return response

    def usage(self) -> oe.Usage:
        """The usage of all outputs together."""
        tracked = self._tracked
        usage = oe.Usage(prompt_tokens=tracked.num_prompt_tokens, completion_tokens=tracked.num_tokens)
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        if (figures := tracked.stream.finished) is not None:
            usage.cached_prompt_tokens = figures.cached_tokens
        return usage

    def _response(self, **event: Any) -> oe.GenerateResponse:
        return oe.GenerateResponse(request_id=self._tracked.request_id, **event)

    def _token(self, token_id: int, position: TokenLogprobs) -> oe.TokenInfo:
        token = oe.TokenInfo(token_id=token_id, token=self._text(token_id), logprob=position.logprob)
        for rank, (other, logprob) in enumerate(zip(position.top_ids, position.top_logprobs, strict=True), start=1):
            token.candidates.add(token_id=other, logprob=logprob, token=self._text(other), rank=rank)
            if other == token_id:
                token.rank = rank
        return token

    def _text(self, token_id: int) -> str:
        return self._bytes_by_id[token_id].decode("utf-8", "replace") if token_id < len(self._bytes_by_id) else ""


def reason_of(stream: OutputStream) -> "oe.FinishReason.ValueType":
    """STOP, LENGTH, or CANCELLED."""
    if stream.state is not StreamState.ENDED:
        return oe.FINISH_REASON_CANCELLED
    if stream.has_stopped:
        return oe.FINISH_REASON_STOP
    return oe.FINISH_REASON_LENGTH


def _match(stream: OutputStream, tracked: TrackedRequest) -> oe.StopMatch | None:
    if (text := stream.processor.match) is not None:
        return oe.StopMatch(stop_text=text)
    finished = stream.finished
    if finished is None or finished.reason is not WireFinishReason.STOP:
        return None
    token_id = finished.stop_token_id
    if token_id is None:  # the constraint is complete: only an end token could follow, and it is not waited for
        return oe.StopMatch(eos_token_id=tracked.card.eos_token_ids[0]) if tracked.card.eos_token_ids else None
    if token_id in tracked.sampling.stop_token_ids:
        return oe.StopMatch(stop_token_id=token_id)
    return oe.StopMatch(eos_token_id=token_id)


_MEDIUMS = {KvTier.DEVICE: oe.STORAGE_MEDIUM_GPU, KvTier.HOST: oe.STORAGE_MEDIUM_CPU_PINNED}


def kv_batch(batch: BlockBatch) -> oe.KvEventBatch:
    """A batch of changes. A snapshot begins with AllBlocksCleared, since the subscriber may have an older state."""
    message = oe.KvEventBatch(sequence_number=batch.sequence, timestamp_unix_nanos=time.time_ns())
    if batch.chunk is not None and batch.chunk.index == 0:
        message.events.add().all_blocks_cleared.SetInParent()
    for change in batch.changes:
        if change.kind is ChangeKind.STORED:
            _add_stored(message, change)
            continue
        last = message.events[-1] if message.events and message.events[-1].HasField("block_removed") else None
        if last is None or last.block_removed.medium != _MEDIUMS[change.tier]:
            last = message.events.add()
            last.block_removed.medium = _MEDIUMS[change.tier]
        last.block_removed.block_hashes.append(_hash(change.block_id))
    return message


def _add_stored(message: oe.KvEventBatch, change: BlockChange) -> None:
    """Add a stored block. If it continues the last event's blocks, it joins that event, as engines report a prompt."""
    token_ids = np.frombuffer(change.token_ids, "<i4").tolist()
    parent = None if change.parent_id is None else _hash(change.parent_id)
    last = message.events[-1].block_stored if message.events and message.events[-1].HasField("block_stored") else None
    medium = _MEDIUMS[change.tier]
    joins = last is not None and last.medium == medium and last.block_size == len(token_ids)
    if last is None or not joins or last.block_hashes[-1] != parent:
        last = message.events.add().block_stored
        last.medium = medium
        last.block_size = len(token_ids)
        if parent is not None:
            last.parent_block_hash.CopyFrom(parent)
    last.block_hashes.append(_hash(change.block_id))
    last.token_ids.extend(token_ids)


def _hash(block_id: int) -> oe.KvBlockHash:
    """The block id as 8 big-endian bytes, as other engines encode theirs."""
    return oe.KvBlockHash(value=block_id.to_bytes(8, "big", signed=True), encoding="int64")


def worst(states: Iterable["oe.HealthState.ValueType"]) -> "oe.HealthState.ValueType":
    """The worst of several states; READY if there are none."""
    order = (oe.HEALTH_STATE_DRAINING, oe.HEALTH_STATE_NOT_READY, oe.HEALTH_STATE_STARTING, oe.HEALTH_STATE_DEGRADED)
    found = set(states)
    return next((state for state in order if state in found), oe.HEALTH_STATE_READY)
