"""The CUDA runner of each rank of a group, in Triton's interpreter over gloo, gives what one rank's does: every kind of
step, every way through a layer, every kind of weights, sampled on each rank."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import ModelConfig
from octavo.model.gpu.weights import GpuWeights
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
from tests.support.model.interpreter import WARNINGS, convert_to_e4m3_as_devices_do, cut_decodes_coarsely
from tests.support.model.ranks import alone, cut, on_ranks
from tests.support.worker.cuda_runners import BLOCK, CONFIG, DEVICE, SAMPLING, VOCAB, Hand, chunk, prompt, random_model

pytestmark = [
    *WARNINGS,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_ranks.py has what two ranks on a device can do"),
]
QWEN3 = {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False, "vocab_size": 128, "hidden_size": 64,
         "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4}  # fmt: skip
SHAPES = {"qwen2": CONFIG, "qwen3": ModelConfig.from_dict(QWEN3)}
GRAMMAR = Grammar(kind=GrammarKind.REGEX, source="unread here")
LEN, SLOTS = 48, 3


def runner_of(ranks: Ranks, shape: str, way: str, weights: str, kv: str) -> CudaRunner:
    model = cut(random_model(SHAPES[shape]), ranks)
    if kv == "fp8":
        fold_cache_scales(model)
    taken = GpuWeights.take(model, max_positions=LEN + BLOCK, weight_format=WeightFormat(weights))
    config = CudaRunnerConfig(
        num_blocks=64, block_size=BLOCK, max_slots=SLOTS, max_model_len=LEN, vocab_size=VOCAB, eos_token_ids=(7,),
        max_batch_tokens=24, launching=Launching.EAGER, kv_dtype=FP8 if kv == "fp8" else None,
        deterministic=Deterministic.ON if way == "deterministic" else Deterministic.OFF,
    )  # fmt: skip
    runner = CudaRunner(taken, config)
    if way != "deterministic":
        runner.graphs.step.autotuner.names = dict.fromkeys(range(1, 9), way)
    return runner


def mask_of(allowed: range) -> StepMasks:
    """For the first row of a step."""
    bits_V = np.zeros(VOCAB, np.bool_)
    bits_V[allowed] = True
    return StepMasks(index_N=np.zeros(1, np.int64), bits_NW=packed_mask(bits_V)[None])


def steps_of(ranks: Ranks, shape: str, way: str, weights: str, kv: str) -> dict[str, Any]:
    """Prompts whole and in chunks, beside decodes, then decodes alone; every way to sample; a grammar's masks; and
    log-probabilities of a prompt."""
    patch = pytest.MonkeyPatch()
    cut_decodes_coarsely(patch)
    convert_to_e4m3_as_devices_do(patch)
    runner = runner_of(ranks, shape, way, weights, kv)
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
    return {
        "tokens": [result.tokens_S.tolist() for result in results],
        "chosen": np.asarray([each.logprob for result in results for each in result.logprobs.values()], np.float32),
        "likely": [each.top_ids for result in results for each in result.logprobs.values()],
        "prompt": np.asarray(
            [each.logprob for result in results for row in result.prompt_logprobs.values() for each in row], np.float32
        ),
        "logits": runner.graphs.step.logits_BV[:1].clone(),
    }


@cache
def plain_alone(shape: str) -> dict[str, Any]:
    """What one rank gives by cuBLAS, in no fewer bits."""
    found: dict[str, Any] = alone(steps_of, shape, "cublas", "bf16", "auto")
    return found


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ("qwen2", "cublas"),
        ("qwen3", "cublas"),
        ("qwen2", "small_batch"),
        ("qwen2", "deterministic"),
        pytest.param("qwen3", "small_batch", marks=pytest.mark.slow),
        pytest.param("qwen2", "split_k-16", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_step_gives_each_rank_what_one_rank_gets(shape: str, way: str, tmp_path: Path) -> None:
    expected = plain_alone(shape)
    found = on_ranks(2, steps_of, tmp_path, shape, way, "bf16", "auto")
    for rank in found:
        assert rank["tokens"] == expected["tokens"]
        assert rank["likely"] == expected["likely"]
        for name in ("chosen", "prompt", "logits"):
            assert len(rank[name]) == len(expected[name]) > 0
            np.testing.assert_allclose(rank[name], expected[name], atol=1e-4, rtol=1e-4)
    assert np.array_equal(found[0]["logits"], found[1]["logits"])


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), [("int8", "auto"), ("fp8", "auto"), ("bf16", "fp8")])
def test_weights_and_cache_of_8_bits_are_cut_too(weights: str, kv: str, tmp_path: Path) -> None:
    """A rank rounds its own part, so what is as near to the plain numbers is all that can be asked."""
    exact = plain_alone("qwen2")["prompt"]
    whole = alone(steps_of, "qwen2", "cublas", weights, kv)["prompt"]
    found = on_ranks(2, steps_of, tmp_path, "qwen2", "cublas", weights, kv)
    assert found[0]["tokens"] == found[1]["tokens"]
    assert torch.equal(torch.from_numpy(found[0]["logits"]), torch.from_numpy(found[1]["logits"]))
    error = np.abs(whole - exact).max()
    assert 0 < np.abs(found[0]["prompt"] - exact).max() < 3 * error
