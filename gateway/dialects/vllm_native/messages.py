"""Output pieces and ends, and facts about the service, as messages of vllm.Inference and vllm.Control. Pure."""

from collections.abc import Iterable, Sequence

from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, StreamState
from octavo.gateway.version import VERSION
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.vllm import vllm_pb2 as vllm
from octavo.wire.messages import ModelCard, TokenLogprobs

API_VERSION = "vllm"
Scores = Iterable[tuple[int, TokenLogprobs]]


class Responses:
    """Makes the responses of one request, with the parts that it asked for."""

    def __init__(self, tracked: TrackedRequest, options: vllm.ResponseOptions) -> None:
        self._tracked = tracked
        self._wants_text = options.output_text if options.HasField("output_text") else True
        self._options = options
        self._scores: list[tuple[int, TokenLogprobs]] = []
        self._num_missing = tracked.num_prompt_tokens - 1 if options.prompt_logprobs else 0
        self._is_prompt_told = False

    def prompt(self, piece: Piece | None = None) -> vllm.GenerateResponse | None:
        """The prompt, once: at the beginning, or with the piece of output 0 that completes its scores; else None."""
        if self._is_prompt_told:
            return None
        if piece is not None:
            self._scores += piece.prompt_logprobs
            self._num_missing -= len(piece.prompt_logprobs)
        if self._num_missing > 0:
            return None
        self._is_prompt_told = True
        tracked = self._tracked
        info = vllm.PromptInfo(num_prompt_tokens=tracked.num_prompt_tokens)
        if self._options.prompt_token_ids:
            info.token_ids.extend(tracked.prompt_ids)
        if self._options.prompt_logprobs:  # the first token has none
            info.logprobs.append(0.0)
            info.ranks.append(0)
            info.candidate_tokens.add()
            _fill_scores(info, self._scores)
        return vllm.GenerateResponse(prompt_info=info)

    def piece(self, piece: Piece, index: int) -> vllm.GenerateResponse:
        """A piece of new output."""
        output = vllm.SequenceOutput(index=index, num_tokens=piece.num_tokens)
        if self._wants_text:
            output.text = piece.text
        if self._options.output_token_ids:
            output.token_ids.extend(piece.token_ids)
        if self._options.output_logprobs:
            _fill_scores(output, piece.logprobs)
        return vllm.GenerateResponse(outputs=output)

    def end(self, index: int, rest: str) -> vllm.GenerateResponse:
        """The end of an output, with the rest of its text; as aborted if it has not ended by itself."""
        stream = self._tracked.streams[index]
        info = vllm.FinishInfo(num_output_tokens=stream.processor.num_tokens, finish_reason=reason_of(stream))
        token_id = stream.finished.stop_token_id if stream.finished else None
        if (text := stream.processor.match) is not None:
            info.stop_string = text
        elif token_id is not None and token_id in self._tracked.sampling.stop_token_ids:
            info.stop_token_id = token_id
        elif token_id is not None:
            info.eos_token_id = token_id
        output = vllm.SequenceOutput(index=index, text=rest if self._wants_text else "", finish_info=info)
        return vllm.GenerateResponse(outputs=output)


def _fill_scores(target: vllm.PromptInfo | vllm.SequenceOutput, scores: Scores) -> None:
    """Append to parallel lists. A token's rank is 0 unless it is among the most probable tokens that were asked for;
    candidates are the latter without the token itself."""
    for token_id, position in scores:
        others = target.candidate_tokens.add()
        chosen_rank = 0
        for rank, (other, logprob) in enumerate(zip(position.top_ids, position.top_logprobs, strict=True), start=1):
            if other == token_id:
                chosen_rank = rank
            else:
                others.tokens.add(id=other, logprob=logprob, rank=rank)
        target.logprobs.append(position.logprob)
        target.ranks.append(chosen_rank)


def aborted_early(index: int) -> vllm.GenerateResponse:
    """The end of an output whose request was aborted before it reached a worker."""
    info = vllm.FinishInfo(finish_reason=vllm.FinishInfo.ABORTED)
    return vllm.GenerateResponse(outputs=vllm.SequenceOutput(index=index, finish_info=info))


def merge(whole: vllm.GenerateResponse, part: vllm.GenerateResponse) -> None:
    """Add a part to the single response of Generate: lists, counts and text accumulate."""
    text, num_tokens = whole.outputs.text + part.outputs.text, whole.outputs.num_tokens + part.outputs.num_tokens
    whole.MergeFrom(part)
    whole.outputs.text, whole.outputs.num_tokens = text, num_tokens


def reason_of(stream: OutputStream) -> "vllm.FinishInfo.FinishReason.ValueType":
    """STOP, LENGTH, or ABORTED."""
    if stream.state is not StreamState.ENDED:
        return vllm.FinishInfo.ABORTED
    if stream.has_stopped:
        return vllm.FinishInfo.STOP
    return vllm.FinishInfo.LENGTH


def server_info(workers: Sequence[WorkerView], *, instance_id: str) -> vllm.ServerInfo:
    """All workers together, as one data-parallel rank. tensor_parallel_size is the largest of any worker."""
    ready = [worker for worker in workers if worker.state is WorkerState.READY]
    ranks = max((worker.card.tensor_parallel_size for worker in ready), default=1)
    sizes = {worker.capacity.block_size for worker in ready}
    block_size = sizes.pop() if len(sizes) == 1 else 0
    return vllm.ServerInfo(
        engine_version=VERSION,
        api_version=API_VERSION,
        instance_id=instance_id,
        parallelism=vllm.ParallelismInfo(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=ranks,
            data_parallel_size_local=1,
        ),
        max_model_len=max((worker.card.max_model_len for worker in ready), default=0),
        kv_block_size=block_size,
        total_kv_blocks=sum(worker.capacity.num_blocks for worker in ready),
        max_running_requests=sum(worker.capacity.max_num_seqs for worker in ready),
        max_batched_tokens=max((worker.capacity.max_batch_tokens for worker in ready), default=0),
        rl_capabilities=vllm.RlCapabilities(),
        effective_attention_block_size=block_size or None,
    )


def model_info(card: ModelCard, *, has_text: bool) -> vllm.ModelInfo:
    """What a model supports. has_text: whether its tokenizer is supported."""
    return vllm.ModelInfo(
        model_id=card.name,
        served_model_name=card.name,
        supports_text_input=has_text,
        supports_token_ids_input=True,
    )
