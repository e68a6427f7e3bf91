"""Rotary embeddings equal transformers', and an independent reference in complex float64 arithmetic."""

from typing import Any

import pytest
import torch
from transformers import Qwen2Config as TransformersConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding, apply_rotary_pos_emb

from octavo.model import ModelConfig
from octavo.model.layers.decoder import Rope, rotary_frequencies, rotate, yarn_amplitude
from tests.support.model.checkpoints import tiny_config

LIMIT = 1e-5
HEADS, KV_HEADS = 14, 2
POSITIONS = [0, 1, 2, 15, 16, 17, 255, 256, 257, 4095, 32767, 32768, 131071]

LONG = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
RECIPES: dict[str, dict[str, Any]] = {
    "plain, theta 1e6": {"rope_theta": 1e6},
    "plain, theta 1e4": {"rope_theta": 1e4},
    "Qwen2.5's long-context recipe": {"rope_theta": 1e6, "rope_scaling": LONG, "max_position_embeddings": 131072},
    "the same, with rope_type": {"rope_theta": 1e6, "rope_scaling": {**LONG, "rope_type": "yarn"}},
    "transformers 5's layout": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"} | LONG},
    "YaRN with its options": {
        "rope_theta": 1e4,
        "rope_scaling": LONG | {"factor": 2.5, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0},
    },
}


def both(recipe: str, head_dim: int) -> tuple[Rope, ModelConfig, Qwen2RotaryEmbedding]:
    raw = tiny_config(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=head_dim)
    raw.pop("rope_theta")
    raw |= RECIPES[recipe]
    config = ModelConfig.from_dict(raw)
    rope = Rope(config, torch.float32, torch.device("cpu"))
    return rope, config, Qwen2RotaryEmbedding(TransformersConfig(**raw))  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("recipe", RECIPES)
def test_turned_queries_and_keys_equal_those_of_transformers(recipe: str, head_dim: int) -> None:
    rope, _, theirs = both(recipe, head_dim)
    positions_T = torch.tensor(POSITIONS)
    x_TNH = torch.randn(len(POSITIONS), HEADS + KV_HEADS, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(x_TNH, positions_T[None])
    expected = apply_rotary_pos_emb(*x_TNH[None].transpose(1, 2).split([HEADS, KV_HEADS], dim=1), cos, sin)
    found = rotate(x_TNH, rope.angles(positions_T)).split([HEADS, KV_HEADS], dim=1)
    for ours_TNH, theirs_1NTH in zip(found, expected, strict=True):
        assert float((ours_TNH - theirs_1NTH[0].transpose(0, 1)).abs().max()) < LIMIT


@pytest.mark.parametrize("recipe", RECIPES)
def test_frequencies_and_amplitude_equal_those_of_transformers(recipe: str) -> None:
    _, config, theirs = both(recipe, 64)
    torch.testing.assert_close(rotary_frequencies(config), theirs.inv_freq, rtol=1e-6, atol=0)
    assert (yarn_amplitude(config.yarn) if config.yarn else 1.0) == pytest.approx(theirs.attention_scaling)


def test_a_pair_is_turned_like_a_complex_number() -> None:
    rope, _, _ = both("plain, theta 1e4", 64)
    x_TNH = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(1))
    positions_T = torch.arange(40)
    angles = positions_T.double()[:, None] * 1e4 ** (-torch.arange(32).double() / 32)
    pairs = torch.complex(x_TNH[..., :32].double(), x_TNH[..., 32:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected_TNH = torch.cat([turned.real, turned.imag], dim=-1).float()
    torch.testing.assert_close(rotate(x_TNH, rope.angles(positions_T)), expected_TNH, rtol=0, atol=LIMIT)


def test_scores_depend_on_the_distance_only() -> None:
    rope, _, _ = both("plain, theta 1e6", 64)
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(2))

    def score(q_position: int, k_position: int) -> float:
        turned_q = rotate(q, rope.angles(torch.tensor([q_position])))
        return float((turned_q * rotate(k, rope.angles(torch.tensor([k_position])))).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_angles_are_worked_out_in_float32_whatever_the_dtype() -> None:
    _, config, _ = both("plain, theta 1e6", 64)
    positions_T = torch.tensor([256, 257, 30001])  # bfloat16 cannot hold 257
    wide = Rope(config, torch.float32, torch.device("cpu")).angles(positions_T)
    narrow = Rope(config, torch.bfloat16, torch.device("cpu")).angles(positions_T)
    assert torch.equal(narrow.cos_TH, wide.cos_TH.bfloat16())
    assert torch.equal(narrow.sin_TH, wide.sin_TH.bfloat16())
