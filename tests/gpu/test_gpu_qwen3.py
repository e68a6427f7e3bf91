"""Qwen3 on a CUDA device: every way to serve it against transformers, recorded steps against the torch runner."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import ModelConfig
from octavo.worker.runners.cuda.graph_runner import Launching
from tests.gpu.test_cuda_runner import serve
from tests.gpu.test_cuda_verify import WAYS_TO_SERVE, compare, told
from tests.gpu.test_gpu_deterministic import LIMITS
from tests.support.model.checkpoints import QWEN3
from tests.support.model.packed_checkpoints import AWQ_CONFIG, write_packed_checkpoint
from tests.support.model.qwen3 import SHAPE, write_qwen3
from tests.support.worker.cuda_runners import cuda_runner, runner_pair, world
from tests.support.worker.invariance import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = ModelConfig.from_dict(SHAPE | {"model_type": "qwen3", "vocab_size": 128})
LARGE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
"""The heads and widths of Qwen3-0.6B."""


@pytest.mark.parametrize("shape", [{}, LARGE], ids=["small", "0.6B's"])
@pytest.mark.parametrize("options", WAYS_TO_SERVE, ids=str)
def test_every_way_to_serve_it_is_green(shape: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    rows = compare(write_qwen3(tmp_path, dtype=torch.bfloat16, **shape), **options)
    assert told(rows) == []
    assert all(row.label.startswith("cuda") for row in rows)


def test_packed_checkpoints_are_green(tmp_path: Path) -> None:
    shape = QWEN3 | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    write_packed_checkpoint(tmp_path, AWQ_CONFIG, **shape)
    assert told(compare(tmp_path)) == []


@pytest.mark.parametrize("num_blocks", [11, 64])
def test_recorded_steps_serve_the_tokens_of_the_torch_runner(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(
        runner_pair(CONFIG, num_blocks=num_blocks, launching=Launching.GRAPHS), monkeypatch, num_blocks=num_blocks
    )
    serve(here, count=24, longest_prompt=30, most_tokens=16)
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 11)


def test_an_answer_in_deterministic_mode_does_not_depend_on_the_batch() -> None:
    config = ModelConfig.from_dict(SHAPE | LARGE | {"model_type": "qwen3", "vocab_size": LIMITS.vocab_size + 27})
    check(cuda_runner(config, LIMITS, launching=Launching.GRAPHS, dtype=torch.bfloat16), LIMITS)
