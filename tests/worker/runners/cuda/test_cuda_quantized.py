"""The CUDA runner over weights of 4 bits, on a GPU or in Triton's interpreter, against the torch runner over the floats
that they stand for."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.gpu.weights import GpuWeights
from octavo.model.layers.linear import Linear
from octavo.model.quantization.rounding import FP8, round_to_groups
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, Launching
from octavo.worker.runners.cuda.runner import CudaRunner
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from tests.support.model.interpreter import WARNINGS, convert_to_e4m3_as_devices_do
from tests.support.worker.cuda_runners import BLOCK, CONFIG, DEVICE, VOCAB, Hand, RunnerPair, prompt, random_model
from tests.support.worker.hand_plans import chunk

pytestmark = WARNINGS
LAUNCHING = Launching.GRAPHS if DEVICE == "cuda" else Launching.EAGER


def quantized_pair(kv_dtype: torch.dtype | None) -> RunnerPair:
    """Both caches of the dtype given; what was not written holds no zeros."""
    common = {
        "num_blocks": 64, "block_size": BLOCK, "max_slots": 4, "max_model_len": 48, "vocab_size": VOCAB,
        "eos_token_ids": (7,), "max_in_flight": 2, "kv_dtype": kv_dtype,
    }  # fmt: skip
    floats, model = random_model(CONFIG), random_model(CONFIG)
    for plain, held in zip(floats.layers.modules(), model.layers.modules(), strict=True):
        if isinstance(plain, Linear) and isinstance(held, Linear):
            weight = round_to_groups(held.weight.data, bits=4, group_size=32)
            held.hold(weight)
            plain.weight.data = weight.dequantized()
    weights = GpuWeights.take(model, max_positions=48 + BLOCK)
    slow = TorchRunner(floats, TorchRunnerConfig(**common))  # type: ignore[arg-type]
    fast = CudaRunner(weights, CudaRunnerConfig(**common, launching=LAUNCHING, max_batch_tokens=24))  # type: ignore[arg-type]
    fast.record()
    return RunnerPair(slow, fast)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_plans_give_the_tokens_of_the_torch_runner(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":
        convert_to_e4m3_as_devices_do(monkeypatch)
    hand = Hand(quantized_pair(kv_dtype))
    hand.join(0, prompt(0, 5))
    hand.join(2, prompt(1, 9), temperature=0.9, seed=2**63 + 17)
    hand.step(prefill=(chunk(0, 0, 5), chunk(2, 0, 9)))
    hand.step(decode={0: 5, 2: 9})
    hand.step(decode={0: 6, 2: 10})
