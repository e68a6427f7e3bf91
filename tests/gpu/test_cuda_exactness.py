"""What fp8 weights and an fp8 cache cost as the kernels compute them: as much as the emulation on a CPU says."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.cpu.quant_error import pieces
from bench.gpu.quant import measure_exactness
from octavo.model import load_model, resolve_checkpoint
from octavo.model.verify.rounding_error import Rounding, measure, round_model
from octavo.worker.loading.weight_format import FP8_CAPABILITY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY,
        reason="no e4m3 on this machine",
    ),
]
HELD_OUT = Path(__file__).resolve().parents[2] / "bench" / "held_out.txt"


def test_the_kernels_are_as_exact_as_their_emulation() -> None:
    folder = resolve_checkpoint("folio-chat")
    texts = pieces(folder, [HELD_OUT], 1024)
    with torch.inference_mode():
        found = measure_exactness(folder, texts)
    for way, rounding in {
        "fp8 weights": Rounding.FP8_WEIGHTS_AND_TOKENS,
        "fp8 cache": Rounding.FP8_CACHE,
        "fp8 weights and cache": Rounding.FP8_ALL_AND_TOKENS,
    }.items():
        rounded = load_model(folder, dtype=torch.bfloat16)
        round_model(rounded, rounding)
        expected = measure(rounded, load_model(folder, dtype=torch.float32), texts, [], kv_dtype=rounding.kv_dtype)
        assert abs(found[way].perplexity / expected.perplexity - 1) < 0.05, way
        assert abs(found[way].same_choice - expected.same_choice) < 0.05, way
        assert found[way].divergence < 1.5 * expected.divergence, way
    assert found["bf16"].same_choice > 0.95
