"""The decoder layers on a GPU or in Triton's interpreter: gate and up of many tokens in one product against the way by
memory, the layers of two ranks, what is added to products, hidden states on the way."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import CausalLM, ModelConfig
from octavo.model.causal_lm import TakeHidden
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.gpu import layers
from octavo.model.gpu.layers import LayerBuffers, Layers, finish_of, run_layers
from octavo.model.gpu.weights import GpuWeights, LayerAddends
from octavo.model.parallel import ALONE, Ranks, part_of
from tests.support.model.ranks import alone, on_ranks, summing_shares

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


def weights_of(config: dict[str, object], ranks: Ranks = ALONE) -> GpuWeights:
    """Of a random model, or a rank's part of them."""
    whole = CausalLM.random(ModelConfig.from_dict(config), seed=1, dtype=DTYPE, device=DEVICE)
    model = CausalLM(whole.config, dtype=DTYPE, device=DEVICE, ranks=ranks)
    views = destinations(whole)
    for name, view in destinations(model).items():
        view.copy_(views[name][part_of(name, tuple(views[name].shape), whole.config, ranks)])
    return GpuWeights.take(model, max_positions=64)


def stream_of(weights: GpuWeights, *, depends_on_qkv: bool, take: TakeHidden | None = None) -> torch.Tensor:
    """A random stream after all layers, whose attention gives random heads, and the mean of QKV's product besides."""
    generator = torch.Generator().manual_seed(2)
    x_TD, attended_TNH = (torch.randn(*shape, generator=generator) for shape in ((9, 128), (9, 2, 64)))
    stream_TD = weights.ranks.stream((9, 128), DTYPE, torch.device(DEVICE))
    buffers, each = LayerBuffers(weights, 9, stream_TD), 2 // weights.ranks.size
    heads = attended_TNH[:, weights.ranks.rank * each :][:, :each].to(DEVICE, DTYPE)
    buffers.x_TD.copy_(x_TD)

    def attend(_index: int, _layer: object, qkv_TC: torch.Tensor, _x: torch.Tensor, out_TNH: torch.Tensor) -> None:
        out_TNH.copy_(heads + qkv_TC.mean(dim=1)[:, None, None] if depends_on_qkv else heads)

    return run_layers(weights, Layers(finish_of(weights, buffers), attend), buffers.x_TD, take)


def stream_of_rank(ranks: Ranks) -> torch.Tensor:
    return stream_of(weights_of(CONFIG | {"num_key_value_heads": 2}, ranks), depends_on_qkv=False)


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks need two devices")
def test_two_ranks_give_the_stream_of_one(tmp_path: Path) -> None:
    expected_TD = alone(stream_of_rank)
    for found_TD in on_ranks(2, stream_of_rank, tmp_path):
        assert abs(found_TD - expected_TD).max() < 1e-5


def stream_of_rank_by_shares(ranks: Ranks, folder: Path, least_rows: int) -> dict[str, torch.Tensor]:
    summing = summing_shares(ranks, (9, 128), folder, least_rows=least_rows)
    assert summing.divided is not None
    with mock.patch.object(summing.divided, "add", side_effect=summing.divided.add) as add:
        found_TD = stream_of_rank(summing)
    return {"stream": found_TD, "sums": torch.tensor(add.call_count)}


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks need two devices")
@pytest.mark.parametrize(("size", "least_rows", "num_sums"), [(2, 9, 4), (2, 10, 0)], ids=["by shares", "few rows"])
def test_ranks_that_sum_shares_have_the_stream_of_one(
    size: int, least_rows: int, num_sums: int, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    expected_TD = alone(stream_of_rank)
    found = on_ranks(size, stream_of_rank_by_shares, tmp_path, tmp_path / "memory", least_rows)
    for rank in found:
        assert abs(rank["stream"] - expected_TD).max() < 1e-5
        assert np.array_equal(rank["stream"], found[0]["stream"])
        assert rank["sums"] == num_sums


def test_hidden_states_can_be_taken_behind_every_layer() -> None:
    taken: dict[int, torch.Tensor] = {}
    weights = weights_of(CONFIG)
    out_TD = stream_of(weights, depends_on_qkv=True, take=lambda index, x_TD: taken.update({index: x_TD.clone()}))
    assert list(taken) == [0, 1]
    assert torch.equal(taken[1], out_TD)
    first = replace(weights, layers=weights.layers[:1])
    assert torch.equal(taken[0], stream_of(first, depends_on_qkv=True))


def test_addends_to_each_product_are_as_if_they_were_in_the_weights() -> None:
    weights = weights_of(CONFIG)
    generator = torch.Generator().manual_seed(3)
    layers, addends = [], []
    for layer in weights.layers:
        merged, added = {}, {}
        for product in ("qkv_CD", "o_DA", "gate_up_ED", "down_DI"):
            matrix = getattr(layer, product)
            down, up = (torch.randn(4, size, generator=generator).to(DEVICE, DTYPE) for size in matrix.T.shape)
            merged[product] = matrix + 0.05 * up.T @ down / matrix.shape[1] ** 0.5
            name = {"qkv_CD": "qkv", "o_DA": "output", "gate_up_ED": "gate_up", "down_DI": "down"}[product]
            added[name] = lambda x, out, down=down, up=up: out.add_(0.05 * (x @ down.T @ up) / x.shape[1] ** 0.5)
        layers.append(replace(layer, **merged))
        addends.append(LayerAddends(**added))
    expected_TD = stream_of(replace(weights, layers=tuple(layers)), depends_on_qkv=True)
    found_TD = stream_of(replace(weights, addends=tuple(addends)), depends_on_qkv=True)
    # Weights that were merged are rounded once more: single elements in bf16 may be far apart, the whole is not.
    plain_TD = stream_of(weights, depends_on_qkv=True)
    assert distance(found_TD, expected_TD) < min(LIMIT, distance(plain_TD, expected_TD) / 4)


def distance(found_TD: torch.Tensor, expected_TD: torch.Tensor) -> float:
    """Of the whole, relative to what is expected."""
    return float((found_TD - expected_TD).float().norm() / expected_TD.float().norm())
