"""Scales for an 8-bit cache change no function, keep every key and value in range, and cost little exactness."""

import pytest
import torch

from octavo.model import CausalLM, KvPool, ModelConfig
from octavo.model.attention.interface import get_backend, make_inputs
from octavo.model.attention.kv_pool import WriteRows
from octavo.model.quantization.cache_scales import cache_scales, fold_cache_scales, power_of_two
from octavo.model.quantization.rounding import FP8, FP8_MAX, round_to_groups
from tests.support.model.checkpoints import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())


def make(dtype: torch.dtype = torch.float32, *, bias: float = 1.0, **changes: object) -> CausalLM:
    model = CausalLM.random(ModelConfig.from_dict(tiny_config(**changes)), seed=0, dtype=dtype)
    for layer in model.decoder_layers:
        layer.self_attn.qkv_proj.bias.data *= bias  # type: ignore[union-attr]
    return model


def run(model: CausalLM, *, kv_dtype: torch.dtype, backend: str = "reference") -> tuple[torch.Tensor, KvPool]:
    """Logits of a prompt in two chunks, and then a decode."""
    kv = KvPool(model.config, 8, 16, kv_dtype)
    ids = torch.arange(50) * 7 % 300
    logits = []
    for start, count in ((0, 33), (33, 16), (49, 1)):
        positions, inputs = make_inputs([list(range(7, -1, -1))], [start], [count], block_size=16)
        hidden = model(ids[start : start + count], positions, kv, inputs, get_backend(backend))
        logits.append(model.logits(hidden))
    return torch.cat(logits), kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_function_to_the_last_bit(dtype: torch.dtype) -> None:
    plain, scaled = make(dtype, bias=300.0), make(dtype, bias=300.0)
    fold_cache_scales(scaled)
    (expected, plain_kv), (found, scaled_kv) = run(plain, kv_dtype=dtype), run(scaled, kv_dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(plain_kv.k_pool_LPKBH, scaled_kv.k_pool_LPKBH)


@pytest.mark.parametrize("bias", [0.0, 1.0, 1e4])
def test_nothing_that_is_cached_exceeds_the_largest_and_most_is_far_from_zero(bias: float) -> None:
    model = make(bias=bias)
    fold_cache_scales(model)
    for pool in (kv := run(model, kv_dtype=torch.float32)[1]).k_pool_LPKBH, kv.v_pool_LPKBH:
        assert float(pool.abs().max()) <= FP8_MAX
        cached = pool[:, [7, 6, 5]]  # full blocks; the rest is zeros
        assert float((cached.abs() < 2**-6).float().mean()) < 0.01


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_half_the_bytes_gives_nearly_the_same_logits(dtype: torch.dtype, backend: str) -> None:
    model = make(dtype)
    expected, plain = run(model, kv_dtype=dtype, backend=backend)
    fold_cache_scales(model)
    found, small = run(model, kv_dtype=FP8, backend=backend)
    assert small.num_bytes * dtype.itemsize == plain.num_bytes
    error = float((found - expected).norm() / expected.norm())
    assert 0.001 < error < 0.08


def test_backends_agree_on_an_8_bit_cache() -> None:
    model = make()
    fold_cache_scales(model)
    logits = [run(model, kv_dtype=FP8, backend=backend)[0] for backend in ("reference", "sdpa")]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.01  # sums in another order round otherwise


def test_blocks_of_an_8_bit_cache_are_copied() -> None:
    kv = KvPool(CONFIG, 4, 16, FP8)
    kv.k_pool_LPKBH.view(torch.uint8)[:, 1] = 0x38
    kv.copy_blocks(torch.tensor([1]), torch.tensor([3]))
    assert kv.k_pool_LPKBH[:, 3].float().unique().tolist() == [1.0]
    assert kv.k_pool_LPKBH[:, 2].float().unique().tolist() == [0.0]


def test_what_lies_beyond_the_largest_becomes_it() -> None:
    pool = KvPool(CONFIG, 1, 16, FP8).k_pools[0]
    new = torch.tensor([1e4, -1e4, 448.0, 1.0]).repeat(2, pool.shape[3] // 4)[None]
    WriteRows.from_slots(torch.tensor([3]), 16).write(new, pool)
    assert torch.equal(pool[0, :, 3].float(), new[0].clamp(-FP8_MAX, FP8_MAX))


def test_integers_take_the_scales_too() -> None:
    plain, held = make(bias=50.0), make(bias=50.0)
    for model in (plain, held):
        for layer in model.decoder_layers:
            for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
                grouped = round_to_groups(linear.weight.data, bits=4, group_size=32)
                linear.weight.data = grouped.dequantized()
                if model is held:
                    linear.hold(grouped)
    fold_cache_scales(plain)
    fold_cache_scales(held)
    torch.testing.assert_close(run(held, kv_dtype=FP8)[0], run(plain, kv_dtype=FP8)[0], rtol=1e-4, atol=1e-4)


def test_scales_are_powers_of_two_that_just_suffice() -> None:
    assert power_of_two(torch.tensor([448.0, 449.0, 1.0, 0.0, 3e4])).tolist() == [1.0, 2.0, 2.0**-8, 1.0, 128.0]
    layer = make(bias=1e4).decoder_layers[0]
    key, value = cache_scales(layer.self_attn.qkv_proj, layer.input_layernorm.weight.data, CONFIG)
    assert key.shape == value.shape == (2,)
    assert bool((key > 1).all())
