"""ModelService: what is served, and what requests may ask for (the capability handshake)."""

from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from octavo.gateway.models import ServedModels
from octavo.gateway.requests.submit import default_sampling
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import current_rpc
from octavo.gateway.validation.fields import TABLE, MessageRules, check, not_served
from octavo.gateway.validation.limits import MAX_LOGPROBS, MAX_STOP_STRINGS
from octavo.gateway.version import VERSION
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import model_pb2, model_pb2_grpc
from octavo.wire.messages import ModelCard

_NO_RULES = MessageRules()


@cache
def supported_paths(message: Descriptor) -> tuple[str, ...]:
    """Every leaf field that is served: "sampling.temperature", "chat.messages.role" (without indexes of elements)."""
    return tuple(_paths(message, ""))


def _paths(message: Descriptor, prefix: str) -> Iterator[str]:
    rules = TABLE.get(message.full_name, _NO_RULES)
    for field in message.fields:
        if rules.fields.get(field.name) is not_served:
            continue
        if field.message_type is None or _is_map(field):
            yield prefix + field.name
        else:
            yield from _paths(field.message_type, f"{prefix}{field.name}.")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """One per gateway."""

    def __init__(self, models: ServedModels, pool: WorkerPool, *, max_message_bytes: int) -> None:
        self._models = models
        self._pool = pool
        self._max_message_bytes = max_message_bytes

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        """All models, by name; empty if no worker is ready."""
        check(request)
        cards = self._pool.cards()
        return model_pb2.ListModelsResponse(models=[self._info(cards[name]) for name in sorted(cards)])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        """One model."""
        check(request)
        card = self._models.card_of(request.model or current_rpc.get().model, self._pool)
        return model_pb2.GetModelResponse(model=self._info(card))

    def _info(self, card: ModelCard) -> model_pb2.ModelInfo:
        workers = [worker for worker in self._pool.workers() if _serves(worker, card)]
        return model_pb2.ModelInfo(
            name=card.name,
            fingerprint=card.fingerprint,
            architecture=card.architecture,
            dtype=card.dtype,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            default_sampling=_defaults(card),
            supported_parameters=supported_paths(pb.GenerateRequest.DESCRIPTOR),
            num_workers=len(workers),
            kv_capacity_tokens=sum(worker.capacity.num_blocks * worker.capacity.block_size for worker in workers),
            server_version=VERSION,
            limits=self._limits(workers),
            tensor_parallel_size=card.tensor_parallel_size,
            kv_cache_dtype=card.kv_cache_dtype,
        )

    def _limits(self, workers: list[WorkerView]) -> model_pb2.RequestLimits:
        per_worker = [worker.capacity.max_num_seqs + worker.capacity.max_waiting for worker in workers]
        return model_pb2.RequestLimits(
            max_message_bytes=self._max_message_bytes,
            max_stop_strings=MAX_STOP_STRINGS,
            max_logprobs=MAX_LOGPROBS,
            max_requests_per_worker=min(per_worker, default=0),
        )


def _serves(worker: WorkerView, card: ModelCard) -> bool:
    return worker.state is WorkerState.READY and worker.card.name == card.name


def _defaults(card: ModelCard) -> pb.SamplingParams:
    values = default_sampling(card)
    return pb.SamplingParams(**values | {"top_k": int(values["top_k"])})
