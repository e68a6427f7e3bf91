"""Time of sampling on a GPU, from a step's logits to its tokens, for one set of parameters after another.

    python -m bench.gpu.sampler [--batches 1 256] [--json out/gpu_sampler.json]

Logits: bf16, [batch, 151,936], of which 151,665 ids may be chosen. `peaked` ones fall with the rank as a language
model's do (at temperature 1 the first has two fifths of the mass), `flat` ones are normal variates: there a cut
lies beyond the candidates that are looked at first. Device microseconds: the median of five timings of replays of one
CUDA graph. Host microseconds: what the launches behind a step take in Python, kernel by kernel, as the runner does it.
The floor reads the logits once at the measured copy rate. Prints a line for each case; --json writes them, too.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.figures import write_json
from bench.gpu.device import copy_rate, need_cuda
from bench.gpu.workloads import QWENS_SAMPLING
from bench.shapes import NUM_IDS, PUBLISHED
from octavo.model.gpu.autotune import time_graph
from octavo.model.gpu.sampling_columns import Stage, plan_row
from octavo.model.gpu.sampling_state import DeviceMasks, SampledBatch, SamplingState
from octavo.model.kernels.sampling.mask import num_words
from octavo.model.kernels.sampling.sample import SampleParts, sample_and_advance
from octavo.model.sampling.params import Feature, features_of
from octavo.wire.messages import SamplingParams

WIDTH, VOCAB = PUBLISHED["0.5B"].vocab_size, NUM_IDS
PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.5, "frequency_penalty": 0.2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("peaked", {"temperature": 0.0}),
    "temperature": ("peaked", {"temperature": 0.7}),
    "temperature 1e-5": ("peaked", {"temperature": 1e-5}),
    "top-k 50": ("peaked", {"temperature": 0.7, "top_k": 50}),
    "top-k 1,000": ("peaked", {"temperature": 0.7, "top_k": 1000}),
    "top-p 0.9": ("peaked", {"temperature": 0.7, "top_p": 0.9}),
    "top-p 0.9, flat": ("flat", {"temperature": 1.0, "top_p": 0.9}),
    "top-k 1,000, top-p 0.9, flat": ("flat", {"temperature": 1.0, "top_k": 1000, "top_p": 0.9}),
    "min-p 0.05": ("peaked", {"temperature": 1.0, "min_p": 0.05}),
    "top-n-sigma 1": ("peaked", {"temperature": 1.0, "top_n_sigma": 1.0}),
    "typical-p 0.9": ("peaked", {"temperature": 1.0, "typical_p": 0.9}),
    "penalties, greedy": ("peaked", {"temperature": 0.0, **PENALTIES}),
    "penalties, temperature": ("peaked", {"temperature": 0.7, **PENALTIES}),
    "Qwen's own": ("peaked", QWENS_SAMPLING),
    "logprobs 5, greedy": ("peaked", {"temperature": 0.0, "num_logprobs": 5}),
    "logprobs 20, greedy": ("peaked", {"temperature": 0.0, "num_logprobs": 20}),
    "min_tokens, greedy": ("peaked", {"temperature": 0.0, "min_tokens": 1 << 30, "stop_token_ids": (151643, 151645)}),
    "allowed ids, greedy": ("peaked", {"temperature": 0.0, "allowed_token_ids": tuple(range(0, VOCAB, 3))}),
    "grammar, greedy": ("peaked", {"temperature": 0.0}),
    "grammar, temperature": ("peaked", {"temperature": 0.7}),
    "bias of 300 ids, greedy": ("peaked", {"temperature": 0.0, "logit_bias": dict.fromkeys(range(0, 30000, 100), 1.0)}),
    "16 bad words, greedy": ("peaked", {"temperature": 0.0, "bad_words": tuple((1, 2, n) for n in range(16))}),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Rows with one set of parameters, ready to be sampled over and over."""

    state: SamplingState
    batch: SampledBatch
    parts: SampleParts
    stages: Stage
    masks: DeviceMasks | None = None

    def behind(self) -> None:
        """Launch what follows the step's own sampler."""
        if self.stages:
            self.state.run(self.stages, self.batch, self.masks)

    def run(self) -> None:
        """Launch the step's own sampler, then the kernels for the rows' parameters."""
        batch, state = self.batch, self.state.state
        sample_and_advance(
            batch.logits_BV, batch.rows_B, state.temperature_R, state.seed_R, state.num_prompt_R, state.last_token_R,
            state.position_R, batch.token_B, batch.is_finite_B, self.parts,
        )  # fmt: skip
        self.behind()


def logits_of(kind: str, batch: int) -> torch.Tensor:
    """Logits of this kind, bf16, on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise_BV = torch.randn(batch, WIDTH, generator=generator, device="cuda")
    if kind == "flat":
        return noise_BV.to(torch.bfloat16)
    rank_BV = noise_BV.argsort(dim=-1).argsort(dim=-1) + 1
    return (20.0 - 1.5 * rank_BV.log() + 0.2 * noise_BV).to(torch.bfloat16)


def prepare(state: SamplingState, logits_BV: torch.Tensor, fields: dict[str, Any], features: Feature) -> Prepared:
    """Every row has the fields of SamplingParams, a prompt of 500 tokens and an output of 40."""
    B, rng = len(logits_BV), np.random.default_rng(0)
    params = SamplingParams(**fields)
    plan = plan_row(params, features_of(params) | features, vocab_size=VOCAB)
    assert plan is not None
    for name, value in plan.columns.items():
        state.state.sampling_columns[name][:B] = value
    for row in range(B):
        ids_T = rng.integers(0, VOCAB, 540).astype(np.int32)
        state.put_tables(row, params, plan, ids_T, 500)
    columns = state.state
    columns.temperature_R[:B] = (
        0.0 if plan.columns["method"] else params.temperature
    )  # as in worker/runners/cuda/staging.py
    columns.position_R[:B], columns.num_prompt_R[:B] = 539, 500
    columns.seed_R[:B] = torch.arange(B, device="cuda")
    batch = SampledBatch(
        logits_BV=logits_BV.clone(),
        rows_B=torch.arange(B, dtype=torch.int32, device="cuda"),
        token_B=torch.zeros(B, dtype=torch.int32, device="cuda"),
        is_finite_B=torch.zeros(B, dtype=torch.int8, device="cuda"),
    )
    masks = None
    if features:
        words = torch.randint(-(2**31), 2**31, (B, num_words(VOCAB)), dtype=torch.int64, device="cuda")
        masks = DeviceMasks(column_N=batch.rows_B, mask_NW=words.to(torch.int32))
    parts = SampleParts(B, VOCAB, "cuda")
    return Prepared(state=state, batch=batch, parts=parts, stages=plan.stages, masks=masks)


def device_us(prepared: Prepared) -> float:
    """Microseconds on the device: the median of five timings of twenty replays."""
    return time_graph(prepared.run) * 1e3


def host_us(prepared: Prepared) -> float:
    """Microseconds on the host: the median of twenty launches, each onto an idle device."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        prepared.behind()
        times.append((time.perf_counter() - start_s) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(batch: int, rate: float) -> list[dict[str, Any]]:
    """A row of figures for each case."""
    state = SamplingState(num_rows=batch + 1, max_batch=batch, vocab_size=VOCAB, device="cuda")
    logits = {kind: logits_of(kind, batch) for kind in ("peaked", "flat")}
    floor, found = batch * VOCAB * 2 / rate * 1e6, []
    for name, (kind, fields) in CASES.items():
        prepared = prepare(state, logits[kind], fields, Feature.GRAMMAR if "grammar" in name else Feature.NONE)
        took = device_us(prepared)
        host = host_us(prepared)
        found.append({"case": name, "batch": batch, "device_us": took, "host_us": host, "floor_us": floor})
        print(f"{batch:4d}  {name:30s} {took:9.1f} us   host {host:7.1f} us   floor {floor:6.1f} us", flush=True)
    return found


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    need_cuda()
    with torch.inference_mode():
        rate = copy_rate()
        print(
            f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s, bf16 logits of {WIDTH} columns", flush=True
        )
        found = [row for batch in arguments.batches for row in measure(batch, rate)]
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
