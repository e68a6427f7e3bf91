"""Qwen3 dense equals transformers' on random checkpoints of its own making, in every way that a CPU computes it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model import BACKENDS, CausalLM, ConfigError, ModelConfig, dense_logits, generate, get_backend, load_model
from octavo.model.attention.interface import make_inputs
from octavo.model.attention.kv_pool import KvPool
from octavo.model.attention.paged import cut, paged_generate, paged_logits
from octavo.model.checkpoint.weight_names import destinations
from octavo.model.cpu.native import native_library
from octavo.model.families.registry import FAMILIES
from octavo.model.invariant import make_invariant
from octavo.model.layers.linear import WeightFormat
from octavo.model.quantization.cache_scales import fold_cache_scales
from octavo.model.quantization.rounding import FP8_MAX
from octavo.model.verify.verify import verify_checkpoint
from tests.support.model.qwen3 import SHAPE, make_qwen3, write_qwen3

LIMIT = 1e-4
IDS = torch.randint(384, (75,), generator=torch.Generator().manual_seed(9))
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 32 on 2, tied": {},
    "heads of 128, untied": {"head_dim": 128, "tie_word_embeddings": False},
    "no grouping": {"num_key_value_heads": 4},
    "YaRN": {
        "rope_scaling": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip
needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Any]:
    changes = SHAPES[request.param]
    ours = load_model(write_qwen3(tmp_path_factory.mktemp("shape"), **changes))
    return ours, make_qwen3(**changes)


def logits_of(theirs: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits_TV: torch.Tensor = theirs(ids[None]).logits[0].float()
    return logits_TV


def test_the_config_says_what_the_family_is(folder: Path) -> None:
    config = load_model(folder).config
    assert config.family is FAMILIES["qwen3"]
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (32, 1e6, True)
    raw = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "rope_theta")}
    config = ModelConfig.from_dict(raw | {"model_type": "qwen3", "tie_word_embeddings": None})
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (128, 1e4, False)


@pytest.mark.parametrize(
    ("field", "changes", "reason"),
    [
        ("attention_bias", {"attention_bias": True}, "true is not supported for qwen3"),
        ("model_type", {"model_type": "qwen3_moe"}, "'qwen3_moe' is not supported, only 'qwen2' and 'qwen3'"),
        ("architectures", {"architectures": ["Qwen2ForCausalLM"]}, "does not name Qwen3ForCausalLM"),
        ("architectures", {"architectures": "Qwen3ForCausalLM"}, "must be a list of names, is 'Qwen3ForCausalLM'"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(field: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(SHAPE | {"model_type": "qwen3"} | changes)
    assert caught.value.field == field
    assert reason in str(caught.value)


def test_every_tensor_has_the_name_that_transformers_gives_it(pair: tuple[CausalLM, Any]) -> None:
    ours, theirs = pair
    head = set() if not ours.config.tie_word_embeddings else {"lm_head.weight"}
    assert set(destinations(ours)) == set(theirs.state_dict()) - head


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_len", [75, 1, 7, 33])
def test_logits_are_the_same_whole_and_in_chunks(pair: tuple[CausalLM, Any], backend: str, chunk_len: int) -> None:
    ours, theirs = pair
    with torch.inference_mode():
        ours_TV = paged_logits(ours, get_backend(backend), IDS.tolist(), cut(len(IDS), chunk_len))
        dense_TV = dense_logits(ours, IDS)
    expected_TV = logits_of(theirs, IDS)
    assert float((ours_TV - expected_TV).abs().max()) < LIMIT
    assert float((dense_TV - expected_TV).abs().max()) < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_of_a_batch_are_the_same(pair: tuple[CausalLM, Any], backend: str) -> None:
    ours, theirs = pair
    prompts = [IDS[start : start + 3 + 5 * start].tolist() for start in range(8)]
    outputs = paged_generate(ours, get_backend(backend), prompts, max_new_tokens=24)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits_TV = logits_of(theirs, torch.tensor(prompt + output))
        assert output == logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert generate(ours, prompts[0], max_new_tokens=24) == outputs[0]


@pytest.mark.parametrize(
    ("wanted", "limit"), [(None, 0.04), (WeightFormat.BF16, 0.04), (WeightFormat.INT8, 0.08)], ids=str
)
@pytest.mark.parametrize("chunk_lens", [[75], [33, 33, 1, 1, 7]], ids=["whole", "chunks and decodes"])
def test_bfloat16_packed_and_not_is_near_float32(
    folder: Path, wanted: WeightFormat | None, limit: float, chunk_lens: list[int]
) -> None:
    if wanted is WeightFormat.INT8 and native_library() is None:
        pytest.skip("no C compiler here")
    ours = load_model(folder, dtype=torch.bfloat16)
    if wanted is not None:
        ours.pack_weights(wanted)
    expected_TV = logits_of(make_qwen3(), IDS)
    with torch.inference_mode():
        found_TV = paged_logits(ours, get_backend("sdpa"), IDS.tolist(), chunk_lens)
    assert float((found_TV - expected_TV).norm() / expected_TV.norm()) < limit


@needs_compiler
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_deterministic_mode_gives_a_token_the_same_bits_in_any_step(
    folder: Path, dtype: torch.dtype, limit: float
) -> None:
    model = load_model(folder, dtype=dtype)
    make_invariant(model, max_positions=len(IDS))
    backend = get_backend("invariant")
    with torch.inference_mode():
        whole_TV, *others = (
            paged_logits(model, backend, IDS.tolist(), lens) for lens in ([75], [1] * 75, [33, 7, 1, 34])
        )
    assert all(torch.equal(whole_TV, other_TV) for other_TV in others)
    assert float((whole_TV - logits_of(make_qwen3(), IDS)).abs().max()) < limit


def test_scales_for_an_8_bit_cache_change_no_function_and_bound_every_key(folder: Path) -> None:
    plain, scaled = load_model(folder), load_model(folder)
    for model in (plain, scaled):
        for layer in model.decoder_layers:
            assert layer.self_attn.k_norm is not None
            layer.self_attn.k_norm.weight.data *= 200
    fold_cache_scales(scaled)
    kv = KvPool(scaled.config, 8, 16, torch.float32)
    positions_T, inputs = make_inputs([list(range(8))], [0], [len(IDS)], block_size=16)
    with torch.inference_mode():
        found_TV = scaled.logits(scaled(IDS, positions_T, kv, inputs, get_backend("reference")))
        expected_TV = dense_logits(plain, IDS)
    torch.testing.assert_close(found_TV, expected_TV, rtol=1e-4, atol=1e-4)
    assert FP8_MAX / 64 < float(kv.k_pool_LPKBH.abs().max()) <= FP8_MAX


def test_verify_compares_it_with_transformers(folder: Path) -> None:
    report = verify_checkpoint(folder, num_prompts=3, max_new_tokens=6)
    assert report.is_ok
    assert {row.check for row in report.rows} >= {"RoPE q", "hidden states, layer 0", "logits", "greedy tokens"}


def test_a_norm_of_heads_that_is_left_out_fails_verification(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(folder: Path, *, dtype: torch.dtype | None) -> CausalLM:
        model = load_model(folder, dtype=dtype)
        model.decoder_layers[1].self_attn.k_norm = None
        return model

    monkeypatch.setattr("octavo.model.verify.verify.load_model", load)
    assert not verify_checkpoint(folder, num_prompts=3, max_new_tokens=6).is_ok
