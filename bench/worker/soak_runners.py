"""What a soak runs on: a runner with a pool so small that requests are preempted, and the sizes of its load.

Must not know: requests, what is looked at.
"""

from dataclasses import dataclass

from bench.shapes import NUM_IDS, PUBLISHED
from octavo.model.checkpoint.loading import load_model
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.invariant import make_invariant
from octavo.worker.config import Deterministic
from octavo.worker.loading.warmup import WarmRunner
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large everything is. num_blocks: far fewer than all slots want at once, so that requests are preempted."""

    max_slots: int
    max_model_len: int
    max_batch_tokens: int
    num_blocks: int
    concurrency: int
    longest_prompt: int
    longest_output: int
    block_size: int = 16


GPU_PLAN = Plan(
    max_slots=128, max_model_len=2048, max_batch_tokens=2048, num_blocks=2_400, concurrency=160, longest_prompt=900,
    longest_output=400,
)  # fmt: skip
CPU_PLAN = Plan(
    max_slots=12, max_model_len=512, max_batch_tokens=128, num_blocks=70, concurrency=16, longest_prompt=200,
    longest_output=60,
)  # fmt: skip


def cuda_runner(name: str, plan: Plan, mode: Deterministic) -> WarmRunner:
    """Over random weights of a published shape, or the embedded model, with recorded steps."""
    from bench.gpu.models import random_model
    from octavo.model.gpu.weights import GpuWeights
    from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig
    from octavo.worker.runners.cuda.runner import CudaRunner

    if name in PUBLISHED:
        model = random_model(PUBLISHED[name].config)
    else:
        model = load_model(resolve_checkpoint(name), device="cuda")
    config = CudaRunnerConfig(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_slots=plan.max_slots,
        max_model_len=plan.max_model_len,
        vocab_size=min(NUM_IDS, model.config.vocab_size),
        max_batch_tokens=plan.max_batch_tokens,
        deterministic=mode,
    )
    runner = CudaRunner(GpuWeights.take(model, max_positions=plan.max_model_len + plan.block_size), config)
    seconds = runner.record(lambda done, total: None)
    print(f"{runner.programs.num_shapes} steps recorded in {seconds:.1f} s", flush=True)
    return runner


def cpu_runner(name: str, plan: Plan, mode: Deterministic) -> WarmRunner:
    """The embedded model, or a checkpoint's folder."""
    model = load_model(resolve_checkpoint(name))
    if mode is Deterministic.ON:
        make_invariant(model, max_positions=plan.max_model_len + 1)
    else:
        model.pack_weights()
    config = TorchRunnerConfig(
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        max_slots=plan.max_slots,
        max_model_len=plan.max_model_len,
        vocab_size=model.config.vocab_size,
        backend="invariant" if mode is Deterministic.ON else "sdpa",
    )
    return TorchRunner(model, config)
