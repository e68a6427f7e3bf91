"""Mixed steps of deterministic mode: no work behind the last attention for tokens that nobody samples."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import CausalLM, ModelConfig
from octavo.model.gpu.invariant_layers import InvariantLayers
from octavo.model.gpu.invariant_steps import InvariantDecodeStep, InvariantMixedStep
from octavo.model.gpu.mixed_step import MixedInputs
from octavo.model.kernels.attention.prefill import list_last_tiles, list_tiles
from tests.model.gpu.test_steps import CONFIG, DEVICE, Device, ints

pytestmark = pytest.mark.usefixtures("one_order")


def test_behind_the_last_attention_only_sampled_tokens_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM.random(ModelConfig.from_dict(CONFIG), seed=1, dtype=torch.float32, device=DEVICE)
    device = Device(model, "cublas")
    weights = device.decode.weights
    decode = InvariantDecodeStep(weights, device.state, device.kv, max_batch=8, vocab_size=300)
    mixed, counts, activate = InvariantMixedStep(decode, max_tokens=64), [], InvariantLayers.activate

    def counted(layers: InvariantLayers, x_TD: torch.Tensor, *rest: torch.Tensor) -> None:
        counts.append(len(x_TD))
        activate(layers, x_TD, *rest)

    monkeypatch.setattr(InvariantLayers, "activate", counted)
    chunks = [(0, 0, 0, 7), (1, 7, 0, 4)]
    mixed.run(
        MixedInputs(
            num_decodes=0, ids_T=ints(range(11)), row_T=ints([0] * 7 + [1] * 4),
            position_T=ints([*range(7), *range(4)]), tiles_W4=ints(list_tiles(chunks)),
            last_tiles_W4=ints(list_last_tiles(chunks)), last_S=ints([6, 10]),
            rows_S=ints([0, 1]), ended_E=ints([0, 1]), position_E=ints([6, 3]),
        )
    )  # fmt: skip
    assert counts == [11, 2]
    logits = decode.logits_BV[:2].clone()
    # The same tokens one by one, as decodes: the same bits.
    for row, length in ((0, 7), (1, 4)):
        for position in range(length):
            device.state.position_R[row], device.state.last_token_R[row] = position, position + 7 * row
            decode.rows_B[:1] = row
            decode.run(1)
        assert torch.equal(decode.logits_BV[0], logits[row])
