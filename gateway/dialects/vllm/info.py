"""VllmEngine's answers about the model, the server and its load. Reads snapshots only."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from octavo.gateway.version import VERSION
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.wire.messages import ModelCard

SERVER_TYPE = "vllm-grpc"  # the dialect's name, by which clients recognise it
_INT32_MAX = 2**31 - 1


def model_info(card: ModelCard, files: Mapping[str, bytes]) -> vllm.GetModelInfoResponse:
    """files: the tokenizer bundle. The answer's paths are the model's name: the server's folders stay private, and
    callers get the tokenizer from GetTokenizer."""
    config = _config(files)
    return vllm.GetModelInfoResponse(
        model_path=card.name,
        tokenizer_path=card.name,
        served_model_name=card.name,
        is_generation=True,
        max_context_length=card.max_model_len,
        max_req_input_len=card.max_model_len - 1,
        vocab_size=card.vocab_size,
        model_type=str(config.get("model_type", "")),
        architectures=[card.architecture],
        eos_token_ids=card.eos_token_ids,
        pad_token_id=_token_id(config, "pad_token_id"),
        bos_token_id=_token_id(config, "bos_token_id"),
        default_sampling_params_json=_defaults(card),
    )


def _defaults(card: ModelCard) -> str:
    """The sampling defaults of the checkpoint as JSON; clients expect top_k as an integer."""
    values = {name: int(value) if name == "top_k" else value for name, value in card.default_sampling.items()}
    return json.dumps(values)


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get("config.json", b"{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _token_id(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and 0 <= value <= _INT32_MAX else 0


def server_info(
    workers: Sequence[WorkerView], *, num_requests: int, is_draining: bool, uptime_s: float
) -> vllm.GetServerInfoResponse:
    """num_requests: how many are in flight, at all gateways."""
    ready = [worker for worker in workers if worker.state is WorkerState.READY]
    return vllm.GetServerInfoResponse(
        active_requests=num_requests,
        is_paused=is_draining,
        last_receive_timestamp=datetime.now(UTC).timestamp(),
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=ready[0].card.kv_cache_dtype if ready else "auto",
        block_size=ready[0].capacity.block_size if ready else 0,
        model_dtype=ready[0].card.dtype if ready else "",
        max_num_seqs=sum(worker.capacity.max_num_seqs for worker in ready),
        constrained_decoding_start="first_token",  # even if a model thinks before it answers
    )


def loads(workers: Sequence[WorkerView], *, tokens_per_s: float) -> vllm.GetLoadsResponse:
    """The load of all workers behind this gateway, reported as one rank, as of their last heartbeats. tokens_per_s: the
    rate at which all gateways send."""
    running, waiting = sum(each.num_running for each in workers), sum(each.num_waiting for each in workers)
    total = sum(each.capacity.num_blocks * each.capacity.block_size for each in workers)
    used = sum(_used_tokens(each) for each in workers)
    max_running = sum(each.capacity.max_num_seqs for each in workers)
    queried, hit = sum(each.num_queried_tokens for each in workers), sum(each.num_hit_tokens for each in workers)
    load = vllm.SchedulerLoad(
        dp_rank=0,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=min(used, _INT32_MAX),
        max_total_num_tokens=min(total, _INT32_MAX),
        token_usage=used / total if total else 0.0,
        gen_throughput=tokens_per_s,
        cache_hit_rate=min(1.0, hit / queried) if queried else 0.0,
        utilization=running / max_running if max_running else 0.0,
        max_running_requests=max_running,
    )
    return vllm.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(), version=VERSION, dp_rank_count=1, loads=[load]
    )


def _used_tokens(worker: WorkerView) -> int:
    """Token capacity of the blocks that requests hold."""
    blocks = worker.capacity.num_blocks - worker.num_free_blocks - worker.num_cached_blocks
    return max(0, blocks) * worker.capacity.block_size
