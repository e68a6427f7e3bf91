"""What follows attention in one call against the same stages one by one: the same bits."""

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from octavo.model.attention.interface import get_backend
from octavo.model.attention.paged import PagedSequences
from octavo.model.cpu import ops
from octavo.model.cpu.products import LayerRest, PanelWeight, can_panel, pack_bf16
from octavo.model.layers.decoder import DecoderLayer
from octavo.model.layers.linear import WeightFormat
from tests.support.model.checkpoints import tiny_config

pytestmark = pytest.mark.skipif(not can_panel(torch.ones(2, 2).bfloat16()), reason="no C compiler here")


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fused(wanted: WeightFormat, **config: int) -> DecoderLayer:
    """The first layer of a small model, which has been packed and fused."""
    small = ModelConfig.from_dict(tiny_config() | config)
    return packed(CausalLM.random(small, seed=1, dtype=torch.bfloat16), wanted).decoder_layers[0]


def packed(model: CausalLM, wanted: WeightFormat = WeightFormat.BF16) -> CausalLM:
    model.pack_weights(wanted)
    return model


def one_by_one(layer: DecoderLayer, attended_TC: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
    hidden_TD = hidden_TD + layer.self_attn.o_proj(attended_TC)
    return hidden_TD + layer.mlp(layer.post_attention_layernorm(hidden_TD))


@pytest.mark.parametrize("num_tokens", [1, 8, 13, 40, 65, 97])
@pytest.mark.parametrize("intermediate_size", [352, 336])  # whole panels or not
@pytest.mark.parametrize("wanted", [WeightFormat.BF16, WeightFormat.INT8])
def test_the_bits_are_those_of_the_stages_one_by_one(
    wanted: WeightFormat, intermediate_size: int, num_tokens: int
) -> None:
    size = {"hidden_size": 96, "intermediate_size": intermediate_size}
    layer = fused(wanted, **size, num_attention_heads=3, num_key_value_heads=1)
    rest = layer.rest
    assert rest is not None
    attended_TC, hidden_TD = normal(num_tokens, rest.o.num_inputs, seed=2), normal(num_tokens, 96, seed=3)
    before = hidden_TD.clone()
    assert torch.equal(rest.run(attended_TC, hidden_TD), one_by_one(layer, attended_TC, hidden_TD))
    assert torch.equal(hidden_TD, before)


@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(70, 896), (550, 1120)])  # whole, and in slabs and pieces
def test_many_threads_give_the_same_bits(num_tokens: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer = fused(WeightFormat.BF16, hidden_size=hidden_size, intermediate_size=1024)
    rest = layer.rest
    assert rest is not None
    attended_TC = normal(num_tokens, rest.o.num_inputs, seed=2)
    hidden_TD = normal(num_tokens, hidden_size, seed=3)
    assert torch.equal(rest.run(attended_TC, hidden_TD), one_by_one(layer, attended_TC, hidden_TD))


def test_gates_and_ups_have_each_their_bias() -> None:
    """Qwen's have none; those of checkpoints that others quantised may."""
    o, down = (pack_bf16(normal(*shape, seed=4), None) for shape in ((64, 32), (64, 96)))
    gate_up = pack_bf16(normal(192, 64, seed=5), normal(192, seed=6))
    norm_D = normal(64, seed=7)
    rest = LayerRest.of(o=o, gate_up=gate_up, down=down, norm_D=norm_D, epsilon=1e-6)
    attended_TC, hidden_TD = normal(70, 32, seed=2), normal(70, 64, seed=3)
    sum_TD = hidden_TD + o.multiply(attended_TC)
    act_TI = ops.silu_mul(gate_up.multiply(ops.rms_norm(sum_TD, norm_D, 1e-6)))
    assert torch.equal(rest.run(attended_TC, hidden_TD), sum_TD + down.multiply(act_TI))


def test_a_step_of_a_packed_model_goes_through_it() -> None:
    config = ModelConfig.from_dict(tiny_config() | {"hidden_size": 128, "intermediate_size": 256})
    model = packed(CausalLM.random(config, seed=1, dtype=torch.bfloat16))
    outs = []
    for is_fused in (True, False):
        if not is_fused:
            for layer in model.decoder_layers:
                layer.rest = None
        outs.append(PagedSequences(model, get_backend("sdpa"), num_sequences=1, max_tokens=20).step({0: range(9)})[0])
    assert torch.equal(*outs)
    model.decoder_layers[0].fuse()
    model.decoder_layers[0].rest.norm_D.zero_()  # type: ignore[union-attr]
    changed = PagedSequences(model, get_backend("sdpa"), num_sequences=1, max_tokens=20).step({0: range(9)})[0]
    assert not torch.equal(outs[0], changed)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    def weight(num_outputs: int, num_inputs: int) -> PanelWeight:
        return pack_bf16(torch.zeros(num_outputs, num_inputs).bfloat16(), None)

    norm_D = torch.ones(64).bfloat16()
    good = {"o": weight(64, 32), "gate_up": weight(96, 64), "down": weight(64, 48)}
    rest = LayerRest.of(**good, norm_D=norm_D, epsilon=1e-6)
    wrongs = {"o": weight(48, 32), "gate_up": weight(96, 48), "down": weight(64, 32)}
    for name, wrong in wrongs.items():
        with pytest.raises(ValueError, match="intermediate" if name == "down" else "model dim"):
            LayerRest.of(**(good | {name: wrong}), norm_D=norm_D, epsilon=1e-6)
    for attended_TC, hidden_TD, named in (((3, 32), (2, 64), "attended"), ((2, 64), (2, 64), "attended"),
                                          ((2, 32), (2, 32), "hidden")):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            rest.run(torch.zeros(attended_TC).bfloat16(), torch.zeros(hidden_TD).bfloat16())
    with pytest.raises(ValueError, match="attended_TC"):
        rest.run(torch.zeros(2, 32), torch.zeros(2, 64).bfloat16())
