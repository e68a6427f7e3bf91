"""Results of a rank's CUDA runner for a few plans that have every kind of step.

Importable only if triton is installed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import ModelConfig, load_model
from octavo.model.checkpoint.packed import Packed
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.sampling.logprobs import MAX_TOP
from octavo.model.kernels.sampling.mask import packed_mask
from octavo.model.layers.linear import WeightFormat
from octavo.model.parallel import Ranks
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, Launching
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.scheduler.plan import StepMasks, StepResult
from tests.support.model.interpreter import convert_to_e4m3_as_devices_do, cut_decodes_coarsely
from tests.support.model.ranks import cut
from tests.support.worker.cuda_runners import BLOCK, CONFIG, DEVICE, SAMPLING, VOCAB, Hand, prompt, random_model
from tests.support.worker.hand_plans import chunk

QWEN3 = {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False, "vocab_size": 128, "hidden_size": 64,
         "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4}  # fmt: skip
SHAPES = {"qwen2": CONFIG, "qwen3": ModelConfig.from_dict(QWEN3)}
GRAMMAR = Grammar(kind=GrammarKind.REGEX, source="unread here")
LEN, SLOTS = 48, 3


def runner_of(
    ranks: Ranks, shape: str, way: str, weights: str, kv: str, launching: Launching, slots: int = SLOTS
) -> CudaRunner:
    """weights: a WeightFormat, or the folder of a packed checkpoint."""
    is_plain = weights in [each.value for each in WeightFormat]
    if is_plain:
        model = cut(random_model(SHAPES[shape]), ranks)
    else:
        model = load_model(Path(weights), dtype=torch.float32, packed=Packed.KEPT, ranks=ranks)
    if kv == "fp8":
        fold_cache_scales(model)
    taken = GpuWeights.take(
        model, max_positions=LEN + BLOCK, weight_format=WeightFormat(weights if is_plain else "bf16")
    )
    config = CudaRunnerConfig(
        num_blocks=64, block_size=BLOCK, max_slots=slots, max_model_len=LEN, vocab_size=VOCAB, eos_token_ids=(7,),
        max_batch_tokens=24, launching=launching, kv_dtype=FP8 if kv == "fp8" else None,
        deterministic=Deterministic.ON if way == "deterministic" else Deterministic.OFF,
    )  # fmt: skip
    runner = CudaRunner(taken, config)
    if way != "deterministic":
        runner.graphs.step.autotuner.names = dict.fromkeys(range(1, 9), way)
    runner.record()
    return runner


def mask_of(allowed: range) -> StepMasks:
    """Masks that allow these tokens in the first row of a step."""
    bits_V = np.zeros(VOCAB, np.bool_)
    bits_V[allowed] = True
    return StepMasks(index_N=np.zeros(1, np.int64), bits_NW=packed_mask(bits_V)[None])


SPECIAL: dict[str, Any] = {"temperature": 60.0, "top_k": 9, "num_logprobs": MAX_TOP + 1}
"""More log-probabilities than the device has room for."""


def sampled_by(ranks: Ranks, way: str) -> dict[str, Any]:
    """Tokens and log-probabilities of one batch whose rows are each sampled in another way; and for each step the
    widths of what the ranks gathered, beginning with steps whose rows have only a temperature."""
    patch, widths = pytest.MonkeyPatch(), list[set[int]]()
    if DEVICE == "cpu":
        cut_decodes_coarsely(patch)
    concatenate = Ranks.concatenate

    def noted(self: Ranks, part_SW: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if widths:
            widths[-1].add(part_SW.shape[1])
        return concatenate(self, part_SW, out=out)

    patch.setattr(Ranks, "concatenate", noted)
    rows = [*SAMPLING, SPECIAL, {"temperature": 60.0, "seed": 3}]
    runner = runner_of(ranks, "qwen2", way, "bf16", "auto", Launching.EAGER, len(rows))
    hand, results = Hand(runner), list[StepResult]()  # type: ignore[arg-type]

    def step(masks: StepMasks | None = None, **what: Any) -> None:
        widths.append(set())
        hand.launch(**what)
        if masks is not None:
            runner.constrain(masks)
        results.append(runner.collect())

    def decode(slots: range, position: int) -> dict[int, int]:
        return dict.fromkeys(slots, position)

    plain, others = range(2), range(2, len(rows))
    for slot in plain:
        hand.join(slot, prompt(slot, 2), **rows[slot])
    step(prefill=tuple(chunk(slot, 0, 2) for slot in plain))
    step(decode=decode(plain, 2))
    for slot in others:
        grammar = {"grammar": GRAMMAR} if slot == others[-1] else {}
        hand.join(slot, prompt(slot, 2), **rows[slot], **grammar)
    last = np.asarray([len(rows) - 1], np.int64)
    masks = StepMasks(index_N=last, bits_NW=mask_of(range(20, 60)).bits_NW)
    step(masks, decode=decode(plain, 3), prefill=tuple(chunk(slot, 0, 2) for slot in others))
    for position in range(2, 5):
        step(masks, decode=decode(plain, position + 2) | decode(others, position))
    patch.undo()
    runner.close()
    return {
        "tokens": [result.tokens_S.tolist() for result in results],
        "chosen": np.asarray([each.logprob for result in results for each in result.logprobs.values()], np.float32),
        "likely": [each.top_ids for result in results for each in result.logprobs.values()],
        "widths": widths,
    }


def steps_of(
    ranks: Ranks, shape: str, way: str, weights: str, kv: str, launching: Launching = Launching.EAGER
) -> dict[str, Any]:
    """Results of steps with prompts whole and in chunks, with decodes among them, then decodes alone; every way to
    sample; a grammar's masks; and log-probabilities of a prompt."""
    patch = pytest.MonkeyPatch()
    if DEVICE == "cpu":
        cut_decodes_coarsely(patch)
        convert_to_e4m3_as_devices_do(patch)
    runner = runner_of(ranks, shape, way, weights, kv, launching)
    hand, results = Hand(runner), list[StepResult]()  # type: ignore[arg-type]

    def step(masks: StepMasks | None = None, **what: Any) -> None:
        hand.launch(**what)
        if masks is not None:
            runner.constrain(masks)
        results.append(runner.collect())

    hand.join(0, prompt(0, 5), grammar=GRAMMAR, num_logprobs=3)
    hand.join(1, prompt(1, 17), num_prompt_logprobs=2, **SAMPLING[3])
    step(mask_of(range(3, 40)), prefill=(chunk(0, 0, 5), chunk(1, 0, 8, last=False)))
    step(mask_of(range(40, 90)), decode={0: 5}, prefill=(chunk(1, 8, 9),))
    hand.join(2, prompt(2, 6), temperature=60.0, seed=5)
    step(mask_of(range(VOCAB)), decode={0: 6, 1: 17}, prefill=(chunk(2, 0, 6),))
    step(mask_of(range(60)), decode={0: 7, 1: 18, 2: 6})
    step(decode={1: 19})
    patch.undo()
    found = {
        "tokens": [result.tokens_S.tolist() for result in results],
        "chosen": np.asarray([each.logprob for result in results for each in result.logprobs.values()], np.float32),
        "likely": [each.top_ids for result in results for each in result.logprobs.values()],
        "prompt": np.asarray(
            [each.logprob for result in results for row in result.prompt_logprobs.values() for each in row], np.float32
        ),
        "logits": runner.graphs.step.logits_BV[:1].clone(),
    }
    runner.close()
    return found
