"""Steps with weights of fewer bits against the generic model with the same weights in floats."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model import CausalLM, KvPool, ModelConfig
from octavo.model.attention.interface import get_backend, make_inputs
from octavo.model.gpu.autotune import Cublas, SmallBatch
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.prefill import list_last_tiles, list_tiles
from octavo.model.layers.decoder import DecoderLayer
from octavo.model.layers.linear import Linear, WeightFormat
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8, Fp8Weight, round_to_groups
from tests.support.model.interpreter import convert_to_e4m3_as_devices_do

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S, M = 16, 12
CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }
)  # fmt: skip


def ints(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).to(DEVICE)


def random_model() -> CausalLM:
    return CausalLM.random(CONFIG, seed=1, dtype=torch.float32, device=DEVICE)


def linears(layer: DecoderLayer) -> list[tuple[Linear, torch.Tensor | None]]:
    """Each with the norm before it."""
    return [
        (layer.self_attn.qkv_proj, layer.input_layernorm.weight.data),
        (layer.self_attn.o_proj, None),
        (layer.mlp.gate_up_proj, layer.post_attention_layernorm.weight.data),
        (layer.mlp.down_proj, None),
    ]


def prepare(kind: str) -> tuple[CausalLM, WeightFormat, CausalLM]:
    """A model, how its weights are taken, and a model of floats that computes the same."""
    model, floats = random_model(), random_model()
    for layer, reference in zip(model.decoder_layers, floats.decoder_layers, strict=True):
        for (linear, _), (reference_linear, norm) in zip(linears(layer), linears(reference), strict=True):
            if kind == "bf16" or (kind == "int4 and plain" and norm is None):
                continue
            if kind.startswith("int4"):
                grouped = round_to_groups(linear.weight.data, bits=4, group_size=32)
                order = torch.randperm(grouped.num_inputs, device=DEVICE).int()
                linear.hold(replace(grouped, order_I=order))
                reference_linear.weight.data = linear.quantized.dequantized()  # type: ignore[union-attr]
                continue
            folded = reference_linear.weight.data * (1.0 if norm is None else norm)
            quantized = Fp8Weight.quantize(folded) if kind == "fp8" else round_to_groups(folded, bits=8)
            reference_linear.weight.data = quantized.dequantized() / (1.0 if norm is None else norm)
    return model, {"fp8": WeightFormat.FP8, "int8": WeightFormat.INT8}.get(kind, WeightFormat.BF16), floats


def expected_logits(model: CausalLM, ids: list[int], kv_dtype: torch.dtype) -> torch.Tensor:
    kv = KvPool(model.config, 20, S, kv_dtype, DEVICE)
    positions, inputs = make_inputs([list(range(20))], [0], [len(ids)], block_size=S, device=DEVICE)
    ids_T = torch.tensor(ids, device=DEVICE)
    return model.logits(model(ids_T, positions, kv, inputs, get_backend("reference")))


@pytest.mark.parametrize("few_tokens", [64, 2])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "int4 and plain"])
def test_steps_compute_what_the_same_weights_in_floats_do(kind: str, few_tokens: int) -> None:
    check_steps(*prepare(kind), few_tokens=few_tokens, kv_dtype=torch.float32, limit=2e-4)


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.slow), "int4"])
def test_steps_over_a_cache_of_e4m3(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        convert_to_e4m3_as_devices_do(monkeypatch)
    model, weight_format, floats = prepare(kind)
    fold_cache_scales(model)
    fold_cache_scales(floats)
    # What lies on the border of two e4m3 numbers may become either.
    check_steps(model, weight_format, floats, few_tokens=64, kv_dtype=FP8, limit=2e-2)


def check_steps(
    model: CausalLM,
    weight_format: WeightFormat,
    floats: CausalLM,
    *,
    few_tokens: int,
    kv_dtype: torch.dtype,
    limit: float,
) -> None:
    """A prefill and a decode by cuBLAS and our quantised products have the logits of the model of floats."""
    weights = GpuWeights.take(model, max_positions=S * M, weight_format=weight_format)
    if weights.products is not None:
        weights = replace(weights, products=replace(weights.products, few_tokens=few_tokens))
    state = RowState(num_slots=5, table_width=M, scratch_block=20, device=DEVICE)
    state.table_RM[:5] = ints([range(M)] * 5)
    kv = KvPool(CONFIG, 21, S, kv_dtype, DEVICE)
    decode = DecodeStep(weights, state, kv, max_batch=4, vocab_size=300)
    paths = {type(decode.autotuner.path(size)) for size in range(1, 9)}
    assert paths == ({Cublas} if weights.is_quantized else {Cublas, SmallBatch})
    mixed = MixedStep(decode, max_tokens=256)
    ids = np.random.default_rng(0).integers(0, 290, 37).tolist()
    prompt = [(0, 0, 0, 37)]
    mixed.run(
        MixedInputs(
            num_decodes=0, ids_T=ints(ids), row_T=ints([0] * 37), position_T=ints(range(37)),
            tiles_W4=ints(list_tiles(prompt)), last_tiles_W4=ints(list_last_tiles(prompt)), last_S=ints([36]),
            rows_S=ints([0]), ended_E=ints([0]), position_E=ints([36]),
        )
    )  # fmt: skip
    expected = expected_logits(floats, ids, kv_dtype)
    torch.testing.assert_close(decode.logits_BV[0].float(), expected[-1], atol=limit, rtol=limit)
    ids.append(int(decode.token_B[0]))
    decode.rows_B[:2] = ints([0, state.scratch_row])
    decode.run(2)
    expected = expected_logits(floats, ids, kv_dtype)
    torch.testing.assert_close(decode.logits_BV[0].float(), expected[-1], atol=limit, rtol=limit)


def test_the_model_holds_what_was_taken() -> None:
    model, weight_format, _ = prepare("fp8")
    before = sum(module.packed_bytes for module in model.modules() if isinstance(module, Linear))
    GpuWeights.take(model, max_positions=S, weight_format=weight_format)
    kept = [module for module in model.modules() if isinstance(module, Linear) and module.quantized]
    assert before == 0
    assert len(kept) == 4 * CONFIG.num_hidden_layers
    assert not any(hasattr(module, "weight") for module in kept)
    assert sum(module.packed_bytes for module in kept) == sum(
        module.quantized.num_outputs * (module.quantized.num_inputs + 4)
        for module in kept
        if isinstance(module.quantized, Fp8Weight)
    )
