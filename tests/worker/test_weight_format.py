"""What a worker's `quantization` does to the weights."""

import pytest
import torch

from model import load_model, resolve_checkpoint
from model.cpu.panels import can_panel
from model.linear import FormatUnavailable, WeightFormat
from worker.config import WorkerConfig
from worker.loaded import Loaded
from worker.runner_loading import load_torch
from worker.runner_memory import weights_bytes

needs_panels = pytest.mark.skipif(
    not can_panel(torch.empty(1, 2, dtype=torch.bfloat16)), reason="no C compiler, or no AVX512-BF16"
)


def load(quantization: str | None, *, dtype: str | None = None) -> Loaded:
    config = WorkerConfig(
        model="folio-chat",
        gateway_endpoints=(),
        num_blocks=64,
        max_num_seqs=4,
        max_batch_tokens=64,
        dtype=dtype,
        quantization=quantization,
    )
    return load_torch(config, lambda stage, done, total: None)


@needs_panels
def test_a_worker_runs_on_integers() -> None:
    assert load("int8").card.fingerprint != load(None).card.fingerprint


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(FormatUnavailable, match="bf16 model"):
        load("int8", dtype="float32")
    with pytest.raises(ValueError, match="'int4' is not int8"):
        load("int4")


@needs_panels
def test_integers_take_half_the_bytes() -> None:
    sizes = []
    for wanted in WeightFormat:
        model = load_model(resolve_checkpoint("folio-chat"), dtype=torch.bfloat16)
        model.pack_weights(wanted)
        kept = model.embed_tokens.weight.numel() * 2
        sizes.append(weights_bytes(model) - kept)
    assert 0.5 <= sizes[1] / sizes[0] < 0.52
