"""Models whose keys and values may not be mixed have different fingerprints."""

from collections.abc import Callable

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from octavo.model.checkpoint.fingerprint import fingerprint
from tests.support.model.checkpoints import tiny_config

CONFIG = ModelConfig.from_dict(tiny_config())


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> CausalLM:
    return CausalLM.random(ModelConfig.from_dict(tiny_config(**changes)), seed=seed, dtype=dtype)


def test_the_same_model_has_the_same_fingerprint_of_32_bytes() -> None:
    assert make().fingerprint == make().fingerprint
    assert len(make().fingerprint) == 32


@pytest.mark.parametrize(
    "other",
    [
        lambda: make(seed=1),
        lambda: make(dtype=torch.bfloat16),
        lambda: make(rope_theta=20000.0),
        lambda: make(rms_norm_eps=1e-5),
        lambda: make(num_attention_heads=8, num_key_value_heads=4, head_dim=8),
    ],
)
def test_another_seed_dtype_or_config_has_another(other: Callable[[], CausalLM]) -> None:
    assert other().fingerprint != make().fingerprint


@pytest.mark.parametrize("name", [name for name, _ in make().named_parameters()])
def test_every_tensor_counts(name: str) -> None:
    model = make()
    dict(model.named_parameters())[name].data.mul_(1.01)
    assert fingerprint(model) != model.fingerprint


def test_end_tokens_say_nothing_about_keys_and_values() -> None:
    assert make(eos_token_id=[1, 2]).fingerprint == make().fingerprint
