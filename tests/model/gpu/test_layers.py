"""The decoder layers with gate and up of many tokens in one product against the way by memory, on a GPU or in Triton's
interpreter."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import CausalLM, ModelConfig
from octavo.model.gpu import layers
from octavo.model.gpu.layers import LayerBuffers, Layers, finish_of, run_layers
from octavo.model.gpu.weights import GpuWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, LIMIT = (torch.bfloat16, 3e-2) if torch.cuda.is_available() else (torch.float32, 1e-4)
CONFIG = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("num_tokens", [5, 130])
def test_both_ways_through_the_layers_give_the_same_stream(num_tokens: int) -> None:
    model = CausalLM.random(ModelConfig.from_dict(CONFIG), seed=1, dtype=DTYPE, device=DEVICE)
    weights = GpuWeights.take(model, max_positions=64)
    x_TD = torch.randn(num_tokens, 128, device=DEVICE).to(DTYPE)
    attended_TNH = torch.randn(num_tokens, 2, 64, device=DEVICE).to(DTYPE)
    streams = []
    for is_faster in (False, True):
        buffers = LayerBuffers(weights, 150)
        for buffer in (buffers.x_TD, buffers.gate_up_T2I, buffers.act_TI, buffers.scale_T):
            buffer.fill_(float("nan"))
        buffers.x_TD[:num_tokens] = x_TD
        with mock.patch.object(layers, "is_faster", return_value=is_faster):
            ops = Layers(finish_of(weights, buffers), lambda *args: args[-1].copy_(attended_TNH))
            out_TD = run_layers(weights, ops, buffers.x_TD[:num_tokens])
        assert out_TD.data_ptr() == buffers.x_TD.data_ptr()
        assert bool(buffers.gate_up_T2I.isnan().all()) is is_faster
        streams.append(out_TD.float())
    torch.testing.assert_close(streams[1], streams[0], atol=LIMIT, rtol=LIMIT)
    assert not torch.equal(streams[0], x_TD.float())
