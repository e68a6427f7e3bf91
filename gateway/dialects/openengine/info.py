"""What openengine.v1 reports about the service, its models and its load. Reads snapshots only.

Unknown numbers are left unset: in this contract a zero means zero.
"""

import time
from collections.abc import Mapping, Sequence

from google.protobuf import struct_pb2

from octavo.gateway.models import ServedModels
from octavo.gateway.validation.limits import MAX_LOGPROBS, MAX_OUTPUTS
from octavo.gateway.version import VERSION
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.openengine import openengine_pb2 as oe
from octavo.wire.messages import ModelCard

ENGINE = "octavo"


def server_info(workers: Sequence[WorkerView], *, instance_id: str, revision: int, release: str) -> oe.ServerInfo:
    """All workers together, as one data-parallel rank. tensor_parallel_size is the largest of any worker."""
    ready = [worker for worker in workers if worker.state is WorkerState.READY]
    ranks = max((worker.card.tensor_parallel_size for worker in ready), default=1)
    extra = struct_pb2.Struct()
    extra.update({"num_workers": len(ready)})
    return oe.ServerInfo(
        engine_name=ENGINE,
        engine_version=VERSION,
        engine_role=oe.ENGINE_ROLE_AGGREGATED,
        instance_id=instance_id,
        supported_models=sorted({worker.card.name for worker in ready}),
        parallelism=oe.ParallelismInfo(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            data_parallel_start_rank=0,
            decode_context_parallel_size=1,
        ),
        kv_connector=oe.KvConnectorInfo(enabled=False),
        schema_revision=revision,
        minimum_client_revision=revision,
        schema_release=release,
        capacity=_capacity(ready),
        extra=extra,
    )


def _capacity(workers: Sequence[WorkerView]) -> oe.DeploymentCapacity:
    capacity = oe.DeploymentCapacity(max_loras=0)
    sizes = {worker.capacity.block_size for worker in workers}
    if len(sizes) == 1:
        capacity.kv_block_size = sizes.pop()
    if workers:
        capacity.total_kv_blocks = sum(worker.capacity.num_blocks for worker in workers)
        capacity.max_running_requests = sum(worker.capacity.max_num_seqs for worker in workers)
        capacity.max_batched_tokens = max(worker.capacity.max_batch_tokens for worker in workers)
    return capacity


def model_info(card: ModelCard, workers: Sequence[WorkerView], *, has_text: bool) -> oe.ModelInfo:
    """What a model supports. has_text: whether its tokenizer is supported."""
    scores = oe.LogprobCapabilities(
        supported=True,
        candidate_selection_modes=[oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
        max_top_n=MAX_LOGPROBS,
    )
    extra = struct_pb2.Struct()
    extra.update({"fingerprint": card.fingerprint, "architecture": card.architecture, "dtype": card.dtype})
    extra.update({"tensor_parallel_size": card.tensor_parallel_size, "kv_cache_dtype": card.kv_cache_dtype})
    room = max((each.capacity.max_num_seqs + each.capacity.max_waiting for each in workers), default=MAX_OUTPUTS)
    return oe.ModelInfo(
        model_id=card.name,
        served_model_name=card.name,
        max_context_length=card.max_model_len,
        max_output_tokens=card.max_model_len - 1,
        supports_text_input=has_text,
        supports_token_ids_input=True,
        generation=oe.GenerationCapabilities(
            prompt_logprobs=scores,
            output_logprobs=scores,
            guided_decoding=oe.GuidedDecodingCapabilities(
                supported=has_text,
                modes=[
                    oe.GUIDED_DECODING_MODE_JSON_SCHEMA,
                    oe.GUIDED_DECODING_MODE_REGEX,
                    oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
                    oe.GUIDED_DECODING_MODE_CHOICE,
                    oe.GUIDED_DECODING_MODE_JSON_OBJECT,
                ]
                if has_text
                else [],
            ),
            max_num_sequences=min(MAX_OUTPUTS, room),
            supports_priority=True,
            supports_stop_in_output=has_text,
            supports_cache_salt=True,
            supports_prefix_cache_bypass=True,
        ),
        supports_lora=False,
        supports_multimodal=False,
        extra=extra,
    )


def load(workers: Sequence[WorkerView], *, instance_id: str, tells_ranks: bool) -> oe.LoadInfo:
    """The load of all workers behind this gateway, as one rank. tells_ranks: list that rank too."""
    running, queued = sum(each.num_running for each in workers), sum(each.num_waiting for each in workers)
    total = sum(each.capacity.num_blocks for each in workers)
    used = sum(max(0, each.capacity.num_blocks - each.num_free_blocks - each.num_cached_blocks) for each in workers)
    message = oe.LoadInfo(
        instance_id=instance_id,
        timestamp_unix_nanos=time.time_ns(),
        running_requests=running,
        queued_requests=queued,
        active_kv_sessions=0,
        used_kv_blocks=used,
        total_kv_blocks=total,
    )
    if tells_ranks:
        message.ranks.add(
            data_parallel_rank=0,
            running_requests=running,
            queued_requests=queued,
            used_kv_blocks=used,
            total_kv_blocks=total,
        )
    return message


def model_checks(models: ServedModels, cards: Mapping[str, ModelCard], name: str) -> list[oe.HealthCheck]:
    """A check for the named model; without a name, for each expected model, or else for each that is served."""
    wanted = (name,) if name else models.expected or tuple(sorted(cards))
    if not wanted:
        return [oe.HealthCheck(name="model", state=oe.HEALTH_STATE_NOT_READY, message="no worker is ready")]
    return [_model_check(models, cards, each) for each in wanted]


def _model_check(models: ServedModels, cards: Mapping[str, ModelCard], name: str) -> oe.HealthCheck:
    if models.is_ready(name, cards):
        return oe.HealthCheck(name="model", state=oe.HEALTH_STATE_READY, message=name)
    is_known = name in models.names(cards)
    state = oe.HEALTH_STATE_STARTING if is_known else oe.HEALTH_STATE_NOT_READY
    message = f"no worker is ready for {name}" if is_known else f"{name} is not served here"
    return oe.HealthCheck(name="model", state=state, message=message)


def role_check(role: "oe.EngineRole.ValueType") -> oe.HealthCheck:
    """Whether this service can take the role: it is always aggregated."""
    if role in (oe.ENGINE_ROLE_UNSPECIFIED, oe.ENGINE_ROLE_AGGREGATED):
        return oe.HealthCheck(name="role", state=oe.HEALTH_STATE_READY, message="aggregated")
    message = "this service is aggregated: it neither prefills nor decodes for others"
    return oe.HealthCheck(name="role", state=oe.HEALTH_STATE_NOT_READY, message=message)
