"""A soak of the engine on a device, without its network: mixed load with cancels and preemptions over a small pool.

    python -m bench.worker.soak --minutes 20 [--seed 0] [--model 0.5B] [--mode deterministic] [--json FILE]

--model: a published shape with random weights, or folio-chat. --mode fast: the ordinary kernels, whose canary may part
at near-ties. --device cpu: the same on a CPU, with folio-chat. Two runs of half the time with two seeds are as good as
one.

Every ten seconds the block manager is audited and memory is looked at; in the end everything must be answered, every
block be free or cached, no row have been without finite logits, memory be flat, and the canary have given one answer.
The exit code is 1 where one of these is not so. Prints a line for each look and the verdicts; --json writes every
sample, too.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.in_process import InProcess
from bench.shapes import MODES, NUM_IDS, PUBLISHED
from bench.worker.soak_load import Canary, Load, LoadSizes
from bench.worker.soak_run import Soak, slopes, verdicts
from octavo.blockmgr.ids import PrefixCache
from octavo.model.checkpoint.loading import load_model
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.invariant import make_invariant
from octavo.worker.config import Deterministic
from octavo.worker.loading.warmup import WarmRunner
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig

LEAST_MINUTES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes. num_blocks: far fewer than all slots need at once, so that requests are preempted."""

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
    """A CUDA runner with recorded steps, over random weights of a published shape or the embedded model."""
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
    seconds = runner.record()
    print(f"{runner.graphs.num_shapes} steps recorded in {seconds:.1f} s", flush=True)
    return runner


def cpu_runner(name: str, plan: Plan, mode: Deterministic) -> WarmRunner:
    """A CPU runner over the embedded model, or a checkpoint in a folder."""
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


def report_of(soak: Soak, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """The whole report, for JSON."""
    return {
        "device": device,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "verdicts": verdicts(soak, MODES[arguments.mode]),
        "asked": dict(soak.load.asked),
        "ended": dict(soak.load.ended),
        "canary": {"answers": soak.canary.num_answers, "partings": [asdict(each) for each in soak.canary.partings]},
        "slopes": slopes(soak.samples[:-1]),
        "samples": [asdict(each) for each in soak.samples],
    }


def make_soak(arguments: argparse.Namespace) -> Soak:
    """Runner, engine and load as the arguments say."""
    on_cuda = arguments.device == "cuda"
    plan, mode = GPU_PLAN if on_cuda else CPU_PLAN, MODES[arguments.mode]
    name = arguments.model or ("0.5B" if on_cuda else "folio-chat")
    runner = (cuda_runner if on_cuda else cpu_runner)(name, plan, mode)
    engine = InProcess(runner, runner.config, max_batch_tokens=plan.max_batch_tokens, prefix_cache=PrefixCache.ON)
    rng, vocab_size = np.random.default_rng(arguments.seed), min(10_000, runner.config.vocab_size)
    sizes = LoadSizes(
        concurrency=plan.concurrency,
        longest_prompt=plan.longest_prompt,
        longest_output=plan.longest_output,
        vocab_size=vocab_size,
    )
    start_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - start_s

    prompt = np.random.default_rng(1234).integers(0, vocab_size, 77).astype(np.int32)
    canary = Canary(engine=engine, prompt_ids_T=prompt, clock=clock)
    return Soak(engine=engine, load=Load(engine=engine, sizes=sizes, rng=rng), canary=canary, clock=clock)


def main() -> None:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument("--mode", choices=MODES, default="deterministic")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.minutes < LEAST_MINUTES:
        parser.error(f"--minutes: at least {LEAST_MINUTES:g}, or there are too few looks to tell whether memory grows")
    if arguments.device == "cuda":
        need_cuda()
    soak = make_soak(arguments)
    soak.run(60 * arguments.minutes)
    report = report_of(soak, arguments, torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu")
    print(f"asked {report['asked']}, ended {report['ended']}, canary parted {report['canary']['partings']}")
    for column, each in report["slopes"].items():
        print(f"{column:15s} {each['kib_per_minute']:+10.1f} ± {each['half_width']:.1f} KiB a minute")
    for name, is_so in report["verdicts"].items():
        print(f"{'ok ' if is_so else 'NO '} {name}")
    write_json(arguments.json, report)
    if not all(report["verdicts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
