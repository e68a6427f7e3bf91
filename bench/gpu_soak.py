"""A soak of the engine on a device, without its network: mixed load with cancels and preemptions over a small pool.

    python -m bench.gpu_soak --minutes 20 [--seed 0] [--model 0.5B] [--mode deterministic] [--json FILE]

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.in_process import InProcess
from bench.modes import MODES
from bench.shapes import NUM_IDS, PUBLISHED
from bench.soak_load import Canary, Load, LoadSizes
from bench.soak_watch import Sample, sample, slopes
from blockmgr.ids import PrefixCache
from model.checkpoint import resolve_checkpoint
from model.invariant import make_invariant
from model.loading import load_model
from worker.config import Deterministic
from worker.runner_warmup import WarmRunner
from worker.torch_runner import TorchRunner, TorchRunnerConfig

SAMPLE_S, CANARY_S = 10.0, 5.0
NEAR_TIE_NATS = 2 / 32  # two spacings of logits between 4 and 8 in bf16
GOOD_ENDS = {"LENGTH", "STOP", "CANCELLED"}


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
    from model.gpu.weights import GpuWeights
    from worker.cuda_programs import CudaRunnerConfig
    from worker.cuda_runner import CudaRunner

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


@dataclass(kw_only=True)
class Soak:
    """A run. samples: what was seen."""

    engine: InProcess
    load: Load
    canary: Canary
    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Under load for so long, then to the end of everything asked for."""
        next_sample_s = next_canary_s = 0.0
        while self.clock() < seconds:
            self.load.fill_up()
            self.load.cancel_some()
            if self.clock() >= next_canary_s:
                self.canary.ask()
                next_canary_s = self.clock() + CANARY_S
            self._step()
            if self.clock() >= next_sample_s:
                self._look()
                next_sample_s = self.clock() + SAMPLE_S
        while self.load.open or self.canary.handle is not None:
            self._step()
        for _ in range(4):  # steps in flight for nobody
            self._step()
        self._look()

    def _step(self) -> None:
        self.engine.step()
        self.load.take_ended()
        self.canary.take()

    def _look(self) -> None:
        now = sample(self.engine, self.clock())
        self.samples.append(now)
        print(
            f"{now.at_s:7.1f} s  {now.num_tokens:9d} tokens  {now.num_steps:7d} steps  "
            f"{self.load.ended.total():6d} ended  "
            f"{now.num_preemptions:5d} preempted  RSS {now.rss / 2**20:7.1f} MiB  "
            f"CUDA {now.cuda_allocated / 2**20:8.1f} MiB  blocks {now.num_free}/{now.num_cached}/{now.num_active}  "
            f"canary {self.canary.num_answers - len(self.canary.partings)}/{self.canary.num_answers}  "
            f"violations {len(now.violations)}",
            flush=True,
        )


def verdicts(soak: Soak, mode: Deterministic) -> dict[str, bool]:
    """What must be so, by name."""
    last, ended, partings = soak.samples[-1], soak.load.ended, soak.canary.partings
    found = {
        "audits clean": not any(each.violations for each in soak.samples),
        "no block held in the end": last.num_active == 0,
        "no row without finite logits": ended["NUMERICAL"] == 0,
        "no errors": set(ended) <= GOOD_ENDS and soak.canary.num_failed == 0,
        "answers of the right length": soak.load.num_mistakes == 0,
        "preemptions and hits happened": bool(last.num_preemptions and last.num_hit_tokens),
        "cancels happened": bool(ended["CANCELLED"]),
        "memory flat": all(each["is_flat"] for each in slopes(soak.samples[:-1]).values()),
    }
    if mode is Deterministic.ON:
        found["canary gave one answer"] = not partings
    else:
        found["canary parted at near-ties only"] = all(each.gap <= NEAR_TIE_NATS for each in partings)
    return found


def report_of(soak: Soak, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Everything, for JSON."""
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
