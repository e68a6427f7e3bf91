"""ModelService: what is served, and what requests may ask for (the capability handshake)."""

import grpc
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import model_pb2, model_pb2_grpc

from gateway.desk import Desk
from gateway.rpc.scope import current_rpc
from gateway.sampling import default_sampling
from gateway.validation.fields import check
from gateway.validation.paths import supported_paths
from gateway.validation.table import MAX_LOGPROBS, MAX_STOP_STRINGS
from gateway.version import VERSION
from gateway.workers.views import WorkerState, WorkerView
from wire.messages import ModelCard

Context = grpc.aio.ServicerContext


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """One per gateway."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        """By name; empty where no worker is ready."""
        check(request)
        cards = self._desk.pool.cards()
        return model_pb2.ListModelsResponse(models=[self._info(cards[name]) for name in sorted(cards)])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        """One of them."""
        check(request)
        card = self._desk.card_of(request.model, current_rpc.get())
        return model_pb2.GetModelResponse(model=self._info(card))

    def _info(self, card: ModelCard) -> model_pb2.ModelInfo:
        workers = [worker for worker in self._desk.pool.workers() if _serves(worker, card)]
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
        )

    def _limits(self, workers: list[WorkerView]) -> model_pb2.RequestLimits:
        per_worker = [worker.capacity.max_num_seqs + worker.capacity.max_waiting for worker in workers]
        return model_pb2.RequestLimits(
            max_message_bytes=self._desk.limits.max_message_bytes,
            max_stop_strings=MAX_STOP_STRINGS,
            max_logprobs=MAX_LOGPROBS,
            max_requests_per_worker=min(per_worker, default=0),
        )


def _serves(worker: WorkerView, card: ModelCard) -> bool:
    return worker.state is WorkerState.READY and worker.card.name == card.name


def _defaults(card: ModelCard) -> pb.SamplingParams:
    values = default_sampling(card)
    return pb.SamplingParams(**values | {"top_k": int(values["top_k"])})  # type: ignore[arg-type]
