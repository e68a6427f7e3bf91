"""The same tokens as transformers: greedy outputs of the CUDA runner beside transformers' on the same device.

    python -m bench.gpu.equality [--shape 0.5B] [--requests 64] [--output 48] [--json FILE]

bf16: 64 requests of eight lengths, all at once through the engine (the embedded model on prompts of its own drawing,
then random weights of a published shape), against transformers' `generate` (bf16, SDPA) on requests of one length at a
time, so that nothing is padded. Where an output leaves transformers', transformers' own logits there say how far its
choice lies above ours: a near-tie is a gap below the spacing of bf16 numbers at that size. Its fp32 forward pass over
the same tokens says how wrong its bf16 logits are there (noise: the largest error over the vocabulary), and its own
fp32 outputs beside its bf16 ones how much rounding alone changes.

fp32: the embedded model on the device, against transformers on the CPU in fp32. It must be the same throughout.

Prints counts and a line for each output that parts; --json writes them, too. The exit code is 1 where an fp32 output
differs.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import need_cuda
from bench.in_process import InProcess
from bench.random_checkpoint import write_checkpoint
from bench.shapes import MODES, SHAPES
from octavo.blockmgr.ids import PrefixCache
from octavo.model.checkpoint.loading import load_model
from octavo.model.checkpoint.source import resolve_checkpoint
from octavo.model.gpu.weights import GpuWeights
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig
from octavo.worker.runners.cuda.runner import CudaRunner

BLOCK_SIZE = 16
LENGTHS = (16, 33, 64, 100, 157, 256, 389, 512)


class Reference:
    """transformers on one device, greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
        self.model.eval()
        self.device = device

    def generate(self, prompts: list[np.ndarray], num_output: int) -> list[list[int]]:
        """The outputs; prompts of the same length are batched together."""
        found: dict[int, list[int]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.from_numpy(np.stack([prompts[i] for i in which]).astype(np.int64)).to(self.device)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, min_new_tokens=num_output,
                do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.0,
            )  # fmt: skip
            found |= dict(zip(which, out[:, length:].tolist(), strict=True))
        return [found[i] for i in range(len(prompts))]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 logits after these tokens, on the CPU."""
        return self.model(torch.tensor([ids], device=self.device), logits_to_keep=1).logits[0, -1].float().cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where an output first differs from the reference's. gap: the reference's logit of its own choice minus that of
    ours. spacing: of bf16 numbers of that size. fp32_gap: the same gap in an fp32 forward pass. noise: largest error of
    the reference's bf16 logits there."""

    request: int
    num_prompt: int
    index: int
    ours: int
    theirs: int
    gap: float
    spacing: float
    fp32_gap: float
    noise: float

    @property
    def is_near_tie(self) -> bool:
        """Whether the gap is smaller than bf16 logits can tell."""
        return self.gap <= self.spacing


def spacing_of(value: float) -> float:
    """The spacing of bf16 numbers of this size (8 significant bits)."""
    return float(2.0 ** (np.floor(np.log2(max(abs(value), 1e-30))) - 7))


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The index; None if they are equal."""
    return next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)


def divergences(
    prompts: list[np.ndarray], ours: list[list[int]], theirs: list[list[int]], bf16: Reference, fp32: Reference
) -> list[Divergence]:
    """The first divergence of each request that has one."""
    found = []
    for request, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        index = first_difference(mine, other)
        if index is None:
            continue
        ids = [*prompt.tolist(), *other[:index]]
        logits_V, exact_V = bf16.logits(ids), fp32.logits(ids)
        best = float(logits_V[other[index]])
        found.append(
            Divergence(
                request=request,
                num_prompt=len(prompt),
                index=index,
                ours=mine[index],
                theirs=other[index],
                gap=best - float(logits_V[mine[index]]),
                spacing=spacing_of(best),
                fp32_gap=float(exact_V[other[index]] - exact_V[mine[index]]),
                noise=float((logits_V - exact_V).abs().max()),
            )
        )
    return found


def show(title: str, num_requests: int, found: list[Divergence]) -> None:
    """Print a line of counts, then a line for each divergence."""
    ties = sum(each.is_near_tie for each in found)
    within = sum(each.gap <= each.noise for each in found)
    print(
        f"{title}: {num_requests - len(found)} of {num_requests} outputs equal; {len(found)} part, {ties} of them at a "
        f"near-tie, {within} at a gap within the reference's own error"
    )
    for each in found:
        print(
            f"    request {each.request:3d} (prompt {each.num_prompt:4d}) token {each.index:3d}: {each.ours} for "
            f"{each.theirs}, gap {each.gap:.5f} (spacing {each.spacing:.5f}, noise {each.noise:.5f}), "
            f"in fp32 {each.fp32_gap:+.5f}",
            flush=True,
        )


def prompts_of(count: int, largest_id: int) -> list[np.ndarray]:
    """Prompts of random ids, equally many of each length."""
    rng = np.random.default_rng(11)
    return [rng.integers(0, largest_id, LENGTHS[i * len(LENGTHS) // count]).astype(np.int32) for i in range(count)]


def serve(
    folder: Path, dtype: torch.dtype, mode: Deterministic, prompts: list[np.ndarray], num_output: int
) -> list[list[int]]:
    """Serve all prompts at once through the engine, with recorded steps."""
    config = CudaRunnerConfig(
        num_blocks=8192,
        block_size=BLOCK_SIZE,
        max_slots=64,
        max_model_len=1024,
        vocab_size=load_vocab(folder),
        max_batch_tokens=2048,
        deterministic=mode,
    )
    weights = GpuWeights.take(load_model(folder, dtype=dtype, device="cuda"), max_positions=1024 + BLOCK_SIZE)
    runner = CudaRunner(weights, config)
    runner.record()
    engine = InProcess(runner, config, max_batch_tokens=2048, prefix_cache=PrefixCache.OFF)
    found = engine.outputs([(prompt, {"max_tokens": num_output, "ignore_eos": True}) for prompt in prompts])
    runner.close()
    del engine, runner, weights
    torch.cuda.empty_cache()
    return found


def load_vocab(folder: Path) -> int:
    """Rows of the embedding: transformers chooses among all of them."""
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def compare_bf16(folder: Path, prompts: list[np.ndarray], num_output: int) -> dict[str, Any]:
    """Compare ours in both modes, and transformers' own fp32, with transformers' bf16."""
    ours = {mode: serve(folder, torch.bfloat16, kind, prompts, num_output) for mode, kind in MODES.items()}
    start_s = time.perf_counter()
    bf16, fp32 = (Reference(folder, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32))
    theirs, exact = bf16.generate(prompts, num_output), fp32.generate(prompts, num_output)
    print(f"transformers: {time.perf_counter() - start_s:.1f} s", flush=True)
    found: dict[str, Any] = {"requests": len(prompts), "output": num_output}
    for mode, outputs in {**ours, "transformers fp32": exact}.items():
        parting = divergences(prompts, outputs, theirs, bf16, fp32)
        show(f"{mode} against transformers bf16", len(prompts), parting)
        found[mode] = [asdict(each) for each in parting]
    return found


def drawn_prompts(folder: Path, count: int) -> list[np.ndarray]:
    """Texts that the model itself samples, each from a random id: text that it can continue."""
    reference = Reference(folder, torch.float32, "cuda")
    torch.manual_seed(0)
    prompts = prompts_of(count, 6000)
    found: dict[int, np.ndarray] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        which = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        first = torch.tensor([[int(prompts[index][0])] for index in which], device="cuda")
        drawn = reference.model.generate(
            first, attention_mask=torch.ones_like(first), max_new_tokens=length - 1, min_new_tokens=length - 1,
            do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found |= dict(zip(which, drawn.cpu().numpy().astype(np.int32), strict=True))
    return [found[index] for index in range(count)]


def compare_fp32(num_requests: int, num_output: int) -> dict[str, int]:
    """How many of the embedded model's fp32 outputs equal those of transformers on the CPU, by mode."""
    folder = resolve_checkpoint("folio-chat")
    prompts = prompts_of(num_requests, 6000)
    wanted = Reference(folder, torch.float32, "cpu").generate(prompts, num_output)
    found = {}
    for mode, kind in MODES.items():
        ours = serve(folder, torch.float32, kind, prompts, num_output)
        found[mode] = sum(one == other for one, other in zip(ours, wanted, strict=True))
        print(f"fp32, folio-chat, {mode}: {found[mode]} of {num_requests} outputs equal transformers' on the CPU")
    return found


def main() -> None:
    """Print the tables, write the JSON. Raises SystemExit if an fp32 output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5B")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    with torch.inference_mode():
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "fp32": compare_fp32(arguments.requests, arguments.output),
        }
        embedded = resolve_checkpoint("folio-chat")
        print("-- folio-chat in bf16, prompts that it drew itself")
        drawn = drawn_prompts(embedded, arguments.requests)
        report["folio-chat bf16"] = compare_bf16(embedded, drawn, arguments.output)
        with tempfile.TemporaryDirectory() as place:
            folder = write_checkpoint(Path(place), SHAPES[arguments.shape])
            prompts = prompts_of(arguments.requests, 10_000)
            print(f"-- {arguments.shape} in bf16, random weights: nearly flat logits, ties everywhere")
            report["bf16"] = compare_bf16(folder, prompts, arguments.output)
    write_json(arguments.json, report)
    if any(count != arguments.requests for count in report["fp32"].values()):
        raise SystemExit("fp32 outputs differ from the CPU's")


if __name__ == "__main__":
    main()
