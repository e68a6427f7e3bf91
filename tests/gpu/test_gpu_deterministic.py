"""Deterministic mode on a real device, with recorded steps: the same ids and log-probabilities alone, in a crowd, in
chunks of all sizes, over a cached prefix and after preemptions; and the same with other padding."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import ModelConfig
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import Launching
from tests.support.worker.cuda_runners import cuda_runner
from tests.support.worker.invariance import Invariance, Limits, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPE = ModelConfig(
    vocab_size=2048,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
LIMITS = Limits(
    num_blocks=1200, block_size=16, max_slots=40, max_batch_tokens=384, max_model_len=640, vocab_size=2000,
    num_prompt=290, num_output=24, crowd=31,
)  # fmt: skip


def test_in_bf16_an_answer_does_not_depend_on_the_batch_or_the_padding() -> None:
    recorded = cuda_runner(SHAPE, LIMITS, launching=Launching.GRAPHS, dtype=torch.bfloat16)
    wanted = check(recorded, LIMITS).alone()
    recorded.close()
    bare = cuda_runner(SHAPE, replace(LIMITS, max_slots=24), launching=Launching.EAGER, dtype=torch.bfloat16)
    assert Invariance(runner=bare, limits=replace(LIMITS, max_slots=24)).alone() == wanted


def test_in_fp32_too() -> None:
    shape, limits = replace(SHAPE, num_hidden_layers=3), replace(LIMITS, num_prompt=120, num_output=8)
    check(cuda_runner(shape, limits, launching=Launching.GRAPHS), limits)


def test_without_the_mode_it_does() -> None:
    """The control: what the others would find."""
    runner = cuda_runner(
        SHAPE, LIMITS, launching=Launching.GRAPHS, deterministic=Deterministic.OFF, dtype=torch.bfloat16
    )
    here = Invariance(runner=runner, limits=LIMITS)
    wanted = here.alone()
    assert any(outcomes != wanted for _, outcomes in here.ways())
