"""The steps by which a GPU's exactness is measured give the logits of the model itself."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu.quant import Steps
from octavo.model import load_model
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import paged_logits
from tests.support.model.checkpoints import write_tiny_checkpoint
from tests.support.model.interpreter import WARNINGS, convert_to_e4m3_as_devices_do, prepare_interpreter

pytestmark = list(WARNINGS)


@pytest.mark.parametrize("way", ["bf16", "fp8 weights and cache"])
def test_prompts_and_single_tokens_give_the_models_logits(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        prepare_interpreter()
        convert_to_e4m3_as_devices_do(monkeypatch)
    write_tiny_checkpoint(tmp_path)
    ids = list(range(1, 20))
    expected = paged_logits(load_model(tmp_path, dtype=torch.float32), get_backend("sdpa"), ids, [len(ids)])
    steps = Steps(tmp_path, way, max_tokens=32, device=device, dtype=torch.float32)
    with torch.inference_mode():
        for found in (steps.logits_of_prompt(ids), steps.logits_by_tokens(ids[:5])):
            error = float((found - expected[: len(found)]).norm() / expected[: len(found)].norm())
            assert error < (1e-4 if way == "bf16" else 0.2)
