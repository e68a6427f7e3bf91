"""What a CUDA runner takes besides weights and KV pool: measured, by rehearsing its largest steps over a pool of one
block, before the real pool is made.

Must not know: how many blocks there will be.
"""

import gc
from dataclasses import replace

import numpy as np
import torch

from octavo.model.attention.kv_pool import kv_block_bytes
from octavo.model.gpu.weights import GpuWeights
from octavo.wire.messages import SamplingParams
from octavo.worker.loading.memory import DoesNotFit, MemoryNeeds, SpareMemory
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, EagerRecorder, GraphRecorder, Launching
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.cuda.staging import MixedLayout
from octavo.worker.runners.outputs import sampler_params
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan

_SAMPLING = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, num_logprobs=0, seed=1)


def cuda_memory_needs(
    weights: GpuWeights,
    config: CudaRunnerConfig,
    *,
    weights_bytes: int,
    memory_fraction: float,
    spare: SpareMemory = SpareMemory.LEFT,
    staging_bytes: int = 0,
) -> MemoryNeeds:
    """Call once, after the weights are loaded. `activation_bytes` of the result covers everything but weights and pool:
    static buffers, the worst step, all recorded graphs, and staging_bytes for copies to the host. Raises DoesNotFit if
    not even the rehearsal fits."""
    device = weights.embed_VD.device
    available_bytes = _free_bytes(device)
    kv_dtype = config.kv_dtype or weights.dtype
    block_bytes = kv_block_bytes(weights.config, block_size=config.block_size, dtype=kv_dtype)
    try:
        runner_bytes = _rehearse(weights, replace(config, num_blocks=1)) - 2 * block_bytes
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"a step of {config.max_batch_tokens} tokens, {config.max_slots} requests, does not fit beside the weights",
            f"weights {weights_bytes >> 20} MiB, then free {available_bytes >> 20} MiB: {error}".splitlines()[0],
            "try a smaller --max-batch-tokens, a smaller --max-num-seqs, or free some memory",
        ) from error
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return MemoryNeeds(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=max(runner_bytes, 0) + staging_bytes,
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_slots,
        memory_fraction=memory_fraction,
        spare=spare,
    )


def _rehearse(weights: GpuWeights, config: CudaRunnerConfig) -> int:
    """Bytes that a runner holds once its largest steps have run, plus what its graphs will take."""
    device = weights.embed_VD.device
    before = _free_bytes(device)
    with torch.inference_mode():
        runner = CudaRunner(weights, config)
        run_largest_steps(runner)
        torch.cuda.synchronize(device)
        steps_bytes = before - _free_bytes(device)
        if config.launching is Launching.EAGER:
            return steps_bytes
        recorder = GraphRecorder()
        first = runner.graphs.record_largest(recorder)
        first_bytes = before - _free_bytes(device) - steps_bytes
        more = runner.graphs.record_largest(recorder)
        more_bytes = before - _free_bytes(device) - steps_bytes - first_bytes
    # The first two graphs also bring what all share: a library's workspace, the pool's first segment. Where two later
    # ones seem to take more, or to give some back, another process did so in this moment.
    num_pairs = runner.graphs.num_shapes // len(first + more) * 2
    return steps_bytes + first_bytes + max(0, min(more_bytes, first_bytes)) * num_pairs


def run_largest_steps(runner: CudaRunner) -> None:
    """The largest prefill, the widest decode and the widest batch of special rows, all on the scratch row."""
    _run_largest_prefill(runner)
    decode, _ = runner.graphs.record_largest(EagerRecorder())
    decode()
    _sample_special(runner)


def _run_largest_prefill(runner: CudaRunner) -> None:
    config, scratch = runner.config, Slot(runner.config.max_slots)
    longest, rest = config.max_model_len, config.max_batch_tokens
    chunks = []
    while rest:
        chunks.append(Chunk(slot=scratch, start=0, num_tokens=min(rest, longest), is_last=False))
        rest -= chunks[-1].num_tokens
    plan = StepPlan(step=0, prefill=tuple(chunks))
    layout = MixedLayout.exact(plan)
    words_U = np.zeros(layout.num_words, np.int32)
    no_tokens_R = [np.zeros(longest, np.int32)] * (scratch + 1)
    layout.fill(words_U, plan, no_tokens_R, scratch_row=scratch, are_all_read=True)
    runner.graphs.run_inputs(layout.inputs(torch.from_numpy(words_U).to(runner.graphs.kv.k_pool_LPKBH.device)))


def _sample_special(runner: CudaRunner) -> None:
    slots_N, one_T = np.arange(runner.config.max_slots, dtype=np.int32), np.ones(1, np.int32)
    params = sampler_params(_SAMPLING, ())
    for slot in slots_N.tolist():
        new = NewRequest(slot=Slot(slot), request_id="", token_ids_T=one_T, num_prompt_tokens=1, sampling=_SAMPLING)
        runner.special.join(new, params)
    logits_NV = runner.graphs.step.logits_BV[: len(slots_N)].float()
    runner.special.sample(logits_NV, slots_N, np.ones(len(slots_N), np.int64), None)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])
