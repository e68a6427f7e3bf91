"""Packed weights against plain ones."""

import copy
from collections.abc import Callable

import pytest
import torch

from octavo.model import CausalLM, ModelConfig, dense_logits
from octavo.model.cpu.products import PanelWeight, can_panel, pack_bf16, pack_int8
from octavo.model.layers.linear import FormatUnavailable, Linear, OneDnnWeight, WeightFormat, can_pack, packed

needs_packing = pytest.mark.skipif(
    packed(torch.ones(2, 2).bfloat16(), None, WeightFormat.BF16) is None, reason="neither a C compiler nor oneDNN"
)


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 13, 14, 16, 33, 130])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 48), (896, 1152), (100, 37)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_is_as_close_to_the_exact_product_as_plain(
    num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    weight = (torch.randn(num_out, num_in) * 0.1).bfloat16()
    bias = torch.randn(num_out).bfloat16() if has_bias else None
    x = torch.randn(num_rows, num_in).bfloat16()
    linear = Linear(weight, bias)
    plain = linear(x)
    linear.pack()
    product = linear(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = exact.abs().max()
    assert product.dtype == torch.bfloat16
    assert product.shape == plain.shape
    assert (product.double() - exact).abs().max() / scale < 2**-8
    assert (plain.double() - exact).abs().max() / scale < 2**-8


@needs_packing
def test_the_same_row_gives_the_same_bits_among_any_others() -> None:
    linear = Linear((torch.randn(256, 512) * 0.05).bfloat16())
    linear.pack()
    if linear.panels is None:
        pytest.skip("oneDNN does not promise it")
    x = torch.randn(48, 512).bfloat16()
    whole = linear(x)
    for count in (1, 2, 15, 16, 17, 32):
        assert torch.equal(linear(x[:count]), whole[:count])


@needs_packing
@pytest.mark.parametrize("wanted", [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.INT8_WEIGHTS])
@pytest.mark.parametrize("num_rows", [1, 9, 30])
def test_a_wide_product_has_the_same_values_in_fp32(num_rows: int, wanted: WeightFormat) -> None:
    weight = (torch.randn(101, 64) * 0.05).bfloat16()
    if wanted is not WeightFormat.BF16 and not can_panel(weight):
        pytest.skip("no int8 weights here")
    linear = Linear(weight)
    x = torch.randn(num_rows, 64).bfloat16()
    for _ in ("plain", "packed"):
        found = linear.forward_float32(x)
        assert found.dtype == torch.float32
        assert torch.equal(found, linear(x).float())
        linear.pack(wanted)


@needs_packing
def test_packing_is_idempotent_and_tells_its_bytes() -> None:
    linear = Linear(torch.randn(64, 128).bfloat16())
    assert linear.packed_bytes == 0
    linear.pack()
    x, first = torch.randn(3, 128).bfloat16(), linear.packed_bytes
    before = linear(x)
    linear.pack()
    assert torch.equal(linear(x), before)
    assert linear.packed_bytes == first == 64 * 128 * 2
    with pytest.raises(AttributeError, match="weight"):
        _ = linear.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    linear = Linear(torch.randn(8, 8, dtype=dtype))
    linear.pack()
    assert linear.weight.shape == (8, 8)
    assert linear.packed_bytes == 0


@needs_packing
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_packed_model_keeps_its_embedding_and_its_logits(is_tied: bool) -> None:
    config = ModelConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
    )
    plain = CausalLM.random(config, seed=0, dtype=torch.bfloat16)
    packed = copy.deepcopy(plain)
    packed.pack_weights()
    ids_T = torch.arange(20)
    expected_TV = dense_logits(plain, ids_T)
    difference = (dense_logits(packed, ids_T) - expected_TV).abs().max() / expected_TV.abs().max()
    assert difference < 0.03
    assert torch.equal(packed.embed_tokens.weight, plain.embed_tokens.weight)
    assert not any(name.endswith("_proj.weight") for name, _ in packed.named_parameters())


Pack = Callable[[torch.Tensor, torch.Tensor | None], PanelWeight]

needs_panels = pytest.mark.skipif(not can_panel(torch.empty(1, 2, dtype=torch.bfloat16)), reason="no C compiler here")


@needs_panels
@pytest.mark.parametrize("pack", [pack_bf16, pack_int8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 18, 19, 28, 29, 112, 113, 130, 510])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 48), (896, 1152), (100, 37), (2, 1), (258, 33)])
def test_our_product_is_that_of_the_weight_it_packed(pack: Pack, num_rows: int, num_in: int, num_out: int) -> None:
    weight, bias = (torch.randn(num_out, num_in) * 0.1).bfloat16(), torch.randn(num_out).bfloat16()
    x = torch.randn(num_rows, num_in).bfloat16()
    panels = pack(weight, bias)
    exact = x.double() @ panels.unpacked().double().T + bias.double()
    torch.testing.assert_close(panels.multiply(x).double(), exact, rtol=2**-8, atol=1e-4)
    if pack is pack_bf16:
        assert torch.equal(panels.unpacked().bfloat16(), weight)


@needs_panels
@pytest.mark.parametrize("pack", [pack_bf16, pack_int8])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_our_product_gives_a_row_the_same_bits_among_any_others(pack: Pack, num_threads: int) -> None:
    panels = pack((torch.randn(256, 512) * 0.05).bfloat16(), None)
    x = torch.randn(512, 512).bfloat16()
    whole = panels.multiply(x)
    torch.set_num_threads(num_threads)
    for count in (1, 2, 5, 6, 7, 12, 13, 14, 15, 18, 19, 48, 112, 113, 300, 505):
        assert torch.equal(panels.multiply(x[:count]), whole[:count])
        assert torch.equal(panels.multiply(x[-count:]), whole[-count:])


@needs_panels
def test_integers_are_within_half_a_step_of_the_weight() -> None:
    weight = torch.randn(40, 64).bfloat16()
    weight[3] = 0
    panels = pack_int8(weight, None)
    step_N1 = weight.float().abs().amax(1, keepdim=True) / 127
    assert bool(((panels.unpacked() - weight.float()).abs() <= 0.5001 * step_N1).all())
    assert panels.num_bytes == 64 * 64  # whole panels


@needs_panels
@pytest.mark.parametrize("wanted", [WeightFormat.INT8, WeightFormat.INT8_WEIGHTS])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_integers_of_what_is_no_number_give_none(wanted: WeightFormat, value: float) -> None:
    """Else a broken checkpoint would answer with noise, where in bf16 its requests end as NUMERICAL."""
    weight = torch.randn(40, 64).bfloat16()
    weight[3, 5] = value
    linear = Linear(weight)
    linear.pack(wanted)
    is_finite = linear(torch.randn(2, 64).bfloat16()).isfinite().all(0)
    assert is_finite.tolist() == [output != 3 for output in range(40)]


@needs_panels
def test_rows_that_do_not_fit_are_refused() -> None:
    panels = pack_bf16(torch.randn(40, 64).bfloat16(), None)
    with pytest.raises(ValueError, match="rows of 64"):
        panels.multiply(torch.randn(2, 62).bfloat16())


def test_integers_of_what_is_not_bf16_are_refused() -> None:
    with pytest.raises(FormatUnavailable, match="bf16"):
        Linear(torch.randn(8, 8)).pack(WeightFormat.INT8)


@needs_panels
@pytest.mark.parametrize(("has_compiler", "layout"), [(False, OneDnnWeight), (True, PanelWeight)])
def test_without_a_compiler_bf16_is_multiplied_by_onednn(
    has_compiler: bool, layout: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setattr("octavo.model.layers.linear.can_panel", lambda weight_NK: False)
        if not can_pack(torch.ones(2, 2).bfloat16()):
            pytest.skip("this CPU, or what is left of it, is none for oneDNN's bf16")
    weight, x = (torch.randn(48, 64) * 0.1).bfloat16(), torch.randn(130, 64).bfloat16()
    found = packed(weight, None, WeightFormat.BF16)
    assert found is not None
    assert type(found) is layout
    torch.testing.assert_close(found.multiply(x).double(), x.double() @ weight.double().T, rtol=2**-7, atol=1e-3)
